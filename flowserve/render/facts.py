"""Facts about a model that a picture shows besides its graph: backend, devices, batching, limits.

Decides which fields of a configuration a picture shows, and their form for programs (`labels` has the texts). Callers:
`runtime` (gathers them), all formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flowserve.config.types import ModelConfig
from flowserve.graph.transfers import ON_HOST, MemoryPlaces, memory_places

BatcherKind = Literal["none", "dynamic", "sequence"]


@dataclass(frozen=True, slots=True)
class Instances:
    """`count` instances on each of `gpus`, or on `device` if no GPU is named: "CPU", "GPU" or "MODEL"."""

    count: int
    device: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of one deployment. Limits are 0 if there is none; `resources` are those of a running batch, by name.
    `places`: the memories of its instances' tensors.
    """

    backend: str = ""
    batcher: BatcherKind = "none"
    max_queue_delay_us: int = 0
    instances: tuple[Instances, ...] = ()
    is_stateful: bool = False
    is_decoupled: bool = False
    max_queue_size: int = 0
    max_inflight_requests: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    places: MemoryPlaces = ON_HOST


Facts = Mapping[str, ModelFacts]  # by the deployment's name
UNKNOWN = ModelFacts()


def gather_facts(configs: Iterable[ModelConfig]) -> Facts:
    """The facts of every deployment."""
    return {config.name: _facts(config) for config in configs}


def _facts(config: ModelConfig) -> ModelFacts:
    # The message in JSON form has every field, including those without a configuration record.
    message = config.json
    dynamic: Mapping[str, Any] = message.get("dynamic_batching", {})
    is_stateful = "sequence_batching" in message
    return ModelFacts(
        backend=config.backend,
        batcher="sequence" if is_stateful else "none" if config.dynamic_batching is None else "dynamic",
        max_queue_delay_us=config.dynamic_batching.max_queue_delay_us if config.dynamic_batching else 0,
        instances=tuple(_instances(config)),
        is_stateful=is_stateful,
        is_decoupled=bool(message.get("model_transaction_policy", {}).get("decoupled")),
        max_queue_size=dynamic.get("default_queue_policy", {}).get("max_queue_size", 0),
        max_inflight_requests=config.ensemble.max_inflight_requests if config.ensemble else 0,
        resources=tuple(_resources(message)),
        places=memory_places(config),
    )


def _instances(config: ModelConfig) -> Iterator[Instances]:
    for group in config.instance_groups:
        if not group.passive:
            yield Instances(group.count, group.kind.removeprefix("KIND_"), group.gpus)


def _resources(message: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    held: dict[str, int] = {}
    for group in message.get("instance_group", ()):
        for resource in group.get("rate_limiter", {}).get("resources", ()):
            held[resource["name"]] = max(held.get(resource["name"], 0), resource["count"])
    return held.items()
