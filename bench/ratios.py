"""Figures set against each other and against the targets.

Decided here: which figure is divided by which. The targets themselves stand in targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench import targets
from bench.echo import UVICORN
from bench.echo import WORK as ECHO
from bench.measure import SLOWEST
from bench.runs import Best, Row
from bench.servers import BEFORE, FLOWSERVE, TRITON
from bench.targets import Target


@dataclass(frozen=True, slots=True)
class Ratio:
    """One comparison. `must`, `want` and `verdict` are None where no target is set for it."""

    what: str
    work: str
    concurrency: int
    figure: float
    must: float | None
    want: float | None
    verdict: str | None


def compare(rows: Sequence[Row], limits: Mapping[str, Best], python_execution: str) -> list[Ratio]:
    """All ratios that `rows` allow, in their order; targets apply where the nodes ran as they are meant for."""
    by_key = {(row.server, row.work, row.concurrency): row for row in rows}
    wanted = targets.THROUGHPUT.get(python_execution, {})
    ratios = []
    for row in rows:
        if row.server != FLOWSERVE:
            continue
        place = (row.work, row.concurrency)
        if peer := by_key.get((TRITON, *place)):
            target = wanted.get(place)
            ratios += [
                _ratio("requests/s over Triton's", place, row.requests_per_second / peer.requests_per_second, target),
                _ratio("p99 over Triton's", place, row.p99_ms / peer.p99_ms, targets.P99 if target else None),
            ]
        for server, what, target in (
            (SLOWEST, "requests/s over its slowest step's", targets.SLOWEST),
            (BEFORE, "requests/s over before's", targets.BEFORE),
        ):
            if peer := by_key.get((server, *place)):
                ratios.append(_ratio(what, place, row.requests_per_second / peer.requests_per_second, target))
        if limit := limits.get(row.work):
            reached = row.requests_per_second / limit.rows_per_second
            ratios.append(_ratio("requests/s over direct calls", place, reached, targets.LIMIT.get(place)))
        ratios += _cpu_share(row, by_key.get((ECHO, *place)), limits)
    return ratios + _extra_step(by_key, python_execution == targets.TRUSTED)


def together(rows: Sequence[Row]) -> list[Ratio]:
    """Whether batches stayed together through the works that can show it, where enough requests are under way."""
    ratios = []
    for row in rows:
        place = (row.work, row.concurrency)
        if row.server != FLOWSERVE or place not in targets.TOGETHER:
            continue
        means = [*row.mean_batch.values()]
        regathered = sum(edge.regathered for edge in row.edges.values())
        ratios += [
            _ratio("rows the first node saw", place, means[0], targets.FIRST_BATCH),
            _ratio("the last node's over them", place, means[-1] / means[0], targets.LAST_OVER_FIRST),
            _ratio("bytes/request copied out of one batch", place, regathered, targets.REGATHERED),
        ]
    return ratios


def _cpu_share(row: Row, echo: Row | None, limits: Mapping[str, Best]) -> list[Ratio]:
    """What a direct loop costs over what the server costs beyond being sent such a request."""
    if echo is None or row.work not in limits:
        return []
    left_us = row.server_cpu_us - echo.server_cpu_us
    # Where noise made the echo dearer than the work there is nothing to judge.
    target = targets.CPU_SHARE if left_us > 0 else None
    figure = limits[row.work].cpu_us / left_us if left_us else 0.0
    return [_ratio("direct CPU over the server's less an echo's", (row.work, row.concurrency), figure, target)]


def _extra_step(by_key: Mapping[tuple[str, str, int], Row], trusted: bool) -> list[Ratio]:
    concurrency = targets.EXTRA_STEP_CONCURRENCY
    one = by_key.get((FLOWSERVE, "identity", concurrency))
    three = by_key.get((FLOWSERVE, "chain", concurrency))
    if not (one and three and trusted):
        return []
    cost_us = (three.server_cpu_us - one.server_cpu_us) / 2
    # The two works are loaded minutes apart. Where noise made the longer one cheaper there is nothing to judge.
    target = targets.EXTRA_STEP_US if cost_us > 0 else None
    return [_ratio("CPU us of an extra step", ("chain", concurrency), cost_us, target)]


def echo_ratio(rows: Sequence[Row]) -> list[Ratio]:
    """Our server's echo over uvicorn's, at each concurrency where both were measured."""
    by_key = {(row.server, row.concurrency): row for row in rows}
    return [
        _ratio(
            "requests/s over uvicorn's",
            ("echo", row.concurrency),
            row.requests_per_second / by_key[UVICORN, row.concurrency].requests_per_second,
            targets.ECHO,
        )
        for row in rows
        if row.server == FLOWSERVE and (UVICORN, row.concurrency) in by_key
    ]


def _ratio(what: str, place: tuple[str, int], figure: float, target: Target | None) -> Ratio:
    if target is None:
        return Ratio(what, *place, figure, None, None, None)
    return Ratio(what, *place, figure, target.must, target.want, target.verdict(figure))
