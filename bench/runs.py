"""What runs found, and the medians over them.

Decided here: which figures are kept of a run, and that the rounds of one place are summed up by their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from bench.batches import EdgeBytes
from bench.load import Measured

WARMUP_S: Final = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for: `seconds` are measured in each run, after WARMUP_S. `against` is another flowserve, "" for
    none."""

    concurrency: tuple[int, ...]
    seconds: float
    rounds: int
    python_execution: str
    against: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or medians. CPU in microseconds per request; `load_busy` is the share of one core that the generator
    took, 0 to 1: near 1 it was the limit. `mean_batch`: rows per execution, by model. `edges`: bytes per request, by
    edge of the graph."""

    work: str
    server: str
    concurrency: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    load_cpu_us: float
    load_busy: float
    mean_batch: Mapping[str, float]
    edges: Mapping[str, EdgeBytes]


@dataclass(frozen=True, slots=True)
class Run(Figures):
    """One run of the load generator."""

    round: int = 0
    requests: int = 0

    @classmethod
    def of(
        cls,
        work: str,
        server: str,
        concurrency: int,
        round_: int,
        measured: Measured,
        mean_batch: Mapping[str, float],
        edges: Mapping[str, EdgeBytes] | None = None,
    ) -> Self:
        """From what the load generator measured, per second and per request."""
        count = measured.requests
        return cls(
            work=work,
            server=server,
            concurrency=concurrency,
            requests_per_second=count / measured.seconds,
            p50_ms=measured.p50_ms,
            p99_ms=measured.p99_ms,
            server_cpu_us=measured.server_cpu_s / count * 1e6,
            load_cpu_us=measured.load_cpu_s / count * 1e6,
            load_busy=measured.load_cpu_s / measured.seconds,
            mean_batch=mean_batch,
            edges=edges or {},
            round=round_,
            requests=count,
        )


@dataclass(frozen=True, slots=True)
class Row(Figures):
    """The medians over the rounds of one (work, server, concurrency)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Direct calls of a work with `batch` rows each; `cpu_us` is what a row costs, all threads together."""

    work: str
    batch: int
    round: int
    rows_per_second: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Best:
    """Direct calls at their best batch size."""

    batch: int
    rows_per_second: float
    cpu_us: float


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Medians over the rounds, in the order in which the runs first came."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.work, run.concurrency, run.server), []).append(run)

    def median(group: Sequence[Run], read: Callable[[Run], float]) -> float:
        return statistics.median(map(read, group))

    return [
        Row(
            work,
            server,
            concurrency,
            median(group, lambda run: run.requests_per_second),
            median(group, lambda run: run.p50_ms),
            median(group, lambda run: run.p99_ms),
            median(group, lambda run: run.server_cpu_us),
            median(group, lambda run: run.load_cpu_us),
            median(group, lambda run: run.load_busy),
            {model: statistics.median(run.mean_batch[model] for run in group) for model in group[0].mean_batch},
            {edge: _median_bytes([run.edges[edge] for run in group if edge in run.edges]) for edge in group[0].edges},
        )
        for (work, concurrency, server), group in groups.items()
    ]


def best_limits(limits: Sequence[Limit]) -> dict[str, Best]:
    """For each work the batch size at which direct calls are fastest, and the medians there."""
    groups: dict[tuple[str, int], list[Limit]] = {}
    for limit in limits:
        groups.setdefault((limit.work, limit.batch), []).append(limit)
    best: dict[str, Best] = {}
    for (work, batch), group in groups.items():
        speed = statistics.median(limit.rows_per_second for limit in group)
        if work not in best or speed > best[work].rows_per_second:
            best[work] = Best(batch, speed, statistics.median(limit.cpu_us for limit in group))
    return best


def _median_bytes(edges: Sequence[EdgeBytes]) -> EdgeBytes:
    return EdgeBytes(
        *(
            statistics.median(getattr(edge, field) for edge in edges)
            for field in ("handed_on", "copied", "regathered", "placed")
        )
    )
