"""ONNX models.

Decided here: how a batch becomes one `session.run`, which sessions there are, and that what comes out is what the
configuration promised. One session serves all instances of a model on the CPU: a session may be run by several threads
at once, and a second copy of the weights would buy nothing. On a GPU each instance has a session and a stream of its
own. How sessions are set up is in onnx_session.py; whether a file and its configuration agree, in onnx_signature.py;
what ragged inputs and batch inputs are, in onnx_ragged.py; runs on tensors that stay on a GPU, in onnx_device.py; who
runs a session there, in onnx_providers.py.

`session.run` with numpy arrays is measured to cost a seventh of building OrtValues in Python, so the latter serves
only the models that need it: those with a BF16 tensor, which onnxruntime does not take from numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowserve.backends.base import ClockNs, ModelFiles, Results, Work
from flowserve.backends.files import model_file, relative
from flowserve.backends.onnx_device import OnnxDeviceInstance
from flowserve.backends.onnx_graphs import OnnxGraphInstance
from flowserve.backends.onnx_providers import accelerators, gpu_providers, graph_sizes
from flowserve.backends.onnx_ragged import WRONG_ROWS, RaggedPorts, part_of
from flowserve.backends.onnx_session import (
    Execute,
    Feed,
    executor,
    open_session,
    run_without_waiting,
    settings,
    signature_of,
    to_be_asked_only,
)
from flowserve.backends.onnx_signature import Port, Signature, completion, disagreements, with_flat_controls
from flowserve.backends.onnx_values import checked, cleaned, needs_preparing, prepared
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import ModelFailed, Problems, Unsupported
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.assemble import gather, scatter
from flowserve.memory.devices import devices
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

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
        """The cores are shared out between the runs that may happen at once, unless the model's parameters say more."""
        path = self._path(config, files)
        opening = partial(open_session, config, path, files, partial(settings, config, options))
        groups = config.instance_groups
        on_cpu = not groups or any(group.kind != KIND_GPU for group in groups)
        session = opening() if on_cpu else open_session(config, path, files, to_be_asked_only)
        signature = signature_of(session)
        config = with_flat_controls(config, signature)
        _refuse_strings_beside_bfloat16(config)
        problems = list(disagreements(config, signature, relative(path, files)))
        if problems:
            raise Problems(problems)
        if all(group.kind != KIND_GPU for group in groups) and accelerators(config):
            log.info("model '%s' has no instance on a GPU: gpu_execution_accelerator is not used", config.name)
        return OnnxModel(config, session if on_cpu else None, signature, opening)

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
        self._config = config
        self.execute = None if session is None else executor(session, config)
        self._open_session = opening
        self._ragged = RaggedPorts(config) if RaggedPorts.are_in(config) else None
        self._asked: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}

    def instance(self, name: str, group: InstanceGroup) -> OnnxInstance | OnnxDeviceInstance:
        if group.kind != KIND_GPU:
            return self._instance(lambda: self.execute)
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

    def _instance(self, open_execute: Callable[[], Any]) -> OnnxInstance:
        """One whose tensors lie on the host, wherever it computes."""
        if self._ragged is not None:
            return RaggedInstance(self, open_execute, self._ragged)
        return OnnxInstance(self, open_execute)

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


class OnnxInstance:
    """The right to run the model's session once at a time."""

    wrong_rows = "its first dimension is no batch dimension, so set max_batch_size to 0"

    def __init__(self, model: OnnxModel, open_execute: Callable[[], Any]) -> None:
        self._model = model
        self._open_execute = open_execute
        self._judge: Callable[..., Array] = checked

    def open(self) -> None:
        self._execute: Execute = self._open_execute()

    def close(self) -> None:
        """The session goes with its last reference."""
        del self._execute

    def run(self, work: Work, clock: ClockNs) -> Results:
        model = self._model
        rows = work.rows
        feed, copied, total = self._feed(work)
        if model.is_batching and total != sum(rows):
            # A member of no rows counts as one to the batcher.
            rows = [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]
        names, indices = model.asked(work.wanted)
        gathered_ns = clock()
        try:
            arrays = self._execute(names, feed)
        except Exception as error:
            raise ModelFailed(f"model '{model.name}' failed: onnxruntime: {cleaned(str(error))}") from error
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                judged = self._judge(array, model.outputs[j], total, model.name, self.wrong_rows)
                outputs[j] = [*scatter(judged, rows)]
            else:
                outputs[j] = [Tensor(self._judge(array, model.outputs[j], -1, model.name, self.wrong_rows))]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        """The arrays by name, the bytes of each input that had to be copied, and the rows of the batch."""
        model = self._model
        feed: Feed = {}
        copied = [0] * len(model.inputs)
        array: Array | None = None
        for i, (spec, column) in enumerate(zip(model.inputs, work.inputs, strict=True)):
            if column[0] is None:
                continue  # an input of a model without batching, left to its default
            array, copied[i] = gather(column, HOST)  # type: ignore[arg-type]  # no member of a batch lacks it
            feed[spec.name] = array
        total = len(array) if array is not None and array.ndim else 0
        for i in model.prepared:
            self._prepare(feed, model.inputs[i], model.ports[i])
        return feed, copied, total

    def _prepare(self, feed: Feed, spec: TensorSpec, port: Port) -> None:
        array = feed.get(spec.name)
        if array is not None:
            feed[spec.name] = prepared(array, spec, port, self._model.name, is_batching=self._model.is_batching)


class RaggedInstance(OnnxInstance):
    """For models with ragged inputs, batch inputs or batch outputs."""

    wrong_rows = WRONG_ROWS

    def __init__(self, model: OnnxModel, open_execute: Callable[[], Any], ragged: RaggedPorts) -> None:
        super().__init__(model, open_execute)
        self._ragged = ragged
        self._judge = self._judge_flat

    def run(self, work: Work, clock: ClockNs) -> Results:
        blank = self._ragged.blank_members(work)
        if blank:
            return self._run_others(work, blank, clock)
        results = super().run(work, clock)
        self._ragged.cut(results.outputs, work)
        return results

    def _run_others(self, work: Work, blank: Collection[int], clock: ClockNs) -> Results:
        """Requests without rows are not shown to the model: a count for each request would be one row too many."""
        shown = [m for m in range(len(work.rows)) if m not in blank]
        if shown:
            results = self.run(part_of(work, shown), clock)
        else:
            results = Results([[]] * len(self._model.outputs), gathered_ns=clock(), computed_ns=clock())
        results.outputs = self._ragged.with_blank(results.outputs, shown, work)
        return results

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        feed, copied, total = self._ragged.feed(work)
        for i in self._model.prepared:
            self._prepare(feed, self._model.inputs[i], self._model.ports[i])
        return feed, copied, total

    def _judge_flat(self, array: Array, spec: TensorSpec, total: int, model: str, wrong_rows: str) -> Array:
        flat = self._ragged.flat_outputs.get(spec.name)
        if flat is not None:
            array, spec, total = array.reshape(-1), flat, -1
        judged: Array = checked(array, spec, total, model, wrong_rows)
        return judged


def _refuse_strings_beside_bfloat16(config: ModelConfig) -> None:
    strings = [spec.name for spec in config.inputs if spec.dtype is DType.BYTES]
    halves = [spec.name for spec in config.outputs if spec.dtype is DType.BF16]
    if strings and halves:
        raise Unsupported(
            f"model '{config.name}': onnxruntime's Python interface cannot take strings (input '{strings[0]}') where "
            f"it answers with BF16 (output '{halves[0]}'); cast that output to TYPE_FP32 or TYPE_FP16 in the model"
        )
