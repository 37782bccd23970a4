"""ONNX files that stand in for missing weights.

Decides what such a model computes: each row of an output is filled with the mean of the row of the first input of
numbers. A dimension of -1 is that of the same axis of this input, else 1. Needs the package `onnx`, as the tests do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

ONNX_TYPES = {
    "TYPE_BOOL": TensorProto.BOOL,
    "TYPE_UINT8": TensorProto.UINT8,
    "TYPE_UINT16": TensorProto.UINT16,
    "TYPE_UINT32": TensorProto.UINT32,
    "TYPE_UINT64": TensorProto.UINT64,
    "TYPE_INT8": TensorProto.INT8,
    "TYPE_INT16": TensorProto.INT16,
    "TYPE_INT32": TensorProto.INT32,
    "TYPE_INT64": TensorProto.INT64,
    "TYPE_FP16": TensorProto.FLOAT16,
    "TYPE_FP32": TensorProto.FLOAT,
    "TYPE_FP64": TensorProto.DOUBLE,
    "TYPE_STRING": TensorProto.STRING,
    "TYPE_BF16": TensorProto.BFLOAT16,
}


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A tensor of the file; `dims` are those that the model sees, without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]


def write_onnx(path: Path, inputs: Sequence[OnnxTensor], outputs: Sequence[OnnxTensor], batches: bool) -> None:
    """Write the model. Raises KeyError for a data type that ONNX does not have."""
    nodes: list[NodeProto] = []
    constants: list[TensorProto] = []
    source = next((one for one in inputs if one.data_type != "TYPE_STRING"), None)
    if source is not None:
        nodes += _mean(source, batches, constants)
    for i, output in enumerate(outputs):
        nodes += _filled(f"o{i}", output, source, inputs, batches, constants)
    graph = helper.make_graph(
        nodes,
        "stand_in",
        [_value(one, batches) for one in inputs],
        [_value(one, batches) for one in outputs],
        initializer=constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def _value(tensor: OnnxTensor, batches: bool) -> onnx.ValueInfoProto:
    axes: list[int | str] = [n if n >= 0 else f"{tensor.name}_{i}" for i, n in enumerate(tensor.dims)]
    shape = ["batch", *axes] if batches else axes
    return helper.make_tensor_value_info(tensor.name, ONNX_TYPES[tensor.data_type], shape)


def _integers(name: str, values: Sequence[int], constants: list[TensorProto]) -> str:
    constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return name


def _mean(source: OnnxTensor, batches: bool, constants: list[TensorProto]) -> list[NodeProto]:
    """`mean`: one number for each row, or one for all."""
    nodes = [helper.make_node("Cast", [source.name], ["numbers"], to=TensorProto.FLOAT)]
    shape = _integers("flat", [0, -1] if batches and source.dims else [-1, 1] if batches else [1, -1], constants)
    nodes.append(helper.make_node("Reshape", ["numbers", shape], ["flattened"]))
    axes = _integers("mean_axes", [1], constants)
    nodes.append(helper.make_node("ReduceMean", ["flattened", axes], ["mean"], keepdims=0))
    return nodes


def _filled(
    prefix: str,
    output: OnnxTensor,
    source: OnnxTensor | None,
    inputs: Sequence[OnnxTensor],
    batches: bool,
    constants: list[TensorProto],
) -> list[NodeProto]:
    """The nodes of one output: its shape, the mean of each row in it, and its data type."""
    nodes: list[NodeProto] = []
    parts = []
    if batches:
        nodes.append(helper.make_node("Shape", [inputs[0].name], [f"{prefix}_batch"], start=0, end=1))
        parts.append(f"{prefix}_batch")
    for i, size in enumerate(output.dims):
        if size < 0 and source is not None and i < len(source.dims):
            axis = i + batches
            nodes.append(helper.make_node("Shape", [source.name], [f"{prefix}_d{i}"], start=axis, end=axis + 1))
            parts.append(f"{prefix}_d{i}")
        else:
            parts.append(_integers(f"{prefix}_d{i}", [max(size, 1)], constants))
    rank = len(parts)
    if rank:
        nodes.append(helper.make_node("Concat", parts, [f"{prefix}_shape"], axis=0))
    else:
        _integers(f"{prefix}_shape", [], constants)
    if source is None:
        constants.append(numpy_helper.from_array(np.zeros([1] * rank, np.float32), f"{prefix}_values"))
    else:
        column = _integers(f"{prefix}_column", [-1 if batches else 1, *[1] * (rank - 1)] if rank else [], constants)
        nodes.append(helper.make_node("Reshape", ["mean", column], [f"{prefix}_values"]))
    nodes.append(helper.make_node("Expand", [f"{prefix}_values", f"{prefix}_shape"], [f"{prefix}_expanded"]))
    last = f"{prefix}_expanded"
    if output.data_type == "TYPE_STRING":
        nodes.append(helper.make_node("Cast", [last], [f"{prefix}_whole"], to=TensorProto.INT64))
        last = f"{prefix}_whole"
    nodes.append(helper.make_node("Cast", [last], [output.name], to=ONNX_TYPES[output.data_type]))
    return nodes
