"""The module that a `model.py` imports as `triton_python_backend_utils`.

Decides the names that models find, with Triton's spelling and behaviour. Requests, responses and tensors are classes of
inference.py. Here are the functions, the logger, the control of other models, the configuration that
`auto_complete_config` completes, and metrics: which operations each kind allows, with Triton's error texts, and how
long a metric is shown (as long as its family exists, whether or not the model keeps the metric). Counting writes to
memory that the server reads when metrics are requested (`Cells` of base.py), and sends no message.
docs/python-models.md lists every name, and the missing ones. It does not know the server, which decides what a load
does, when it is allowed, how the metrics of several instances are summed, and which names of metrics are allowed.

Callers: models.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakSet

from flowserve.backends.base import IS_READY, LOAD, METRIC_VALUE, NO_FILES, OPEN_FAMILY, UNLOAD, BlsClient, Cells
from flowserve.backends.python.pb_utils.context import Constant, TritonModelException, active, caller_for, shown_as
from flowserve.backends.python.pb_utils.inference import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseIterator,
    Tensor,
    TritonError,
    name_text,
    numpy_to_triton_type,
)
from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError
from flowserve.memory import raw
from flowserve.values import BY_NUMBER, Array, DType

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

# As on Triton, the type of TYPE_BOOL is Python's here, and numpy's in `triton_to_numpy_type`.
TRITON_STRING_TO_NUMPY: Final = {dtype.config_name: dtype.numpy.type for dtype in DType} | {"TYPE_BOOL": bool}

# The properties that `ModelConfig` takes for an input and an output.
_BOTH: Final = ("name", "data_type", "dims", "reshape", "is_shape_tensor", "is_non_linear_format_io")
_PROPERTIES: Final[Mapping[str, tuple[str, ...]]] = {
    "input": (*_BOTH, "optional", "allow_ragged_batch", "format"),
    "output": (*_BOTH, "label_filename"),
}

# Triton's texts, which its tests match.
_DELETED: Final = "Invalid metric operation as the corresponding 'MetricFamily' has been deleted."
_NEGATIVE: Final = "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."


_counting: WeakSet[Metric | MetricFamily] = WeakSet()  # all that have a lock


def _renew_locks() -> None:
    """This process was forked by the model. Locks may be held by threads that do not exist here."""
    for one in [*_counting]:
        one._lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=_renew_locks)


@shown_as("MetricKind")
class MetricKind(Constant):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


@shown_as("Metric")
class Metric:
    """One combination of labels of a family. Made by `MetricFamily.Metric`. Used on any thread."""

    def __init__(
        self,
        family: int,
        kind: MetricKind,
        caller: BlsClient,
        labels: Mapping[str, str],
        buckets: Sequence[float] | None,
        cells: Cells,
    ) -> None:
        self._family = family
        self._kind = kind
        self._caller = caller
        self._labels = labels
        self._buckets = buckets
        self._cells: Cells | None = cells  # None once the family is deleted
        self._lock = threading.Lock()  # an addition is a read and a write
        _counting.add(self)

    def increment(self, value: float) -> None:
        """Add to a counter (no negative values) or to a gauge."""
        cells = self._cells_for("increment", "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        is_counter = self._kind is MetricKind.COUNTER
        if is_counter and value < 0:
            raise TritonModelException(f"Failed to increment metric value: {_NEGATIVE}")
        with self._lock:
            cells[0 if is_counter else 2] += float(value)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        cells = self._cells_for("set", "Set", MetricKind.GAUGE)
        with self._lock:
            cells[1] = float(value)
            cells[2] = 0.0
            cells[0] = float(self._caller.clock())

    def observe(self, value: float) -> None:
        """Count a value in its bucket of a histogram."""
        cells = self._cells_for("observe", "Observe", MetricKind.HISTOGRAM)
        with self._lock:
            cells[1 + bisect_left(self._buckets or (), float(value))] += 1
            cells[0] += float(value)

    def value(self) -> float:
        """The value of a counter or a gauge as the server shows it, other instances included."""
        self._cells_for("get", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        try:
            found: float = self._caller.ask(METRIC_VALUE, (self._family, dict(self._labels)))
        except FlowserveError as error:
            raise TritonModelException(f"Failed to get metric value: {error}") from None
        return found

    def _cells_for(self, verb: str, name: str, *kinds: MetricKind) -> Cells:
        failed = f"Failed to {verb} metric value"
        if self._kind not in kinds:
            raise TritonModelException(f"{failed}: TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {name}")
        if self._cells is None:
            raise TritonModelException(f"{failed}: {_DELETED}")
        return self._cells


_Metric = Metric  # inside of MetricFamily, `Metric` is the method


@shown_as("MetricFamily")
class MetricFamily:
    """Metrics of one name and kind. Several families of one name are shown as one."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        failed = "Error when creating MetricFamily"
        self._metrics: dict[tuple[tuple[str, str], ...], _Metric] = {}
        self._lock = threading.Lock()
        _counting.add(self)
        self._kind = kind
        if [*map(type, (name, description, kind))] != [str, str, MetricKind]:
            raise TritonModelException(f"{failed}: it has a name, a description, and a kind such as MetricFamily.GAUGE")
        caller = caller_for(failed)
        self._about = name, description, kind.name.lower()
        try:
            self._open(caller)
        except FlowserveError as error:
            raise TritonModelException(f"{failed}: {error}") from None
        self._caller = caller

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> _Metric:
        """The metric with these labels. `buckets`: upper bounds of a histogram's buckets, ascending."""
        failed = "Error when creating Metric"
        given: Any = {} if labels is None else labels
        if not isinstance(given, Mapping) or not all(isinstance(part, str) for pair in given.items() for part in pair):
            raise TritonModelException(f"{failed}: labels are a dictionary of texts, got {given!r}")
        key = tuple(sorted(given.items()))
        try:
            edges = None if buckets is None else [float(one) for one in buckets]
        except (TypeError, ValueError):
            raise TritonModelException(f"{failed}: buckets are a list of numbers, got {buckets!r}") from None
        with self._lock:
            metric = self._metrics.get(key)
            if metric is None or edges != metric._buckets:
                count = {MetricKind.COUNTER: 1, MetricKind.GAUGE: 3}.get(self._kind, 2 + len(edges or ()))
                try:
                    if os.getpid() != self._pid:  # a process that the model has forked counts its new metrics apart
                        self._open(self._caller)
                    cells = self._caller.metric(self._number, dict(key), edges, count)
                except FlowserveError as error:
                    raise TritonModelException(f"{failed}: {error}") from None
                metric = self._metrics[key] = Metric(self._number, self._kind, self._caller, dict(key), edges, cells)
        return metric

    def _open(self, caller: BlsClient) -> None:
        self._number: int = caller.ask(OPEN_FAMILY, self._about)
        self._pid = os.getpid()

    def __del__(self) -> None:
        caller: Any = getattr(self, "_caller", None)
        if caller is None:
            return  # its constructor raised
        for metric in self._metrics.values():
            metric._cells = None
        caller.drop(self._number)


