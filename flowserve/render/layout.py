"""A drawing of a graph with coordinates: layers of boxes, wires, nested ensembles.

Decides all coordinates, in px, the width of text, and the direction of a graph for which none is given. A box is one
layer after its last producer. A wire that passes a layer gets its own lane there, so that no wire crosses a box; a
tensor is labelled where it leaves a box, in a gap that is large enough. A nested ensemble is a frame or a folded box. A
frame is laid out first and then is one box of the surrounding layout, so that no other box can be inside it.

Layers follow each other from left to right ("LR") or from top to bottom ("TB"). The layout computes with coordinates
that are independent of the direction: `along` the layers and `across` them; `left`, `top`, `width` and `height` are
derived from them. Does not decide colours, fonts and notation (`svg`, its caller).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from flowserve.graph.types import Graph
from flowserve.render.labels import Configs, crossing, folded_lines, kind, node_lines, scope_title
from flowserve.render.scopes import BoxId, Joint, Scope, scopes_of, spec_in

CHAR: Final = 6.7  # width of a character of the label font, in px: generous, because the viewer's font is unknown
TITLE_CHAR: Final = 8.2
LINE: Final = 16  # height of a line of text
PAD: Final = 12
Direction = Literal["LR", "TB"]
DIRECTIONS: Final = ("LR", "TB")
BEND: Final[dict[Direction, float]] = {"LR": 56, "TB": 40}  # room for wires to shift between two layers
LONG: Final = 1600  # a graph that would be wider than this is drawn in the direction that is narrower
MARGIN: Final = 24
HEAD: Final = 44  # the graph's title
ROW: Final = 34  # space across for one port
LABEL: Final = 32  # height of a label, which has two lines
BESIDE: Final = 6  # between a wire and the text to its right
LANE: Final = 12
MERGE: Final = 20  # the width and height of a merge
GAP: Final = 26  # between two boxes of a layer
FRAME_HEAD: Final = 34  # an open ensemble's title
SWEEPS: Final = 4

_Solid = Literal["end", "node", "folded", "merge"]


@dataclass(slots=True, eq=False)
class Box:
    """One rectangle of one layer.

    "end" is an input or output of the graph, "folded" an ensemble drawn as one box, "frame" one drawn open or a space,
    "merge" a point where tensors of several conditions become one, "port" the point where a tensor crosses a frame, and
    "lane" the path of a wire past a layer, as long as the layer. `node`, `scope` (of an ensemble) and `space` identify
    what it represents; `space` is 0 of all others. It extends over `length` along the layers and `breadth` across them,
    and keeps `beside` free after that, for labels. Ports are distances across, from its beginning. `text_left` is the
    distance of a frame's title from its left.
    """

    kind: Literal["end", "node", "folded", "merge", "frame", "port", "lane"]
    direction: Direction = "LR"
    lines: tuple[str, ...] = ()
    length: float = 0.0
    breadth: float = 0.0
    beside: float = 0.0
    inputs: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()
    node: int = -1
    scope: str = ""
    space: int = 0
    layer: int = 0
    along: float = 0.0
    across: float = 0.0
    layer_along: float = 0.0
    text_left: float = float(PAD)
    inside: Drawing | None = None
    wires_in: list[Wire] = field(default_factory=list)
    wires_out: list[Wire] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.along if self.direction == "LR" else self.across

    @property
    def top(self) -> float:
        return self.across if self.direction == "LR" else self.along

    @property
    def width(self) -> float:
        return self.length if self.direction == "LR" else self.breadth

    @property
    def height(self) -> float:
        return self.breadth if self.direction == "LR" else self.length


@dataclass(slots=True, eq=False)
class Wire:
    """One piece of an edge, from a port to a port of the next layer. Points are (along, across).

    `label` is at its beginning, on the first wire of a tensor that leaves a box. `edges` are the edges it is part of.
    """

    source: Box
    output: int
    target: Box
    input: int
    edges: tuple[int, ...] = ()
    label: tuple[str, ...] = ()

    @property
    def start(self) -> tuple[float, float]:
        return self.source.along + self.source.length, self.source.across + self.source.outputs[self.output]

    @property
    def end(self) -> tuple[float, float]:
        past = self.target.length if self.target.kind == "lane" else 0.0
        return self.target.along + past, self.target.across + self.target.inputs[self.input]

    @property
    def direction(self) -> Direction:
        return self.source.direction

    @property
    def label_at(self) -> tuple[float, float]:
        """The left end of the label's first line, on its baseline, as (x, y)."""
        along, across = self.start
        return (along + BESIDE, across - 4) if self.direction == "LR" else (across + BESIDE, along + LINE - 3)

    @property
    def has_arrow(self) -> bool:
        """Whether it ends here, and does not continue past a layer or inside a frame."""
        return self.target.kind in ("end", "node", "folded", "merge")

    @property
    def bent(self) -> float:
        """The coordinate along where the bend ends; it begins at `turn`, and no box is between them."""
        return self.target.layer_along

    @property
    def turn(self) -> float:
        return self.bent - BEND[self.direction]


