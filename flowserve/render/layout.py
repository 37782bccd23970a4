"""Where everything stands in a drawn graph: layers from left to right, nested ensembles as frames or as folded boxes.

Decided here: all coordinates of a drawing (drawing.py). A box stands one layer right of the last box it waits for. A
wire that passes a layer gets a lane there of its own, so none runs through a box; a tensor is labelled where it leaves
a box, in a gap wide enough for it. An open ensemble is laid out by itself first and is then one box of the layout
around it, so nothing foreign can lie inside its frame.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from flowserve.graph.types import Graph
from flowserve.render.drawing import BEND, LINE, MARGIN, PAD, TITLE_CHAR, Box, Drawing, Wire, text_width
from flowserve.render.facts import Facts
from flowserve.render.labels import ensemble_title, kind, node_lines, written
from flowserve.render.scopes import End, Joint, Scope, scopes_of

ROW: Final = 34  # height of one port
LANE: Final = 12
GAP: Final = 26  # between two boxes of a layer
FRAME_HEAD: Final = 34  # an open ensemble's title
SWEEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Spare:
    """Room for what a page writes into a picture later: lines below those of each node's box, and characters behind the
    type of each tensor, those of the graph's inputs too. What stands here is as wide as what comes may be.
    """

    lines: tuple[str, ...] = ()
    tensor: str = ""


NO_SPARE: Final = Spare()


def lay_out(graph: Graph, facts: Facts, folded: Container[str] = (), spare: Spare = NO_SPARE) -> Drawing:
    """Place everything. `folded` has the paths of the ensembles that are drawn as one box each.

    Boxes never overlap but for frames and what is in them, and no wire runs through a box that it does not enter.
    """
    drawing = _Layout(graph, facts, folded, spare).scope(scopes_of(graph))
    drawing.shift(MARGIN, MARGIN)
    drawing.width += 2 * MARGIN
    drawing.height += 2 * MARGIN
    return drawing


class _Layout:
    """The layout of one graph, scope by scope."""

    def __init__(self, graph: Graph, facts: Facts, folded: Container[str], spare: Spare) -> None:
        self.graph = graph
        self.facts = facts
        self.folded = folded
        self.spare = spare

    def scope(self, scope: Scope) -> Drawing:
        """One scope with its upper left corner at the origin."""
        boxes = self._boxes(scope)
        _choose_layers(boxes, scope.joints.values())
        drawing = self._with_lanes(boxes, scope)
        _order_layers(drawing)
        _place(drawing)
        return drawing

    def _boxes(self, scope: Scope) -> dict[End, Box]:
        boxes: dict[End, Box] = {}
        if scope.path:
            boxes |= {("in", i): _port() for i in range(len(scope.entering))}
            boxes |= {("out", i): _port() for i in range(len(scope.leaving))}
        else:
            boxes |= {("in", i): _box("end", (s.name, kind(s)), 0, 1) for i, s in enumerate(self.graph.inputs)}
            boxes |= {("out", i): _box("end", (s.name, kind(s)), 1, 0) for i, s in enumerate(self.graph.outputs)}
        for node in scope.nodes:
            lines = (*node_lines(self.graph, node, self.facts), *self.spare.lines)
            box = _box("node", lines, len(node.inputs), len(node.outputs))
            box.node = node.index
            boxes["node", node.index] = box
        for number, inner in enumerate(scope.inner):
            boxes["scope", number] = self._fold(inner) if inner.path in self.folded else self._open(inner)
        return boxes

    def _label(self, scope: Scope, joint: Joint) -> tuple[str, ...]:
        """The box of an input has said what it holds, and at a frame's border the label stands outside."""
        if joint.source[0] == "in":
            return ("", self.spare.tensor) if self.spare.tensor and not scope.path else ()
        return joint.tensor, kind(written(self.graph, self.graph.edges[joint.edges[0]])) + self.spare.tensor

    def _fold(self, scope: Scope) -> Box:
        count = sum(len(each.nodes) for each in (scope, *scope.walk()))
        lines = (scope.name, *ensemble_title(scope.ensemble, scope.ensemble, self.facts).split(", "), _steps(count))
        box = _box("folded", lines, len(scope.entering), len(scope.leaving))
        box.scope = scope.path
        return box

    def _open(self, scope: Scope) -> Box:
        inside = self.scope(scope)
        title = ensemble_title(scope.name, scope.ensemble, self.facts)
        box = Box("frame", (title,), scope=scope.path, inside=inside)
        box.width = max(inside.width, text_width((title,)) + 2 * PAD)
        box.height = FRAME_HEAD + inside.height + PAD
        inside.shift(0.0, FRAME_HEAD)
        for port in inside.leaving:  # the frame may be wider than what is in it
            port.left = box.width
        box.inputs = tuple(port.top + port.inputs[0] for port in inside.entering)
        box.outputs = tuple(port.top + port.outputs[0] for port in inside.leaving)
        return box

    def _with_lanes(self, boxes: dict[End, Box], scope: Scope) -> Drawing:
        layers: list[list[Box]] = [[] for _ in range(1 + max(box.layer for box in boxes.values()))]
        entering, leaving = ([box for end, box in boxes.items() if end[0] == side] for side in ("in", "out"))
        drawing = Drawing(layers, entering, leaving)
        for box in boxes.values():
            drawing.layers[box.layer].append(box)
        labelled: set[tuple[End, int]] = set()
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
                drawing.wires.append(Wire(at, port, lane, 0, edges, label))
                at, port, label = lane, 0, ()
            drawing.wires.append(Wire(at, port, target, joint.input, edges, label))
        return drawing


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}, folded"


