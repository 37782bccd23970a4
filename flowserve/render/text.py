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
from itertools import chain, pairwise

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render import labels
from flowserve.render.layout import Direction, direction_of
from flowserve.render.scopes import Scope, merges_of, scopes_of
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
        model += "".join(f", {space.title}" for space in graph.around(node.space))
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
    for index, spec in enumerate(specs):
        fed = [edge for edge in graph.edges if (edge.consumer, edge.input) == (consumer, index)]
        sources = " or ".join(f"{_source(graph, edge)}{costs.get(edge, '')}" for edge in fed)
        yield spec.name, labels.kind(spec), f"<- {sources}" if fed else "not given"


def _source(graph: Graph, edge: Edge) -> str:
    """The source of a tensor; the tensor's own name only if it differs from the port's."""
    if edge.producer == GRAPH:
        return f"input {graph.inputs[edge.output].name}"
    name, port = graph.nodes[edge.producer].name, graph.nodes[edge.producer].outputs[edge.output].name
    if graph.is_presence(edge):
        return f"whether {name} wrote {port}"
    return f"{name}.{port}" + (f" as {edge.tensor}" if edge.tensor != port else "")


def _readers(graph: Graph, producer: int, output: int) -> str:
    read = [edge for edge in graph.edges if (edge.producer, edge.output) == (producer, output)]
    found = [_reader(graph, edge) for edge in read]
    found += [f"`{space.title}`" for space in graph.spaces if (producer, output) in space.opens]
    return f"-> {', '.join(found)}" if found else ""


def _reader(graph: Graph, edge: Edge) -> str:
    if edge.consumer == GRAPH:
        return f"output {graph.outputs[edge.input].name}"
    node = graph.nodes[edge.consumer]
    return f"{node.name}.{node.inputs[edge.input].name}"


def _costs(graph: Graph, configs: labels.Configs) -> Costs:
    """The transfer of each edge, or, in a graph with models on other machines, the transfer between machines; {} if all
    of the graph is on the host, where every edge is a view.
    """
    crossing = {edge: text for edge in graph.edges if (text := labels.crossing(graph, edge, configs))}
    if crossing:
        return {edge: f" ({text})" for edge, text in crossing.items()}
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
    merge: Callable[[str], str]
    scope: Callable[[int, str], list[str]]  # the beginning of a nested ensemble: number, title
    space: Callable[[int, str], list[str]]  # as `scope`, of steps that run for some rows or items
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


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The id of the box in which each node and each merge is drawn, by its number: a folded ensemble is one box."""

    nodes: Mapping[int, str]
    merges: Mapping[int, str]


def _boxes(outermost: Scope, numbers: Mapping[int, int], folded: Container[str]) -> _Boxes:
    """`numbers`: of the nested scopes, by their identity."""
    everywhere = [outermost, *outermost.walk()]
    nodes = {node.index: f"n{node.index}" for scope in everywhere for node in scope.nodes}
    merges = {number: f"m{place}" for place, number in enumerate(chain(*(scope.merges for scope in everywhere)))}
    for scope in _folded_scopes(outermost, folded):
        box = f"s{numbers[id(scope)]}"
        for each in (scope, *scope.walk()):
            nodes.update((node.index, box) for node in each.nodes)
            merges.update((number, box) for number in each.merges)
    return _Boxes(nodes, merges)


def _folded_scopes(scope: Scope, folded: Container[str]) -> Iterator[Scope]:
    """The outermost ensembles within `scope` that are folded."""
    for inner in scope.inner:
        if inner.path in folded:
            yield inner
        else:
            yield from _folded_scopes(inner, folded)


def _statements(graph: Graph, configs: labels.Configs, folded: Container[str], language: _Language) -> Iterator[str]:
    outermost = scopes_of(graph)
    numbers = {id(scope): number for number, scope in enumerate(outermost.walk())}
    boxes, tints = _boxes(outermost, numbers, folded), tints_of(graph, configs)

    def contents(scope: Scope) -> Iterator[str]:
        for node in scope.nodes:
            yield language.node(boxes.nodes[node.index], tints[node.index], *labels.node_lines(graph, node, configs))
        for number in scope.merges:
            yield language.merge(boxes.merges[number])
        for inner in scope.inner:
            if inner.path in folded:
                yield language.folded(f"s{numbers[id(inner)]}", *labels.folded_lines(inner, configs))
                continue
            begin = language.scope if inner.space is None else language.space
            yield from begin(numbers[id(inner)], labels.scope_title(inner, configs))
            for line in contents(inner):
                yield f"    {line}"
            yield language.scope_end

    for index, spec in enumerate(graph.inputs):
        yield language.end(f"in{index}", spec.name, labels.kind(spec))
    yield from contents(outermost)
    for index, spec in enumerate(graph.outputs):
        yield language.end(f"out{index}", spec.name, labels.kind(spec))
    yield from _edges(graph, configs, boxes, language)


def _edges(graph: Graph, configs: labels.Configs, boxes: _Boxes, language: _Language) -> Iterator[str]:
    drawn: set[tuple[str, str, str]] = set()
    for edge in graph.edges:
        source = f"in{edge.output}" if edge.producer == GRAPH else boxes.nodes[edge.producer]
        target = f"out{edge.input}" if edge.consumer == GRAPH else boxes.nodes[edge.consumer]
        passed = [number for number in merges_of(graph, edge) if number in boxes.merges]
        specs = [*(graph.derived[number].spec for number in passed), graph.written(edge)]
        way = pairwise([source, *(boxes.merges[number] for number in passed), target])
        for (one, other), spec in zip(way, specs, strict=True):
            if one == other or (one, other, edge.tensor) in drawn:  # inside of a folded ensemble
                continue
            if one[0] in "sm" or other[0] in "sm":
                drawn.add((one, other, edge.tensor))
            # The box of an input of the graph shows its type.
            crossing = labels.crossing(graph, edge, configs)
            label = () if one.startswith("in") else (edge.tensor, labels.kind(spec))
            yield language.edge(one, other, *label, *([crossing] if crossing else []))


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
    merge=lambda name: f'{name} [shape=diamond, style=filled, fillcolor="#ffffff", label="", width=0.25, height=0.25];',
    scope=lambda number, text: [f"subgraph cluster_{number} {{", f"    label={_quote(text)};"],
    space=lambda number, text: [f"subgraph cluster_{number} {{", f"    label={_quote(text)}; style=dashed;"],
    scope_end="}",
    edge=lambda a, b, *lines: f"{a} -> {b}" + (f" [label={_quote(*lines)}];" if lines else ";"),
)
_MERMAID = _Language(
    end=lambda name, *lines: f'{name}(["{_label(*lines)}"])',
    node=lambda name, tint, *lines: f'{name}["{_label(*lines)}"]:::{tint.name}',
    folded=lambda name, *lines: f'{name}[["{_label(*lines)}"]]',
    merge=lambda name: f'{name}{{" "}}',
    scope=lambda number, text: [f'subgraph s{number}["{_label(text)}"]'],
    space=lambda number, text: [f"style s{number} stroke-dasharray:6 4", f'subgraph s{number}["{_label(text)}"]'],
    scope_end="end",
    edge=lambda a, b, *lines: f'{a} -- "{_label(*lines)}" --> {b}' if lines else f"{a} --> {b}",
)
