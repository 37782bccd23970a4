"""A drawing of a graph with coordinates: layers of boxes from left to right, wires, nested ensembles.

Decides all coordinates, in px, and the width of text. A box is one layer to the right of its last producer. A wire that
passes a layer gets its own lane there, so that no wire crosses a box; a tensor is labelled where it leaves a box, in a
gap that is wide enough. A nested ensemble is a frame or a folded box. A frame is laid out first and then is one box of
the surrounding layout, so that no other box can be inside it. Does not decide colours, fonts and notation (`svg` and
`png`, its callers).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from flowserve.graph.types import Graph
from flowserve.render.labels import UNKNOWN, Configs, ensemble_title, kind, node_lines, scope_title, tint_of
from flowserve.render.scopes import BoxId, Joint, Scope, scopes_of

CHAR: Final = 6.7  # width of a character of the label font, in px: generous, because the viewer's font is unknown
TITLE_CHAR: Final = 8.2
LINE: Final = 16  # height of a line of text
PAD: Final = 12
BEND: Final = 56  # room for edges to change height between two layers
MARGIN: Final = 24
HEAD: Final = 44  # the graph's title
ROW: Final = 34  # height of one port
LANE: Final = 12
GAP: Final = 26  # between two boxes of a layer
FRAME_HEAD: Final = 34  # an open ensemble's title
SWEEPS: Final = 4


@dataclass(slots=True, eq=False)
class Box:
    """One rectangle of one layer.

    "end" is an input or output of the graph, "folded" an ensemble drawn as one box, "frame" one drawn open, "port" the
    point where a tensor crosses a frame, and "lane" the path of a wire past a layer, as wide as the layer. `node` and
    `scope` identify what it represents. Ports are heights below `top`.
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
    tint: str = ""  # of a node, by its model's backend
    inside: Drawing | None = None
    space: int = 0  # of a frame around the nodes of a space; 0: of an ensemble
    wires_in: list[Wire] = field(default_factory=list)
    wires_out: list[Wire] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Wire:
    """One piece of an edge, from a port to a port of the next layer.

    `label` is at its left end, on the first wire of a tensor that leaves a box. `edges` are the edges it is part of.
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
        """Whether it ends here, and does not continue past a layer or inside a frame."""
        return self.target.kind in ("end", "node", "folded")

    @property
    def bent(self) -> float:
        """The x coordinate where the bend ends; it begins at `turn`, and no box is between them."""
        return self.target.layer_left

    @property
    def turn(self) -> float:
        return self.bent - BEND


@dataclass(slots=True, eq=False)
class Drawing:
    """Boxes by layer, top to bottom, and the wires between neighbouring layers. The inside of a frame is a drawing too.

    `entering` and `leaving` are the first and last boxes by number, independent of their order in the layers.
    """

    layers: list[list[Box]]
    entering: list[Box]
    leaving: list[Box]
    wires: list[Wire] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

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
        for box in (box for layer in self.layers for box in layer):
            box.left += right
            box.layer_left += right
            box.top += down
            if box.inside:
                box.inside.shift(right, down)


def text_width(lines: Sequence[str], first: float = CHAR) -> float:
    """The width of the widest line. `first` is the character width of the first line, which may be a title."""
    return max((_cells(line) * (CHAR if number else first) for number, line in enumerate(lines)), default=0.0)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


@dataclass(frozen=True, slots=True)
class Spare:
    """Space reserved for text that a page writes into a picture later: lines below those of each node's box, and
    characters after the type of each tensor, including the graph's inputs. The given texts have the maximum width.
    """

    lines: tuple[str, ...] = ()
    tensor: str = ""


NO_SPARE: Final = Spare()


def lay_out(
    graph: Graph, configs: Configs, folded: Container[str] = (), spare: Spare = NO_SPARE, *, heading: str = ""
) -> Drawing:
    """Lay out a graph. `folded` has the paths of the ensembles that are drawn as one box each. With a `heading`, there
    is space for it above the drawing.

    Boxes do not overlap, except frames and their contents, and no wire crosses a box that it does not enter.
    """
    drawing = _Layout(graph, configs, folded, spare).scope(scopes_of(graph))
    above = HEAD if heading else 0
    drawing.shift(MARGIN, MARGIN + above)
    drawing.width = max(drawing.width, text_width((heading,), TITLE_CHAR)) + 2 * MARGIN
    drawing.height += 2 * MARGIN + above
    return drawing


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of one graph, scope by scope."""

    graph: Graph
    configs: Configs
    folded: Container[str]
    spare: Spare

    def scope(self, scope: Scope) -> Drawing:
        """One scope with its upper left corner at the origin."""
        boxes = self._boxes(scope)
        _choose_layers(boxes, scope.joints.values())
        drawing = self._with_lanes(boxes, scope)
        _order_layers(drawing)
        _place(drawing)
        return drawing

    def _boxes(self, scope: Scope) -> dict[BoxId, Box]:
        boxes: dict[BoxId, Box] = {}
        if scope.path:
            boxes |= {("in", i): _port() for i in range(len(scope.entering))}
            boxes |= {("out", i): _port() for i in range(len(scope.leaving))}
        else:
            boxes |= {("in", i): _box("end", (s.name, kind(s)), 0, 1) for i, s in enumerate(self.graph.inputs)}
            boxes |= {("out", i): _box("end", (s.name, kind(s)), 1, 0) for i, s in enumerate(self.graph.outputs)}
        for node in scope.nodes:
            lines = (*node_lines(self.graph, node, self.configs), *self.spare.lines)
            box = _box("node", lines, len(node.inputs), len(node.outputs))
            box.node = node.index
            box.tint = tint_of(self.configs.get(node.model.name, UNKNOWN))
            boxes["node", node.index] = box
        for number, inner in enumerate(scope.inner):
            boxes["scope", number] = self._fold(inner) if inner.path in self.folded else self._open(inner)
        return boxes

    def _label(self, scope: Scope, joint: Joint) -> tuple[str, ...]:
        """The label of a joint; none for an input, whose box shows its type, and inside a frame's border."""
        if joint.source[0] == "in":
            return ("", self.spare.tensor) if self.spare.tensor and not scope.path else ()
        return joint.tensor, kind(self.graph.written(self.graph.edges[joint.edges[0]])) + self.spare.tensor

    def _fold(self, scope: Scope) -> Box:
        count = sum(len(each.nodes) for each in (scope, *scope.walk()))
        steps = f"{count} step{'' if count == 1 else 's'}, folded"
        lines = (scope.name, *ensemble_title(scope.ensemble, scope.ensemble, self.configs).split(", "), steps)
        box = _box("folded", lines, len(scope.entering), len(scope.leaving))
        box.scope = scope.path
        return box

    def _open(self, scope: Scope) -> Box:
        inside = self.scope(scope)
        title = scope_title(scope, self.configs)
        box = Box("frame", (title,), scope=scope.path if scope.space is None else "", inside=inside)
        box.space = scope.space.index if scope.space is not None else 0
        box.width = max(inside.width, text_width((title,)) + 2 * PAD)
        box.height = FRAME_HEAD + inside.height + PAD
        inside.shift(0.0, FRAME_HEAD)
        for port in inside.leaving:  # the frame may be wider than its contents
            port.left = box.width
        box.inputs = tuple(port.top + port.inputs[0] for port in inside.entering)
        box.outputs = tuple(port.top + port.outputs[0] for port in inside.leaving)
        return box

    def _with_lanes(self, boxes: dict[BoxId, Box], scope: Scope) -> Drawing:
        layers: list[list[Box]] = [[] for _ in range(1 + max(box.layer for box in boxes.values()))]
        entering, leaving = ([box for end, box in boxes.items() if end[0] == side] for side in ("in", "out"))
        drawing = Drawing(layers, entering, leaving)
        for box in boxes.values():
            drawing.layers[box.layer].append(box)
        labelled: set[tuple[BoxId, int]] = set()
        for joint in scope.joints.values():
            at, port = boxes[joint.source], joint.output
            label: tuple[str, ...] = ()
            if (joint.source, joint.output) not in labelled:
                label = self._label(scope, joint)
            labelled.add((joint.source, joint.output))
            target, edges = boxes[joint.target], tuple(joint.edges)
            for layer in range(at.layer + 1, target.layer):
                lane = Box("lane", height=LANE, inputs=(LANE / 2,), outputs=(LANE / 2,), layer=layer)
                drawing.layers[layer].append(lane)
                drawing.add(Wire(at, port, lane, 0, edges, label))
                at, port, label = lane, 0, ()
            drawing.add(Wire(at, port, target, joint.input, edges, label))
        return drawing


