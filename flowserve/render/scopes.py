"""Reconstructs the nested ensembles and the spaces of a flat graph: the boxes in each, and the connections between
them.

Decides what crosses the border of a nested ensemble: a tensor enters it once, regardless of the number of nodes that
read it, and leaves it once. Decides also which tensors are *merges*, boxes of their own: those that several conditions
write, and those that a `fill` completes. Used by formats that draw nested ensembles as frames, never for serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Literal

from flowserve.graph.types import DERIVED, GRAPH, Derivation, Edge, Graph, Node, Ref, Space
from flowserve.values import TensorSpec

# A box of a scope: the scope's own input or output by number, a node by index, an inner scope by its number in `inner`,
# a merge by its number among the graph's derived tensors.
BoxId = tuple[Literal["in", "node", "scope", "merge", "out"], int]
_MERGES: Final = (Derivation.MERGE, Derivation.PRESENT)


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

    `name` is its name in the surrounding scope, "" for the whole graph; `path` joins the names of the ensembles down to
    it, as node names do. `space`: None for an ensemble. `merges` are numbers of derived tensors. `entering` and
    `leaving` are the tensors that cross its border, in the order of their ports.
    """

    name: str = ""
    path: str = ""
    ensemble: str = ""
    space: Space | None = None
    rows: int = 0
    nodes: list[Node] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    inner: list[Scope] = field(default_factory=list)
    entering: list[Ref] = field(default_factory=list)
    leaving: list[Ref] = field(default_factory=list)
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
    spaces = _drawn(graph)
    outermost = Scope(ensemble=graph.name)
    outermost.entering = [(GRAPH, index) for index in range(len(graph.inputs))]
    chains = [
        _chain(outermost, node, [space for space in graph.around(node.space) if space.index in spaces])
        for node in graph.nodes
    ]
    around = {GRAPH: [outermost], **dict(enumerate(chains))}
    merges = _merges(graph, around)
    for number, edge in enumerate(graph.edges):
        at: tuple[BoxId, int] = ("in", edge.output), 0
        if edge.producer != GRAPH:
            at = ("node", edge.producer), edge.output
        end: tuple[BoxId, int] = ("out", edge.input), 0
        if edge.consumer != GRAPH:
            end = ("node", edge.consumer), edge.input
        tensor, above = (edge.producer, edge.output), around[edge.producer]
        for merge in merges_of(graph, edge):
            if merge in merges:
                _join(above, merges[merge], tensor, at, (("merge", merge), 0), edge, number)
                at, tensor, above = (("merge", merge), 0), (DERIVED, merge), merges[merge]
        _join(above, around[edge.consumer], tensor, at, end, edge, number)
    return outermost


def ensembles_of(graph: Graph) -> list[str]:
    """The paths of the nested ensembles, outer ones first: each can be folded into one box."""
    return [scope.path for scope in scopes_of(graph).walk() if scope.space is None]


def merges_of(graph: Graph, edge: Edge) -> list[int]:
    """The merges on the way of an edge's tensor, beginning at its producer, by their numbers."""
    return [number for number in _way_of(graph, edge) if graph.derived[number].how in _MERGES]


def spec_in(graph: Graph, edge: Edge, space: int) -> TensorSpec:
    """The declaration of an edge's tensor within a space that it passes: within `each`, that of one item."""
    if edge.producer != GRAPH and graph.nodes[edge.producer].space == space:
        found = graph.nodes[edge.producer].outputs[edge.output]
    elif edge.producer == GRAPH and not space:
        found = graph.inputs[edge.output]
    else:
        found = graph.written(edge)
    for number in _way_of(graph, edge):
        if graph.derived[number].space == space:
            found = graph.derived[number].spec
    return found


def _way_of(graph: Graph, edge: Edge) -> list[int]:
    """The derived tensors between an edge's producer and consumer."""
    return _way(graph, (DERIVED, edge.derived), (edge.producer, edge.output)) or [] if edge.derived >= 0 else []


