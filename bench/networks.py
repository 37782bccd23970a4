"""The ONNX networks that are measured, built from seeded weights instead of files in the repository.

All read X and write Y (mostly 10 logits), FP32, with the batch as the first dimension. They are untrained: only their
cost matters, and that different inputs give clearly different outputs.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

# Old enough for every onnxruntime that reads the files; Triton's environment has another version than this one.
OPSET = 17
IR_VERSION = 8

IMAGE = (3, 224, 224)
FEATURES = 256
CLASSES = 10


def _weights(generator: np.random.Generator, name: str, *shape: int) -> onnx.TensorProto:
    """He-scaled normal weights of that shape: signals neither vanish nor explode through the layers."""
    scale = np.sqrt(2.0 / np.prod(shape[1:], dtype=np.float64)) if len(shape) > 1 else 0.05
    values: npt.NDArray[np.float32] = (generator.standard_normal(shape) * scale).astype(np.float32)
    return numpy_helper.from_array(values, name)


def _model(
    name: str,
    dims: tuple[int, ...],
    nodes: list[onnx.NodeProto],
    weights: list[onnx.TensorProto],
    answer: tuple[int, ...] = (CLASSES,),
) -> bytes:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", *dims])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", *answer])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@functools.cache
def perceptron() -> bytes:
    """256 -> 256 -> 64 -> 10 with ReLU between: cheap, and several times cheaper per row in a batch."""
    generator = np.random.default_rng(1)
    widths = (FEATURES, 256, 64, CLASSES)
    nodes, weights, source = [], [], "X"
    for layer, (width_in, width_out) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        target = "Y" if last else f"sum{layer}"
        weights += [
            _weights(generator, f"w{layer}", width_out, width_in),
            _weights(generator, f"b{layer}", width_out),
        ]
        nodes.append(helper.make_node("Gemm", [source, f"w{layer}", f"b{layer}"], [target], transB=1))
        if not last:
            nodes.append(helper.make_node("Relu", [target], [f"active{layer}"]))
        source = f"active{layer}"
    return _model("perceptron", (FEATURES,), nodes, weights)


@functools.cache
def convolution() -> bytes:
    """One convolution over 3x224x224 that keeps the shape, so that several can follow each other."""
    weights = [_weights(np.random.default_rng(4), "w", IMAGE[0], IMAGE[0], 3, 3)]
    nodes = [helper.make_node("Conv", ["X", "w"], ["Y"], pads=[1, 1, 1, 1])]
    return _model("convolution", IMAGE, nodes, weights, IMAGE)


@functools.cache
def convolutions() -> bytes:
    """Three strided convolutions over 3x224x224, a global mean and a dense layer: about 58 million multiplications."""
    generator = np.random.default_rng(2)
    nodes, weights, source = [], [], "X"
    for layer, (channels_in, channels_out, kernel) in enumerate(((3, 16, 7), (16, 32, 3), (32, 64, 3))):
        pad = kernel // 2
        weights += [
            _weights(generator, f"w{layer}", channels_out, channels_in, kernel, kernel),
            _weights(generator, f"b{layer}", channels_out),
        ]
        nodes += [
            helper.make_node(
                "Conv", [source, f"w{layer}", f"b{layer}"], [f"sum{layer}"], strides=[2, 2], pads=[pad, pad, pad, pad]
            ),
            helper.make_node("Relu", [f"sum{layer}"], [f"active{layer}"]),
        ]
        source = f"active{layer}"
    weights += [_weights(generator, "dense", CLASSES, 64), _weights(generator, "bias", CLASSES)]
    nodes += [
        helper.make_node("GlobalAveragePool", [source], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense", "bias"], ["Y"], transB=1),
    ]
    return _model("convolutions", IMAGE, nodes, weights)