COUNTER: Final = MetricKind.COUNTER
GAUGE: Final = MetricKind.GAUGE
HISTOGRAM: Final = MetricKind.HISTOGRAM


class ModelConfig:
    """The configuration that a model completes in `auto_complete_config`: a dictionary (the JSON form of config.pbtxt),
    with Triton's methods to add missing fields.

    The methods raise ValueError for a value that contradicts what the user wrote.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """A copy of the whole configuration."""
        return copy.deepcopy(self._model_config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch that the model takes: at least what the user wrote."""
        written = self._model_config.get("max_batch_size", 0)
        if written > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {written}, but in auto_complete_config function, model "
                f"supports max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def add_input(self, model_input: Mapping[str, Any]) -> None:
        """`model_input` has "name", "data_type", "dims", and optionally "optional" and other properties of an input."""
        self._add("input", model_input)

    def add_output(self, model_output: Mapping[str, Any]) -> None:
        """`model_output` has "name", "data_type" and "dims"."""
        self._add("output", model_output)

    def set_dynamic_batching(self) -> None:
        """Enable the dynamic batcher. Raises ValueError if the user chose another scheduler."""
        chosen = {"dynamic_batching", "sequence_batching", "ensemble_scheduling"} & self._model_config.keys()
        if chosen - {"dynamic_batching"}:
            raise ValueError(
                f"configuration specified scheduling choice {', '.join(sorted(chosen))}, not dynamic_batching"
            )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        """`transaction_policy` has "decoupled", a bool."""
        unknown = transaction_policy.keys() - {"decoupled"}
        if unknown:
            raise ValueError(f"model transaction policy has unknown properties {', '.join(sorted(unknown))}")
        written = self._model_config.get("model_transaction_policy", {})
        if written.get("decoupled", False) and not transaction_policy.get("decoupled", False):
            raise ValueError("configuration specified a decoupled model, but in auto_complete_config it is not")
        self._model_config["model_transaction_policy"] = dict(transaction_policy)

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        for needed in ("name", "data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{kind} added in auto_complete_config function lacks '{needed}': {dict(tensor)}")
        for unknown in (key for key in tensor if key not in _PROPERTIES[kind]):
            hint = did_you_mean(unknown, _PROPERTIES[kind])
            raise ValueError(
                f"{kind} '{tensor['name']}' added in auto_complete_config function has the property '{unknown}', which "
                f"{kind}s do not have{hint and f' ({hint})'}"
            )
        if isinstance(tensor["dims"], str) or not isinstance(tensor["dims"], Iterable):
            raise ValueError(
                f"{kind} '{tensor['name']}' added in auto_complete_config function has dims {tensor['dims']!r}, which "
                "are no list, as in [4]"
            )
        tensors: list[dict[str, Any]] = self._model_config.setdefault(kind, [])
        written = next((entry for entry in tensors if entry["name"] == tensor["name"]), None)
        if written is None:
            tensors.append({**tensor, "dims": list(tensor["dims"])})
            return
        for key in ("data_type", "dims"):
            found = written.get(key)
            ours = list(tensor[key]) if key == "dims" else tensor[key]
            if found in (None, [], "TYPE_INVALID"):
                written[key] = ours
            elif found != ours:
                raise ValueError(
                    f"unable to add {kind} '{tensor['name']}': model configuration specified {key} {found}, but in "
                    f"auto_complete_config function it has {key} {ours}"
                )


