"""Trains this model and writes its model.onnx, and characters.txt beside the step that needs it.

    python graphs/read_text_recognise/train.py

Decided here: the shape of the network and how long it learns. The file has one character in a row. Seeded; some minutes
on two cores. Needs numpy, Pillow, matplotlib (for its fonts) and onnx.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

GRAPHS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GRAPHS), str(GRAPHS / "read_text")]

from pages import CHARACTERS, Glyphs, glyphs_of_pages  # noqa: E402
from training import Conv, Dense, Floats, Network, TensorProto, Writer, train  # noqa: E402

SEED = 20260
PAGES, HELD_OUT_PAGES = 1800, 200
EPOCHS = 10


def pictures(glyphs: Glyphs) -> Floats:
    return (glyphs.glyphs.astype(np.float32) / 255)[..., None]


def export(network: Network) -> None:
    out = Writer()
    crops = out.node("Cast", out.node("Reshape", "GLYPH", out.ints(-1, 1, 32, 32)), to=TensorProto.FLOAT)
    crops = out.node("Mul", crops, out.constant(np.array(1 / 255, np.float32)))
    out.node("Softmax", out.network(network, crops, "PLACE"), axis=1, output="PROBABILITIES")
    out.save(
        GRAPHS / "read_text_recognise" / "1" / "model.onnx",
        "read_text_recognise",
        {
            "GLYPH": (TensorProto.UINT8, ["batch", 32, 32]),
            "PLACE": (TensorProto.FLOAT, ["batch", 4]),
        },
        {"PROBABILITIES": (TensorProto.FLOAT, ["batch", len(CHARACTERS)])},
    )
    (GRAPHS / "read_text_assemble" / "1" / "characters.txt").write_text("\n".join(CHARACTERS) + "\n", encoding="utf-8")


def main() -> None:
    rng = np.random.default_rng(SEED)
    seen, held_out = glyphs_of_pages(rng, PAGES), glyphs_of_pages(rng, HELD_OUT_PAGES)
    print(f"{len(seen.labels)} characters to learn from, {len(held_out.labels)} held out")
    convs = [Conv(rng, 5, 1, 12), Conv(rng, 3, 12, 32), Conv(rng, 3, 32, 32)]
    network = Network(convs, [Dense(rng, 4 * 4 * 32 + 4, 128), Dense(rng, 128, len(CHARACTERS), relu=False)])
    train(network, pictures(seen), seen.labels, rng, epochs=EPOCHS, extra=seen.places)
    right = network.predict(pictures(held_out), held_out.places) == held_out.labels
    print(f"held-out accuracy {right.mean():.4f} ({int(right.sum())} of {len(right)})")
    export(network)


if __name__ == "__main__":
    main()
