"""Trains `digit` and writes its model.onnx, and held_out.json beside this script: digits the model never saw.

    python graphs/digit/train.py

Decided here: what the made-up digits look like (8 x 8 pixels, grey levels 0 to 9, so that one fits a request one can
read) and the network. Seeded; under a minute. Needs numpy, Pillow, matplotlib (for its fonts) and onnx.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

GRAPHS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GRAPHS)]

from training import Conv, Dense, Floats, Network, TensorProto, Writer, train  # noqa: E402

SEED = 20262
DIGITS, HELD_OUT = 20_000, 2_000
EPOCHS = 8
LEVELS = 9
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif")


def some_digit(rng: np.random.Generator, digit: int) -> npt.NDArray[np.uint8]:
    """One digit as [8, 8] grey levels: drawn large, bent, shifted, blurred, made small."""
    if rng.random() < 0.4:
        font = ImageFont.load_default(64)
    else:
        font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{rng.choice(FONTS)}.ttf", 64)
    picture = Image.new("L", (80, 80))
    ImageDraw.Draw(picture).text(
        (40, 40), str(digit), font=font, fill=255, anchor="mm", stroke_width=int(rng.integers(0, 4))
    )
    angle, (wide, high), slant = rng.normal(0, 0.08), rng.uniform(0.6, 0.95, 2), rng.normal(0, 0.1)
    shift = rng.normal(0, 2, 2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bend = turn @ np.array([[wide, slant], [0, high]])
    origin = np.array([40, 40]) - bend @ (np.array([40, 40]) + shift)
    terms = (bend[0, 0], bend[0, 1], origin[0], bend[1, 0], bend[1, 1], origin[1])
    picture = picture.transform((80, 80), Image.Transform.AFFINE, terms, Image.Resampling.BILINEAR)
    picture = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 2))))
    small: Floats = np.asarray(picture.resize((8, 8), Image.Resampling.BOX), np.float32)
    small = small / max(1.0, float(small.max())) * LEVELS + rng.normal(0, 0.4, (8, 8))
    return np.clip(np.rint(small), 0, LEVELS).astype(np.uint8)


def some_digits(rng: np.random.Generator, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    labels = rng.integers(0, 10, count)
    return np.stack([some_digit(rng, int(label)) for label in labels]), labels


def scaled(pixels: npt.NDArray[np.uint8]) -> Floats:
    return (pixels.astype(np.float32) / LEVELS)[..., None]


def export(network: Network) -> None:
    out = Writer()
    pixels = out.node("Cast", out.node("Reshape", "PIXELS", out.ints(-1, 1, 8, 8)), to=TensorProto.FLOAT)
    pixels = out.node("Mul", pixels, out.constant(np.array(1 / LEVELS, np.float32)))
    out.node("Softmax", out.network(network, pixels), axis=1, output="PROBABILITIES")
    out.node("ArgMax", "PROBABILITIES", axis=1, keepdims=1, output="DIGIT")
    out.save(
        GRAPHS / "digit" / "1" / "model.onnx",
        "digit",
        {"PIXELS": (TensorProto.UINT8, ["batch", 8, 8])},
        {"DIGIT": (TensorProto.INT64, ["batch", 1]), "PROBABILITIES": (TensorProto.FLOAT, ["batch", 10])},
    )


def main() -> None:
    rng = np.random.default_rng(SEED)
    pixels, labels = some_digits(rng, DIGITS)
    unseen, answers = some_digits(rng, HELD_OUT)
    network = Network(
        [Conv(rng, 3, 1, 16), Conv(rng, 3, 16, 32)], [Dense(rng, 2 * 2 * 32, 64), Dense(rng, 64, 10, relu=False)]
    )
    train(network, scaled(pixels), labels, rng, epochs=EPOCHS)
    right = network.predict(scaled(unseen)) == answers
    print(f"held-out accuracy {right.mean():.4f} ({int(right.sum())} of {len(right)})")
    export(network)
    sample = [{"digit": int(answers[i]), "pixels": unseen[i].tolist()} for i in range(100)]
    lines = ",\n".join(json.dumps(each) for each in sample)
    (Path(__file__).parent / "held_out.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