@shown_as("Logger")
class Logger:
    """Log messages of models, in Python's logging under "flowserve.model.<name>". Used as a class, as on Triton."""

    @shown_as("Logger.LogLevel")
    class LogLevel(Constant):
        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO: ClassVar = LogLevel.INFO
    WARNING: ClassVar = LogLevel.WARNING
    ERROR: ClassVar = LogLevel.ERROR
    VERBOSE: ClassVar = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel | int = LogLevel.INFO) -> None:
        levels = [logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG]
        number = int(level)
        _log(levels[number] if 0 <= number < len(levels) else logging.INFO, message)

    @staticmethod
    def log_info(message: str) -> None:
        _log(logging.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(logging.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _log(logging.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(logging.DEBUG, message)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name, None if it has none."""
    inputs = inference_request._inputs
    for tensor in inference_request.inputs() if inputs is None else inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, None if it has none."""
    for tensor in inference_response._outputs:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of `model_config["input"]` of that name, None if there is none."""
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of `model_config["output"]` of that name, None if there is none."""
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def get_model_dir() -> str:
    """The folder of the model's version, which contains its model.py."""
    if active.context is None:
        raise TritonModelException("get_model_dir: no model runs on this thread")
    return active.context.folders[0]


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> type[Any]:
    """The numpy scalar type of a data type's number in ModelConfig."""
    return BY_NUMBER[data_type].numpy.type


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy scalar type of a data type's name, such as "TYPE_FP32"."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """A tensor of strings in Triton's BYTES encoding; None for any other tensor."""
    return raw.encode_bytes(input_tensor) if input_tensor.dtype.kind in "OSU" else None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements of Triton's BYTES encoding, as a one-dimensional object array of `bytes`."""
    encoded = memoryview(encoded_tensor).cast("B")
    count = position = 0
    while position + 4 <= len(encoded):
        position += 4 + int.from_bytes(encoded[position : position + 4], "little")
        count += 1
    return raw.decode_bytes(encoded, count, name="deserialize_bytes_tensor", model=active.model)


def load_model(model_name: str | bytes, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model, or load it again, and wait until it is ready. `config`: a configuration as JSON that replaces its
    own. `files`: "file:1/model.py" -> contents, which replace its folder; then `config` is required.
    """
    if files is not None and not isinstance(files, Mapping):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    contents = {name: _bytes(str(model_name), name, content) for name, content in (files or NO_FILES).items()}
    _ask("Failed to load model", LOAD, (name_text("model_name", model_name), config), contents)


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Unload a model. Returns at once; it is closed after its last request. `unload_dependents`: also unload the models
    of an ensemble, except those that were loaded by name.
    """
    _ask("Failed to unload model", UNLOAD, (name_text("model_name", model_name), bool(unload_dependents)))


def is_model_ready(model_name: str | bytes, model_version: str = "") -> bool:
    """Whether the model accepts requests, for this version or for any. False for an unknown name."""
    return bool(
        _ask("Failed to check model readiness", IS_READY, (name_text("model_name", model_name), str(model_version)))
    )


def _ask(failed: str, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
    caller = caller_for(failed)
    try:
        return caller.ask(what, arguments, files)
    except FlowserveError as error:
        raise TritonModelException(f"{failed}: {error}") from None


def _bytes(model: str, name: Any, content: Any) -> bytes:
    if not isinstance(name, str):
        raise TritonModelException(f"failed to load model '{model}', the path of a file should be a string: {name!r}")
    if not isinstance(content, bytes | bytearray | memoryview):
        raise TritonModelException(f"failed to load model '{model}', the content of {name!r} should be bytes")
    return bytes(content)


def _log(level: int, message: str) -> None:
    name = active.model
    logging.getLogger(f"flowserve.model.{name}" if name else "flowserve.model").log(level, "%s", message)
