"""A work as a model repository on disk, in Triton's layout.

Every model.py is written for `triton_python_backend_utils` and is the same for both servers. The one difference: the
Triton from PyPI has no onnxruntime backend, so there a model.py runs the ONNX file on its whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from bench.works import BATCH_MAX, Onnx, Python, Step, Work


class Onnxruntime(Enum):
    """How an ONNX step is served: as a node of the server's own, or inside a model.py."""

    BACKEND = "backend"
    MODEL_PY = "model.py"


_PYTHON_MODEL = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        {first}
        responses = []
        for request in requests:
{reads}
            y = {expression}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
"""

_READ = '            {name} = pb_utils.get_input_tensor_by_name(request, "{name}").as_numpy()'

# As many threads as the direct calls use, and no busy-waiting, which would take the cores from the other steps.
_ONNX_IN_PYTHON = """\
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], args["model_version"], "model.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        parts = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        answer = self.session.run(["Y"], {"X": rows})[0]
        responses, first = [], 0
        for part in parts:
            tensor = pb_utils.Tensor("Y", answer[first : first + len(part)])
            responses.append(pb_utils.InferenceResponse([tensor]))
            first += len(part)
        return responses
"""


def write_repository(work: Work, folder: Path, onnx_steps: Onnxruntime, *, varying: bool = False) -> None:
    """Write the models and ensembles of `work` and its partner as folders under `folder`. With `varying` every dim in
    the configs is -1, except those of ONNX models."""
    for deployment in work.deployments:
        for step in deployment.steps:
            # A single step is served under the work's own name, without an ensemble.
            name = step.model if deployment.is_ensemble else deployment.name
            if not (folder / name).exists():  # shared by both deployments
                _write_model(folder, name, step, onnx_steps, varying)
        if deployment.is_ensemble:
            (folder / deployment.name / "1").mkdir(parents=True)
            (folder / deployment.name / "config.pbtxt").write_text(_ensemble_config(deployment, varying))


def served_models(work: Work) -> tuple[str, ...]:
    """The names whose statistics show the batches of `work`, in the order of its steps."""
    names = [
        step.model if deployment.is_ensemble else deployment.name
        for deployment in work.deployments
        for step in deployment.steps
    ]
    return tuple(dict.fromkeys(names))


def _write_model(folder: Path, name: str, step: Step, onnx_steps: Onnxruntime, varying: bool) -> None:
    version = folder / name / "1"
    version.mkdir(parents=True)
    backend = "python"
    match step.kind:
        case Python(expression, first):
            reads = "\n".join(_READ.format(name=tensor) for tensor in step.inputs)
            (version / "model.py").write_text(_PYTHON_MODEL.format(reads=reads, expression=expression, first=first))
        case Onnx(build):
            varying = False  # the file has fixed dims
            (version / "model.onnx").write_bytes(build())
            if onnx_steps is Onnxruntime.BACKEND:
                backend = "onnxruntime"
            else:
                (version / "model.py").write_text(_ONNX_IN_PYTHON)
    (version.parent / "config.pbtxt").write_text(_model_config(name, backend, step, varying))


def _model_config(name: str, backend: str, step: Step, varying: bool) -> str:
    return "\n".join(
        [
            f'name: "{name}"',
            f'backend: "{backend}"',
            f"max_batch_size: {BATCH_MAX}",
            *(_tensor("input", tensor, step.dims, varying) for tensor in step.inputs),
            _tensor("output", "Y", step.dims_out, varying),
            "instance_group [ { count: 1, kind: KIND_CPU } ]",
            "dynamic_batching { }",
            "",
        ]
    )


def _ensemble_config(work: Work, varying: bool) -> str:
    return "\n".join(
        [
            f'name: "{work.name}"',
            'platform: "ensemble"',
            f"max_batch_size: {BATCH_MAX}",
            _tensor("input", "X", work.dims, varying),
            _tensor("output", "Y", work.steps[-1].dims_out, varying),
            "ensemble_scheduling {",
            *([f"  max_inflight_requests: {work.limit}"] if work.limit else []),
            *(_step(step) for step in work.steps),
            "}",
            "",
        ]
    )


def _step(step: Step) -> str:
    inputs = " ".join(_map("input_map", step.inputs))
    outputs = " ".join(_map("output_map", {"Y": step.output}))
    return f'  step {{ model_name: "{step.model}" model_version: -1 {inputs} {outputs} }}'


def _map(field: str, entries: Mapping[str, str]) -> list[str]:
    return [f'{field} {{ key: "{key}" value: "{value}" }}' for key, value in entries.items()]


def _tensor(field: str, name: str, dims: tuple[int, ...], varying: bool) -> str:
    text = ", ".join("-1" if varying else str(dim) for dim in dims)
    return f'{field} [ {{ name: "{name}", data_type: TYPE_FP32, dims: [ {text} ] }} ]'
