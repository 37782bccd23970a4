"""Small ONNX files for tests.

Decides how a test describes the contents of a file. Needs the package `onnx`, which flowserve itself does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import onnx
from onnx import TensorProto, helper

from flowserve.values import DType

_NAMES: Final = {
    DType.FP16: "FLOAT16",
    DType.FP32: "FLOAT",
    DType.FP64: "DOUBLE",
    DType.BF16: "BFLOAT16",
    DType.BYTES: "STRING",
}


def onnx_value(name: str, dtype: DType, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    number = getattr(TensorProto, _NAMES.get(dtype, dtype.wire))
    return helper.make_tensor_value_info(name, number, shape)


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> bytes:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


def onnx_node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, **attributes)


def onnx_identity(dtype: DType = DType.FP32, shape: Sequence[int | str | None] | None = ("N", 4)) -> bytes:
    node = onnx_node("Identity", ["x"], ["y"])
    return onnx_model([node], [onnx_value("x", dtype, shape)], [onnx_value("y", dtype, shape)])
