"""Trains this model and writes its model.onnx.

    python graphs/read_text_orient/train.py

Decided here: every mark votes for one of four directions, votes add up (as logarithms of probabilities), and a picture
counts as upright where its marks say little. Seeded; some minutes on two cores. Needs numpy,
Pillow, matplotlib (for its fonts) and onnx.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

GRAPHS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GRAPHS), str(GRAPHS / "read_text")]

from pages import DECODE, FIND, png, some_page  # noqa: E402
from training import Conv, Dense, Floats, Network, TensorProto, Writer, softmax, train  # noqa: E402

SEED = 20261
PAGES, HELD_OUT_PAGES = 700, 200
EPOCHS = 5
MOST_MARKS = 48
# How many times likelier than each other direction upright is, before a single mark is seen.
UPRIGHT = 20.0


def marks_of_page(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The marks of one upright page: [n, 32, 32]."""
    marks = FIND.marks_of(DECODE.page_of(png(some_page(rng)[0])))[1]
    used: npt.NDArray[np.uint8] = marks[marks.any(axis=(1, 2))]
    return used


def turned(marks: npt.NDArray[np.uint8], quarters: int) -> Floats:
    """Marks of a picture turned clockwise, as the network takes them: [n, 32, 32, 1]."""
    return (np.rot90(marks, -quarters, axes=(1, 2)).astype(np.float32) / 255)[..., None]


def export(network: Network, prior: Floats) -> None:
    out = Writer()
    flat = out.node("Reshape", "MARKS", out.ints(-1, 1, 32, 32))
    ink = out.node("ReduceMax", out.node("Cast", flat, to=TensorProto.FLOAT), axes=[1, 2, 3], keepdims=0)
    used = out.node("Transpose", out.node("NonZero", ink))
    crops = out.node("Cast", out.node("GatherND", flat, used), to=TensorProto.FLOAT)
    crops = out.node("Mul", crops, out.constant(np.array(1 / 255, np.float32)))
    votes = out.node("LogSoftmax", out.network(network, crops), axis=1)
    nothing = out.node("ConstantOfShape", out.node("Concat", out.node("Shape", ink), out.ints(4), axis=0))
    votes = out.node("Reshape", out.node("ScatterND", nothing, used, votes), out.ints(-1, MOST_MARKS, 4))
    total = out.node("Add", out.node("ReduceSum", votes, out.ints(1), keepdims=0), out.constant(prior))
    quarters = out.node("ArgMax", total, axis=1, keepdims=1)
    degrees = out.node("Mul", quarters, out.ints(90))
    out.node("Cast", degrees, to=TensorProto.INT32, output="ORIENTATION")
    out.save(
        GRAPHS / "read_text_orient" / "1" / "model.onnx",
        "read_text_orient",
        {"MARKS": (TensorProto.UINT8, ["batch", MOST_MARKS, 32, 32])},
        {"ORIENTATION": (TensorProto.INT32, ["batch", 1])},
    )


def main() -> None:
    rng = np.random.default_rng(SEED)
    marks = np.concatenate([marks_of_page(rng) for _ in range(PAGES)])
    x = np.concatenate([turned(marks, quarters) for quarters in range(4)])
    labels = np.repeat(np.arange(4), len(marks))
    print(f"{len(labels)} turned marks to learn from")
    convs = [Conv(rng, 5, 1, 8), Conv(rng, 3, 8, 16), Conv(rng, 3, 16, 24)]
    network = Network(convs, [Dense(rng, 4 * 4 * 24, 48), Dense(rng, 48, 4, relu=False)])
    train(network, x, labels, rng, epochs=EPOCHS)
    prior = np.log(np.array([UPRIGHT, 1, 1, 1], np.float32))
    held_out = [page for page in (marks_of_page(rng) for _ in range(HELD_OUT_PAGES)) if len(page) >= 8]
    right = sum(
        int((np.log(softmax(network.logits(turned(page, quarters))) + 1e-9).sum(axis=0) + prior).argmax()) == quarters
        for page in held_out
        for quarters in range(4)
    )
    pictures = 4 * len(held_out)
    print(f"held-out accuracy {right / pictures:.4f} ({right} of {pictures} pictures of 8 marks or more)")
    export(network, prior)


if __name__ == "__main__":
    main()
