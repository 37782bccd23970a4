"""What a drawn graph consists of once everything has its place: boxes, wires between them, and drawings in frames.

Decided here: what a format that draws by itself is told, in px, and how much room text takes. Where things stand is
layout.py's; colours, fonts and notation are the renderers'.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

CHAR: Final = 6.7  # width of a character of the label font, in px: generous, since the viewer's font is unknown
TITLE_CHAR: Final = 8.2
LINE: Final = 16  # height of a line of text
PAD: Final = 12
BEND: Final = 56  # room for edges to change height between two layers
MARGIN: Final = 24


@dataclass(slots=True, eq=False)
class Box:
    """One rectangle of one layer.

    "end" is an input or output of the graph, "folded" an ensemble drawn as one box, "frame" one drawn open, "port" the
    spot where a tensor crosses a frame, and "lane" the way of a wire past a layer, as wide as the layer. `node` and
    `scope` say what it stands for. Ports are heights below `top`.
    """

    kind: Literal["end", "node", "folded", "frame", "port", "lane"]
    lines: tuple[str, ...] = ()
    width: float = 0.0
    height: float = 0.0
    inputs: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()
    node: int = -1
    scope: str = ""
    layer: int = 0
    left: float = 0.0
    top: float = 0.0
    layer_left: float = 0.0
    inside: Drawing | None = None

    @property
    def is_drawn(self) -> bool:
        return self.kind not in ("port", "lane")


@dataclass(slots=True, eq=False)
class Wire:
    """One piece of an edge, from a port to a port of the next layer.

    `label` stands at its left end, on the first wire of a tensor that leaves a box. `edges` are those it is a piece of.
    """

    source: Box
    output: int
    target: Box
    input: int
    edges: tuple[int, ...] = ()
    label: tuple[str, ...] = ()

    @property
    def start(self) -> tuple[float, float]:
        return self.source.left + self.source.width, self.source.top + self.source.outputs[self.output]

    @property
    def end(self) -> tuple[float, float]:
        right = self.target.width if self.target.kind == "lane" else 0.0
        return self.target.left + right, self.target.top + self.target.inputs[self.input]

    @property
    def has_arrow(self) -> bool:
        """Whether it ends here, and does not go on past a layer or inside a frame."""
        return self.target.kind in ("end", "node", "folded")

    @property
    def bent(self) -> float:
        """Where the bend is over: `turn` is where it begins, between them no box stands."""
        return self.target.layer_left

    @property
    def turn(self) -> float:
        return self.bent - BEND


@dataclass(slots=True, eq=False)
class Drawing:
    """Boxes by layer, top to bottom, and the wires between neighbouring layers. A frame's inside is a drawing too.

    `entering` and `leaving` are the first and last boxes by number, in whatever order the layers have them.
    """

    layers: list[list[Box]]
    entering: list[Box]
    leaving: list[Box]
    wires: list[Wire] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def boxes(self) -> list[Box]:
        """Every box that is drawn, a frame before what lies in it."""
        own = [box for layer in self.layers for box in layer if box.is_drawn]
        return own + [box for frame in own if frame.inside for box in frame.inside.boxes()]

    def all_wires(self) -> list[Wire]:
        inner = [box.inside for layer in self.layers for box in layer if box.inside]
        return self.wires + [wire for drawing in inner for wire in drawing.all_wires()]

    def shift(self, right: float, down: float) -> None:
        for box in (box for layer in self.layers for box in layer):
            box.left += right
            box.layer_left += right
            box.top += down
            if box.inside:
                box.inside.shift(right, down)


def text_width(lines: Sequence[str], first: float = CHAR) -> float:
    """Of the widest line. `first` is the width of a character of the first line, which may be a title."""
    return max((_cells(line) * (CHAR if number else first) for number, line in enumerate(lines)), default=0.0)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