def _box(kind: Literal["end", "node", "folded"], lines: tuple[str, ...], inputs: int, outputs: int) -> Box:
    width = 2 * PAD + max(text_width(lines, TITLE_CHAR), 60.0)
    height = float(max(2 * PAD + LINE * len(lines), ROW * max(inputs, outputs)))
    return Box(kind, lines, width, height, _spread(inputs, height), _spread(outputs, height))


def _port() -> Box:
    return Box("port", height=ROW, inputs=(ROW / 2,), outputs=(ROW / 2,))


def _spread(count: int, height: float) -> tuple[float, ...]:
    return tuple(height * (number + 0.5) / count for number in range(count))


def _choose_layers(boxes: dict[BoxId, Box], joints: Iterable[Joint]) -> None:
    """Inputs first, outputs last, and between them each box to the right of all its producers."""
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
    _choose_heights(drawing)
    labels = [0.0 for _ in drawing.layers]
    for wire in drawing.wires:
        labels[wire.source.layer] = max(labels[wire.source.layer], text_width(wire.label))
    left = 0.0
    for number, layer in enumerate(drawing.layers):
        width = max((box.width for box in layer), default=0.0)  # lanes have no width yet
        for box in layer:
            box.layer_left = left
            if box.kind == "lane":
                box.width = width
            box.left = left + (width - box.width) / 2
            if box.inside:
                box.inside.shift(box.left, box.top)
        left += width + labels[number] + BEND
    drawing.width = left - BEND
    drawing.height = max(box.top + box.height for layer in drawing.layers for box in layer)