@dataclass(slots=True, eq=False)
class Drawing:
    """Boxes by layer, in their order across, and the wires between neighbouring layers. The inside of a frame is a
    drawing too.

    `entering` and `leaving` are the first and last boxes by number, independent of their order in the layers.
    """

    direction: Direction
    layers: list[list[Box]]
    entering: list[Box]
    leaving: list[Box]
    wires: list[Wire] = field(default_factory=list)
    length: float = 0.0
    breadth: float = 0.0

    @property
    def width(self) -> float:
        return self.length if self.direction == "LR" else self.breadth

    @property
    def height(self) -> float:
        return self.breadth if self.direction == "LR" else self.length

    def add(self, wire: Wire) -> None:
        self.wires.append(wire)
        wire.source.wires_out.append(wire)
        wire.target.wires_in.append(wire)

    def boxes(self) -> list[Box]:
        """Every visible box, a frame before its contents."""
        own = [box for layer in self.layers for box in layer if box.kind not in ("port", "lane")]
        return own + [box for frame in own if frame.inside for box in frame.inside.boxes()]

    def all_wires(self) -> list[Wire]:
        inner = [box.inside for layer in self.layers for box in layer if box.inside]
        return self.wires + [wire for drawing in inner for wire in drawing.all_wires()]

    def shift(self, right: float, down: float) -> None:
        along, across = (right, down) if self.direction == "LR" else (down, right)
        for box in (box for layer in self.layers for box in layer):
            box.along += along
            box.layer_along += along
            box.across += across
            if box.inside:
                box.inside.shift(right, down)

    def grow(self, right: float, down: float) -> None:
        """Enlarge its area."""
        along, across = (right, down) if self.direction == "LR" else (down, right)
        self.length += along
        self.breadth += across


def text_width(lines: Sequence[str], first: float = CHAR) -> float:
    """The width of the widest line. `first` is the character width of the first line, which may be a title."""
    return max((_cells(line) * (CHAR if number else first) for number, line in enumerate(lines)), default=0.0)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


@dataclass(frozen=True, slots=True)
class Spare:
    """Space reserved for text that a page writes into a picture later: lines below those of each node's box, and
    characters after the type of each tensor, including the graph's inputs, and after the title of each space. The given
    texts have the maximum width.
    """

    lines: tuple[str, ...] = ()
    tensor: str = ""
    space: str = ""


NO_SPARE: Final = Spare()


def direction_of(graph: Graph, configs: Configs, folded: Container[str] = (), spare: Spare = NO_SPARE) -> Direction:
    """The direction in which a graph is drawn if none is given: left to right, unless that is LONG, and top to bottom
    is narrower.
    """
    wide = _scope_drawing(graph, configs, folded, spare, "LR").width
    if wide <= LONG:
        return "LR"
    return "TB" if _scope_drawing(graph, configs, folded, spare, "TB").width < wide else "LR"


def lay_out(
    graph: Graph,
    configs: Configs,
    folded: Container[str] = (),
    spare: Spare = NO_SPARE,
    *,
    heading: str = "",
    direction: Direction | None = None,
) -> Drawing:
    """Lay out a graph. `folded` has the paths of the ensembles that are drawn as one box each. With a `heading`, there
    is space for it above the drawing. `direction` None: that of `direction_of`.

    Boxes do not overlap, except frames and their contents, and no wire crosses a box that it does not enter.
    """
    direction = direction or direction_of(graph, configs, folded, spare)
    drawing = _scope_drawing(graph, configs, folded, spare, direction)
    above = HEAD if heading else 0
    drawing.shift(MARGIN, MARGIN + above)
    drawing.grow(max(text_width((heading,), TITLE_CHAR) - drawing.width, 0) + 2 * MARGIN, 2 * MARGIN + above)
    return drawing


