"""What a model.py written for Triton imports as `triton_python_backend_utils`.

Decided here: the names that such models find, with Triton's spelling and behaviour; the classes among them are in
files of their own beside this one. docs/python-models.md lists every name, and what is not there. This module does not
know the server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from flowserve.backends.python_calls import ResponseIterator
from flowserve.backends.python_import import scope
from flowserve.backends.triton_metrics import Metric, MetricFamily, MetricKind
from flowserve.backends.triton_model_config import ModelConfig
from flowserve.backends.triton_models import is_model_ready, load_model, unload_model
from flowserve.backends.triton_objects import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    TritonError,
)
from flowserve.backends.triton_tensors import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    MemoryType,
    PreferredMemory,
    Tensor,
    TritonModelException,
    numpy_to_triton_type,
)
from flowserve.memory import bytes_codec
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

TRITON_STRING_TO_NUMPY: Final = {dtype.config_name: dtype.numpy.type for dtype in DType}

COUNTER: Final = MetricKind.COUNTER
GAUGE: Final = MetricKind.GAUGE
HISTOGRAM: Final = MetricKind.HISTOGRAM


class Logger:
    """Messages of models, in Python's logging under "flowserve.model.<name>". Used as a class, as in Triton."""

    INFO: ClassVar[int] = 0
    WARNING: ClassVar[int] = 1
    ERROR: ClassVar[int] = 2
    VERBOSE: ClassVar[int] = 3

    @staticmethod
    def log(message: str, level: int = 0) -> None:
        levels = {Logger.WARNING: logging.WARNING, Logger.ERROR: logging.ERROR, Logger.VERBOSE: logging.DEBUG}
        _log(levels.get(level, logging.INFO), message)

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
    """The request's input of that name, None where it has none."""
    inputs = inference_request._inputs
    for tensor in inference_request.inputs() if inputs is None else inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, None where it has none."""
    for tensor in inference_response._outputs:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of `model_config["input"]` of that name."""
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of `model_config["output"]` of that name."""
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def get_model_dir() -> str:
    """The folder of the model's version, where its model.py lies."""
    if scope.owner is None:
        raise TritonModelException("get_model_dir: no model runs on this thread")
    return scope.owner.folders[0]


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> type[Any]:
    """The numpy scalar type of a data type's number in ModelConfig."""
    return BY_NUMBER[data_type].numpy.type


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy scalar type of "TYPE_FP32" and its kin."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """A tensor of strings in Triton's BYTES encoding; None for any other tensor."""
    return bytes_codec.encode(input_tensor) if input_tensor.dtype.kind in "OSU" else None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements of Triton's BYTES encoding, as a one-dimensional object array of `bytes`."""
    encoded = memoryview(encoded_tensor).cast("B")
    count = position = 0
    while position + 4 <= len(encoded):
        position += 4 + int.from_bytes(encoded[position : position + 4], "little")
        count += 1
    return bytes_codec.decode(encoded, count, name="deserialize_bytes_tensor", model=scope.model)


def _log(level: int, message: str) -> None:
    name = scope.model
    logging.getLogger(f"flowserve.model.{name}" if name else "flowserve.model").log(level, "%s", message)
