"""ONNX models on the CPU.

Decided here: how a batch becomes one `session.run`, how sessions are set up, and that what comes out is what the
configuration promised. One session serves all instances of a model: a session may be run by several threads at once,
and a second copy of the weights would buy nothing. Whether a file and its configuration agree is in
onnx_signature.py, what ragged inputs and batch inputs are in onnx_ragged.py.

`session.run` with numpy arrays is measured to cost a seventh of building OrtValues in Python, so the latter serves
only the models that need it: those with a BF16 tensor, which onnxruntime does not take from numpy.

The only file that knows onnxruntime. It never asks it for a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from flowserve.backends.base import ClockNs, ModelFiles, Results, Work
from flowserve.backends.files import model_file, relative
from flowserve.backends.onnx_ragged import WRONG_ROWS, RaggedPorts, part_of
from flowserve.backends.onnx_signature import Port, Signature, completion, disagreements, with_flat_controls
from flowserve.backends.shapes import fits, shown
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid, ModelFailed, Problem, Problems, Unsupported
from flowserve.graph.conversion import reshaped
from flowserve.memory.assemble import gather, scatter
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

Feed = dict[str, Array]
Execute = Callable[[list[str], Feed], list[Any]]

# ONNX's own numbers (TensorProto.DataType) for the one type that numpy cannot carry.
_ONNX_BFLOAT16: Final = 16
_BFLOAT16: Final = DType.BF16.numpy
# Triton's optimization.graph.level: 0, or nothing said, is everything.
_LEVELS: Final = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
# "/src/graph/model.cc:166 onnxruntime::Model::Model(a, b) const ": where in onnxruntime, which helps nobody here.
_SOURCE_LOCATION: Final = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^\n]*?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
)


class OnnxRuntime:
    """The backend. A version is a file `model.onnx`, or a folder of that name with that file and its weights."""

    name = "onnxruntime"
    default_filename = "model.onnx"
    default_instance_count = 2  # as Triton's for this backend on the CPU

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """As Triton: nothing for a configuration that names inputs and outputs, whatever else it leaves out."""
        if config.inputs and config.outputs:
            return Completion()
        path = self._path(config, files)
        settings = ort.SessionOptions()
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is only asked for its names
        session = _open(config, path, files, settings)
        return completion(config, _signature(session), relative(path, files))

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> OnnxModel:
        """The cores are shared out between the runs that may happen at once, unless the model's parameters say more."""
        path = self._path(config, files)
        session = _open(config, path, files, _settings(config, options))
        signature = _signature(session)
        config = with_flat_controls(config, signature)
        _refuse_strings_beside_bfloat16(config)
        problems = list(disagreements(config, signature, relative(path, files)))
        if problems:
            raise Problems(problems)
        return OnnxModel(config, session, signature)

    def _path(self, config: ModelConfig, files: ModelFiles) -> Path:
        path = model_file(config, files, self.default_filename)
        return path / self.default_filename if path.is_dir() else path


