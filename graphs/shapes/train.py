"""Trains the models of `shapes` and writes their files: shapes_preprocess, shapes_classify and shapes_segment; and
held_out.json beside this script: pictures the models never saw.

    pip install torch==2.13.0
    python graphs/shapes/train.py

Decided here: what the made-up pictures look like (one shape in a colour of its own on a ground of another, any size)
and the two small networks. torch trains and is no part of the product; what it learnt is written as plain ONNX nodes.
Seeded; a few minutes of processor time. Needs numpy, torch, Pillow and onnx.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import nn

GRAPHS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GRAPHS)]

from training import TensorProto, Writer  # noqa: E402

SEED = 20264
PICTURES, HELD_OUT, SHOWN = 10_000, 1_000, 8
BATCH = 50
SIZE = 32  # what the networks see, in pixels each way
KINDS = ("circle", "square", "triangle", "cross")

Bytes = npt.NDArray[np.uint8]


def some_picture(rng: np.random.Generator, kind: int, width: int, height: int) -> tuple[Bytes, Bytes]:
    """A picture [height, width, 3] with one shape, and which of its pixels [SIZE, SIZE] are the shape's."""
    ground, ink = rng.integers(0, 256, (2, 3))
    while np.abs(ground - ink).sum() < 150:
        ground, ink = rng.integers(0, 256, (2, 3))
    r = float(rng.uniform(0.16, 0.34))
    x, y = rng.uniform(r + 0.03, 0.97 - r, 2)
    turn = float(rng.uniform(-0.25, 0.25))
    mask = Image.new("L", (4 * SIZE, 4 * SIZE))
    _draw(ImageDraw.Draw(mask), KINDS[kind], 4 * SIZE * x, 4 * SIZE * y, 4 * SIZE * r, turn)
    large = np.asarray(mask.resize((width, height), Image.Resampling.BOX), np.float32)[..., None] / 255
    picture = ground * (1 - large) + ink * large + rng.normal(0, 8, (height, width, 3))
    small = np.asarray(mask.resize((SIZE, SIZE), Image.Resampling.BOX), np.uint8)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8), (small > 127).astype(np.uint8)


def _draw(pen: ImageDraw.ImageDraw, kind: str, x: float, y: float, r: float, turn: float) -> None:
    if kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
        return
    corners = {
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0.0, -1.0), (0.87, 0.5), (-0.87, 0.5)],
        "cross": [
            *[(-0.3, -1.0), (0.3, -1.0), (0.3, -0.3), (1.0, -0.3), (1.0, 0.3), (0.3, 0.3)],
            *[(0.3, 1.0), (-0.3, 1.0), (-0.3, 0.3), (-1.0, 0.3), (-1.0, -0.3), (-0.3, -0.3)],
        ],
    }[kind]
    sin, cos = np.sin(turn), np.cos(turn)
    pen.polygon([(x + r * (a * cos - b * sin), y + r * (a * sin + b * cos)) for a, b in corners], fill=255)


def formatted(picture: Bytes) -> npt.NDArray[np.float32]:
    """What shapes_preprocess makes of a picture: [3, SIZE, SIZE], the mean colour at 0."""
    tensor = torch.from_numpy(picture.astype(np.float32)).permute(2, 0, 1)[None] / 255
    small = nn.functional.interpolate(tensor, (SIZE, SIZE), mode="bilinear", align_corners=False)[0]
    centred: npt.NDArray[np.float32] = (small - small.mean(dim=(1, 2), keepdim=True)).numpy()
    return centred


def some_pictures(rng: np.random.Generator, count: int) -> tuple[list[Bytes], torch.Tensor, torch.Tensor, torch.Tensor]:
    kinds = rng.integers(0, len(KINDS), count)
    sizes = rng.integers(SIZE, 2 * SIZE + 1, (count, 2))
    made = [some_picture(rng, int(kind), int(w), int(h)) for kind, (w, h) in zip(kinds, sizes, strict=True)]
    inputs = torch.from_numpy(np.stack([formatted(picture) for picture, _ in made]))
    masks = torch.from_numpy(np.stack([mask for _, mask in made]).astype(np.float32))
    return [picture for picture, _ in made], inputs, torch.from_numpy(kinds), masks


def classifier() -> nn.Sequential:
    """[n, 3, SIZE, SIZE] to logits [n, kinds]."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, len(KINDS)))


def segmenter() -> nn.Sequential:
    """[n, 3, SIZE, SIZE] to logits [n, 1, SIZE, SIZE]: down once, a wide look around, up again."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=4, dilation=4),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(16, 1, 3, padding=1),
    )


