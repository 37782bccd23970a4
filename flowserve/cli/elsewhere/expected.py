"""The expected throughput and latency of a deployment with some models on other machines, simulated from measured
times.

Decides the inputs of the simulated scheduler: the time of each batch, with its round trip if its model is on another
machine, the instances of each model, and the cores of this machine, of which each running batch of a model in the
server takes one. The server's own work is not simulated. Caller: `place`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from flowserve.cli.elsewhere.step_figures import BatchTime, GraphFigures, MeasuredGraph
from flowserve.config.types import InstanceGroup, LimitedResource, ModelConfig, RateLimiter
from flowserve.graph.types import Graph
from flowserve.runtime.clock import SECOND_NS
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.simulation.deployment import SimulatedDeployment
from flowserve.simulation.records import Arrival
from flowserve.simulation.rows import RowPlan

REQUESTS: Final = 2000
BEHIND: Final = 0.9  # of the rate: random arrivals deviate a little from it
_CORES: Final = "cores"


@dataclass(frozen=True, slots=True)
class Expected:
    """Responses per second, and the latencies of requests that were not refused. `is_behind`: more requests arrive than
    are answered, and latencies grow as long as that lasts.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    is_behind: bool = False


def expect(
    subject: MeasuredGraph,
    figures: GraphFigures,
    takes: Mapping[str, BatchTime],
    placed: Mapping[str, int],
    cores: int,
    concurrency: int,
    rate: float = 0.0,
) -> Expected:
    """`takes`: the time of a batch of each model where it runs. `placed`: of each model on other machines, how many
    batches it works on at a time. `concurrency` requests at a time; with a `rate`, they arrive at random instead, so
    many per second. Raises Unsupported for models of iterative sequences.
    """
    configs = {name: _as_placed(config, placed.get(name, 0)) for name, config in subject.configs.items()}
    answers = {name: one.answers for name, one in figures.models.items()}
    world = SimulatedDeployment(
        subject.graph,
        configs,
        lambda model, rows: round(takes[model].of(max(rows, 1)) * SECOND_NS / answers[model]),
        lambda model, number: answers[model],
        (Available(_CORES, cores),),
        _row_plan(subject.graph, figures.shares),
    )
    gaps_ms = np.random.default_rng(1).exponential(1000 / rate, REQUESTS) if rate else np.zeros(REQUESTS)
    has_sequences = subject.make_id is not None
    arrivals = [
        Arrival(float(at_ms), subject.rows, 0, 0.0, number if has_sequences else 0, has_sequences, has_sequences)
        for number, at_ms in enumerate(np.cumsum(gaps_ms), 1)
    ]
    found = world.live(arrivals, REQUESTS if rate else concurrency)
    latencies = [one.latency_ms for one in found.outcomes if one.error is None]
    p50_ms, p99_ms = (float(np.percentile(latencies or [0.0], share)) for share in (50, 99))
    return Expected(found.requests_per_s, p50_ms, p99_ms, found.requests_per_s < BEHIND * rate)


def _as_placed(config: ModelConfig, count: int) -> ModelConfig:
    if count:
        return replace(config, instance_groups=(InstanceGroup(config.name, count=count),))
    limits = RateLimiter((LimitedResource(_CORES, 1, is_global=True),))
    groups = (one if one.kind == "KIND_GPU" else replace(one, rate_limiter=limits) for one in config.instance_groups)
    return replace(config, instance_groups=tuple(groups))


def _row_plan(graph: Graph, shares: Mapping[str, float]) -> RowPlan:
    """The measured shares of rows that pass a condition, and the measured items, as whole numbers."""
    taken = {str(one.test): min(1.0, shares.get(one.name, 1.0)) for one in graph.spaces if one.test is not None}
    items = {str(one.each): round(shares.get(one.name, 1.0)) for one in graph.spaces if one.each is not None}
    return RowPlan(graph, taken, items)
