"""A compiled graph as text: for terminals, logs and tests that compare whole graphs, and in two diagram languages: DOT,
for Graphviz, and Mermaid, for READMEs and web pages.

Decides the layout of the plain text: nodes are in topological order; each input shows its source, each output its
readers, and, if part of the graph is on a device, the transfer. Decides also the statements of each language and their
escaping: names come from users, and Mermaid interprets labels as markup. Does not run Graphviz or Mermaid. Callers:
`formats`, `cli`, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render import labels
from flowserve.render.layout import Direction, direction_of
from flowserve.render.scopes import Scope, scopes_of
from flowserve.render.tints import TINTS, tints_of
from flowserve.values import TensorSpec

Row = tuple[str, str, str]
Costs = Mapping[Edge, str]


def render_text(graph: Graph, configs: labels.Configs) -> str:
    """Several lines, each with a newline. Equal graphs give equal texts."""
    costs = _costs(graph, configs)
    blocks = [
        ("inputs", [(spec.name, labels.kind(spec), _readers(graph, GRAPH, i)) for i, spec in enumerate(graph.inputs)])
    ]
    for node in graph.nodes:
        model = ", ".join(labels.model_lines(node, configs.get(node.model.name, labels.UNKNOWN)))
        blocks.append((f"{node.index + 1}. {node.name}: model {model}", list(_node_rows(graph, node, costs))))
    blocks.append(("outputs", list(_input_rows(graph, GRAPH, graph.outputs, costs))))
    names, kinds = (max((len(row[column]) for _, rows in blocks for row in rows), default=0) for column in (0, 1))
    lines = [labels.title(graph, configs)]
    for heading, rows in blocks:
        lines.append(f"  {heading}")
        lines += [f"    {name:{names}}  {what:{kinds}}  {where}".rstrip() for name, what, where in rows]
    return "\n".join(lines) + "\n"


def _node_rows(graph: Graph, node: Node, costs: Costs) -> Iterator[Row]:
    yield from _input_rows(graph, node.index, node.inputs, costs)
    for index, spec in enumerate(node.outputs):
        yield spec.name, labels.kind(spec), _readers(graph, node.index, index) or "not asked for"


def _input_rows(graph: Graph, consumer: int, specs: Sequence[TensorSpec], costs: Costs) -> Iterator[Row]:
    """The source of each tensor that a node reads, or of each output of the graph."""
    fed = {edge.input: edge for edge in graph.edges if edge.consumer == consumer}
    for index, spec in enumerate(specs):
        edge = fed.get(index)
        source = "not given" if edge is None else f"<- {_source(graph, edge)}{costs.get(edge, '')}"
        yield spec.name, labels.kind(spec), source


def _source(graph: Graph, edge: Edge) -> str:
    """The source of a tensor; the tensor's own name only if it differs from the port's."""
    port = graph.written(edge).name
    if edge.producer == GRAPH:
        return f"input {port}"
    name = graph.nodes[edge.producer].name
    return f"{name}.{port}" + (f" as {edge.tensor}" if edge.tensor != port else "")


def _readers(graph: Graph, producer: int, output: int) -> str:
    read = [edge for edge in graph.edges if (edge.producer, edge.output) == (producer, output)]
    return f"-> {', '.join(_reader(graph, edge) for edge in read)}" if read else ""


def _reader(graph: Graph, edge: Edge) -> str:
    if edge.consumer == GRAPH:
        return f"output {graph.outputs[edge.input].name}"
    node = graph.nodes[edge.consumer]
    return f"{node.name}.{node.inputs[edge.input].name}"


def _costs(graph: Graph, configs: labels.Configs) -> Costs:
    """The transfer of each edge; {} if all of the graph is on the host, where every edge is a view."""
    found = labels.transfers_of(graph, configs)
    if not any(place.is_gpu for transfer in found for place in (*transfer.source, *transfer.to)):
        return {}
    return {edge: f" ({labels.cost(transfer)})" for edge, transfer in zip(graph.edges, found, strict=True)}


# Diagram languages


@dataclass(frozen=True, slots=True)
class _Language:
    """The statements of a language. The first argument is an id; texts are the lines of a label."""

    end: Callable[..., str]  # an input or output of the graph: id, name, type
    node: Callable[..., str]  # after the id: the tint; the same below
    folded: Callable[..., str]  # a nested ensemble as one box: id, lines
    scope: Callable[[int, str], list[str]]  # the beginning of a nested ensemble: number, title
    scope_end: str
    edge: Callable[..., str]  # source, target, and the lines of the label, if there is one


def render_dot(
    graph: Graph, configs: labels.Configs, folded: Container[str] = (), *, direction: Direction | None = None
) -> str:
    """A `digraph`, ready for `dot -Tsvg`. `folded` and `direction` as for `render_svg`."""
    rank = direction or direction_of(graph, configs, folded)
    style = [
        f'graph [rankdir={rank}, label={_quote(labels.title(graph, configs))}, labelloc=t, fontname="monospace"];',
        'node [shape=box, style="rounded,filled", fontname="monospace"];',
        'edge [fontname="monospace", fontsize=10];',
    ]
    lines = (f"    {line}\n" for line in [*style, *_statements(graph, configs, folded, _DOT)])
    return f"digraph {_quote(graph.name)} {{\n{''.join(lines)}}}\n"


def render_mermaid(
    graph: Graph, configs: labels.Configs, folded: Container[str] = (), *, direction: Direction | None = None
) -> str:
    """The text of a ```mermaid block, without its fences. `folded` and `direction` as for `render_svg`."""
    tints = sorted(set(tints_of(graph, configs)), key=TINTS.index)
    lines = [*_statements(graph, configs, folded, _MERMAID)]
    lines += [f"classDef {tint.name} fill:{tint.fill},stroke:{tint.line},color:#24292f" for tint in tints]
    flow = direction or direction_of(graph, configs, folded)
    return f"flowchart {flow}\n" + "".join(f"    {line}\n" for line in lines)


def _statements(graph: Graph, configs: labels.Configs, folded: Container[str], language: _Language) -> Iterator[str]:
    outermost = scopes_of(graph)
    numbers = {id(scope): number for number, scope in enumerate(outermost.walk())}
    tints = tints_of(graph, configs)
    boxes = {node.index: f"n{node.index}" for node in graph.nodes}

    def contents(scope: Scope) -> Iterator[str]:
        for node in scope.nodes:
            yield language.node(boxes[node.index], tints[node.index], *labels.node_lines(graph, node, configs))
        for inner in scope.inner:
            if inner.path in folded:
                box = f"s{numbers[id(inner)]}"
                boxes.update((node.index, box) for each in (inner, *inner.walk()) for node in each.nodes)
                yield language.folded(box, *labels.folded_lines(inner, configs))
                continue
            yield from language.scope(numbers[id(inner)], labels.ensemble_title(inner.name, inner.ensemble, configs))
            for line in contents(inner):
                yield f"    {line}"
            yield language.scope_end

    for index, spec in enumerate(graph.inputs):
        yield language.end(f"in{index}", spec.name, labels.kind(spec))
    yield from contents(outermost)
    for index, spec in enumerate(graph.outputs):
        yield language.end(f"out{index}", spec.name, labels.kind(spec))
    drawn: set[tuple[str, str, str]] = set()
    for edge in graph.edges:
        source = f"in{edge.output}" if edge.producer == GRAPH else boxes[edge.producer]
        target = f"out{edge.input}" if edge.consumer == GRAPH else boxes[edge.consumer]
        if source == target or (source, target, edge.tensor) in drawn:  # inside of a folded ensemble
            continue
        if source.startswith("s") or target.startswith("s"):
            drawn.add((source, target, edge.tensor))
        # The box of an input of the graph shows its type.
        label = () if edge.producer == GRAPH else (edge.tensor, labels.kind(graph.written(edge)))
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
    node=lambda name, tint, *lines: f'{name} [fillcolor="{tint.fill}", color="{tint.line}", label={_quote(*lines)}];',
    folded=lambda name, *lines: f'{name} [fillcolor="#fff8c5", color="#9a6700", label={_quote(*lines)}];',
    scope=lambda number, text: [f"subgraph cluster_{number} {{", f"    label={_quote(text)};"],
    scope_end="}",
    edge=lambda a, b, *lines: f"{a} -> {b}" + (f" [label={_quote(*lines)}];" if lines else ";"),
)
_MERMAID = _Language(
    end=lambda name, *lines: f'{name}(["{_label(*lines)}"])',
    node=lambda name, tint, *lines: f'{name}["{_label(*lines)}"]:::{tint.name}',
    folded=lambda name, *lines: f'{name}[["{_label(*lines)}"]]',
    scope=lambda number, text: [f'subgraph s{number}["{_label(text)}"]'],
    scope_end="end",
    edge=lambda a, b, *lines: f'{a} -- "{_label(*lines)}" --> {b}' if lines else f"{a} --> {b}",
)