def fit(network: nn.Sequential, inputs: torch.Tensor, targets: torch.Tensor, loss: nn.Module, epochs: int) -> None:
    steps = epochs * (len(inputs) // BATCH)
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(inputs)).split(BATCH):
            optimiser.zero_grad()
            wrong = loss(network(inputs[chosen]), targets[chosen])
            wrong.backward()
            optimiser.step()
            schedule.step()
            total += float(wrong.detach())
        print(f"epoch {epoch + 1}/{epochs}: loss {total / (len(inputs) // BATCH):.4f}", flush=True)


def write_layers(out: Writer, network: nn.Sequential, x: str) -> str:
    """The network's layers as ONNX nodes; the name of what the last one makes."""
    for layer in network:
        values = [out.constant(value.detach().numpy()) for value in layer.parameters()]
        if isinstance(layer, nn.Conv2d):
            around = [int(layer.padding[0])] * 4  # type: ignore[arg-type]
            x = out.node("Conv", x, *values, strides=list(layer.stride), pads=around, dilations=list(layer.dilation))
        elif isinstance(layer, nn.Linear):
            x = out.node("Gemm", x, *values, transB=1)
        elif isinstance(layer, nn.Flatten):
            x = out.node("Flatten", x)
        elif isinstance(layer, nn.Upsample):
            scales = out.constant(np.array([1, 1, 2, 2], np.float32))
            x = out.node(
                "Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            )  # fmt: skip
        else:
            x = out.node("Relu", x)
    return x


def export(classify: nn.Sequential, segment: nn.Sequential) -> None:
    image: list[int | str] = ["batch", 3, SIZE, SIZE]
    out = Writer()
    planes = out.node("Transpose", out.node("Cast", "RAW_IMAGE", to=TensorProto.FLOAT), perm=[0, 3, 1, 2])
    planes = out.node("Div", planes, out.constant(np.array(255, np.float32)))
    rows = out.node("Shape", planes, start=0, end=2)
    sizes = out.node("Concat", rows, out.ints(SIZE, SIZE), axis=0)
    small = out.node("Resize", planes, "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    mean = out.node("ReduceMean", small, axes=[2, 3], keepdims=1)
    out.node("Sub", small, mean, output="PREPROCESSED_OUTPUT")
    _save(out, "preprocess", {"RAW_IMAGE": (TensorProto.UINT8, ["batch", "height", "width", 3])},
          {"PREPROCESSED_OUTPUT": (TensorProto.FLOAT, image)})  # fmt: skip
    out = Writer()
    out.node("Softmax", write_layers(out, classify, "FORMATTED_IMAGE"), axis=1, output="CLASSIFICATION_OUTPUT")
    _save(out, "classify", {"FORMATTED_IMAGE": (TensorProto.FLOAT, image)},
          {"CLASSIFICATION_OUTPUT": (TensorProto.FLOAT, ["batch", len(KINDS)])})  # fmt: skip
    out = Writer()
    flat = out.node("Reshape", write_layers(out, segment, "FORMATTED_IMAGE"), out.ints(-1, SIZE, SIZE))
    shape = out.node("Greater", flat, out.constant(np.array(0, np.float32)))
    out.node("Cast", shape, to=TensorProto.UINT8, output="SEGMENTATION_OUTPUT")
    _save(out, "segment", {"FORMATTED_IMAGE": (TensorProto.FLOAT, image)},
          {"SEGMENTATION_OUTPUT": (TensorProto.UINT8, ["batch", SIZE, SIZE])})  # fmt: skip


def _save(out: Writer, name: str, inputs: Any, outputs: Any) -> None:
    out.save(GRAPHS / f"shapes_{name}" / "1" / "model.onnx", f"shapes_{name}", inputs, outputs)


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    rng = np.random.default_rng(SEED)
    _, inputs, kinds, masks = some_pictures(rng, PICTURES)
    pictures, unseen, answers, shapes = some_pictures(rng, HELD_OUT)
    classify, segment = classifier(), segmenter()
    fit(classify, inputs, kinds, nn.CrossEntropyLoss(), 10)
    fit(segment, inputs, masks[:, None], nn.BCEWithLogitsLoss(), 4)
    with torch.no_grad():
        right = classify(unseen).argmax(dim=1) == answers
        found = segment(unseen)[:, 0] > 0
    both, either = (found & (shapes > 0)).sum(dim=(1, 2)), (found | (shapes > 0)).sum(dim=(1, 2))
    print(f"held-out accuracy {right.float().mean():.4f}, overlap of the shapes {(both / either).mean():.4f}")
    export(classify, segment)
    (GRAPHS / "shapes_classify" / "labels.txt").write_text("".join(f"{kind}\n" for kind in KINDS), encoding="utf-8")
    sample = [
        {"kind": KINDS[int(answers[i])], "pixels": int(shapes[i].sum()), "image": pictures[i].tolist()}
        for i in range(len(pictures))
        if max(pictures[i].shape[:2]) <= SIZE + 8
    ][:SHOWN]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in sample)
    (Path(__file__).parent / "held_out.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
