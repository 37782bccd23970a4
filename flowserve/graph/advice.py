"""What is right about a graph and yet makes it slow: where batches that were formed once fall apart again.

Decided here: what is worth a warning when a user asks for a check. Nothing is refused, and nothing that runs reads
this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowserve.config.types import ModelConfig
from flowserve.errors import Problem
from flowserve.graph.functions import BACKEND
from flowserve.graph.types import Graph, ModelKey


def advise(graph: Graph, configs: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """One per model of an ensemble that breaks up what its other models batch together.

    Silent where none of them forms batches. `configs` has every model of the graph by name.
    """
    models = {node.model: configs[node.model.name] for node in graph.nodes if node.is_batching}
    batchers = {key: config for key, config in models.items() if config.dynamic_batching is not None}
    if not batchers:
        return
    largest = max(batchers, key=lambda key: batchers[key].max_batch_size)
    for key, config in models.items():
        yield from _breaks(graph, key, config, largest, batchers[largest].max_batch_size)


def _breaks(graph: Graph, key: ModelKey, config: ModelConfig, largest: ModelKey, rows: int) -> Iterator[Problem]:
    place = config.source.place("max_batch_size")
    where = f"ensemble '{graph.name}': batches fall apart at model '{key.name}'"
    if config.decoupled and config.backend == BACKEND:
        return  # such a function takes one request at a time, whatever its configuration says
    if config.dynamic_batching is None and config.max_batch_size > 1:
        yield Problem(f"{where}: it has no dynamic_batching", place, "A1", "add `dynamic_batching { }`")
    elif config.max_batch_size < rows:
        rows_here = "1 row" if config.max_batch_size == 1 else f"{config.max_batch_size} rows"
        yield Problem(f"{where}: it takes {rows_here} at once and model '{largest.name}' {rows}", place, "A2")
