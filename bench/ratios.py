"""Figures set against each other and against the targets.

Decided here: which figure is divided by which. The targets themselves stand in targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench import targets
from bench.measure import Row
from bench.servers import FLOWSERVE, TRITON
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


def compare(rows: Sequence[Row], limits: Mapping[str, tuple[int, float]], python_execution: str) -> list[Ratio]:
    """All ratios that `rows` allow, in their order; targets apply where the nodes ran as they are meant for."""
    trusted = python_execution == targets.TRUSTED
    by_key = {(row.server, row.work, row.concurrency): row for row in rows}
    ratios = []
    for row in rows:
        if row.server != FLOWSERVE:
            continue
        place = (row.work, row.concurrency)
        if peer := by_key.get((TRITON, *place)):
            target = targets.THROUGHPUT.get(place) if trusted else None
            ratios += [
                _ratio("requests/s over Triton's", place, row.requests_per_second / peer.requests_per_second, target),
                _ratio("p99 over Triton's", place, row.p99_ms / peer.p99_ms, targets.P99 if target else None),
            ]
        if row.work in limits:
            reached = row.requests_per_second / limits[row.work][1]
            ratios.append(_ratio("requests/s over direct calls", place, reached, targets.LIMIT.get(place)))
    return ratios + _extra_step(by_key, trusted)


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
            row.requests_per_second / by_key["uvicorn", row.concurrency].requests_per_second,
            targets.ECHO,
        )
        for row in rows
        if row.server == FLOWSERVE and ("uvicorn", row.concurrency) in by_key
    ]


def _ratio(what: str, place: tuple[str, int], figure: float, target: Target | None) -> Ratio:
    if target is None:
        return Ratio(what, *place, figure, None, None, None)
    return Ratio(what, *place, figure, target.must, target.want, target.verdict(figure))
