"""A compiled graph as a self-contained SVG: no scripts, fonts or network; it follows the viewer's dark or light mode.

Decides colours and strokes. Does not decide positions (`layout`). Boxes and wires have attributes that identify them
(`data-node`, `data-scope`, `data-space`, `data-edges`), for scripts of a surrounding page. Callers: `formats`, `html`,
the live page.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from flowserve.graph.types import Graph
from flowserve.render.labels import Configs, title
from flowserve.render.layout import LINE, MARGIN, NO_SPARE, Box, Direction, Spare, Wire, lay_out
from flowserve.render.tints import TINTS, Tint, tints_of

ARROW: Final = 7
ASSETS: Final = Path(__file__).with_name("assets")


def _style(file: str, tints: str) -> str:
    return "".join((ASSETS / file).read_text("utf-8").replace("/*TINTS*/", tints).splitlines())


# Light colours first, then dark ones in a media query: viewers without media queries draw the light picture.
LIGHT_STYLE: Final = _style(
    "picture.css", "".join(f".flowserve .{t.name}{{fill:{t.fill};stroke:{t.line}}}" for t in TINTS)
)
_DARK_STYLE: Final = _style(
    "dark.css", "".join(f".flowserve .{t.name}{{fill:{t.dark_fill};stroke:{t.dark_line}}}" for t in TINTS)
)
STYLE: Final = f"{LIGHT_STYLE}@media (prefers-color-scheme:dark){{{_DARK_STYLE}}}"
CLASSES: Final = {"end": ("g", 14), "node": ("n", 6), "folded": ("o", 6), "frame": ("f", 10)}


def render_svg(
    graph: Graph,
    configs: Configs,
    folded: Container[str] = (),
    *,
    style: str = STYLE,
    spare: Spare = NO_SPARE,
    direction: Direction | None = None,
) -> str:
    """The text of an SVG file. `folded` has the paths of nested ensembles to draw as one box. `spare` reserves space
    that a page fills later: the last lines of each node's box, and the lower line of each label, by its `data-edges`.
    `direction` None: that of `layout.direction_of`.
    """
    head = title(graph, configs)
    drawing = lay_out(graph, configs, folded, spare, heading=head, direction=direction)
    tints = tints_of(graph, configs)
    width, height = drawing.width, drawing.height
    boxes, wires = drawing.boxes(), drawing.all_wires()
    frames = [box for box in boxes if box.kind == "frame"]
    body = [
        *(_box_svg(box, tints) for box in frames),
        *map(_wire_svg, wires),
        *map(_label_svg, wires),
        *(_box_svg(box, tints) for box in boxes if box.kind != "frame"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="flowserve" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>{_text(head)}</title>\n"
        + (f"<style>{style}</style>\n" if style else "")
        + '<rect class="p" width="100%" height="100%"/>\n'
        f'<text class="t" x="{MARGIN}" y="28">{_text(head)}</text>\n'
        + "".join(f"{line}\n" for line in body if line)
        + "</svg>\n"
    )


def _text(text: str) -> str:
    """Escaped, with characters that XML does not allow replaced."""
    return escape("".join(char if char >= " " or char in "\t\n" else "\N{REPLACEMENT CHARACTER}" for char in text))


def _wire_svg(wire: Wire) -> str:
    """Straight beside its label, a bend in the gap before the next layer, then straight to its box or past a layer."""
    (start, a), (end, b), middle = wire.start, wire.end, (wire.turn + wire.bent) / 2
    curve = [_point(wire, *at) for at in ((middle, a), (middle, b), (wire.bent - ARROW, b))]
    path = (
        f'<path class="e" data-edges="{_numbers(wire)}" d="M{_point(wire, start, a)}L{_point(wire, wire.turn, a)}'
        f'C{" ".join(curve)}L{_point(wire, end, b)}"/>'
    )
    if not wire.has_arrow:
        return path
    corners = [_point(wire, *at) for at in ((end, b), (end - ARROW, b - 4), (end - ARROW, b + 4))]
    return f'{path}<path class="a" d="M{"L".join(corners)}z"/>'


def _point(wire: Wire, along: float, across: float) -> str:
    return f"{along:.1f} {across:.1f}" if wire.direction == "LR" else f"{across:.1f} {along:.1f}"


def _numbers(wire: Wire) -> str:
    return " ".join(map(str, wire.edges))


def _label_svg(wire: Wire) -> str:
    if not wire.label:
        return ""
    x, y = wire.label_at
    above, below = map(_text, wire.label)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}">{above}</text>'
        f'<text class="s" data-edges="{_numbers(wire)}" x="{x:.1f}" y="{y + LINE:.1f}">{below}</text>'
    )


def _box_svg(box: Box, tints: Sequence[Tint]) -> str:
    if box.kind == "merge":
        return _merge_svg(box)
    kind_class, radius = CLASSES[box.kind]
    kind_class += " w" * (box.space > 0)
    if box.kind == "node":
        kind_class += f" {tints[box.node].name}"
    means = f' data-node="{box.node}"' if box.kind == "node" else ""
    means += f' data-space="{box.space}"' if box.space else ""
    means += f" data-scope={quoteattr(_text(box.scope))}" if box.scope else ""
    shape = (
        f'<rect class="{kind_class}" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}"'
        f' height="{box.height:.1f}" rx="{radius}"/>'
    )
    return f"<g{means}>{shape}{''.join(_lines_svg(box))}</g>"


def _merge_svg(box: Box) -> str:
    """A diamond."""
    x, y, half = box.left, box.top + box.height / 2, box.width / 2
    return (
        f'<path class="m" d="M{x:.1f} {y:.1f}l{half:.1f} {-half:.1f} {half:.1f} {half:.1f} {-half:.1f} {half:.1f}z"/>'
    )


def _lines_svg(box: Box) -> Iterator[str]:
    if box.kind == "frame":
        yield f'<text class="s" x="{box.left + box.text_left:.1f}" y="{box.top + 20:.1f}">{_text(box.lines[0])}</text>'
        return
    x = box.left + box.width / 2
    first = box.top + box.height / 2 - LINE * (len(box.lines) - 1) / 2 + 4
    for number, line in enumerate(box.lines):
        at = f'class="{"s" if number else "t"}" text-anchor="middle" x="{x:.1f}" y="{first + LINE * number:.1f}"'
        yield f"<text {at}>{_text(line)}</text>"
