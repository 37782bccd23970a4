"""Pictures of printed text, made up, with what is written where.

Decided here: words, fonts, sizes and noise of the training pictures. The crops come from the very steps that the server
runs (`read_text_decode`, `read_text_find`, `read_text_arrange`), so that training sees what serving sees.
"""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

GRAPHS = Path(__file__).resolve().parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PUNCTUATION = ".,:;!?'-()/&"
SINGLE = LETTERS.upper() + LETTERS + "0123456789" + PUNCTUATION
# Neighbours that many fonts print as one piece of ink: the recogniser reads them as one character.
JOINED = ["ff", "fi", "fl", "ft", "tt", "rt", "tf", "rf", "ry", "ffi", "fj", "rv", "ty", "rw", "fy"]
CHARACTERS = [*SINGLE, *JOINED]
WORDS = (GRAPHS / "read_text" / "words.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Crops with their right class. glyphs: [n, 32, 32] UINT8; places: [n, 4]; labels: [n] indices into CHARACTERS."""

    glyphs: npt.NDArray[np.uint8]
    places: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def step(name: str) -> types.ModuleType:
    """A step's model.py as a module, without a server: its functions do not touch `triton_python_backend_utils`."""
    sys.modules.setdefault("triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location(name, GRAPHS / name / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DECODE, FIND, ARRANGE = step("read_text_decode"), step("read_text_find"), step("read_text_arrange")


def some_word(rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.45:
        word = str(rng.choice(WORDS))
        case = rng.random()
        word = word.upper() if case < 0.15 else word.capitalize() if case < 0.4 else word
    elif kind < 0.6:
        word = "".join(rng.choice(list("0123456789"), rng.integers(1, 6)))
    else:
        word = "".join(rng.choice(list(SINGLE[:62]), rng.integers(1, 8)))
    if rng.random() < 0.35:
        mark = str(rng.choice(list(PUNCTUATION)))
        if mark == "(":
            return f"({word}"
        at = len(word) if mark in ".,:;!?)" else int(rng.integers(0, len(word) + 1))
        word = word[:at] + mark + word[at:]
    return word


def some_font(rng: np.random.Generator) -> ImageFont.FreeTypeFont:
    size = int(rng.integers(16, 45))
    layout = ImageFont.Layout.BASIC
    if rng.random() < 0.65:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont)
        return font.font_variant(layout_engine=layout) if rng.random() < 0.5 else font
    name = str(rng.choice(["DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono"]))
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}.ttf", size, layout_engine=layout)


def some_lines(rng: np.random.Generator, font: ImageFont.FreeTypeFont, count: int, width: int) -> list[str]:
    lines = []
    for _ in range(count):
        line = some_word(rng)
        while True:
            longer = f"{line} {some_word(rng)}"
            if font.getlength(longer) > width or rng.random() < 0.1:
                break
            line = longer
        lines.append(line)
    return lines


def draw(
    rng: np.random.Generator, font: ImageFont.FreeTypeFont, lines: list[str]
) -> tuple[Image.Image, list[tuple[float, float]]]:
    """The picture of some lines, and where each begins: x and the middle of the line, in pixels."""
    pitch = font.size * float(rng.uniform(1.25, 1.7))
    left, top = (int(edge) for edge in rng.integers(4, 30, 2))
    width = left + max(font.getlength(line) for line in lines) + rng.integers(6, 30)
    size = (int(width), int(top + pitch * len(lines) + 16))
    dark, light = int(rng.integers(0, 90)), int(rng.integers(170, 256))
    if rng.random() < 0.25:
        dark, light = light, dark
    picture = Image.new("L", size, light)
    pen = ImageDraw.Draw(picture)
    starts = []
    for index, line in enumerate(lines):
        pen.text((left, top + index * pitch), line, font=font, fill=dark)
        starts.append((float(left), top + index * pitch + 0.6 * font.size))
    if rng.random() < 0.5:
        picture = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 0.03 * font.size))))
    grey = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(0, 14), (size[1], size[0]))
    return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8)), starts


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def some_page(rng: np.random.Generator) -> tuple[Image.Image, str, ImageFont.FreeTypeFont, list[tuple[float, float]]]:
    font = some_font(rng)
    while True:
        lines = some_lines(rng, font, int(rng.integers(1, 6)), int(rng.integers(150, 580)))
        picture, starts = draw(rng, font, lines)
        if max(picture.size) <= DECODE.SIDE - 2 * DECODE.MARGIN:
            return picture, "\n".join(lines), font, starts


def written(line: str, font: ImageFont.FreeTypeFont, left: float, x0: float, x1: float) -> str:
    """What of a line lies between two columns: the characters whose middle does."""
    edges = [left + font.getlength(line[:end]) for end in range(len(line) + 1)]
    return "".join(
        character
        for character, start, end in zip(line, edges, edges[1:], strict=False)
        if x0 <= (start + end) / 2 < x1 and character != " "
    )


def glyphs_of_page(rng: np.random.Generator) -> Glyphs:
    """The characters of one made-up page, those left out that the steps before the recogniser did not cut out well."""
    picture, text, font, starts = some_page(rng)
    page = DECODE.page_of(png(picture))
    boxes, _ = FIND.marks_of(page)
    found: list[tuple[Any, tuple[float, ...], int]] = []
    for box, place, _ in ARRANGE.characters(ARRANGE.upright(page, boxes, 0)[1]):
        x0, y0, x1, y1 = (edge - DECODE.MARGIN for edge in box)
        nearest = int(np.argmin([abs((y0 + y1) / 2 - middle) for _, middle in starts]))
        name = written(text.split("\n")[nearest], font, starts[nearest][0], x0 - 0.5, x1 + 0.5)
        if name in CHARACTERS:
            found.append((ARRANGE.crop(page, box), place, CHARACTERS.index(name)))
    if not found:
        return Glyphs(np.zeros((0, 32, 32), np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    glyphs, places, labels = zip(*found, strict=True)
    return Glyphs(np.stack(glyphs), np.array(places, np.float32), np.array(labels, np.int64))


def glyphs_of_pages(rng: np.random.Generator, pages: int) -> Glyphs:
    each = [glyphs_of_page(rng) for _ in range(pages)]
    return Glyphs(*(np.concatenate([getattr(one, name) for one in each]) for name in ("glyphs", "places", "labels")))