class OnnxModel:
    """One version: its session, and what to expect of it."""

    is_pure = True
    may_run_inline = True

    def __init__(self, config: ModelConfig, session: Any, signature: Signature) -> None:
        self.name = config.name
        self.inputs = config.inputs
        self.outputs = config.outputs
        self.is_batching = config.max_batch_size > 0
        ports = {port.name: port for port in signature.inputs}
        # Indices of the inputs whose arrays are not fed as they are gathered.
        self.prepared = [i for i, spec in enumerate(config.inputs) if _needs_preparing(spec, ports[spec.name])]
        self.ports = [ports[spec.name] for spec in config.inputs]
        self.execute: Execute = session.run
        answers = any(spec.dtype is DType.BF16 for spec in config.outputs)
        if answers or any(spec.dtype is DType.BF16 for spec in config.inputs):
            self.execute = _CarryingBfloat16(session, answers=answers)
        self._ragged = RaggedPorts(config) if RaggedPorts.are_in(config) else None
        self._asked: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}

    def instance(self, name: str, group: InstanceGroup) -> OnnxInstance:
        return OnnxInstance(self) if self._ragged is None else RaggedInstance(self, self._ragged)

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

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    def open(self) -> None:
        """The session is open already."""

    def close(self) -> None:
        """The session belongs to the model."""

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
            arrays = model.execute(names, feed)
        except Exception as error:
            raise ModelFailed(f"model '{model.name}' failed: onnxruntime: {cleaned(str(error))}") from error
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                outputs[j] = [*scatter(self._checked(array, model.outputs[j], total), rows)]
            else:
                outputs[j] = [Tensor(self._checked(array, model.outputs[j], -1))]
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
        if array is None:
            return
        if spec.dtype is DType.BYTES:
            array = _to_text(array, spec.name, self._model.name)
        if spec.reshape is not None and not spec.ragged:
            batch = array.shape[:1] if self._model.is_batching else ()
            array = array.reshape(batch + reshaped(array.shape[len(batch) :], spec.dims, spec.reshape))
        feed[spec.name] = array if port.shape else array.reshape(())

    def _checked(self, array: Array, spec: TensorSpec, total: int) -> Array:
        """An output in the configuration's shape. `total` is the batch's row count, -1 for a model without batching."""
        where = f"model '{self._model.name}', output '{spec.name}'"
        if spec.dtype is DType.BYTES:
            array = _to_bytes(array)
        if array.dtype != spec.dtype.numpy:
            raise ModelFailed(f"{where}: the configuration promises {spec.dtype}, the model answered {array.dtype}")
        shape = array.shape
        batch = shape[:1] if total >= 0 else ()
        inner = spec.dims if spec.reshape is None else spec.reshape
        if total >= 0 and batch != (total,):
            raise ModelFailed(
                f"{where}: the batch has {total} rows, the model answered shape {shown(shape)}; {self.wrong_rows}"
            )
        tail = shape[len(batch) :]
        if not shape and inner == (1,):
            return array.reshape(1)
        if not fits(tail, inner):
            promised = shown((*batch, *inner))
            raise ModelFailed(
                f"{where}: the configuration promises shape {promised}, the model answered {shown(shape)}"
            )
        return array if spec.reshape is None else array.reshape(batch + reshaped(tail, spec.reshape, spec.dims))


class RaggedInstance(OnnxInstance):
    """For models with ragged inputs, batch inputs or batch outputs."""

    wrong_rows = WRONG_ROWS

    def __init__(self, model: OnnxModel, ragged: RaggedPorts) -> None:
        super().__init__(model)
        self._ragged = ragged

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

    def _checked(self, array: Array, spec: TensorSpec, total: int) -> Array:
        flat = self._ragged.flat_outputs.get(spec.name)
        return super()._checked(array, spec, total) if flat is None else super()._checked(array.reshape(-1), flat, -1)


class _CarryingBfloat16:
    """Runs a session that has BF16 tensors: they go in and out as OrtValues, which is slower."""

    def __init__(self, session: Any, *, answers: bool) -> None:
        self._session = session
        self._answers = answers  # whether BF16 is among the outputs, not only among the inputs

    def __call__(self, names: list[str], feed: Feed) -> list[Any]:
        values = {name: self._value(array) if array.dtype == _BFLOAT16 else array for name, array in feed.items()}
        if not self._answers:
            return list(self._session.run(names, values))
        for name, array in feed.items():
            if array.dtype != _BFLOAT16:
                values[name] = ort.OrtValue.ortvalue_from_numpy(array)
        return [self._array(value) for value in self._session.run_with_ort_values(names, values)]

    @staticmethod
    def _value(array: Array) -> Any:
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)

    @staticmethod
    def _array(value: Any) -> Any:
        if value.data_type() != "tensor(bfloat16)":
            return value.numpy()
        array = np.empty(value.shape(), _BFLOAT16)
        # The value's memory goes with it, so its bytes are copied out while it lives.
        ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
        return array


def cleaned(text: str) -> str:
    """onnxruntime's message without its prefixes, source locations and stack."""
    text = text.partition("\nStacktrace")[0]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"Load model from .*? failed:", "", text)
    return " ".join(_SOURCE_LOCATION.sub("", text).split())


