"""Texts for tensors, nodes and graphs, common to all formats. Callers: all formats."""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.graph.transfers import Transfer, transfers
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render.facts import UNKNOWN, Facts, Instances, ModelFacts
from flowserve.values import TensorSpec


def kind(spec: TensorSpec) -> str:
    """Data type and dims as in a configuration, without the batch dimension, and special properties: "FP32 [3,-1]",
    "INT64 [-1] ragged", "FP32 [4] optional".
    """
    marks = [word for word, is_so in (("ragged", spec.ragged), ("optional", spec.optional)) if is_so]
    return " ".join([str(spec.dtype), f"[{','.join(map(str, spec.dims))}]", *marks])


def batching(max_batch_size: int) -> str:
    """The maximum size of a request or batch."""
    return f"batches up to {max_batch_size}" if max_batch_size else "no batching"


def title(graph: Graph, facts: Facts) -> str:
    what = "ensemble" if graph.is_ensemble else "model"
    parts = [f"{what} {graph.name}", f"version {graph.version}", batching(graph.max_batch_size)]
    return ", ".join([*parts, *_inflight(facts.get(graph.name, UNKNOWN))])


def ensemble_title(name: str, ensemble: str, facts: Facts) -> str:
    """`name` is the nested ensemble's name in its outer one: "find", or "find#2" for the second."""
    return ", ".join([f"ensemble {name}", *_inflight(facts.get(ensemble, UNKNOWN))])


def written(graph: Graph, edge: Edge) -> TensorSpec:
    """The producer's declaration of an edge's tensor."""
    specs = graph.inputs if edge.producer == GRAPH else graph.nodes[edge.producer].outputs
    return specs[edge.output]


def transfers_of(graph: Graph, facts: Facts) -> tuple[Transfer, ...]:
    """The transfer of each edge's tensor to its consumer."""
    return transfers(graph, [facts.get(node.model.name, UNKNOWN).places for node in graph.nodes])


def cost(transfer: Transfer) -> str:
    """ "copy host to gpu0, 602112 bytes a row": the transfer of a tensor to its reader."""
    if transfer.kind == "view":
        return "view"
    source, to = (" or ".join(map(str, places)) for places in (transfer.source, transfer.to))
    words = {"copy": "copy", "shared": "shares the copy", "depends": "view or copy"}
    size = "" if transfer.row_bytes is None else f", {transfer.row_bytes} bytes a row"
    return f"{words[transfer.kind]} {source} to {to}{size}"


def short_name(name: str) -> str:
    """A node's name without the ensembles around it, for pictures that draw those."""
    return name.rpartition("/")[2]


def node_lines(graph: Graph, node: Node, facts: Facts) -> tuple[str, ...]:
    """A node's box: its short name, then everything known about its model, and which of its inputs are special: they
    have no box of their own.
    """
    known = facts.get(node.model.name, UNKNOWN)
    return (short_name(node.name), *model_lines(node, known), *_special_inputs(graph, node))


def _special_inputs(graph: Graph, node: Node) -> Iterator[str]:
    ragged = [spec.name for spec in node.inputs if spec.ragged]
    optional = {index: spec.name for index, spec in enumerate(node.inputs) if spec.optional}
    if ragged:
        yield f"ragged: {', '.join(ragged)}"
    if optional:
        given = {edge.input for edge in graph.edges if edge.consumer == node.index}
        yield "optional: " + ", ".join(
            name if index in given else f"{name} (not given)" for index, name in optional.items()
        )


def model_lines(node: Node, known: ModelFacts) -> Iterator[str]:
    yield f"{node.model}, {known.backend}" if known.backend else str(node.model)
    yield _batches(node, known)
    if known.instances:
        yield " + ".join(_instances(group) for group in known.instances)
    marks = [word for word, is_so in (("stateful", known.is_stateful), ("decoupled", known.is_decoupled)) if is_so]
    if marks:
        yield ", ".join(marks)
    limits = [f"queue of {known.max_queue_size}"] if known.max_queue_size else []
    limits += [f"holds {count} {name}" for name, count in known.resources]
    if limits:
        yield ", ".join(limits)


def _batches(node: Node, known: ModelFacts) -> str:
    if not node.is_batching or known.batcher == "none":
        return batching(node.max_batch_size)
    waits = f", waits {known.max_queue_delay_us} us" if known.max_queue_delay_us else ""
    return f"{known.batcher} {batching(node.max_batch_size)}{waits}"


def _instances(group: Instances) -> str:
    count = f"{group.count} instance{'' if group.count == 1 else 's'}"
    if group.gpus:
        return f"{count} on GPU {','.join(map(str, group.gpus))}"
    return f"{count}, devices by the model" if group.device == "MODEL" else f"{count} on {group.device}"


def _inflight(known: ModelFacts) -> list[str]:
    limit = known.max_inflight_requests
    return [f"at most {limit} in flight per step"] if limit else []
