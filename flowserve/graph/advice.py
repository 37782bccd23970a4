"""Warnings about valid graphs that are probably not intended: batches that are split, and batches that will fail.

Decides which warnings `flowserve check` prints. Refuses nothing, and is not used at run time. Caller: `cli/check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowserve.config.types import ModelConfig
from flowserve.errors import Problem
from flowserve.graph.function_model import BACKEND
from flowserve.graph.types import GRAPH, Graph


def advise(graph: Graph, configs: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """At most one warning for each model that splits the batches of an earlier model, and one for each step at which a
    request of several rows, which the ensemble accepts, would fail.

    Only a model behind the one that formed the batch can split it, so a small model before a larger one gets no
    warning, nor does a model behind a decoupled one, whose responses arrive one by one. `configs` has every model of
    the graph by name.
    """
    largest: dict[str, ModelConfig] = {}
    for edge in graph.edges:
        if GRAPH in (edge.producer, edge.consumer) or edge.derived >= 0 or graph.nodes[edge.consumer].space:
            continue  # the rows of a space are divided into parts as models need them, and joined afterwards
        first, second = (configs[graph.nodes[end].model.name] for end in (edge.producer, edge.consumer))
        if _hands_on_batches(first) and _rows(first) > _rows(largest.get(second.name)):
            largest[second.name] = first
    for name in sorted(largest):
        yield from _breaks(graph, largest[name], configs[name])
    yield from _lose_rows(graph)


def _lose_rows(graph: Graph) -> Iterator[Problem]:
    """The warnings about several rows before a model without a batch dimension: only a leading 1 can be removed."""
    losing = {edge.consumer for edge in graph.edges if edge.conversion is not None and edge.conversion.batch < 0}
    for node in graph.nodes if graph.max_batch_size > 1 else ():
        if node.index in losing:
            whole = f"ensemble '{graph.name}' takes up to {graph.max_batch_size} rows"
            text = (
                f"{whole}, and requests of more than one fail at step '{node.name}', whose model has no batch dimension"
            )
            hint = f"give '{node.model.name}' a batch dimension, or lower the max_batch_size of '{graph.name}' to 1"
            yield Problem(text, node.place, "A3", hint)


def _hands_on_batches(config: ModelConfig) -> bool:
    return config.dynamic_batching is not None and config.max_batch_size > 1 and not config.decoupled


def _rows(config: ModelConfig | None) -> int:
    return 0 if config is None else config.max_batch_size


def _breaks(graph: Graph, first: ModelConfig, second: ModelConfig) -> Iterator[Problem]:
    if second.sequence is not None or second.max_batch_size < 1 or (second.decoupled and second.backend == BACKEND):
        return  # sequences have their own batching; the others never batch, whatever their configuration
    place = second.source.place("max_batch_size")
    where = f"ensemble '{graph.name}': batches fall apart at model '{second.name}'"
    rows = first.max_batch_size
    before = f"model '{first.name}' before it makes batches of up to {rows} rows"
    if second.dynamic_batching is None and second.max_batch_size > 1:
        text = f"{where}: {before}, and it takes them request by request: it has no dynamic_batching"
        yield Problem(text, place, "A1", "add `dynamic_batching { }`")
    elif second.max_batch_size < rows:
        takes = "single rows" if second.max_batch_size == 1 else f"{second.max_batch_size} rows at most"
        hint = f"raise its max_batch_size to {rows}"
        hint += f", or lower that of '{first.name}' to {second.max_batch_size}" if second.max_batch_size > 1 else ""
        yield Problem(f"{where}: {before}, and it takes {takes}", place, "A2", hint)
