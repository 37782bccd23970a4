"""A small neural network in numpy, and its way into an ONNX file: what the training scripts of these folders share.

Decided here: convolutions, dense layers, Adam, and how they are written as ONNX nodes. Knows nothing of any data.
Everything is seeded: one machine makes the same file twice. Not a deployment: the server reads folders only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Floats = Array  # float32 throughout, which numpy's types lose at the first division
Values = dict[str, tuple[int, list[int | str]]]

OPSET = 17
IR_VERSION = 9


class Conv:
    """A convolution with stride 2 and ReLU; pictures are [n, height, width, channels]."""

    def __init__(self, rng: np.random.Generator, size: int, inputs: int, outputs: int) -> None:
        self.size, self.pad = size, size // 2
        fan_in = size * size * inputs
        self.weight: Floats = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, outputs)).astype(np.float32)
        self.bias: Floats = np.zeros(outputs, np.float32)
        self.gradients: list[Floats] = []

    @property
    def parameters(self) -> list[Floats]:
        return [self.weight, self.bias]

    def forward(self, x: Floats) -> Floats:
        pad = self.pad
        self.padded_shape = (x.shape[0], x.shape[1] + 2 * pad, x.shape[2] + 2 * pad, x.shape[3])
        padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.size, self.size), axis=(1, 2))[:, ::2, ::2]
        n, height, width = windows.shape[:3]
        self.columns = windows.transpose(0, 1, 2, 4, 5, 3).reshape(n * height * width, -1)
        y: Floats = np.maximum(self.columns @ self.weight + self.bias, 0).reshape(n, height, width, -1)
        self.y = y
        return y

    def backward(self, dy: Floats) -> Floats:
        n, height, width, outputs = dy.shape
        flat = (dy * (self.y > 0)).reshape(-1, outputs)
        self.gradients = [self.columns.T @ flat, flat.sum(axis=0)]
        patches = (flat @ self.weight.T).reshape(n, height, width, self.size, self.size, -1)
        dx = np.zeros(self.padded_shape, np.float32)
        for row in range(self.size):
            for column in range(self.size):
                dx[:, row : row + 2 * height : 2, column : column + 2 * width : 2] += patches[:, :, :, row, column]
        return dx[:, self.pad : -self.pad, self.pad : -self.pad]


class Dense:
    """A dense layer, with ReLU unless it is the last."""

    def __init__(self, rng: np.random.Generator, inputs: int, outputs: int, *, relu: bool = True) -> None:
        self.weight: Floats = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        self.bias: Floats = np.zeros(outputs, np.float32)
        self.relu = relu
        self.gradients: list[Floats] = []

    @property
    def parameters(self) -> list[Floats]:
        return [self.weight, self.bias]

    def forward(self, x: Floats) -> Floats:
        self.x = x
        self.y = x @ self.weight + self.bias
        if self.relu:
            self.y = np.maximum(self.y, 0)
        return self.y

    def backward(self, dy: Floats) -> Floats:
        if self.relu:
            dy = dy * (self.y > 0)
        self.gradients = [self.x.T @ dy, dy.sum(axis=0)]
        return dy @ self.weight.T


class Network:
    """Convolutions, then dense layers that also see `extra` numbers per example."""

    def __init__(self, convs: list[Conv], dense: list[Dense]) -> None:
        self.convs, self.dense = convs, dense

    def logits(self, x: Floats, extra: Floats | None = None) -> Floats:
        """x: [n, height, width, channels], or [n, numbers] without convolutions; extra: [n, numbers]."""
        for conv in self.convs:
            x = conv.forward(x)
        self.shape = x.shape
        x = x.reshape(len(x), -1)
        self.flat = x.shape[1]
        if extra is not None:
            x = np.concatenate([x, extra], axis=1)
        for dense in self.dense:
            x = dense.forward(x)
        return x

    def backward(self, dy: Floats) -> None:
        for dense in reversed(self.dense):
            dy = dense.backward(dy)
        if not self.convs:
            return
        dy = dy[:, : self.flat].reshape(self.shape)
        for conv in reversed(self.convs):
            dy = conv.backward(dy)

    def predict(self, x: Floats, extra: Floats | None = None) -> npt.NDArray[np.int64]:
        """The best class of each example, in pieces that fit into memory."""
        pieces = [slice(start, start + 1024) for start in range(0, len(x), 1024)]
        logits = [self.logits(x[piece], None if extra is None else extra[piece]) for piece in pieces]
        best: npt.NDArray[np.int64] = np.concatenate(logits).argmax(axis=1)
        return best


def softmax(logits: Floats) -> Floats:
    powers: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def train(
    network: Network,
    x: Floats,
    labels: npt.NDArray[np.int64],
    rng: np.random.Generator,
    *,
    epochs: int,
    extra: Floats | None = None,
    batch: int = 128,
    rate: float = 2e-3,
    decay: float = 1e-4,
) -> None:
    """Adam with weight decay on the cross entropy; the learning rate falls to 0 along half a cosine."""
    layers: list[Conv | Dense] = [*network.convs, *network.dense]
    moments = [[(np.zeros_like(p), np.zeros_like(p)) for p in layer.parameters] for layer in layers]
    steps, step = epochs * (len(x) // batch), 0
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        total = 0.0
        for start in range(0, len(x) - batch + 1, batch):
            step += 1
            chosen = order[start : start + batch]
            probabilities = softmax(network.logits(x[chosen], None if extra is None else extra[chosen]))
            rows = np.arange(batch)
            total -= float(np.log(probabilities[rows, labels[chosen]] + 1e-9).mean())
            probabilities[rows, labels[chosen]] -= 1
            network.backward(probabilities / np.float32(batch))
            now = rate * 0.5 * (1 + np.cos(np.pi * step / steps))
            for layer, pairs in zip(layers, moments, strict=True):
                for parameter, gradient, (first, second) in zip(layer.parameters, layer.gradients, pairs, strict=True):
                    first += 0.1 * (gradient - first)
                    second += 0.001 * (gradient * gradient - second)
                    size = np.sqrt(second / (1 - 0.999**step)) + 1e-8
                    parameter -= np.float32(now) * (first / (1 - 0.9**step) / size + np.float32(decay) * parameter)
        print(f"epoch {epoch + 1}/{epochs}: loss {total / (len(x) // batch):.4f}", flush=True)


class Writer:
    """Collects the nodes of an ONNX file. Tensors are known by name; `node` makes one up unless it is given."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, value: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def node(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def network(self, network: Network, x: str, extra: str = "") -> str:
        """The logits of `network`. x: [n, channels, height, width] (or [n, numbers]); extra: [n, numbers] or ""."""
        for conv in network.convs:
            size, channels = conv.size, conv.weight.shape[0] // conv.size**2
            weight = conv.weight.reshape(size, size, channels, -1).transpose(3, 2, 0, 1)
            x = self.node(
                "Conv", x, self.constant(weight), self.constant(conv.bias), strides=[2, 2], pads=[conv.pad] * 4
            )
            x = self.node("Relu", x)
        if network.convs:
            # Training has the channels last: only then do the dense layers find their numbers where they learnt them.
            x = self.node("Transpose", x, perm=[0, 2, 3, 1])
        x = self.node("Reshape", x, self.ints(0, network.dense[0].weight.shape[0] - (4 if extra else 0)))
        if extra:
            x = self.node("Concat", x, extra, axis=1)
        for dense in network.dense:
            x = self.node("Gemm", x, self.constant(dense.weight), self.constant(dense.bias))
            if dense.relu:
                x = self.node("Relu", x)
        return x

    def save(self, path: Path, name: str, inputs: Values, outputs: Values) -> None:
        """Check the file and write it. `inputs` and `outputs`: name -> (ONNX element type, shape)."""
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(key, *value) for key, value in inputs.items()],
            [helper.make_tensor_value_info(key, *value) for key, value in outputs.items()],
            self.constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, str(path))
        print(f"wrote {path.parent.parent.name}/{path.parent.name}/{path.name}, {path.stat().st_size} bytes")


__all__ = ["Conv", "Dense", "Floats", "Network", "TensorProto", "Writer", "softmax", "train"]