def _choose_heights(drawing: Drawing) -> None:
    """Move each box as close to the height of its neighbours as order and gaps allow, so that wires are straight."""
    for layer in drawing.layers:
        _settle(layer, [0.0] * len(layer))
    for _ in range(SWEEPS):
        for layer in drawing.layers[1:]:
            tops = [[wire.start[1] - box.inputs[wire.input] for wire in box.wires_in] for box in layer]
            _settle(layer, list(map(_level, layer, tops)))
        for layer in drawing.layers[-2::-1]:
            tops = [[wire.end[1] - box.outputs[wire.output] for wire in box.wires_out] for box in layer]
            _settle(layer, list(map(_level, layer, tops)))
    highest = min(box.top for layer in drawing.layers for box in layer)
    for box in (box for layer in drawing.layers for box in layer):
        box.top -= highest


def _level(box: Box, tops: Sequence[float]) -> float:
    """The average of the `tops` at which each wire on one side of a box would be straight; its own without wires."""
    return sum(tops) / len(tops) if tops else box.top


def _settle(layer: Sequence[Box], wanted: Sequence[float]) -> None:
    """Set the tops closest to the wanted ones, in order and without overlap: colliding boxes move together."""
    offsets = [0.0]
    for upper, lower in pairwise(layer):
        is_tight = upper.kind == "lane" or lower.kind == "lane"
        offsets.append(offsets[-1] + upper.height + (LANE if is_tight else GAP))
    blocks: list[tuple[float, int]] = []  # the sum of its boxes' wanted positions, and their number
    for top, offset in zip(wanted, offsets, strict=False):
        blocks.append((top - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = blocks[-1][0] + total, blocks[-1][1] + count
    settled = [total / count for total, count in blocks for _ in range(count)]
    for box, base, offset in zip(layer, settled, offsets, strict=False):
        box.top = base + offset
