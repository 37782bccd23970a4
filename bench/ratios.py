"""Ratios within one run, since absolute figures differ from machine to machine, and their targets.

For throughput more is better; for p99 and CPU less is. `must` is the least that is accepted, `want` the aim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.echo import UVICORN
from bench.echo import WORK as ECHO
from bench.measure import SLOWEST as SLOWEST_ALONE
from bench.runs import Best, Row, Variant
from bench.servers import BEFORE as OTHER
from bench.servers import FLOWSERVE, TRITON


@dataclass(frozen=True, slots=True)
class Target:
    must: float
    want: float
    less_is_better: bool = False

    def verdict(self, figure: float) -> str:
        """ "want", "must" or "below", by the better of the two that `figure` reaches."""
        sign = -1.0 if self.less_is_better else 1.0
        if sign * figure >= sign * self.want:
            return "want"
        return "must" if sign * figure >= sign * self.must else "below"


Place = tuple[str, int]  # work, concurrency

# With an ONNX node the targets hold for each execution of the Python steps around it.
_WITH_ONNX: Final[Mapping[Place, Target]] = {("mlp", 32): Target(2.5, 4.0), ("cnn", 8): Target(1.3, 1.6)}

# Requests per second over those of a Triton whose steps are Python models, by the execution of flowserve's.
THROUGHPUT: Final[Mapping[str, Mapping[Place, Target]]] = {
    "inline": {
        ("chain", 1): Target(3.3, 5.0),
        ("chain", 8): Target(3.2, 4.0),
        ("chain", 32): Target(3.2, 4.0),
        ("diamond", 8): Target(2.5, 4.0),
        ("diamond", 32): Target(2.5, 4.0),
        ("chain_big", 8): Target(2.5, 4.0),
        ("chain_big", 32): Target(2.5, 4.0),
        **_WITH_ONNX,
    },
    "process": {
        ("chain", 1): Target(1.5, 2.0),
        ("chain", 8): Target(1.7, 2.5),
        ("chain", 32): Target(2.1, 3.0),
        ("diamond", 1): Target(1.2, 2.0),
        ("diamond", 8): Target(1.7, 2.5),
        ("diamond", 32): Target(2.2, 3.0),
        **_WITH_ONNX,
    },
}

# Requests per second of a model with state over those of the same model without, with 64 sequences at a time.
SEQUENCES: Final = Target(0.7, 0.9)

# p99 over Triton's p99, at each of the places above.
P99: Final = Target(1.0, 0.5, less_is_better=True)

# Requests per second over what direct calls reach at their best batch size, by (work, concurrency).
LIMIT: Final[Mapping[Place, Target]] = {("cnn", 8): Target(0.75, 0.82)}

# CPU of direct calls over the server's less an echo's of the same body: the share of the CPU time that is the work.
CPU_SHARE: Final = Target(0.9, 0.9)

# Server CPU of each further inline step, microseconds per request, at concurrency 32: (chain - identity) / 2.
EXTRA_STEP_US: Final = Target(5.0, 2.0, less_is_better=True)
EXTRA_STEP_CONCURRENCY: Final = 32

# Requests per second of a Starlette echo on flowserve's HTTP server over the same on uvicorn.
ECHO_TARGET: Final = Target(0.8, 1.1)

# Requests per second of an ensemble over those of its slowest member alone.
SLOWEST: Final = Target(0.8, 0.9)

# Requests per second over another flowserve's: a smaller figure is more than noise.
BEFORE: Final = Target(0.95, 1.0)

# Batches that stay together, for small tensors and many requests: rows per batch of the first node, the last node's
# over them, bytes per request that were copied between nodes although they came out of one batch.
TOGETHER: Final[frozenset[Place]] = frozenset({("chain", 32), ("diamond", 32), ("mlp", 32)})
FIRST_BATCH: Final = Target(8.0, 16.0)
LAST_OVER_FIRST: Final = Target(0.9, 1.0)
REGATHERED: Final = Target(0.0, 0.0, less_is_better=True)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One comparison. `must`, `want` and `verdict` are None where no target is set for it."""

    what: str
    work: str
    variant: Variant
    concurrency: int
    figure: float
    must: float | None
    want: float | None
    verdict: str | None


Key = tuple[str, str, Variant, int]  # server, work, variant, concurrency


