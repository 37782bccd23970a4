"""Reconstructs the nested ensembles and the spaces of a flat graph: the boxes in each, and the connections between
them.

Decides what crosses the border of a nested ensemble: a tensor enters it once, regardless of the number of nodes that
read it, and leaves it once. Used by formats that draw nested ensembles as frames, never for serving.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from flowserve.graph.types import GRAPH, Edge, Graph, Node, Space

# A box of a scope: the scope's own input or output by number, a node by index, an inner scope by its number in `inner`.
BoxId = tuple[Literal["in", "node", "scope", "out"], int]
TensorId = tuple[int, int]  # producer and output, as in Edge


@dataclass(slots=True, eq=False)
class Joint:
    """A connection from a box's output to a box's input in one scope. `edges` are the numbers of the graph's edges that
    it represents.
    """

    source: BoxId
    output: int
    target: BoxId
    input: int
    tensor: str
    edges: list[int]


@dataclass(slots=True, eq=False)
class Scope:
    """One ensemble: the whole graph, or a nested one of it; or a space, whose nodes run for some rows or items.

    `name` is its name in the surrounding scope, "" for the whole graph; `path` joins the names down to it, as node
    names do. `space`: None for an ensemble. `entering` and `leaving` are the tensors that cross its border, in the
    order of their ports.
    """

    name: str = ""
    path: str = ""
    ensemble: str = ""
    space: Space | None = None
    nodes: list[Node] = field(default_factory=list)
    inner: list[Scope] = field(default_factory=list)
    entering: list[TensorId] = field(default_factory=list)
    leaving: list[TensorId] = field(default_factory=list)
    joints: dict[tuple[BoxId, int, BoxId, int], Joint] = field(default_factory=dict)

    def walk(self) -> Iterator[Scope]:
        """The nested scopes, outer ones first, without this one."""
        for scope in self.inner:
            yield scope
            yield from scope.walk()

    def join(self, source: tuple[BoxId, int], target: tuple[BoxId, int], tensor: str, edge: int) -> None:
        made = self.joints.setdefault((*source, *target), Joint(*source, *target, tensor, []))
        made.edges.append(edge)


def scopes_of(graph: Graph) -> Scope:
    """The outermost scope, which contains all others."""
    return _scopes(graph, _drawn(graph))


def _scopes(graph: Graph, spaces: Container[int]) -> Scope:
    outermost = Scope(ensemble=graph.name)
    outermost.entering = [(GRAPH, index) for index in range(len(graph.inputs))]
    chains = [
        _chain(outermost, node, [space for space in graph.around(node.space) if space.index in spaces])
        for node in graph.nodes
    ]
    for number, edge in enumerate(graph.edges):
        above = [outermost] if edge.producer == GRAPH else chains[edge.producer]
        below = [outermost] if edge.consumer == GRAPH else chains[edge.consumer]
        _join(above, below, edge, number)
    return outermost


def _drawn(graph: Graph) -> set[int]:
    """The spaces that can be one frame: no tensor goes from one of their nodes through another node back into them."""
    drawn = {space.index for space in graph.spaces}
    for space in graph.spaces:
        inside = {n.index for n in graph.nodes if space in graph.around(n.space)}
        behind: set[int] = set()  # nodes outside that read what was made inside
        for node in graph.nodes:
            makers = {edge.producer for edge in graph.edges if edge.consumer == node.index}
            if node.index in inside:
                if makers & behind:
                    drawn.discard(space.index)
            elif makers & (inside | behind):
                behind.add(node.index)
    return {index for index in drawn if all(one.index in drawn for one in graph.around(index))}


def _chain(outermost: Scope, node: Node, spaces: Sequence[Space]) -> list[Scope]:
    """The scopes around a node, outermost first; missing ones are created."""
    chain = [outermost]
    names = [*zip(node.name.split("/"), node.path, strict=False)]  # the last name is the node's own
    for depth in range(len(names) + 1):
        steps: list[tuple[str, str, Space | None]] = [(s.title, "", s) for s in spaces if s.depth == depth]
        steps += [(*names[depth], None)] if depth < len(names) else []
        for name, ensemble, space in steps:
            around = chain[-1]
            inner = next((one for one in around.inner if one.name == name and one.space == space), None)
            if inner is None:
                inner = Scope(name, f"{around.path}/{name}".lstrip("/"), ensemble, space)
                around.inner.append(inner)
            chain.append(inner)
    chain[-1].nodes.append(node)
    return chain


def _join(above: Sequence[Scope], below: Sequence[Scope], edge: Edge, number: int) -> None:
    """Connect an edge out of the producer's scopes, across, and into the consumer's."""
    tensor = (edge.producer, edge.output)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(above, below, strict=False)))
    at: tuple[BoxId, int] = (
        (("in", edge.output), 0) if edge.producer == GRAPH else (("node", edge.producer), edge.output)
    )
    for scope, around in zip(reversed(above[shared:]), reversed(above[shared - 1 : -1]), strict=True):
        port = _port(scope.leaving, tensor)
        scope.join(at, (("out", port), 0), _inside(scope, edge), number)
        at = ("scope", around.inner.index(scope)), port
    around = below[shared - 1]
    for scope in below[shared:]:
        port = _port(scope.entering, tensor)
        around.join(at, (("scope", around.inner.index(scope)), port), _inside(around, edge), number)
        around, at = scope, (("in", port), 0)
    end: tuple[BoxId, int] = (
        (("out", edge.input), 0) if edge.consumer == GRAPH else (("node", edge.consumer), edge.input)
    )
    around.join(at, end, _inside(around, edge), number)


def _port(ports: list[TensorId], tensor: TensorId) -> int:
    if tensor not in ports:
        ports.append(tensor)
    return ports.index(tensor)


def _inside(scope: Scope, edge: Edge) -> str:
    """The tensor's name without the names of the ensembles around it."""
    path = scope.path
    while path and not edge.tensor.startswith(f"{path}/"):  # an outer ensemble gave it its name
        path = path.rpartition("/")[0]
    return edge.tensor[len(path) + 1 :] if path else edge.tensor
