"""A compiled graph as a PNG, for chats, slides and terminals that show pictures.

Decides strokes and fonts, at twice the resolution of the SVG. Pillow, which draws, is optional and imported only here.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from flowserve.errors import Unsupported
from flowserve.graph.types import Graph
from flowserve.render.labels import TINTS, Configs, title
from flowserve.render.layout import LINE, MARGIN, PAD, Box, Drawing, Wire, lay_out
from flowserve.render.svg import ARROW

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

SCALE: Final = 2.0
PIXELS_MAX: Final = 80_000_000  # about 240 MB while drawing; a larger drawing gets a lower resolution
PAPER, INK, PALE, LABEL = "#ffffff", "#24292f", "#57606a", 11
SPACE: Final = ("#f0fbf3", "#1a7f37")  # the fill and outline of a frame around the nodes of a space
BOXES: Final = {  # fill, outline, corner; nodes are tinted by their backend
    "end": ("#f6f8fa", "#6e7781", 14),
    "node": ("#ddf4ff", "#0969da", 6),
    "folded": ("#fff8c5", "#9a6700", 6),
    "frame": ("#fffceb", "#9a6700", 10),
}


def render_png(graph: Graph, configs: Configs) -> bytes:
    """The bytes of a PNG file. Raises Unsupported if Pillow is not installed."""
    head = title(graph, configs)
    drawing = lay_out(graph, configs, heading=head)
    width, height = drawing.width, drawing.height
    scale = min(SCALE, (PIXELS_MAX / (width * height)) ** 0.5)
    buffer = io.BytesIO()
    _Canvas(width, height, scale).draw(head, drawing).save(buffer, "PNG")
    return buffer.getvalue()


class _Canvas:
    def __init__(self, width: float, height: float, scale: float) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise Unsupported(
                "a PNG needs Pillow, which is not installed: pip install 'flowserve[pictures]' (SVG needs nothing)"
            ) from None
        self._scale = scale
        self._image: Image.Image = Image.new("RGB", (round(width * scale), round(height * scale)), PAPER)
        self._pen: ImageDraw.ImageDraw = ImageDraw.Draw(self._image)
        self._title: ImageFont.FreeTypeFont | ImageFont.ImageFont = ImageFont.load_default(13 * scale)
        self._small: ImageFont.FreeTypeFont | ImageFont.ImageFont = ImageFont.load_default(LABEL * scale)

    def draw(self, head: str, drawing: Drawing) -> Image.Image:
        self._text(MARGIN, 24, head, is_title=True, anchor="lm")
        boxes = drawing.boxes()
        for box in boxes:
            if box.kind == "frame":
                self._box(box)
                self._text(box.left + PAD, box.top + 17, box.lines[0], anchor="lm")
        for wire in drawing.all_wires():
            self._wire(wire)
        for box in boxes:
            if box.kind != "frame":
                self._box(box)
                self._lines(box)
        return self._image

    def _box(self, box: Box) -> None:
        fill, outline, radius = BOXES[box.kind]
        if box.kind == "node":
            fill, outline = TINTS[box.tint]
        elif box.space:
            fill, outline = SPACE
        corners = [(box.left, box.top), (box.left + box.width, box.top + box.height)]
        self._pen.rounded_rectangle(
            [self._at(*corner) for corner in corners], radius * self._scale, fill, outline, round(self._scale)
        )

    def _lines(self, box: Box) -> None:
        x, y = box.left + box.width / 2, box.top + box.height / 2 - LINE * (len(box.lines) - 1) / 2
        for number, line in enumerate(box.lines):
            self._text(x, y + LINE * number, line, is_title=number == 0, anchor="mm")

    def _wire(self, wire: Wire) -> None:
        (x, y), (end, end_y) = wire.start, wire.end
        bend = [_bend(wire.turn, y, wire.bent - ARROW, end_y, step / 24) for step in range(25)]
        self._pen.line([self._at(*point) for point in [(x, y), *bend, (end, end_y)]], PALE, round(1.3 * self._scale))
        if wire.has_arrow:
            tip = [(end, end_y), (end - ARROW, end_y - 4), (end - ARROW, end_y + 4)]
            self._pen.polygon([self._at(*point) for point in tip], PALE)
        for line, (text, ink) in enumerate(zip(wire.label, (INK, PALE), strict=False)):
            self._text(x + 6, y - 8 + LINE * line, text, ink=ink, anchor="lm")

    def _text(self, x: float, y: float, text: str, *, anchor: str, is_title: bool = False, ink: str = "") -> None:
        font = self._title if is_title else self._small
        # A newline in a name would be drawn as one, and anchors are for single lines.
        self._pen.text(self._at(x, y), text.replace("\n", " "), ink or (INK if is_title else PALE), font, anchor=anchor)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return x * self._scale, y * self._scale


def _bend(x: float, y: float, end_x: float, end_y: float, part: float) -> tuple[float, float]:
    """A point of the same curve as in the SVG: level at both ends."""
    rest = 1 - part
    across = rest**3 * x + 3 * rest * part * (x + end_x) / 2 + part**3 * end_x
    down = rest**2 * (1 + 2 * part) * y + part**2 * (3 - 2 * part) * end_y
    return across, down
