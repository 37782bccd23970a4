"""`python -m bench --latency`: the open loop at shares of each server's own capacity, flowserve beside Triton, in one
table.

The capacity is that server's requests/s in the closed loop of the same round. The latency of a request counts from its
intended send time. Knows the runs of measure.py, not how they are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from bench.runs import Run, Variant
from bench.servers import FLOWSERVE, TRITON
from bench.tables import Spread, cell, markdown_table

WORKS: Final = ("chain", "diamond", "mlp", "chain_big", "cnn")
CONCURRENCY: Final = (32,)
SHARES: Final = ("30%", "60%", "85%")

_LATENCIES: Final[dict[str, Callable[[Run], float]]] = {
    "p50 ms": lambda run: run.p50_ms,
    "p99 ms": lambda run: run.p99_ms,
}


def latencies(runs: Sequence[Run]) -> str:
    """A line for each work, mode and share: medians over the rounds, with the lowest and the highest. The ratio is that
    of the two runs of one round; it is bold where flowserve's latency is not below Triton's."""
    works = list(dict.fromkeys(run.work for run in runs))
    modes = list(dict.fromkeys(run.variant.execution for run in runs))
    groups: dict[tuple[str, str, Variant], dict[int, Run]] = {}
    for run in runs:
        if run.variant.arrivals:
            groups.setdefault((run.server, run.work, run.variant), {})[run.round] = run
    headings = ["workload", "mode", "share", "requests/s", "Triton's"]
    for heading in _LATENCIES:
        headings += [heading, "Triton's", f"ratio of {heading.split()[0]}"]
    rows = []
    for work, mode in itertools.product(works, modes):
        for (server, measured, variant), ours in groups.items():
            if (server, measured, variant.execution) != (FLOWSERVE, work, mode):
                continue
            theirs = groups.get((TRITON, work, variant.of_peer()), {})
            row = [work, mode, variant.arrivals, *_pair(ours, theirs, lambda run: run.requests_per_second)]
            for read in _LATENCIES.values():
                row += [*_pair(ours, theirs, read), _ratio(ours, theirs, read)]
            rows.append(row)
    return markdown_table(headings, rows)


def _pair(ours: dict[int, Run], theirs: dict[int, Run], read: Callable[[Run], float]) -> list[str]:
    return [cell(Spread.of([read(run) for run in group.values()]) if group else None) for group in (ours, theirs)]


def _ratio(ours: dict[int, Run], theirs: dict[int, Run], read: Callable[[Run], float]) -> str:
    ratios = [read(run) / read(theirs[number]) for number, run in ours.items() if number in theirs]
    if not ratios:
        return ""
    median = Spread.of(ratios).median
    return f"{median:.2f}" if median < 1 else f"**{median:.2f}**"
