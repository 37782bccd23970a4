"""A flat graph as the nest of ensembles it was folded from: which boxes lie in which, and what joins them there.

Decided here: what crosses the border of a nested ensemble. A tensor that enters it enters once, however many of its
nodes read it, and one that leaves it leaves once. Pictures that draw nested ensembles as frames start here; the
program that serves never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from flowserve.graph.types import GRAPH, Edge, Graph, Node

# A box of a scope: the scope's own input or output by number, a node by index, an inner scope by its number in `inner`.
End = tuple[Literal["in", "node", "scope", "out"], int]
Tensor = tuple[int, int]  # producer and output, as in Edge


@dataclass(slots=True, eq=False)
class Joint:
    """From a box's output to a box's input in one scope. `edges` are the graph's edges it carries, by number."""

    source: End
    output: int
    target: End
    input: int
    tensor: str
    edges: list[int]


@dataclass(slots=True, eq=False)
class Scope:
    """One ensemble: the whole graph, or a nested one of it.

    `name` is what it is called in the scope around it, "" for the whole; `path` joins the names down to it, as node
    names do. `entering` and `leaving` are the tensors that cross its border, in the order of their ports.
    """

    name: str = ""
    path: str = ""
    ensemble: str = ""
    nodes: list[Node] = field(default_factory=list)
    inner: list[Scope] = field(default_factory=list)
    entering: list[Tensor] = field(default_factory=list)
    leaving: list[Tensor] = field(default_factory=list)
    joints: dict[tuple[End, int, End, int], Joint] = field(default_factory=dict)

    def walk(self) -> Iterator[Scope]:
        """The scopes inside, outer ones first; not this one."""
        for scope in self.inner:
            yield scope
            yield from scope.walk()

    def join(self, source: tuple[End, int], target: tuple[End, int], tensor: str, edge: int) -> None:
        made = self.joints.setdefault((*source, *target), Joint(*source, *target, tensor, []))
        made.edges.append(edge)


def scopes_of(graph: Graph) -> Scope:
    """The outermost scope, with all others inside."""
    outermost = Scope(ensemble=graph.name)
    outermost.entering = [(GRAPH, index) for index in range(len(graph.inputs))]
    chains = [_chain(outermost, node) for node in graph.nodes]
    for number, edge in enumerate(graph.edges):
        above = [outermost] if edge.producer == GRAPH else chains[edge.producer]
        below = [outermost] if edge.consumer == GRAPH else chains[edge.consumer]
        _join(above, below, edge, number)
    return outermost


def _chain(outermost: Scope, node: Node) -> list[Scope]:
    """The scopes around a node, outermost first, made where they are new."""
    chain = [outermost]
    for name, ensemble in zip(node.name.split("/"), node.path, strict=False):  # the last name is the node's own
        around = chain[-1]
        inner = next((scope for scope in around.inner if scope.name == name), None)
        if inner is None:
            inner = Scope(name, f"{around.path}/{name}".lstrip("/"), ensemble)
            around.inner.append(inner)
        chain.append(inner)
    chain[-1].nodes.append(node)
    return chain


def _join(above: Sequence[Scope], below: Sequence[Scope], edge: Edge, number: int) -> None:
    """Out of the producer's scopes, across, and into the consumer's."""
    tensor = (edge.producer, edge.output)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(above, below, strict=False)))
    at: tuple[End, int] = (("in", edge.output), 0) if edge.producer == GRAPH else (("node", edge.producer), edge.output)
    for scope, around in zip(reversed(above[shared:]), reversed(above[shared - 1 : -1]), strict=True):
        port = _port(scope.leaving, tensor)
        scope.join(at, (("out", port), 0), _inside(scope, edge), number)
        at = ("scope", around.inner.index(scope)), port
    around = below[shared - 1]
    for scope in below[shared:]:
        port = _port(scope.entering, tensor)
        around.join(at, (("scope", around.inner.index(scope)), port), _inside(around, edge), number)
        around, at = scope, (("in", port), 0)
    end: tuple[End, int] = (("out", edge.input), 0) if edge.consumer == GRAPH else (("node", edge.consumer), edge.input)
    around.join(at, end, _inside(around, edge), number)


def _port(ports: list[Tensor], tensor: Tensor) -> int:
    if tensor not in ports:
        ports.append(tensor)
    return ports.index(tensor)


def _inside(scope: Scope, edge: Edge) -> str:
    """The tensor's name without those of the ensembles it is drawn in."""
    path = scope.path
    while path and not edge.tensor.startswith(f"{path}/"):  # it has its name from an ensemble further out
        path = path.rpartition("/")[0]
    return edge.tensor[len(path) + 1 :] if path else edge.tensor