def compare(rows: Sequence[Row], limits: Mapping[str, Best]) -> list[Ratio]:
    """All ratios that `rows` allow, in their order; the targets apply to plain loads."""
    by_key = {(row.server, row.work, row.variant, row.concurrency): row for row in rows}
    ratios = []
    for row in rows:
        if row.server != FLOWSERVE:
            continue
        place, variant = (row.work, row.concurrency), row.variant
        # In an open loop the rate is given, so that only latencies can be compared.
        closed = not variant.arrivals
        if peer := by_key.get((TRITON, row.work, variant.of_peer(), row.concurrency)):
            target = THROUGHPUT.get(variant.execution, {}).get(place) if variant.plain else None
            if closed:
                ratio = row.requests_per_second / peer.requests_per_second
                ratios.append(_ratio("requests/s over Triton's", row, ratio, target))
            ratios.append(_ratio("p99 over Triton's", row, row.p99_ms / peer.p99_ms, P99 if target else None))
        for server, what, target in (
            (SLOWEST_ALONE, "requests/s over its slowest step's", SLOWEST),
            (OTHER, "requests/s over before's", BEFORE),
        ):
            if closed and (peer := by_key.get((server, row.work, variant, row.concurrency))):
                ratios.append(_ratio(what, row, row.requests_per_second / peer.requests_per_second, target))
        if variant.plain and (limit := limits.get(row.work)):
            reached = row.requests_per_second / limit.rows_per_second
            ratios.append(_ratio("requests/s over direct calls", row, reached, LIMIT.get(place)))
            ratios += _cpu_share(row, by_key.get((ECHO, row.work, Variant(), row.concurrency)), limit)
        ratios += _extra_step(row, by_key)
    return ratios


def together(rows: Sequence[Row]) -> list[Ratio]:
    """Whether batches stayed together, for the works and concurrencies that can show it."""
    ratios = []
    for row in rows:
        if row.server != FLOWSERVE or (row.work, row.concurrency) not in TOGETHER or not row.variant.plain:
            continue
        means = [*row.mean_batch.values()]
        regathered = sum(edge.regathered for edge in row.edges.values())
        ratios += [
            _ratio("rows per batch of the first node", row, means[0], FIRST_BATCH),
            _ratio("the last node's over them", row, means[-1] / means[0], LAST_OVER_FIRST),
            _ratio("bytes/request copied out of one batch", row, regathered, REGATHERED),
        ]
    return ratios


def _cpu_share(row: Row, echo: Row | None, limit: Best) -> list[Ratio]:
    """CPU time of direct calls over what the server uses beyond receiving such a request."""
    if echo is None:
        return []
    left_us = row.server_cpu_us - echo.server_cpu_us
    # Noise can make the echo more expensive than the work; then there is no verdict.
    target = CPU_SHARE if left_us > 0 else None
    figure = limit.cpu_us / left_us if left_us else 0.0
    return [_ratio("direct CPU over the server's less an echo's", row, figure, target)]


def _extra_step(row: Row, by_key: Mapping[Key, Row]) -> list[Ratio]:
    if row.work != "chain" or row.variant.execution != "inline" or not row.variant.plain:
        return []
    one = by_key.get((FLOWSERVE, "identity", row.variant, EXTRA_STEP_CONCURRENCY))
    if one is None or row.concurrency != EXTRA_STEP_CONCURRENCY:
        return []
    cost_us = (row.server_cpu_us - one.server_cpu_us) / 2
    # The two works run minutes apart. Noise can make the longer one cheaper; then there is no verdict.
    return [_ratio("CPU us of an extra step", row, cost_us, EXTRA_STEP_US if cost_us > 0 else None)]


def echo_ratio(rows: Sequence[Row]) -> list[Ratio]:
    """The echo on flowserve's HTTP server over uvicorn's, at each concurrency where both were measured."""
    by_key = {(row.server, row.concurrency): row for row in rows}
    return [
        _ratio(
            "requests/s over uvicorn's",
            row,
            row.requests_per_second / by_key[UVICORN, row.concurrency].requests_per_second,
            ECHO_TARGET,
        )
        for row in rows
        if row.server == FLOWSERVE and (UVICORN, row.concurrency) in by_key
    ]


def _ratio(what: str, row: Row, figure: float, target: Target | None) -> Ratio:
    verdict = target.verdict(figure) if target else None
    must, want = (target.must, target.want) if target else (None, None)
    return Ratio(what, row.work, row.variant, row.concurrency, figure, must, want, verdict)
