"""What can be wrong with decoupled nodes in a graph: rules that show only after folding.

Decided here: which tensors cannot be read together because nothing says which of them belong together (G20), and which
limit a graph could not keep because the step that waits holds what it waits for (G21). What levels are is decided in
nesting.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import networkx as nx

from flowserve.config.types import ModelConfig
from flowserve.errors import Problem
from flowserve.graph.nesting import are_nested, origins, written_by
from flowserve.graph.types import GRAPH, Graph, Node


def counts_that_differ(graph: Graph) -> Iterator[Problem]:
    """Steps, and answers, whose tensors come out of different decoupled steps that are not one below the other."""
    found = origins(graph, graph.edges)
    for reader in (*(node.index for node in graph.nodes), GRAPH):
        writers = [edge.producer for edge in graph.edges if edge.consumer == reader]
        chains = [written_by(graph, found, writer) for writer in writers]
        if are_nested(chains):
            continue
        makers = " and ".join(dict.fromkeys(f"'{graph.nodes[chain[-1]].name}'" for chain in chains if chain))
        node = graph.nodes[reader] if reader != GRAPH else None
        who = "its outputs are" if node is None else f"step of model '{node.model.name}' receives inputs"
        text = f"{who} originated from different decoupled models: {makers}"
        yield Problem(
            f"in ensemble {graph.name}, {text}",
            node.place if node is not None else None,
            rule="G20",
            hint="each answers as often as it likes, and nothing says which answers belong together",
        )
        return  # what lies below is mixed up for the same reason


def pauses_without_end(graph: Graph, available: Mapping[str, Mapping[int, ModelConfig]]) -> Iterator[Problem]:
    """Limited steps behind a decoupled one that run on the only instance of its own model: while it waits in its send
    until they are over, it keeps that instance.
    """
    joined: nx.DiGraph[int] = nx.DiGraph()
    joined.add_nodes_from(range(len(graph.nodes)))
    joined.add_edges_from(
        (edge.producer, edge.consumer) for edge in graph.edges if GRAPH not in (edge.producer, edge.consumer)
    )
    for node in graph.nodes:
        if not node.decoupled or _instances(node, available) != 1:
            continue
        below = [graph.nodes[n] for n in sorted(nx.descendants(joined, node.index))]
        limit = min((one.max_inflight for one in below if one.max_inflight), default=0)
        for later in below if limit else ():
            if later.model == node.model:
                yield Problem(
                    f"in ensemble {graph.name}, max_inflight_requests {limit} can never be kept: step '{node.name}'"
                    f" keeps the only instance of model '{node.model.name}' while it waits in its send until step"
                    f" '{later.name}' is over, which needs that instance",
                    later.place,
                    rule="G21",
                    hint=f"give '{node.model.name}' another instance, or leave the limit out",
                )


def _instances(node: Node, available: Mapping[str, Mapping[int, ModelConfig]]) -> int:
    config = available[node.model.name][node.model.version]
    return sum(group.count for group in config.instance_groups if not group.passive)
