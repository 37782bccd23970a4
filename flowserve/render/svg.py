"""A compiled graph as a self-contained SVG: no scripts, fonts or network; it follows the viewer's dark or light mode.

Decides colours and strokes. Does not decide positions (`layout`). Boxes and wires have attributes that identify them
(`data-node`, `data-scope`, `data-edges`), for scripts of a surrounding page. Callers: `formats`, `html`, the live page.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from flowserve.graph.types import Graph
from flowserve.render.labels import Configs, title
from flowserve.render.layout import LINE, MARGIN, NO_SPARE, PAD, Box, Spare, Wire, lay_out

ARROW: Final = 7
ASSETS: Final = Path(__file__).with_name("assets")
# Light colours first, then dark ones in a media query: viewers without media queries draw the light picture.
STYLE: Final = "".join((ASSETS / "picture.css").read_text("utf-8").splitlines())
CLASSES: Final = {"end": ("g", 14), "node": ("n", 6), "folded": ("o", 6), "frame": ("f", 10)}


def render_svg(
    graph: Graph, configs: Configs, folded: Container[str] = (), *, style: str = STYLE, spare: Spare = NO_SPARE
) -> str:
    """The text of an SVG file. `folded` has the paths of nested ensembles to draw as one box. `spare` reserves space
    that a page fills later: the last lines of each node's box, and the lower line of each label, by its `data-edges`.
    """
    head = title(graph, configs)
    drawing = lay_out(graph, configs, folded, spare, heading=head)
    width, height = drawing.width, drawing.height
    boxes, wires = drawing.boxes(), drawing.all_wires()
    frames = [box for box in boxes if box.kind == "frame"]
    body = [
        *map(_box_svg, frames),
        *map(_wire_svg, wires),
        *map(_label_svg, wires),
        *(_box_svg(box) for box in boxes if box.kind != "frame"),
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
    """Straight below its label, one bend in the gap before the next layer, then straight to its box or past a layer."""
    (start, y), (end, end_y), middle = wire.start, wire.end, (wire.turn + wire.bent) / 2
    path = (
        f'<path class="e" data-edges="{_numbers(wire)}" d="M{start:.1f} {y:.1f}H{wire.turn:.1f}C{middle:.1f} {y:.1f}'
        f' {middle:.1f} {end_y:.1f} {wire.bent - ARROW:.1f} {end_y:.1f}H{end:.1f}"/>'
    )
    if not wire.has_arrow:
        return path
    tip = f"M{end:.1f} {end_y:.1f}l-{ARROW} -4v8z"
    return f'{path}<path class="a" d="{tip}"/>'


def _numbers(wire: Wire) -> str:
    return " ".join(map(str, wire.edges))


def _label_svg(wire: Wire) -> str:
    if not wire.label:
        return ""
    x, y = wire.start
    above, below = map(_text, wire.label)
    return (
        f'<text x="{x + 6:.1f}" y="{y - 4:.1f}">{above}</text>'
        f'<text class="s" data-edges="{_numbers(wire)}" x="{x + 6:.1f}" y="{y + 12:.1f}">{below}</text>'
    )


def _box_svg(box: Box) -> str:
    kind_class, radius = CLASSES[box.kind]
    kind_class += " w" * (box.space > 0)
    if box.kind == "node":
        kind_class += f" {box.tint or 'other'}"
    means = f' data-node="{box.node}"' if box.kind == "node" else ""
    means += f' data-space="{box.space}"' if box.space else ""
    means += f" data-scope={quoteattr(_text(box.scope))}" if box.scope else ""
    shape = (
        f'<rect class="{kind_class}" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}"'
        f' height="{box.height:.1f}" rx="{radius}"/>'
    )
    return f"<g{means}>{shape}{''.join(_lines_svg(box))}</g>"


def _lines_svg(box: Box) -> Iterator[str]:
    if box.kind == "frame":
        yield f'<text class="s" x="{box.left + PAD:.1f}" y="{box.top + 20:.1f}">{_text(box.lines[0])}</text>'
        return
    x = box.left + box.width / 2
    first = box.top + box.height / 2 - LINE * (len(box.lines) - 1) / 2 + 4
    for number, line in enumerate(box.lines):
        at = f'class="{"s" if number else "t"}" text-anchor="middle" x="{x:.1f}" y="{first + LINE * number:.1f}"'
        yield f"<text {at}>{_text(line)}</text>"
