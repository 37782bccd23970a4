"""The order of a measurement: which server is loaded when, and what is kept of it.

Decided here: rounds. In each round every concurrency is run on every server in turn, the order reversed from round to
round, so that a slow minute of the machine meets all of them; what is reported is the median over the rounds. Between
two runs the other servers stand idle. The direct calls take their turn with no server loaded.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bench import servers
from bench.load import Measured
from bench.repositories import Onnxruntime, served_models, write_repository
from bench.requests import write_requests
from bench.servers import BenchFailed, Server
from bench.works import Work

WARMUP_S: Final = 0.5
LIMIT_BATCHES: Final = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load generator. CPU in microseconds per request; `load_busy` is the share of one core that the
    generator took, 0 to 1: near 1 it was the limit; `mean_batch` by model, rows per execution."""

    work: str
    server: str
    concurrency: int
    round: int
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    load_cpu_us: float
    load_busy: float
    mean_batch: Mapping[str, float]

    @classmethod
    def of(
        cls, work: str, server: str, concurrency: int, round_: int, measured: Measured, mean_batch: Mapping[str, float]
    ) -> Self:
        """From what the load generator measured, per second and per request."""
        count = measured.requests
        return cls(
            work=work,
            server=server,
            concurrency=concurrency,
            round=round_,
            requests=count,
            requests_per_second=count / measured.seconds,
            p50_ms=measured.p50_ms,
            p99_ms=measured.p99_ms,
            server_cpu_us=measured.server_cpu_s / count * 1e6,
            load_cpu_us=measured.load_cpu_s / count * 1e6,
            load_busy=measured.load_cpu_s / measured.seconds,
            mean_batch=mean_batch,
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """Direct calls of the same work with `batch` rows each."""

    work: str
    batch: int
    round: int
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for: `seconds` are measured in each run, after WARMUP_S."""

    concurrency: tuple[int, ...]
    seconds: float
    rounds: int
    python_execution: str


Say = Callable[[str], None]


def measure_work(work: Work, plan: Plan, say: Say) -> tuple[list[Run], list[Limit]]:
    """Measure one work on flowserve and, where TRITONSERVER is set, on Triton. Raises BenchFailed."""
    with tempfile.TemporaryDirectory(prefix="flowserve-bench-") as name:
        folder = Path(name)
        write_requests(work, folder / "requests", max(plan.concurrency))
        with _both(work, plan, folder) as running:
            return _rounds(work, plan, folder / "requests", running, say)


@contextlib.contextmanager
def _both(work: Work, plan: Plan, folder: Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        ours = folder / "flowserve"
        write_repository(work, ours, Onnxruntime.BACKEND)
        command = servers.flowserve_command(ours, plan.python_execution)
        log = folder / "flowserve.log"
        running = [stack.enter_context(servers.serving(servers.FLOWSERVE, command, log, environment=work.environment))]
        if os.environ.get("TRITONSERVER"):
            theirs = folder / "triton"
            write_repository(work, theirs, Onnxruntime.MODEL_PY)
            port = servers.free_port()
            command = servers.triton_command(theirs, port)
            log = folder / "triton.log"
            running.append(
                stack.enter_context(
                    servers.serving(servers.TRITON, command, log, port=port, environment=work.environment)
                )
            )
        yield running


def _rounds(
    work: Work, plan: Plan, requests: Path, running: Sequence[Server], say: Say
) -> tuple[list[Run], list[Limit]]:
    runs: list[Run] = []
    limits: list[Limit] = []
    models = served_models(work)
    for number in range(plan.rounds):
        limits += _direct(work, number, plan.seconds / len(LIMIT_BATCHES))
        for concurrency in plan.concurrency:
            for server in running if number % 2 == 0 else reversed(running):
                say(f"{work.name}: round {number + 1} of {plan.rounds}, {server.name}, concurrency {concurrency}")
                try:
                    runs.append(_one(work.name, models, requests, server, concurrency, number, plan.seconds))
                except BenchFailed as error:
                    raise BenchFailed(f"{work.name}: {error}") from error
    return runs, limits


def _one(
    work: str, models: Sequence[str], requests: Path, server: Server, concurrency: int, number: int, seconds: float
) -> Run:
    before = servers.executions(server, models)
    measured = servers.run_load(requests, server, concurrency, WARMUP_S, seconds)
    after = servers.executions(server, models)
    mean_batch = {model: _mean_batch(before[model], after[model]) for model in models}
    return Run.of(work, server.name, concurrency, number, measured, mean_batch)


def _mean_batch(before: tuple[int, int], after: tuple[int, int]) -> float:
    rows, calls = after[0] - before[0], after[1] - before[1]
    return rows / calls if calls else 0.0


def _direct(work: Work, number: int, seconds: float) -> list[Limit]:
    """The work as direct calls in a loop, `seconds` for each batch size."""
    call = work.direct()
    limits = []
    for batch in LIMIT_BATCHES:
        rows = work.rows(batch)
        call(rows)
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            call(rows)
            done += batch
        limits.append(Limit(work.name, batch, number, done / elapsed))
    return limits


@dataclass(frozen=True, slots=True)
class Row:
    """The medians over the rounds of one (work, server, concurrency)."""

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


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Medians over the rounds, in the order in which the runs first came."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.work, run.concurrency, run.server), []).append(run)
    return [
        Row(
            work,
            server,
            concurrency,
            statistics.median(run.requests_per_second for run in group),
            statistics.median(run.p50_ms for run in group),
            statistics.median(run.p99_ms for run in group),
            statistics.median(run.server_cpu_us for run in group),
            statistics.median(run.load_cpu_us for run in group),
            statistics.median(run.load_busy for run in group),
            {model: statistics.median(run.mean_batch[model] for run in group) for model in group[0].mean_batch},
        )
        for (work, concurrency, server), group in groups.items()
    ]


def best_limits(limits: Sequence[Limit]) -> dict[str, tuple[int, float]]:
    """For each work the batch size at which direct calls are fastest, and the rows per second there."""
    speeds: dict[str, dict[int, list[float]]] = {}
    for limit in limits:
        speeds.setdefault(limit.work, {}).setdefault(limit.batch, []).append(limit.rows_per_second)
    return {
        work: max(((batch, statistics.median(all_)) for batch, all_ in by_batch.items()), key=lambda pair: pair[1])
        for work, by_batch in speeds.items()
    }
