"""The plan of a measurement, the figures of each run, and the medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from bench.batches import EdgeBytes
from bench.load import Measured
from bench.requests import MOST_ROWS

WARMUP_S: Final = 0.5
_MEDIANS: Final = ("requests_per_second", "p50_ms", "p99_ms", "server_cpu_us", "load_cpu_us", "load_busy")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """How a work is served and loaded. The defaults are those of a closed loop of equal requests.

    * `execution`: where flowserve runs each model.py ("inline", "thread", "process"); "" for other servers.
    * `dims`: "fixed" in the configs of the models, or "varying" (-1); "" where there is no model.
    * `shapes` and `heads`: of the requests, see `requests.write_requests`.
    * `client`: the "own" load generator, or "wrk".
    * `arrivals`: "" in a closed loop; in an open loop "60%" of the measured capacity, or "1500/s".
    """

    execution: str = ""
    dims: str = ""
    shapes: str = "one"
    heads: str = "equal"
    client: str = "own"
    arrivals: str = ""

    def __str__(self) -> str:
        shapes = {"one": "", "rows": f"1-{MOST_ROWS} rows", "lengths": "changing lengths"}[self.shapes]
        heads = "changing heads" if self.heads == "changing" else ""
        client = self.client if self.client != "own" else ""
        arrivals = f"open loop {self.arrivals}" if self.arrivals else ""
        return ", ".join(filter(None, (self.execution, self.dims, shapes, heads, client, arrivals)))

    @property
    def plain(self) -> bool:
        """Whether this is the load that the targets are set for."""
        return self.shapes == "one" and self.heads == "equal" and not self.arrivals

    def of_peer(self) -> Variant:
        """The same load of a server that has no `execution`."""
        return replace(self, execution="")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: every combination of these values, and in an open loop each of `arrivals` besides.

    `seconds` are measured in each run, after WARMUP_S. `against` is another flowserve, "" for none.
    """

    concurrency: tuple[int, ...]
    seconds: float
    rounds: int
    executions: tuple[str, ...] = ("inline",)
    dims: tuple[str, ...] = ("varying",)
    shapes: tuple[str, ...] = ("one",)
    heads: tuple[str, ...] = ("equal",)
    clients: tuple[str, ...] = ("own",)
    arrivals: tuple[str, ...] = ()
    against: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or medians. CPU in microseconds per request. `load_busy`: the share of one core that the client used,
    0 to 1; near 1 it limited the run. `mean_batch`: rows per execution, by model. `edges`: bytes per request, by
    edge of the graph."""

    work: str
    variant: Variant
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
    """One run of a client."""

    round: int = 0
    requests: int = 0

    @classmethod
    def of(
        cls,
        work: str,
        variant: Variant,
        server: str,
        concurrency: int,
        round_: int,
        measured: Measured,
        mean_batch: Mapping[str, float],
        edges: Mapping[str, EdgeBytes] | None = None,
    ) -> Self:
        """The figures per second and per request, from what the client measured."""
        count = measured.requests
        return cls(
            work=work,
            variant=variant,
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
    """The medians over the rounds of one (work, variant, server, concurrency)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Direct calls of a work with `batch` rows each; `cpu_us`: CPU time of a row, all threads together."""

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
    """Medians over the rounds, in the order of the first runs."""
    groups: dict[tuple[str, Variant, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.work, run.variant, run.concurrency, run.server), []).append(run)
    return [
        Row(
            work,
            variant,
            server,
            concurrency,
            **{name: statistics.median(getattr(run, name) for run in group) for name in _MEDIANS},
            mean_batch={
                model: statistics.median(run.mean_batch[model] for run in group) for model in group[0].mean_batch
            },
            edges={
                edge: _median_bytes([run.edges[edge] for run in group if edge in run.edges]) for edge in group[0].edges
            },
        )
        for (work, variant, concurrency, server), group in groups.items()
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
