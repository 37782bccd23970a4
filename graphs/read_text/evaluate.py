"""Reads made-up pages with the whole chain, without a server, and counts what came out right.

    python graphs/read_text/evaluate.py

The pages are made like the training pages, from another seed. Needs numpy, Pillow, matplotlib (for its fonts) and
onnxruntime.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime

sys.path[:0] = [str(Path(__file__).parent)]

from pages import ARRANGE, DECODE, FIND, GRAPHS, png, some_page, step  # noqa: E402

SEED = 20265
PAGES = 300
ASSEMBLE = step("read_text_assemble")


class Chain:
    """The steps of `read_text`, one after the other."""

    def __init__(self) -> None:
        cpu = ["CPUExecutionProvider"]
        self.orient = onnxruntime.InferenceSession(GRAPHS / "read_text_orient" / "1" / "model.onnx", providers=cpu)
        self.recognise = onnxruntime.InferenceSession(
            GRAPHS / "read_text_recognise" / "1" / "model.onnx", providers=cpu
        )
        names = GRAPHS / "read_text_assemble" / "1" / "characters.txt"
        self.characters = names.read_text(encoding="utf-8").splitlines()

    def read(self, file: bytes) -> tuple[str, float, int]:
        """Text, confidence and orientation of one picture."""
        page = DECODE.page_of(file)
        boxes, marks = FIND.marks_of(page)
        degrees = int(self.orient.run(None, {"MARKS": marks[None]})[0][0, 0])
        glyphs, places, layout = ARRANGE.arrange(page, boxes, degrees)
        used = layout[:, 0] >= 0
        probabilities = self.recognise.run(None, {"GLYPH": glyphs[used], "PLACE": places[used]})[0]
        text, confidence = ASSEMBLE.assemble(probabilities, layout, self.characters)
        return text, confidence, degrees


def main() -> None:
    rng, chain = np.random.default_rng(SEED), Chain()
    pages, right_pages, characters, wrong = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for _ in range(PAGES):
        picture, text, font, _ = some_page(rng)
        name = str(font.getname()[0])
        read, _, degrees = chain.read(png(picture))
        pages[name] += 1
        right_pages[name] += (read, degrees) == (text, 0)
        characters[name] += len(text)
        wrong[name] += sum(
            max(i1 - i0, j1 - j0)
            for tag, i0, i1, j0, j1 in difflib.SequenceMatcher(None, text, read, autojunk=False).get_opcodes()
            if tag != "equal"
        )
    for name in sorted(pages):
        share = 1 - wrong[name] / characters[name]
        print(
            f"{name}: {share:.4f} of {characters[name]} characters, {right_pages[name]} of {pages[name]} pages exactly"
        )


if __name__ == "__main__":
    main()
