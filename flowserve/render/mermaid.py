"""A compiled graph as a Mermaid flowchart, for READMEs and web pages that draw Mermaid themselves.

Decided here: the notation and its escaping: names come from users, and Mermaid reads its labels as markup.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.render.facts import Facts
from flowserve.render.labels import ensemble_title, kind, node_lines, written
from flowserve.render.scopes import Scope, scopes_of


def render_mermaid(graph: Graph, facts: Facts) -> str:
    """The text of a ```mermaid block, without its fences."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _lines(graph, facts))]) + "\n"


def _lines(graph: Graph, facts: Facts) -> Iterator[str]:
    outermost = scopes_of(graph)
    numbers = {id(scope): number for number, scope in enumerate(outermost.walk())}
    for index, spec in enumerate(graph.inputs):
        yield f'in{index}(["{_label(spec.name, kind(spec))}"])'
    yield from _scope(graph, outermost, numbers, facts)
    for index, spec in enumerate(graph.outputs):
        yield f'out{index}(["{_label(spec.name, kind(spec))}"])'
    for edge in graph.edges:
        yield _edge(graph, edge)


def _scope(graph: Graph, scope: Scope, numbers: dict[int, int], facts: Facts) -> Iterator[str]:
    """What stands in one ensemble, nested ones as subgraphs."""
    for node in scope.nodes:
        yield f'n{node.index}["{_label(*node_lines(graph, node, facts))}"]'
    for inner in scope.inner:
        yield f'subgraph s{numbers[id(inner)]}["{_label(ensemble_title(inner.name, inner.ensemble, facts))}"]'
        for line in _scope(graph, inner, numbers, facts):
            yield f"    {line}"
        yield "end"


def _edge(graph: Graph, edge: Edge) -> str:
    source = f"in{edge.output}" if edge.producer == GRAPH else f"n{edge.producer}"
    target = f"out{edge.input}" if edge.consumer == GRAPH else f"n{edge.consumer}"
    if edge.producer == GRAPH:  # the box it leaves has said it
        return f"{source} --> {target}"
    return f'{source} -- "{_label(edge.tensor, kind(written(graph, edge)))}" --> {target}'


def _label(*lines: str) -> str:
    return "<br/>".join(_escape(line) for line in lines)


def _escape(text: str) -> str:
    """Letters, digits and a few harmless marks stay; the rest become Mermaid's numbered entities, which cannot end a
    label.
    """
    return "".join(char if char.isalnum() or char in " _-./,[]:" else f"#{ord(char)};" for char in text)
