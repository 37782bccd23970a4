"""Draws the pictures of this folder, with pictures.json that says what stands in each and which way it is turned.

    python graphs/read_text/draw_pictures.py

Their texts are not among the training pictures, which are made of words in random order. Seeded; needs numpy and
Pillow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SEED = 20264
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture. `turned`: degrees clockwise; `noise`: standard deviation in grey levels."""

    name: str
    text: str
    size: int
    ink: int = 20
    paper: int = 245
    turned: int = 0
    noise: float = 0.0


SAMPLES = (
    Sample("hello", "Hello, graph! 3 models, 1 answer.", 28),
    Sample("receipt", "Receipt No. 20471\nCoffee 2 x 3.50\nApple cake 4.20\nTotal: 11.20", 26),
    Sample("turned_90", "This side up, please.\nHandle with care!", 24, turned=90),
    Sample("turned_180", "Upside down?\nNot for long: 180 degrees.", 30, turned=180),
    Sample("turned_270", "Platform 7\nDeparts 16:45, coach B-12", 26, turned=270),
    Sample("night", "Light letters on a dark page\nread just as well.", 24, ink=235, paper=35),
    Sample("noisy", "Grainy scans (like this one)\nare not a problem.", 26, ink=60, paper=190, noise=10.0),
    Sample("large", "BIG & bold", 44),
    Sample("wide", "A picture wider than the page is made smaller before it is read.", 40),
    Sample("empty", "", 24),
)


def draw(sample: Sample, rng: np.random.Generator) -> Image.Image:
    font = ImageFont.load_default(sample.size)
    lines = sample.text.split("\n")
    pitch = round(1.4 * sample.size)
    width = round(max(font.getlength(line) for line in lines)) + 32
    picture = Image.new("L", (max(width, 120), pitch * len(lines) + 24), sample.paper)
    pen = ImageDraw.Draw(picture)
    for index, line in enumerate(lines):
        pen.text((16, 12 + index * pitch), line, font=font, fill=sample.ink)
    grey = np.asarray(picture, np.float64) + rng.normal(0, sample.noise, (picture.height, picture.width))
    return Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8)).rotate(-sample.turned, expand=True)


def main() -> None:
    rng = np.random.default_rng(SEED)
    answers = {}
    for sample in SAMPLES:
        draw(sample, rng).save(FOLDER / f"{sample.name}.png", optimize=True)
        answers[f"{sample.name}.png"] = {"text": sample.text, "orientation": sample.turned}
    (FOLDER / "pictures.json").write_text(json.dumps(answers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
