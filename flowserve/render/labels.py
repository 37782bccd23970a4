"""Texts for tensors, nodes and graphs, common to all formats.

Decides which fields of a configuration a picture shows besides the graph (backend, instances, batching, limits), and
their texts. Callers: all formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from flowserve.config.types import DynamicBatching, InstanceGroup, ModelConfig, SourceMap
from flowserve.graph.transfers import Transfer, bytes_of_row, memory_places, transfers
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.render.scopes import Scope
from flowserve.values import TensorSpec, shape_text

Configs = Mapping[str, ModelConfig]  # of the deployments in a picture, by name
UNKNOWN: Final = ModelConfig("", "", "", 0, (), (), SourceMap(""))  # of a deployment that is not among them


def batcher(config: ModelConfig) -> Literal["none", "dynamic", "sequence"]:
    if config.sequence is not None:
        return "sequence"
    return "none" if config.dynamic_batching is None else "dynamic"


def queueing(config: ModelConfig) -> DynamicBatching:
    return config.dynamic_batching or DynamicBatching()


def device(group: InstanceGroup) -> str:
    """The device of instances without a list of GPUs: "CPU", "GPU" or "MODEL"."""
    return group.kind.removeprefix("KIND_")


def resources(config: ModelConfig) -> dict[str, int]:
    """The resources of a running batch, by name."""
    held: dict[str, int] = {}
    for group in config.instance_groups:
        for resource in group.rate_limiter.resources:
            held[resource.name] = max(held.get(resource.name, 0), resource.count)
    return held


def kind(spec: TensorSpec) -> str:
    """Data type and dims as in a configuration, without the batch dimension, and special properties: "FP32 [3,-1]",
    "INT64 [-1] ragged", "FP32 [4] optional".
    """
    marks = [word for word, is_so in (("ragged", spec.ragged), ("optional", spec.optional)) if is_so]
    return " ".join([str(spec.dtype), shape_text(spec.dims), *marks])


def batching(max_batch_size: int) -> str:
    """The maximum size of a request or batch."""
    return f"batches up to {max_batch_size}" if max_batch_size else "no batching"


def title(graph: Graph, configs: Configs) -> str:
    what = "ensemble" if graph.is_ensemble else "model"
    parts = [f"{what} {graph.name}", f"version {graph.version}", batching(graph.max_batch_size)]
    return ", ".join([*parts, *_inflight(configs.get(graph.name, UNKNOWN))])


def scope_title(scope: Scope, configs: Configs) -> str:
    """The title of a frame: of a nested ensemble, or the rows or items of a space."""
    return scope.space.title if scope.space is not None else ensemble_title(scope.name, scope.ensemble, configs)


def ensemble_title(name: str, ensemble: str, configs: Configs) -> str:
    """`name` is the nested ensemble's name in its outer one: "find", or "find#2" for the second."""
    return ", ".join([f"ensemble {name}", *_inflight(configs.get(ensemble, UNKNOWN))])


def folded_lines(scope: Scope, configs: Configs) -> tuple[str, ...]:
    """The box of a nested ensemble whose steps are not drawn."""
    count = sum(len(each.nodes) for each in (scope, *scope.walk()))
    steps = f"{count} step{'' if count == 1 else 's'}, folded"
    return (scope.name, *ensemble_title(scope.ensemble, scope.ensemble, configs).split(", "), steps)


def transfers_of(graph: Graph, configs: Configs) -> tuple[Transfer, ...]:
    """The transfer of each edge's tensor to its consumer."""
    return transfers(graph, [memory_places(configs.get(node.model.name, UNKNOWN)) for node in graph.nodes])


def cost(transfer: Transfer) -> str:
    """ "copy host to gpu0, 602112 bytes a row": the transfer of a tensor to its reader."""
    if transfer.kind == "view":
        return "view"
    source, to = (" or ".join(map(str, places)) for places in (transfer.source, transfer.to))
    words = {"copy": "copy", "shared": "shares the copy", "depends": "view or copy"}
    size = "" if transfer.row_bytes is None else f", {transfer.row_bytes} bytes a row"
    return f"{words[transfer.kind]} {source} to {to}{size}"


def crossing(graph: Graph, edge: Edge, configs: Configs) -> str:
    """ "602112 bytes a row cross": the transfer of an edge to another machine, or from one; between two models that are
    both on other machines the tensor crosses twice, by way of the server. "" if it stays in the server, or in a
    segment.
    """
    ends = [configs.get(graph.nodes[n].model.name, UNKNOWN) for n in (edge.producer, edge.consumer) if n != GRAPH]
    times = sum(bool(config.placed) for config in ends)
    is_inside = len(ends) == 2 and ends[0].segment == ends[1].segment != ""
    if not times or is_inside:
        return ""
    row_bytes = bytes_of_row(graph.written(edge))
    size = "bytes that vary" if row_bytes is None else f"{row_bytes} bytes a row"
    return f"{size} cross{' twice' if times == 2 else ''}"


def node_lines(graph: Graph, node: Node, configs: Configs) -> tuple[str, ...]:
    """A node's box: its short name, then everything known about its model, and which of its inputs are special: they
    have no box of their own.
    """
    config = configs.get(node.model.name, UNKNOWN)
    short_name = node.name.rpartition("/")[2]  # the ensembles around it are drawn
    return (short_name, *model_lines(node, config), *_special_inputs(graph, node))


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


def model_lines(node: Node, config: ModelConfig) -> Iterator[str]:
    yield f"{node.model}, {config.backend}" if config.backend else str(node.model)
    yield _batches(node, config)
    if config.placed:
        count = sum(group.count for group in config.active_groups)
        yield f"{count} instance{'' if count == 1 else 's'} on {config.placed}"
    elif groups := config.active_groups:
        yield " + ".join(map(_instances, groups))
    marks = ["stateful"] if batcher(config) == "sequence" else []
    marks += ["decoupled"] if config.decoupled else []
    if marks:
        yield ", ".join(marks)
    queue_size = queueing(config).default_queue_policy.max_queue_size
    limits = [f"queue of {queue_size}"] if queue_size else []
    limits += [f"holds {count} {name}" for name, count in resources(config).items()]
    if limits:
        yield ", ".join(limits)


def _batches(node: Node, config: ModelConfig) -> str:
    if not node.max_batch_size or batcher(config) == "none":
        return batching(node.max_batch_size)
    delay_us = queueing(config).max_queue_delay_us
    return f"{batcher(config)} {batching(node.max_batch_size)}" + (f", waits {delay_us} us" if delay_us else "")


def _instances(group: InstanceGroup) -> str:
    count = f"{group.count} instance{'' if group.count == 1 else 's'}"
    if group.gpus:
        return f"{count} on GPU {','.join(map(str, group.gpus))}"
    return f"{count}, devices by the model" if device(group) == "MODEL" else f"{count} on {device(group)}"


def _inflight(config: ModelConfig) -> list[str]:
    limit = config.max_inflight_requests
    return [f"at most {limit} in flight per step"] if limit else []
