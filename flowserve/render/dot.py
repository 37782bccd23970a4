"""A compiled graph in the DOT language, for Graphviz and whatever else reads it.

Decided here: the notation and its escaping. Graphviz is never run; its user draws the text.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.render.facts import Facts
from flowserve.render.labels import ensemble_title, kind, node_lines, title, written
from flowserve.render.scopes import Scope, scopes_of


def render_dot(graph: Graph, facts: Facts) -> str:
    """A `digraph`, ready for `dot -Tsvg`."""
    lines = [f"digraph {_quote(graph.name)} {{", *(f"    {line}" for line in _lines(graph, facts)), "}"]
    return "\n".join(lines) + "\n"


def _lines(graph: Graph, facts: Facts) -> Iterator[str]:
    outermost = scopes_of(graph)
    numbers = {id(scope): number for number, scope in enumerate(outermost.walk())}
    yield f'graph [rankdir=LR, label={_quote(title(graph, facts))}, labelloc=t, fontname="monospace"];'
    yield 'node [shape=box, style="rounded,filled", fillcolor="#ddf4ff", fontname="monospace"];'
    yield 'edge [fontname="monospace", fontsize=10];'
    for index, spec in enumerate(graph.inputs):
        yield f'in{index} [shape=oval, fillcolor="#f6f8fa", label={_quote(spec.name, kind(spec))}];'
    yield from _scope(graph, outermost, numbers, facts)
    for index, spec in enumerate(graph.outputs):
        yield f'out{index} [shape=oval, fillcolor="#f6f8fa", label={_quote(spec.name, kind(spec))}];'
    for edge in graph.edges:
        yield _edge(graph, edge)


def _scope(graph: Graph, scope: Scope, numbers: dict[int, int], facts: Facts) -> Iterator[str]:
    for node in scope.nodes:
        yield f"n{node.index} [label={_quote(*node_lines(graph, node, facts))}];"
    for inner in scope.inner:
        yield f"subgraph cluster_{numbers[id(inner)]} {{"
        yield f"    label={_quote(ensemble_title(inner.name, inner.ensemble, facts))};"
        for line in _scope(graph, inner, numbers, facts):
            yield f"    {line}"
        yield "}"


def _edge(graph: Graph, edge: Edge) -> str:
    source = f"in{edge.output}" if edge.producer == GRAPH else f"n{edge.producer}"
    target = f"out{edge.input}" if edge.consumer == GRAPH else f"n{edge.consumer}"
    if edge.producer == GRAPH:  # the box it leaves has said it
        return f"{source} -> {target};"
    return f"{source} -> {target} [label={_quote(edge.tensor, kind(written(graph, edge)))}];"


def _quote(*lines: str) -> str:
    """A quoted string. A backslash stands for itself, and a line of a name is not a line of the label."""
    plain = ("".join(max(char, " ") for char in line) for line in lines)
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in plain)
    return '"' + "\\n".join(escaped) + '"'
