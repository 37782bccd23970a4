"""A compiled graph as one self-contained SVG: layers from left to right, dark on light, no scripts, fonts or network.

Decided here: where everything stands. A box stands one layer right of the last box it waits for. An edge that passes
a layer gets a lane there of its own, so no edge runs through a box; a tensor is labelled once, in the gap to the
right of its box. Legible for the graphs people draw by hand, about fifteen nodes; larger ones come out right, but
large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.render.labels import batching, kind, node_model, title, written

CHAR: Final = 6.7  # width of a character of the label font, in px: generous, since the viewer's font is unknown
TITLE_CHAR: Final = 8.2
ROW: Final = 34  # height of one port
PAD: Final = 12
GAP: Final = 26  # between two boxes of a layer
BEND: Final = 56  # room for edges to change height between two layers
MARGIN: Final = 24
HEAD: Final = 44  # the graph's title

STYLE: Final = (
    "text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:#24292f}"
    ".t{font-size:13px;font-weight:bold}.s{fill:#57606a}"
    ".n{fill:#ddf4ff;stroke:#0969da}.g{fill:#f6f8fa;stroke:#6e7781}"
    ".e{fill:none;stroke:#57606a;stroke-width:1.3}"
)


@dataclass(slots=True, eq=False)
class Box:
    """One rectangle, or (without lines) the lane of an edge that passes its layer, as wide as the layer.

    The layout sets `layer`, then `left` and `top`, and `layer_left` and `layer_width`, which are the whole layer's.
    """

    lines: tuple[str, ...]
    is_node: bool
    inputs: int = 1
    outputs: int = 1
    layer: int = 0
    left: float = 0.0
    top: float = 0.0
    layer_left: float = 0.0
    layer_width: float = 0.0

    @property
    def is_lane(self) -> bool:
        return not self.lines

    @property
    def width(self) -> float:
        if self.is_lane:
            return self.layer_width
        return 2 * PAD + max(len(self.lines[0]) * TITLE_CHAR, *(len(line) * CHAR for line in self.lines[1:]), 60.0)

    @property
    def height(self) -> float:
        if self.is_lane:
            return float(ROW)
        return max(PAD * 2 + 16.0 * len(self.lines), ROW * max(self.inputs, self.outputs))

    def port_y(self, number: int, count: int) -> float:
        return self.top + self.height * (number + 0.5) / max(count, 1)


@dataclass(slots=True, eq=False)
class Wire:
    """One piece of an edge, from a port to a port of the next layer.

    `label` stands at its left end, on the tensor's first wire only.
    """

    source: Box
    output: int
    target: Box
    input: int
    label: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Drawing:
    """Boxes by layer, top to bottom, and the wires between neighbouring layers."""

    layers: list[list[Box]]
    wires: list[Wire]
    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)


def render_svg(graph: Graph) -> str:
    """The text of an SVG file."""
    drawing = lay_out(graph)
    head = title(graph)
    width = max(drawing.width, len(head) * TITLE_CHAR + 2 * MARGIN)
    body = [*map(_wire_svg, drawing.wires), *map(_label_svg, drawing.wires), *map(_box_svg, drawing.boxes)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{drawing.height:.0f}"'
        f' viewBox="0 0 {width:.0f} {drawing.height:.0f}" role="img">\n'
        f"<title>{escape(head)}</title>\n<style>{STYLE}</style>\n"
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text class="t" x="{MARGIN}" y="28">{escape(head)}</text>\n'
        + "".join(f"{line}\n" for line in body if line)
        + "</svg>\n"
    )


def lay_out(graph: Graph) -> Drawing:
    """Place every box and wire. Boxes never overlap, and no wire runs through a box."""
    boxes = _boxes(graph)
    _choose_layers(graph, boxes)
    drawing = _with_lanes(graph, boxes)
    _order_layers(drawing)
    _place(drawing)
    return drawing


Key = tuple[str, int]


def _ends(edge: Edge) -> tuple[tuple[Key, int], tuple[Key, int]]:
    """The box and port an edge leaves, and those it reaches."""
    source = (("in", edge.output), 0) if edge.producer == GRAPH else (("node", edge.producer), edge.output)
    target = (("out", edge.input), 0) if edge.consumer == GRAPH else (("node", edge.consumer), edge.input)
    return source, target


def _boxes(graph: Graph) -> dict[Key, Box]:
    boxes: dict[Key, Box] = {}
    for i, spec in enumerate(graph.inputs):
        boxes["in", i] = Box((spec.name, kind(spec)), is_node=False)
    for node in graph.nodes:
        lines = [node.name, node_model(node), batching(node.max_batch_size)]
        boxes["node", node.index] = Box(tuple(lines), True, len(node.inputs), len(node.outputs))
    for i, spec in enumerate(graph.outputs):
        boxes["out", i] = Box((spec.name, kind(spec)), is_node=False)
    return boxes


def _choose_layers(graph: Graph, boxes: dict[Key, Box]) -> None:
    # Edges are in the order of their producers and nodes are numbered in running order, so one pass settles all.
    for edge in graph.edges:
        (source, _), (target, _) = _ends(edge)
        boxes[target].layer = max(boxes[target].layer, boxes[source].layer + 1)
    last = max(box.layer for box in boxes.values())
    for key, box in boxes.items():
        if key[0] == "out":
            box.layer = last


def _with_lanes(graph: Graph, boxes: dict[Key, Box]) -> Drawing:
    layers: list[list[Box]] = [[] for _ in range(1 + max(box.layer for box in boxes.values()))]
    for box in boxes.values():
        layers[box.layer].append(box)
    wires: list[Wire] = []
    labelled: set[tuple[Key, int]] = set()
    for edge in graph.edges:
        (source, output), (target, port) = _ends(edge)
        at, leaving = boxes[source], output
        label: tuple[str, ...] = ()
        # The box of an input has said what it holds.
        if edge.producer != GRAPH and (source, output) not in labelled:
            label = (edge.tensor, kind(written(graph, edge)))
        labelled.add((source, output))
        for layer in range(at.layer + 1, boxes[target].layer):
            lane = Box((), is_node=False, layer=layer)
            layers[layer].append(lane)
            wires.append(Wire(at, leaving, lane, 0, label))
            at, leaving, label = lane, 0, ()
        wires.append(Wire(at, leaving, boxes[target], port, label))
    return Drawing(layers, wires, boxes=list(boxes.values()))


def _order_layers(drawing: Drawing) -> None:
    """Sort each layer by where its wires come from, then by where they go, a few times: fewer crossings."""
    rank = {id(box): float(i) for layer in drawing.layers for i, box in enumerate(layer)}
    before: dict[int, list[tuple[Box, float]]] = {}
    after: dict[int, list[tuple[Box, float]]] = {}
    for wire in drawing.wires:
        before.setdefault(id(wire.target), []).append((wire.source, wire.output / 100))
        after.setdefault(id(wire.source), []).append((wire.target, wire.input / 100))
    for neighbours, layers in ((before, drawing.layers), (after, drawing.layers[::-1])) * 4:
        for layer in layers:
            layer.sort(key=lambda box: _middle(neighbours.get(id(box), ()), rank, rank[id(box)]))
            rank.update((id(box), float(i)) for i, box in enumerate(layer))


def _middle(neighbours: Sequence[tuple[Box, float]], rank: dict[int, float], own: float) -> float:
    if not neighbours:
        return own
    return sum(rank[id(box)] + port for box, port in neighbours) / len(neighbours)


def _place(drawing: Drawing) -> None:
    heights = [sum(box.height for box in layer) + GAP * (len(layer) - 1) for layer in drawing.layers]
    left = float(MARGIN)
    for layer, height in zip(drawing.layers, heights, strict=True):
        width = max(box.width for box in layer)  # a lane has none yet
        top = HEAD + MARGIN + (max(heights) - height) / 2
        for box in layer:
            box.layer_left, box.layer_width = left, width
            box.left, box.top = left + (width - box.width) / 2, top
            top += box.height + GAP
        labels = [len(line) * CHAR for wire in drawing.wires if wire.source in layer for line in wire.label]
        left += width + max(labels, default=0.0) + BEND
    drawing.width = left - BEND + MARGIN
    drawing.height = HEAD + 2 * MARGIN + max(heights)


def _wire_svg(wire: Wire) -> str:
    """

    traight under its label, one bend in the gap before the next layer, then straight to its box or through its lane.
    """
    y = wire.source.port_y(wire.output, wire.source.outputs)
    end_y = wire.target.port_y(wire.input, wire.target.inputs)
    start, bent = wire.source.left + wire.source.width, wire.target.layer_left
    end = wire.target.left + (wire.target.width if wire.target.is_lane else 0)
    turn, middle = bent - BEND, bent - BEND / 2
    arrow = "" if wire.target.is_lane else ' marker-end="url(#arrow)"'
    return (
        f'<path class="e" d="M{start:.1f} {y:.1f}H{turn:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {end_y:.1f}'
        f' {bent - 8:.1f} {end_y:.1f}H{end:.1f}"{arrow}/>'
    )


def _label_svg(wire: Wire) -> str:
    if not wire.label:
        return ""
    y = wire.source.port_y(wire.output, wire.source.outputs)
    x = wire.source.left + wire.source.width + 6
    above, below = map(escape, wire.label)
    return (
        f'<text x="{x:.1f}" y="{y - 4:.1f}">{above}</text><text class="s" x="{x:.1f}" y="{y + 12:.1f}">{below}</text>'
    )


def _box_svg(box: Box) -> str:
    kind_class, radius = ("n", 6) if box.is_node else ("g", 14)
    shape = (
        f'<rect class="{kind_class}" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}"'
        f' height="{box.height:.1f}" rx="{radius}"/>'
    )
    return shape + "".join(_lines_svg(box))


def _lines_svg(box: Box) -> Iterator[str]:
    x = box.left + box.width / 2
    first = box.top + box.height / 2 - 16 * (len(box.lines) - 1) / 2 + 4
    for number, line in enumerate(box.lines):
        at = f'class="{"s" if number else "t"}" text-anchor="middle" x="{x:.1f}" y="{first + 16 * number:.1f}"'
        yield f"<text {at}>{escape(line)}</text>"
