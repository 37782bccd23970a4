"""Conversion between the tensors of a batch and the tensors of a model file, and checks of what the model returned.

Decides reshapes and scalars of inputs, shapes and data types of outputs, the encoding of strings, and the text of
onnxruntime's errors. Outputs may be numpy arrays or device arrays: only shape and dtype are read. It does not import
onnxruntime and does not know batches.

Callers: the modules of this package, and the tensorrt backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Work
from flowserve.backends.onnx.signature import Port, Signature
from flowserve.backends.shapes import fits, shape_text
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.conversion import reshaped
from flowserve.values import Array, DType, TensorSpec

AnyArray = Any  # a numpy array, or a DeviceArray

WRONG_ROWS: Final = "its first dimension is no batch dimension, so set max_batch_size to 0"

# Clients choose the names of requested outputs, in any order and number: so many combinations are remembered.
_SELECTIONS_MAX: Final = 100
# "/src/graph/model.cc:166 onnxruntime::Model::Model(a, b) const ": a position in onnxruntime's source, of no use to
# users.
_SOURCE_LOCATION: Final = re.compile(
    r"/\S+\.(?:cc|cpp|h|hpp):\d+ [^\n]*?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
)


class ModelTensors:
    """The inputs and outputs of one model: the configuration's specs beside the ports of the file, in the same order.

    `prepared`: indices of the inputs that are converted after they are gathered. `made`: all outputs of the file by
    name, whether or not the configuration has them. `passed_through`: names of the outputs that are inputs of the file
    at the same time.
    """

    def __init__(self, config: ModelConfig, signature: Signature) -> None:
        self.name = config.name
        self.inputs = config.inputs
        self.outputs = config.outputs
        self.is_batching = config.max_batch_size > 0
        by_name = {port.name: port for port in signature.inputs}
        self.ports = [by_name[spec.name] for spec in config.inputs]
        self.prepared = [
            i
            for i, (spec, port) in enumerate(zip(config.inputs, self.ports, strict=True))
            if needs_preparing(spec, port)
        ]
        self.made = {port.name: port for port in signature.outputs}
        self.output_ports = [self.made[spec.name] for spec in config.outputs]
        self.passed_through = frozenset(self.made.keys() & by_name.keys())
        self._selections: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}

    def selected(self, wanted: Sequence[tuple[str, ...]]) -> tuple[list[str], list[int]]:
        """Names and indices of the outputs to compute for a batch whose members request the outputs `wanted`: those
        that all members request if they request the same, else all outputs.
        """
        names = wanted[0]
        for other in wanted:
            if other != names:
                names = tuple(spec.name for spec in self.outputs)
                break
        found = self._selections.get(names)
        if found is None:
            if len(self._selections) > _SELECTIONS_MAX:
                self._selections.clear()
            indices = [j for j, spec in enumerate(self.outputs) if spec.name in names]
            found = self._selections[names] = ([self.outputs[j].name for j in indices], indices)
        return found


def member_rows(work: Work, total: int) -> list[int]:
    """The rows of each member of a batch of `total` rows. `work.rows` counts an empty member as one row."""
    if total == sum(work.rows):
        return work.rows
    return [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]


def needs_preparing(spec: TensorSpec, port: Port) -> bool:
    return spec.dtype is DType.BYTES or spec.reshape is not None or not port.shape


def prepared(array: Array, spec: TensorSpec, port: Port, model: str, *, is_batching: bool) -> Array:
    """A gathered input, converted to the file's shape, and to text for BYTES. Raises Invalid for text that is not
    UTF-8.
    """
    if spec.dtype is DType.BYTES:
        array = _to_text(array, spec.name, model)
    return array.reshape(fed_shape(array.shape, spec, port, is_batching=is_batching))


def fed_shape(shape: tuple[int, ...], spec: TensorSpec, port: Port, *, is_batching: bool) -> tuple[int, ...]:
    """The shape that the file expects for an input of this shape."""
    if spec.reshape is not None and not spec.ragged:
        batch = shape[:1] if is_batching else ()
        shape = batch + reshaped(shape[len(batch) :], spec.dims, spec.reshape)
    return shape if port.shape else ()


def checked(array: AnyArray, spec: TensorSpec, total: int, model: str, wrong_rows: str) -> AnyArray:
    """An output in the configuration's shape. `total` is the batch's row count, -1 for a model without batching;
    `wrong_rows` is the hint for an output with another row count. Raises ModelFailed for another row count, shape or
    data type.
    """
    if spec.dtype is DType.BYTES:
        array = _to_bytes(array)
    if array.dtype != spec.dtype.numpy:
        raise _other(model, spec, f"the configuration promises {spec.dtype}, the model answered {array.dtype}")
    shape = array.shape
    batch = shape[:1] if total >= 0 else ()
    inner = spec.dims if spec.reshape is None else spec.reshape
    if total >= 0 and batch != (total,):
        what = f"the batch has {total} rows, the model answered shape {shape_text(shape)}; {wrong_rows}"
        raise _other(model, spec, what)
    tail = shape[len(batch) :]
    if not shape and inner == (1,):
        return array.reshape((1,))
    if tail != inner and not fits(tail, inner):
        what = (
            f"the configuration promises shape {shape_text((*batch, *inner))}, the model answered {shape_text(shape)}"
        )
        raise _other(model, spec, what)
    return array if spec.reshape is None else array.reshape(batch + reshaped(tail, spec.reshape, spec.dims))


def promised(spec: TensorSpec) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The dtype and the shape of a row of an output that needs no conversion; None for outputs that may need one."""
    if spec.dtype is DType.BYTES or spec.reshape is not None or spec.is_variable:
        return None
    return spec.dtype.numpy, spec.dims


def _other(model: str, spec: TensorSpec, what: str) -> ModelFailed:
    return ModelFailed(f"model '{model}', output '{spec.name}': {what}")


def made_shape(spec: TensorSpec, port: Port, total: int) -> tuple[int, ...] | None:
    """The shape of an output in the file, if it is known before the run, else None. `total` as in `checked`."""
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
    """ONNX strings are text: onnxruntime takes `str` objects, and would take the repr of any other object."""
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