def _open(config: ModelConfig, path: Path, files: ModelFiles, settings: Any) -> Any:
    # onnxruntime also prints what it raises; the text reaches the user once, through us.
    settings.log_severity_level = 4
    try:
        return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = cleaned(str(error)).replace(f"{files.repository}/", "")
        where = f"failed to load '{config.name}' version {files.version}: {relative(path, files)}"
        raise Invalid(f"{where} is not an ONNX model that onnxruntime {ort.__version__} can run: {text}") from error


def _signature(session: Any) -> Signature:
    inputs = [_port(node, is_optional=node.type.startswith("optional(")) for node in session.get_inputs()]
    defaults = [_port(node, is_optional=True) for node in session.get_overridable_initializers()]
    ordered = sorted([*inputs, *defaults], key=lambda port: port.is_optional)
    return Signature(tuple(ordered), tuple(_port(node, is_optional=False) for node in session.get_outputs()))


def _port(node: Any, *, is_optional: bool) -> Port:
    # A dimension that varies is None or the name the exporter gave it.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return Port(node.name, node.type, shape, is_optional)


def _needs_preparing(spec: TensorSpec, port: Port) -> bool:
    return spec.dtype is DType.BYTES or spec.reshape is not None or not port.shape


def _refuse_strings_beside_bfloat16(config: ModelConfig) -> None:
    strings = [spec.name for spec in config.inputs if spec.dtype is DType.BYTES]
    halves = [spec.name for spec in config.outputs if spec.dtype is DType.BF16]
    if strings and halves:
        raise Unsupported(
            f"model '{config.name}': onnxruntime's Python interface cannot take strings (input '{strings[0]}') where "
            f"it answers with BF16 (output '{halves[0]}'); cast that output to TYPE_FP32 or TYPE_FP16 in the model"
        )


def _settings(config: ModelConfig, options: Mapping[str, str]) -> Any:
    settings = ort.SessionOptions()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(options.get("runs_at_once", "1")))
    # Triton's 0 means "you choose", as does saying nothing.
    settings.intra_op_num_threads = _parameter(config, options, "intra_op_thread_count", 0) or share
    settings.inter_op_num_threads = _parameter(config, options, "inter_op_thread_count", 0) or 1
    parallel = _parameter(config, options, "execution_mode", 0) == 1
    settings.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    settings.enable_cpu_mem_arena = bool(_parameter(config, options, "enable_mem_arena", 1))
    # A memory pattern is kept for every shape seen, for ever: with shapes that vary beyond the batch that is a leak.
    varies = any(spec.is_variable for spec in config.inputs)
    settings.enable_mem_pattern = bool(_parameter(config, options, "enable_mem_pattern", 0 if varies else 1))
    settings.graph_optimization_level = _LEVELS.get(_graph_level(config), _LEVELS[0])
    # Threads that spin between runs take the cores that the other models and the server need.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return settings


def _parameter(config: ModelConfig, options: Mapping[str, str], name: str, default: int) -> int:
    """What the model's parameters say, else the operator for all models, else `default`."""
    text = config.parameters.get(name)
    if text is None:
        return int(options.get(name, default))
    try:
        return int(text)
    except ValueError:
        message = f"parameter '{name}' of model '{config.name}' must be a whole number, found '{text}'"
        raise Problems([Problem(message, config.source.place(f"parameters[{name}]"))]) from None


def _graph_level(config: ModelConfig) -> int:
    optimization = config.json.get("optimization") or {}
    return int((optimization.get("graph") or {}).get("level", 0))


def _to_text(array: Array, name: str, model: str) -> Array:
    """ONNX strings are text; onnxruntime takes `str` objects, and would take the repr of anything else."""
    try:
        return _objects([element.decode() for element in array.ravel().tolist()], array.shape)
    except UnicodeDecodeError as error:
        raise Invalid(
            f"inference input '{name}' for model '{model}' must hold UTF-8 text, as ONNX strings do: {error}"
        ) from error


def _to_bytes(array: Array) -> Array:
    return _objects([element.encode() for element in array.ravel().tolist()], array.shape)


def _objects(elements: list[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)
