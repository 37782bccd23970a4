"""ONNX models: how one is opened, and which sessions and instances there are of it.

Decided here: one session serves all instances of a model on the CPU, since a session may be run by several threads at
once, and a second copy of the weights would buy nothing. On a GPU each instance has a session and a stream of its own.
How sessions are set up is in onnx_session.py, how many threads they get in onnx_threads.py, who runs one on a GPU in
onnx_providers.py; whether a file and its configuration agree, in onnx_signature.py. How a batch becomes a run is in
onnx_instance.py, for tensors that stay on a GPU in onnx_device.py and onnx_graphs.py; what ragged inputs and batch
inputs are, in onnx_ragged.py; outputs that other processes read, in onnx_placed.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowserve.backends.base import ModelFiles
from flowserve.backends.files import model_file, relative
from flowserve.backends.onnx_device import OnnxDeviceInstance
from flowserve.backends.onnx_graphs import OnnxGraphInstance
from flowserve.backends.onnx_instance import OnnxInstance, RaggedInstance
from flowserve.backends.onnx_placed import Placing
from flowserve.backends.onnx_providers import accelerators, gpu_providers, graph_sizes
from flowserve.backends.onnx_ragged import RaggedPorts
from flowserve.backends.onnx_session import (
    executor,
    host_value,
    open_session,
    run_without_waiting,
    settings,
    signature_of,
    to_be_asked_only,
)
from flowserve.backends.onnx_signature import Signature, completion, disagreements, with_flat_controls
from flowserve.backends.onnx_threads import session_on_cpu
from flowserve.backends.onnx_values import needs_preparing
from flowserve.config.complete import RULE
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Problems, Unsupported
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices
from flowserve.values import DType

log = logging.getLogger("flowserve.load")

KIND_GPU: Final = "KIND_GPU"


class OnnxRuntime:
    """The backend. A version is a file `model.onnx`, or a folder of that name with that file and its weights."""

    name = "onnxruntime"
    default_filename = "model.onnx"
    default_instance_count = 2  # as Triton's for this backend on the CPU
    gpu_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """As Triton: nothing for a configuration that names inputs and outputs, whatever else it leaves out."""
        if config.inputs and config.outputs:
            return Completion()
        path = self._path(config, files)
        session = open_session(config, path, files, to_be_asked_only)
        return completion(config, signature_of(session), relative(path, files))

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> OnnxModel:
        """The cores are shared out between the runs that may happen at once, unless the model's parameters say more, or
        its runs are too short to be shared.
        """
        path = self._path(config, files)
        opening = partial(open_session, config, path, files, partial(settings, config, options))
        groups = config.instance_groups
        on_cpu = not groups or any(group.kind != KIND_GPU for group in groups)
        if on_cpu:
            session = session_on_cpu(config, path, options, settings, partial(open_session, config, path, files))
        else:
            session = open_session(config, path, files, to_be_asked_only)
        config, signature = _judged(config, session, relative(path, files))
        if all(group.kind != KIND_GPU for group in groups) and accelerators(config):
            log.info("model '%s' has no instance on a GPU: gpu_execution_accelerator is not used", config.name)
        return OnnxModel(config, session if on_cpu else None, signature, opening)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Whether the file is one that onnxruntime opens, and what the configuration says it is; and whether the words
        for its settings, and for a GPU's, are ones that onnxruntime knows.
        """
        path = self._path(config, files)
        settings(config, {})
        if any(group.kind == KIND_GPU for group in config.instance_groups):
            gpu_providers(config, 0)
        _judged(config, open_session(config, path, files, to_be_asked_only), relative(path, files))

    def _path(self, config: ModelConfig, files: ModelFiles) -> Path:
        path = model_file(config, files, self.default_filename)
        return path / self.default_filename if path.is_dir() else path