def _scope_drawing(
    graph: Graph, configs: Configs, folded: Container[str], spare: Spare, direction: Direction
) -> Drawing:
    return _Layout(graph, configs, folded, spare, direction).scope(scopes_of(graph))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of one graph, scope by scope."""

    graph: Graph
    configs: Configs
    folded: Container[str]
    spare: Spare
    direction: Direction

    def scope(self, scope: Scope) -> Drawing:
        """One scope with its upper left corner at the origin."""
        boxes = self._boxes(scope)
        _choose_layers(boxes, scope.joints.values())
        drawing = self._with_lanes(boxes, scope)
        _order_layers(drawing)
        _place(drawing)
        return drawing

    def _boxes(self, scope: Scope) -> dict[BoxId, Box]:
        labels = self._labels(scope)

        def box(at: BoxId, kind: _Solid, lines: tuple[str, ...], inputs: int, outputs: int) -> Box:
            named = [labels.get((at, number), ()) for number in range(outputs)]
            return _box(self.direction, kind, lines, inputs, named)

        boxes: dict[BoxId, Box] = {}
        if scope.name:
            boxes |= {("in", i): self._port(()) for i in range(len(scope.entering))}
            # The label of a tensor that leaves is outside, beside the frame's port: the port inside keeps space for it.
            boxes |= {("out", i): self._port(self._name(scope, i)) for i in range(len(scope.leaving))}
        else:
            boxes |= {
                ("in", i): box(("in", i), "end", (s.name, kind(s)), 0, 1) for i, s in enumerate(self.graph.inputs)
            }
            boxes |= {
                ("out", i): box(("out", i), "end", (s.name, kind(s)), 1, 0) for i, s in enumerate(self.graph.outputs)
            }
        for node in scope.nodes:
            lines = (*node_lines(self.graph, node, self.configs), *self.spare.lines)
            made = box(("node", node.index), "node", lines, len(node.inputs), len(node.outputs))
            made.node = node.index
            boxes["node", node.index] = made
        for number in scope.merges:
            named = labels.get((("merge", number), 0), ())
            boxes["merge", number] = _merge(self.direction, named)
        for number, inner in enumerate(scope.inner):
            if inner.path in self.folded:
                made = box(
                    ("scope", number),
                    "folded",
                    folded_lines(inner, self.configs),
                    len(inner.entering),
                    len(inner.leaving),
                )
                made.scope = inner.path
                boxes["scope", number] = made
            else:
                boxes["scope", number] = self._open(inner)
        return boxes

    def _labels(self, scope: Scope) -> dict[tuple[BoxId, int], tuple[str, ...]]:
        """The label of each output of a box that has readers: none for an input, whose box shows its type, and inside a
        frame's border.
        """
        labels: dict[tuple[BoxId, int], tuple[str, ...]] = {}
        sent = self._crossing(scope)
        for joint in scope.joints.values():
            crosses = sent.get((joint.source, joint.output), "")
            if joint.source[0] != "in":
                what = kind(spec_in(self.graph, self.graph.edges[joint.edges[0]], scope.rows)) + crosses
                labels.setdefault((joint.source, joint.output), (joint.tensor, what + self.spare.tensor))
            elif (self.spare.tensor or crosses) and not scope.name:
                labels[joint.source, joint.output] = ("", crosses.removeprefix(", ") + self.spare.tensor)
        return labels

    def _crossing(self, scope: Scope) -> dict[tuple[BoxId, int], str]:
        """The text after each output's type about transfers to other machines: the largest transfer to one of its
        readers.
        """
        found: dict[tuple[BoxId, int], str] = {}
        for joint in scope.joints.values():
            for number in joint.edges:
                text = crossing(self.graph, self.graph.edges[number], self.configs)
                if text and len(text) + 2 > len(found.get((joint.source, joint.output), "")):
                    found[joint.source, joint.output] = f", {text}"
        return found

    def _name(self, scope: Scope, leaving: int) -> tuple[str, ...]:
        """The longest label that a tensor may have outside of `scope`."""
        joint = next(joint for joint in scope.joints.values() if joint.target == ("out", leaving))
        edge = self.graph.edges[joint.edges[0]]
        around = scope.rows if scope.space is None else scope.space.parent
        return edge.tensor, kind(spec_in(self.graph, edge, around)) + self.spare.tensor

    def _open(self, scope: Scope) -> Box:
        inside = self.scope(scope)
        title = scope_title(scope, self.configs)
        title_width = text_width((title + (self.spare.space if scope.space else ""),))
        box = Box("frame", self.direction, (title,), inside=inside)
        if scope.space is None:
            box.scope = scope.path
        else:
            box.space = scope.space.index
        entering = [port.across + port.inputs[0] for port in inside.entering]
        if self.direction == "TB" and entering and title_width + PAD > min(entering):
            box.text_left = max(entering) + BESIDE  # wires enter at the top, and the title is beside them
        beside = PAD if self.direction == "TB" else 0.0  # from left to right there is the gap for bends
        box.text_left += beside
        inside.grow(max(box.text_left + title_width + PAD - inside.width, 2 * beside), FRAME_HEAD + PAD)
        inside.shift(beside, FRAME_HEAD)
        box.length, box.breadth = inside.length, inside.breadth
        for port in inside.entering:
            port.along = 0.0
        for port in inside.leaving:  # the frame may be longer than its contents
            port.along = box.length
        box.inputs = tuple(port.across + port.inputs[0] for port in inside.entering)
        box.outputs = tuple(port.across + port.outputs[0] for port in inside.leaving)
        return box

    def _port(self, label: tuple[str, ...]) -> Box:
        beside = _label_space(self.direction, label) - ROW / 2
        return Box("port", self.direction, breadth=ROW, beside=max(beside, 0.0), inputs=(ROW / 2,), outputs=(ROW / 2,))

    def _with_lanes(self, boxes: dict[BoxId, Box], scope: Scope) -> Drawing:
        layers: list[list[Box]] = [[] for _ in range(1 + max(box.layer for box in boxes.values()))]
        entering, leaving = ([box for end, box in boxes.items() if end[0] == side] for side in ("in", "out"))
        drawing = Drawing(self.direction, layers, entering, leaving)
        labels = self._labels(scope)
        for box in boxes.values():
            drawing.layers[box.layer].append(box)
        for joint in scope.joints.values():
            at, port = boxes[joint.source], joint.output
            label = labels.pop((joint.source, joint.output), ())  # on one wire of each tensor
            target, edges = boxes[joint.target], tuple(joint.edges)
            for layer in range(at.layer + 1, target.layer):
                lane = Box("lane", self.direction, breadth=LANE, inputs=(LANE / 2,), outputs=(LANE / 2,), layer=layer)
                drawing.layers[layer].append(lane)
                drawing.add(Wire(at, port, lane, 0, edges, label))
                at, port, label = lane, 0, ()
            drawing.add(Wire(at, port, target, joint.input, edges, label))
        return drawing


def _box(
    direction: Direction, kind: _Solid, lines: tuple[str, ...], inputs: int, labels: Sequence[tuple[str, ...]]
) -> Box:
    """`labels`: that of each output."""
    width = 2 * PAD + max(text_width(lines, TITLE_CHAR), 60.0)
    height = float(2 * PAD + LINE * len(lines))
    length, breadth = (width, height) if direction == "LR" else (height, width)
    breadth = max(breadth, ROW * max(inputs, len(labels)))
    spaces = [_label_space(direction, label) for label in labels]
    cell = max([breadth / max(len(labels), 1), *spaces[:-1]])  # a label ends before the next output
    breadth = max(breadth, cell * (len(labels) - 1) + 2 * PAD)
    first = (breadth - cell * (len(labels) - 1)) / 2
    outputs = tuple(first + cell * number for number in range(len(labels)))
    beside = max(outputs[-1] + spaces[-1] - breadth, 0.0) if labels else 0.0
    return Box(kind, direction, lines, length, breadth, beside, _spread(inputs, breadth), outputs)


def _merge(direction: Direction, label: tuple[str, ...]) -> Box:
    """All its wires meet at its corners. `label`: that of its output."""
    middle = (MERGE / 2,)
    beside = max(_label_space(direction, label) - MERGE / 2, 0.0)
    return Box("merge", direction, length=MERGE, breadth=MERGE, beside=beside, inputs=middle, outputs=middle)


def _label_space(direction: Direction, label: Sequence[str]) -> float:
    """The space across that a label takes, from its wire on. From left to right that of a port is enough."""
    return text_width(label) + 2 * BESIDE if label and direction == "TB" else 0.0


def _spread(count: int, breadth: float) -> tuple[float, ...]:
    return tuple(breadth * (number + 0.5) / count for number in range(count))


def _choose_layers(boxes: dict[BoxId, Box], joints: Iterable[Joint]) -> None:
    """Inputs first, outputs last, and between them each box after all its producers."""
    import networkx as nx  # imported late: a server that draws nothing does not need it

    joined: nx.DiGraph[BoxId] = nx.DiGraph()
    joined.add_nodes_from(end for end in boxes if end[0] not in ("in", "out"))
    joined.add_edges_from((j.source, j.target) for j in joints if j.source[0] != "in" and j.target[0] != "out")
    last = 1
    for layer, ends in enumerate(nx.topological_generations(joined), 1):
        last = layer + 1
        for end in ends:
            boxes[end].layer = layer
    for end, box in boxes.items():
        if end[0] == "out":
            box.layer = last


def _order_layers(drawing: Drawing) -> None:
    """Sort each layer by the sources of its wires, then by their targets, a few times, to reduce crossings."""
    rank = {box: float(i) for layer in drawing.layers for i, box in enumerate(layer)}

    def by_sources(box: Box) -> float:
        ranks = [rank[wire.source] + wire.output / len(wire.source.outputs) for wire in box.wires_in]
        return sum(ranks) / len(ranks) if ranks else rank[box]

    def by_targets(box: Box) -> float:
        ranks = [rank[wire.target] + wire.input / len(wire.target.inputs) for wire in box.wires_out]
        return sum(ranks) / len(ranks) if ranks else rank[box]

    for position, layers in ((by_sources, drawing.layers), (by_targets, drawing.layers[::-1])) * SWEEPS:
        for layer in layers:
            layer.sort(key=position)
            rank.update((box, float(i)) for i, box in enumerate(layer))


def _place(drawing: Drawing) -> None:
    _choose_positions(drawing)
    labels = [0.0 for _ in drawing.layers]
    for wire in drawing.wires:
        if wire.label:
            size = text_width(wire.label) if drawing.direction == "LR" else LABEL
            labels[wire.source.layer] = max(labels[wire.source.layer], size)
    bend = BEND[drawing.direction]
    along = 0.0
    for number, layer in enumerate(drawing.layers):
        length = max((box.length for box in layer), default=0.0)  # lanes have no length yet
        for box in layer:
            box.layer_along = along
            if box.kind == "lane":
                box.length = length
            box.along = along + (length - box.length) / 2
            if box.inside:
                box.inside.shift(box.left, box.top)
        along += length + labels[number] + bend
    drawing.length = along - bend
    drawing.breadth = max(box.across + box.breadth + box.beside for layer in drawing.layers for box in layer)


def _choose_positions(drawing: Drawing) -> None:
    """Move each box as close to its neighbours' position across as order and gaps allow, so that wires are straight."""
    for layer in drawing.layers:
        _settle(layer, [0.0] * len(layer))
    for _ in range(SWEEPS):
        for layer in drawing.layers[1:]:
            wanted = [[wire.start[1] - box.inputs[wire.input] for wire in box.wires_in] for box in layer]
            _settle(layer, list(map(_level, layer, wanted)))
        for layer in drawing.layers[-2::-1]:
            wanted = [[wire.end[1] - box.outputs[wire.output] for wire in box.wires_out] for box in layer]
            _settle(layer, list(map(_level, layer, wanted)))
    first = min(box.across for layer in drawing.layers for box in layer)
    for box in (box for layer in drawing.layers for box in layer):
        box.across -= first


def _level(box: Box, wanted: Sequence[float]) -> float:
    """The average of the positions at which each wire on one side of a box would be straight; its own without wires."""
    return sum(wanted) / len(wanted) if wanted else box.across


def _settle(layer: Sequence[Box], wanted: Sequence[float]) -> None:
    """Set the positions closest to the wanted ones, in order and without overlap: colliding boxes move together."""
    offsets = [0.0]
    for one, other in pairwise(layer):
        is_tight = one.kind == "lane" or other.kind == "lane"
        offsets.append(offsets[-1] + one.breadth + one.beside + (LANE if is_tight else GAP))
    blocks: list[tuple[float, int]] = []  # the sum of its boxes' wanted positions, and their number
    for position, offset in zip(wanted, offsets, strict=False):
        blocks.append((position - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = blocks[-1][0] + total, blocks[-1][1] + count
    settled = [total / count for total, count in blocks for _ in range(count)]
    for box, base, offset in zip(layer, settled, offsets, strict=False):
        box.across = base + offset
