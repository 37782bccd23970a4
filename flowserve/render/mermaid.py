"""A compiled graph as a Mermaid flowchart, for READMEs and web pages that draw Mermaid themselves.

Decided here: the notation and its escaping: names come from users, and Mermaid reads its labels as markup.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.graph.types import GRAPH, Edge, Graph
from flowserve.render.labels import batching, kind, node_model, written


def render_mermaid(graph: Graph) -> str:
    """The text of a ```mermaid block, without its fences."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _lines(graph))]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    for index, spec in enumerate(graph.inputs):
        yield f'in{index}(["{_label(spec.name, kind(spec))}"])'
    for node in graph.nodes:
        lines = [node.name, f"{node_model(node)}, {batching(node.max_batch_size)}"]
        yield f'n{node.index}["{_label(*lines)}"]'
    for index, spec in enumerate(graph.outputs):
        yield f'out{index}(["{_label(spec.name, kind(spec))}"])'
    for edge in graph.edges:
        yield _edge(graph, edge)


def _edge(graph: Graph, edge: Edge) -> str:
    source = f"in{edge.output}" if edge.producer == GRAPH else f"n{edge.producer}"
    target = f"out{edge.input}" if edge.consumer == GRAPH else f"n{edge.consumer}"
    if edge.producer == GRAPH:  # the box it leaves has said it
        return f"{source} --> {target}"
    return f'{source} -- "{_label(edge.tensor, kind(written(graph, edge)))}" --> {target}'


def _label(*lines: str) -> str:
    return "<br/>".join(_escape(line) for line in lines)


def _escape(text: str) -> str:
    """

    etters, digits and a few harmless marks stay; the rest become Mermaid's numbered entities, which cannot end a label.
    """
    return "".join(char if char.isalnum() or char in " _-./,[]:" else f"#{ord(char)};" for char in text)
