"""A plain model as the graph that it is.

Decided here: that its inputs and outputs are its one node's, in order. Ensembles are compile.py's, which a server
without any does not import, nor the library of graphs behind it.
"""

from __future__ import annotations

from flowserve.config.types import ModelConfig
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node


def compile_model(config: ModelConfig, version: int) -> Graph:
    """A plain model as a graph of one node, fed by the graph's inputs in order."""
    node = Node(
        index=0,
        name=config.name,
        model=ModelKey(config.name, version),
        inputs=config.inputs,
        outputs=config.outputs,
        max_batch_size=config.max_batch_size,
        place=config.source.place(""),
        decoupled=config.decoupled,
    )
    edges = [Edge(spec.name, GRAPH, i, 0, i) for i, spec in enumerate(config.inputs)]
    edges += [Edge(spec.name, 0, j, GRAPH, j) for j, spec in enumerate(config.outputs)]
    return Graph(
        config.name, version, config.inputs, config.outputs, config.max_batch_size, nodes=(node,), edges=tuple(edges)
    )