def _box(kind: Literal["end", "node", "folded"], lines: tuple[str, ...], inputs: int, outputs: int) -> Box:
    width = 2 * PAD + max(text_width(lines, TITLE_CHAR), 60.0)
    height = float(max(2 * PAD + LINE * len(lines), ROW * max(inputs, outputs)))
    return Box(kind, lines, width, height, _spread(inputs, height), _spread(outputs, height))


def _port() -> Box:
    return Box("port", height=ROW, inputs=(ROW / 2,), outputs=(ROW / 2,))


def _spread(count: int, height: float) -> tuple[float, ...]:
    return tuple(height * (number + 0.5) / count for number in range(count))


def _choose_layers(boxes: dict[End, Box], joints: Iterable[Joint]) -> None:
    """Inputs first, outputs last, and between them each box right of all that it waits for."""
    import networkx as nx  # not before something is drawn: a server that nobody looks at does without

    joined: nx.DiGraph[End] = nx.DiGraph()
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
    """Sort each layer by where its wires come from, then by where they go, a few times: fewer crossings."""
    rank = {id(box): float(i) for layer in drawing.layers for i, box in enumerate(layer)}
    before: dict[int, list[tuple[Box, float]]] = {}
    after: dict[int, list[tuple[Box, float]]] = {}
    for wire in drawing.wires:
        source, target = wire.source, wire.target
        before.setdefault(id(target), []).append((source, wire.output / len(source.outputs)))
        after.setdefault(id(source), []).append((target, wire.input / len(target.inputs)))
    for neighbours, layers in ((before, drawing.layers), (after, drawing.layers[::-1])) * SWEEPS:
        for layer in layers:
            layer.sort(key=lambda box: _middle(neighbours.get(id(box), ()), rank, rank[id(box)]))
            rank.update((id(box), float(i)) for i, box in enumerate(layer))


def _middle(neighbours: Sequence[tuple[Box, float]], rank: dict[int, float], own: float) -> float:
    if not neighbours:
        return own
    return sum(rank[id(box)] + port for box, port in neighbours) / len(neighbours)


def _place(drawing: Drawing) -> None:
    _choose_heights(drawing)
    labels = [0.0 for _ in drawing.layers]
    for wire in drawing.wires:
        labels[wire.source.layer] = max(labels[wire.source.layer], text_width(wire.label))
    left = 0.0
    for number, layer in enumerate(drawing.layers):
        width = max((box.width for box in layer), default=0.0)  # a lane has none yet
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
    """Each box as near to the height of its neighbours as its layer's order and gaps allow, so that wires run level."""
    before: dict[int, list[Wire]] = {}
    after: dict[int, list[Wire]] = {}
    for wire in drawing.wires:
        before.setdefault(id(wire.target), []).append(wire)
        after.setdefault(id(wire.source), []).append(wire)
    for layer in drawing.layers:
        _settle(layer, [0.0] * len(layer))
    for _ in range(SWEEPS):
        for layer in drawing.layers[1:]:
            _settle(layer, [_level(before.get(id(box), ()), box, forward=True) for box in layer])
        for layer in drawing.layers[-2::-1]:
            _settle(layer, [_level(after.get(id(box), ()), box, forward=False) for box in layer])
    highest = min(box.top for layer in drawing.layers for box in layer)
    for box in (box for layer in drawing.layers for box in layer):
        box.top -= highest


def _level(wires: Sequence[Wire], box: Box, *, forward: bool) -> float:
    """The `top` at which the wires on one side of a box would, in the mean, run straight; its own where it has none."""
    if not wires:
        return box.top
    if forward:
        tops = [wire.source.top + wire.source.outputs[wire.output] - box.inputs[wire.input] for wire in wires]
    else:
        tops = [wire.target.top + wire.target.inputs[wire.input] - box.outputs[wire.output] for wire in wires]
    return sum(tops) / len(tops)


def _settle(layer: Sequence[Box], wanted: Sequence[float]) -> None:
    """Set tops nearest to those wanted, in order and without overlap: what collides moves as one, by its mean."""
    offsets = [0.0]
    for upper, lower in pairwise(layer):
        is_tight = upper.kind == "lane" or lower.kind == "lane"
        offsets.append(offsets[-1] + upper.height + (LANE if is_tight else GAP))
    blocks: list[tuple[float, int]] = []  # the sum of what its boxes want, and how many they are
    for top, offset in zip(wanted, offsets, strict=False):
        blocks.append((top - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = blocks[-1][0] + total, blocks[-1][1] + count
    settled = [total / count for total, count in blocks for _ in range(count)]
    for box, base, offset in zip(layer, settled, offsets, strict=False):
        box.top = base + offset
