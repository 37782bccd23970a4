"""How a tensor, a node and a graph are called, in every picture alike."""

from __future__ import annotations

from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.values import TensorSpec


def kind(spec: TensorSpec) -> str:
    """Data type and dims as a configuration writes them, without the batch dimension: "FP32 [3,-1]"."""
    return f"{spec.dtype} [{','.join(map(str, spec.dims))}]"


def batching(max_batch_size: int) -> str:
    """What a request, or a batch, may hold."""
    return f"batches up to {max_batch_size}" if max_batch_size else "no batching"


def title(graph: Graph) -> str:
    what = "ensemble" if graph.is_ensemble else "model"
    return f"{what} {graph.name}, version {graph.version}, {batching(graph.max_batch_size)}"


def written(graph: Graph, edge: Edge) -> TensorSpec:
    """What the producer of an edge says about its tensor."""
    specs = graph.inputs if edge.producer == GRAPH else graph.nodes[edge.producer].outputs
    return specs[edge.output]


def node_model(node: Node) -> str:
    return f"{node.model.name}/{node.model.version}"
