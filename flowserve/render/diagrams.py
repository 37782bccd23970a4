"""A compiled graph in two diagram languages: DOT, for Graphviz, and Mermaid, for READMEs and web pages.

Decides the statements of each language and their escaping: names come from users, and Mermaid interprets labels as
markup. Does not run Graphviz or Mermaid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flowserve.graph.types import GRAPH, Graph
from flowserve.render.facts import Facts
from flowserve.render.labels import ensemble_title, kind, node_lines, title, written
from flowserve.render.scopes import Scope, scopes_of


@dataclass(frozen=True, slots=True)
class _Language:
    """The statements of a language. The first argument is an id; texts are the lines of a label."""

    end: Callable[..., str]  # an input or output of the graph: id, name, type
    node: Callable[..., str]
    scope: Callable[[int, str], list[str]]  # the beginning of a nested ensemble: number, title
    scope_end: str
    edge: Callable[..., str]  # source, target, and the lines of the label, if there is one


def render_dot(graph: Graph, facts: Facts) -> str:
    """A `digraph`, ready for `dot -Tsvg`."""
    style = [
        f'graph [rankdir=LR, label={_quote(title(graph, facts))}, labelloc=t, fontname="monospace"];',
        'node [shape=box, style="rounded,filled", fillcolor="#ddf4ff", fontname="monospace"];',
        'edge [fontname="monospace", fontsize=10];',
    ]
    lines = (f"    {line}\n" for line in [*style, *_statements(graph, facts, _DOT)])
    return f"digraph {_quote(graph.name)} {{\n{''.join(lines)}}}\n"


def render_mermaid(graph: Graph, facts: Facts) -> str:
    """The text of a ```mermaid block, without its fences."""
    return "flowchart LR\n" + "".join(f"    {line}\n" for line in _statements(graph, facts, _MERMAID))


def _statements(graph: Graph, facts: Facts, language: _Language) -> Iterator[str]:
    outermost = scopes_of(graph)
    numbers = {id(scope): number for number, scope in enumerate(outermost.walk())}

    def contents(scope: Scope) -> Iterator[str]:
        for node in scope.nodes:
            yield language.node(f"n{node.index}", *node_lines(graph, node, facts))
        for inner in scope.inner:
            yield from language.scope(numbers[id(inner)], ensemble_title(inner.name, inner.ensemble, facts))
            for line in contents(inner):
                yield f"    {line}"
            yield language.scope_end

    for index, spec in enumerate(graph.inputs):
        yield language.end(f"in{index}", spec.name, kind(spec))
    yield from contents(outermost)
    for index, spec in enumerate(graph.outputs):
        yield language.end(f"out{index}", spec.name, kind(spec))
    for edge in graph.edges:
        source = f"in{edge.output}" if edge.producer == GRAPH else f"n{edge.producer}"
        target = f"out{edge.input}" if edge.consumer == GRAPH else f"n{edge.consumer}"
        # The box of an input of the graph shows its type.
        label = () if edge.producer == GRAPH else (edge.tensor, kind(written(graph, edge)))
        yield language.edge(source, target, *label)


def _quote(*lines: str) -> str:
    """A string in DOT, in which backslashes are literal and control characters of a name are spaces."""
    plain = ("".join(max(char, " ") for char in line) for line in lines)
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in plain)
    return '"' + "\\n".join(escaped) + '"'


def _label(*lines: str) -> str:
    """A label in Mermaid. Letters, digits and a few harmless marks stay; the rest become Mermaid's numbered entities,
    which cannot end a label.
    """
    return "<br/>".join(
        "".join(char if char.isalnum() or char in " _-./,[]:" else f"#{ord(char)};" for char in line) for line in lines
    )


_DOT = _Language(
    end=lambda name, *lines: f'{name} [shape=oval, fillcolor="#f6f8fa", label={_quote(*lines)}];',
    node=lambda name, *lines: f"{name} [label={_quote(*lines)}];",
    scope=lambda number, text: [f"subgraph cluster_{number} {{", f"    label={_quote(text)};"],
    scope_end="}",
    edge=lambda a, b, *lines: f"{a} -> {b}" + (f" [label={_quote(*lines)}];" if lines else ";"),
)
_MERMAID = _Language(
    end=lambda name, *lines: f'{name}(["{_label(*lines)}"])',
    node=lambda name, *lines: f'{name}["{_label(*lines)}"]',
    scope=lambda number, text: [f'subgraph s{number}["{_label(text)}"]'],
    scope_end="end",
    edge=lambda a, b, *lines: f'{a} -- "{_label(*lines)}" --> {b}' if lines else f"{a} --> {b}",
)
