"""What an ONNX model is fed, and whether what it answered is what its configuration promised.

Decided here: reshapes and scalars on the way in, shapes and types on the way out, strings both ways, and how
onnxruntime's failures read. Outputs may be numpy's or a device's: only their facts are looked at. It does not import
onnxruntime.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from flowserve.backends.onnx_signature import Port
from flowserve.backends.shapes import fits, shown
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.conversion import reshaped
from flowserve.values import Array, DType, TensorSpec

AnyArray = Any  # numpy's, or a DeviceArray


# "/src/graph/model.cc:166 onnxruntime::Model::Model(a, b) const ": where in onnxruntime, which helps nobody here.
_SOURCE_LOCATION: Final = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^\n]*?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
)


def needs_preparing(spec: TensorSpec, port: Port) -> bool:
    return spec.dtype is DType.BYTES or spec.reshape is not None or not port.shape


def prepared(array: Array, spec: TensorSpec, port: Port, model: str, *, is_batching: bool) -> Array:
    """A gathered input as the file wants it."""
    if spec.dtype is DType.BYTES:
        array = _to_text(array, spec.name, model)
    return array.reshape(fed_shape(array.shape, spec, port, is_batching=is_batching))


def fed_shape(shape: tuple[int, ...], spec: TensorSpec, port: Port, *, is_batching: bool) -> tuple[int, ...]:
    """The shape in which the file wants an input that has this one."""
    if spec.reshape is not None and not spec.ragged:
        batch = shape[:1] if is_batching else ()
        shape = batch + reshaped(shape[len(batch) :], spec.dims, spec.reshape)
    return shape if port.shape else ()


def checked(array: AnyArray, spec: TensorSpec, total: int, model: str, wrong_rows: str) -> AnyArray:
    """An output in the configuration's shape. `total` is the batch's row count, -1 for a model without batching;
    `wrong_rows` says what to do where it has another. Raises ModelFailed.
    """
    if spec.dtype is DType.BYTES:
        array = _to_bytes(array)
    if array.dtype != spec.dtype.numpy:
        raise _other(model, spec, f"the configuration promises {spec.dtype}, the model answered {array.dtype}")
    shape = array.shape
    batch = shape[:1] if total >= 0 else ()
    inner = spec.dims if spec.reshape is None else spec.reshape
    if total >= 0 and batch != (total,):
        what = f"the batch has {total} rows, the model answered shape {shown(shape)}; {wrong_rows}"
        raise _other(model, spec, what)
    tail = shape[len(batch) :]
    if not shape and inner == (1,):
        return array.reshape((1,))
    if tail != inner and not fits(tail, inner):
        what = f"the configuration promises shape {shown((*batch, *inner))}, the model answered {shown(shape)}"
        raise _other(model, spec, what)
    return array if spec.reshape is None else array.reshape(batch + reshaped(tail, spec.reshape, spec.dims))


def promised(spec: TensorSpec) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The type and the shape of a row that an output which needs nothing done has; None where there is no such."""
    if spec.dtype is DType.BYTES or spec.reshape is not None or spec.is_variable:
        return None
    return spec.dtype.numpy, spec.dims


def _other(model: str, spec: TensorSpec, what: str) -> ModelFailed:
    return ModelFailed(f"model '{model}', output '{spec.name}': {what}")


def made_shape(spec: TensorSpec, port: Port, total: int) -> tuple[int, ...] | None:
    """The shape in which the file will answer, where it is known before: `total` as above. None where it varies."""
    if not port.shape:
        return ()
    inner = spec.dims if spec.reshape is None else spec.reshape
    if any(dim < 0 for dim in inner):
        return None
    return (total, *inner) if total >= 0 else inner


def cleaned(text: str) -> str:
    """onnxruntime's message without its prefixes, source locations and stack."""
    text = text.partition("\nStacktrace")[0]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"Load model from .*? failed:", "", text)
    return " ".join(_SOURCE_LOCATION.sub("", text).split())


def _to_bytes(array: Array) -> Array:
    return _objects([element.encode() for element in array.ravel().tolist()], array.shape)


def _to_text(array: Array, name: str, model: str) -> Array:
    """ONNX strings are text; onnxruntime takes `str` objects, and would take the repr of anything else."""
    try:
        return _objects([element.decode() for element in array.ravel().tolist()], array.shape)
    except UnicodeDecodeError as error:
        raise Invalid(
            f"inference input '{name}' for model '{model}' must hold UTF-8 text, as ONNX strings do: {error}"
        ) from error


def _objects(elements: list[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)