def _way(graph: Graph, tensor: Ref, origin: Ref) -> list[int] | None:
    """The derived tensors between `origin` and a tensor that is made from it; None if it is made from others."""
    if tensor == origin:
        return []
    if tensor[0] != DERIVED:
        return None
    made = graph.derived[tensor[1]]
    if made.how is Derivation.PRESENT:  # it reads no tensor
        return [tensor[1]]
    found = next((way for way in (_way(graph, read, origin) for read in made.reads) if way is not None), None)
    return None if found is None else [*found, tensor[1]]


def _merges(graph: Graph, around: Mapping[int, list[Scope]]) -> dict[int, list[Scope]]:
    """The scopes around each merge, which is also added to the innermost: that of all its producers, without the spaces
    that it ends. A merge is not drawn if one frame contains both sources and readers of it, because wires lead in one
    direction only. `around`: the scopes of each node, and of GRAPH.
    """
    ways = [(edge, merges_of(graph, edge)) for edge in graph.edges]
    producers: dict[int, list[list[Scope]]] = {}
    for edge, merges in ways:
        for merge in merges:
            producers.setdefault(merge, []).append(around[edge.producer])
    found = {merge: _shared(chains, graph.around(graph.derived[merge].space)) for merge, chains in producers.items()}
    for merge, scopes in [*found.items()]:
        before, behind = set[int](), set[int]()
        for edge, merges in ways:
            if merge in merges:
                place = merges.index(merge)
                way = [around[edge.producer], *(found.get(one, []) for one in merges), around[edge.consumer]]
                before |= {id(one) for chain in way[: place + 1] for one in chain[len(scopes) :]}
                behind |= {id(one) for chain in way[place + 2 :] for one in chain[len(scopes) :]}
        if before & behind:
            del found[merge]
        else:
            scopes[-1].merges.append(merge)
    return found


def _shared(chains: Sequence[list[Scope]], spaces: Sequence[Space]) -> list[Scope]:
    """The scopes that all chains share, outermost first, before the first that is a space other than these."""
    shared = takewhile(lambda level: all(one is level[0] for one in level), zip(*chains, strict=False))
    return [*takewhile(lambda scope: scope.space is None or scope.space in spaces, (level[0] for level in shared))]


def _drawn(graph: Graph) -> set[int]:
    """The spaces that can be one frame: no tensor goes from one of their nodes through another node back into them."""
    drawn = {space.index for space in graph.spaces}
    for space in graph.spaces:
        inside = {n.index for n in graph.nodes if space in graph.around(n.space)}
        behind: set[int] = set()  # nodes outside that depend on nodes inside
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
                path = f"{around.path}/{name}".lstrip("/") if space is None else around.path
                inner = Scope(name, path, ensemble, space, around.rows if space is None else space.index)
                around.inner.append(inner)
            chain.append(inner)
    chain[-1].nodes.append(node)
    return chain


def _join(
    above: Sequence[Scope],
    below: Sequence[Scope],
    tensor: Ref,
    source: tuple[BoxId, int],
    target: tuple[BoxId, int],
    edge: Edge,
    number: int,
) -> None:
    """Connect an output of a box, out of the scopes around it, across, and into those around another box's input."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(above, below, strict=False)))
    at = source
    for scope, around in zip(reversed(above[shared:]), reversed(above[shared - 1 : -1]), strict=True):
        port = _port(scope.leaving, tensor)
        scope.join(at, (("out", port), 0), _inside(scope, edge), number)
        at = ("scope", around.inner.index(scope)), port
    around = below[shared - 1]
    for scope in below[shared:]:
        port = _port(scope.entering, tensor)
        around.join(at, (("scope", around.inner.index(scope)), port), _inside(around, edge), number)
        around, at = scope, (("in", port), 0)
    around.join(at, target, _inside(around, edge), number)


def _port(ports: list[Ref], tensor: Ref) -> int:
    if tensor not in ports:
        ports.append(tensor)
    return ports.index(tensor)


def _inside(scope: Scope, edge: Edge) -> str:
    """The tensor's name without the names of the ensembles around it."""
    path = scope.path
    while path and not edge.tensor.startswith(f"{path}/"):  # an outer ensemble gave it its name
        path = path.rpartition("/")[0]
    return edge.tensor[len(path) + 1 :] if path else edge.tensor
