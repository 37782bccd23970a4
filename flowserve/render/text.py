"""A compiled graph as text: for terminals, logs, and tests that compare whole graphs.

Decides the layout. Nodes are in topological order; each input shows its source, each output its readers, and, if part
of the graph is on a device, the transfer. Callers: `formats`, `cli`, tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render.facts import UNKNOWN, Facts
from flowserve.render.labels import cost, kind, model_lines, title, transfers_of, written

Row = tuple[str, str, str]
Costs = Mapping[Edge, str]


def render_text(graph: Graph, facts: Facts) -> str:
    """Several lines, each with a newline. Equal graphs give equal texts."""
    costs = _costs(graph, facts)
    blocks = [("inputs", list(_graph_inputs(graph)))]
    blocks += [(_node_title(node, facts), list(_node_rows(graph, node, costs))) for node in graph.nodes]
    blocks.append(("outputs", list(_graph_outputs(graph, costs))))
    rows = [row for _, block in blocks for row in block]
    names, kinds = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [title(graph, facts)]
    for heading, block in blocks:
        lines.append(f"  {heading}")
        lines += [f"    {name:{names}}  {what:{kinds}}  {where}".rstrip() for name, what, where in block]
    return "\n".join(lines) + "\n"


def _node_title(node: Node, facts: Facts) -> str:
    model = ", ".join(model_lines(node, facts.get(node.model.name, UNKNOWN)))
    return f"{node.index + 1}. {node.name}: model {model}"


def _graph_inputs(graph: Graph) -> Iterator[Row]:
    for index, spec in enumerate(graph.inputs):
        yield spec.name, kind(spec), _readers(graph, GRAPH, index)


def _graph_outputs(graph: Graph, costs: Costs) -> Iterator[Row]:
    for index, spec in enumerate(graph.outputs):
        edge = next(edge for edge in graph.edges if (edge.consumer, edge.input) == (GRAPH, index))
        yield spec.name, kind(spec), f"<- {_source(graph, edge)}{costs.get(edge, '')}"


def _node_rows(graph: Graph, node: Node, costs: Costs) -> Iterator[Row]:
    fed = {edge.input: edge for edge in graph.edges if edge.consumer == node.index}
    for index, spec in enumerate(node.inputs):
        edge = fed.get(index)
        source = "not given" if edge is None else f"<- {_source(graph, edge)}{costs.get(edge, '')}"
        yield spec.name, kind(spec), source
    for index, spec in enumerate(node.outputs):
        yield spec.name, kind(spec), _readers(graph, node.index, index) or "not asked for"


def _source(graph: Graph, edge: Edge) -> str:
    """The source of a tensor; the tensor's own name only if it differs from the port's."""
    port = written(graph, edge).name
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


def _costs(graph: Graph, facts: Facts) -> Costs:
    """The transfer of each edge; {} if all of the graph is on the host, where every edge is a view."""
    found = transfers_of(graph, facts)
    if not any(place.is_gpu for transfer in found for place in (*transfer.source, *transfer.to)):
        return {}
    return {edge: f" ({cost(transfer)})" for edge, transfer in zip(graph.edges, found, strict=True)}