class OnnxModel:
    """One version: its session on the CPU, where it has instances there, and what to expect of it. `opening` opens
    another, given the providers that run it.
    """

    is_pure = True

    def __init__(self, config: ModelConfig, session: Any, signature: Signature, opening: Callable[..., Any]) -> None:
        self.name = config.name
        self.inputs = config.inputs
        self.outputs = config.outputs
        self.is_batching = config.max_batch_size > 0
        # Whoever waits for a device holds up the loop.
        self.may_run_inline = all(group.kind != KIND_GPU for group in config.instance_groups)
        ports = {port.name: port for port in signature.inputs}
        # Indices of the inputs whose arrays are not fed as they are gathered.
        self.prepared = [i for i, spec in enumerate(config.inputs) if needs_preparing(spec, ports[spec.name])]
        self.ports = [ports[spec.name] for spec in config.inputs]
        answers = {port.name: port for port in signature.outputs}
        self.output_ports = [answers[spec.name] for spec in config.outputs]
        self.handed_through = frozenset(answers.keys() & ports.keys())
        self._config = config
        self._session = session
        self.execute = None if session is None else executor(session, config)
        self._open_session = opening
        self._ragged = RaggedPorts(config) if RaggedPorts.are_in(config) else None
        self._asked: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}

    def instance(self, name: str, group: InstanceGroup) -> OnnxInstance | OnnxDeviceInstance:
        if group.kind != KIND_GPU:
            return self._instance(lambda: self.execute, self._placing)
        memory = devices()[group.gpus[0] if group.gpus else 0]
        gpu = memory.place.number
        if not stays_on_device(self._config):
            return self._instance(lambda: executor(self._open_session(gpu_providers(self._config, gpu)), self._config))

        def open_session_on(stream: int) -> Any:
            return self._open_session(gpu_providers(self._config, gpu, stream))

        sizes = graph_sizes(self._config)
        if sizes:
            return OnnxGraphInstance(self, memory, open_session_on, run_without_waiting, sizes)
        return OnnxDeviceInstance(self, memory, open_session_on, run_without_waiting)

    def _instance(self, open_execute: Callable[[], Any], placing: Callable[[], Placing] | None = None) -> OnnxInstance:
        """One whose tensors lie on the host, wherever it computes."""
        if self._ragged is not None:
            return RaggedInstance(self, open_execute, self._ragged)
        return OnnxInstance(self, open_execute, placing)

    def _placing(self) -> Placing:
        return Placing(self._session, host_value, self)

    def close(self) -> None:
        """The session goes with its last reference."""

    def asked(self, wanted: Sequence[tuple[str, ...]]) -> tuple[list[str], list[int]]:
        """Names and indices of the outputs to compute: those that all members want, else all of them."""
        names = wanted[0]
        for other in wanted:
            if other != names:
                names = tuple(spec.name for spec in self.outputs)
                break
        found = self._asked.get(names)
        if found is None:
            if len(self._asked) > 100:
                self._asked.clear()  # clients choose these names, in any order and number
            indices = [j for j, spec in enumerate(self.outputs) if spec.name in names]
            found = self._asked[names] = ([self.outputs[j].name for j in indices], indices)
        return found


def _judged(config: ModelConfig, session: Any, file: str) -> tuple[ModelConfig, Signature]:
    """The configuration as a session of this file is fed by it. Raises Problems or Unsupported where they disagree."""
    signature = signature_of(session)
    config = with_flat_controls(config, signature)
    _refuse_strings_beside_bfloat16(config)
    problems = [replace(problem, rule=RULE) for problem in disagreements(config, signature, file)]
    if problems:
        raise Problems(problems)
    return config, signature


def _refuse_strings_beside_bfloat16(config: ModelConfig) -> None:
    strings = [spec.name for spec in config.inputs if spec.dtype is DType.BYTES]
    halves = [spec.name for spec in config.outputs if spec.dtype is DType.BF16]
    if strings and halves:
        raise Unsupported(
            f"model '{config.name}': onnxruntime's Python interface cannot take strings (input '{strings[0]}') where "
            f"it answers with BF16 (output '{halves[0]}'); cast that output to TYPE_FP32 or TYPE_FP16 in the model"
        )
