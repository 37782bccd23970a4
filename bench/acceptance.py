"""`python -m bench --acceptance`: chain and diamond beside Triton, against the targets of the runtime.

The ratios are those of the two runs of one round, which are seconds apart; the table shows their medians over the
rounds, with the lowest and the highest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.table import Table

from bench.measure import measure_work
from bench.ratios import THROUGHPUT
from bench.runs import Plan, Run, Say, Variant
from bench.servers import BEFORE, FLOWSERVE, TRITON
from bench.tables import Spread
from bench.works import WORKS

CONCURRENCY: Final = (1, 8, 32)
EXECUTIONS: Final[Mapping[str, tuple[str, ...]]] = {"chain": ("process", "inline"), "diamond": ("process",)}

P99: Final = 1.0  # over Triton's: less
FIXED_OVER_VARYING: Final = 1.15  # requests/s: at most
# Requests/s over Triton's with fixed dims, of the chain in processes: 0.9 times the ratios at commit 970c5ec.
FIXED: Final = {1: 0.9 * 1.89, 8: 0.9 * 1.94, 32: 0.9 * 2.40}

Read = Callable[[Run], float]


@dataclass(frozen=True, slots=True)
class Check:
    """One cell of the table: a ratio, and its target where it has one. `most`: the target is an upper limit."""

    what: str
    spread: Spread
    target: float | None = None
    most: bool = False

    @property
    def reached(self) -> bool:
        if self.target is None:
            return True
        return self.spread.median <= self.target if self.most else self.spread.median >= self.target

    def __str__(self) -> str:
        return f"{_text(self.spread)} {self.limit}".strip()

    @property
    def limit(self) -> str:
        return "" if self.target is None else f"{'≤' if self.most else '≥'} {self.target:.2f}"


@dataclass(frozen=True, slots=True)
class Line:
    """One load: requests/s and CPU microseconds per request of each server (medians), and the ratios."""

    work: str
    variant: Variant
    concurrency: int
    servers: Mapping[str, tuple[float, float]]
    checks: tuple[Check, ...]

    @property
    def place(self) -> str:
        return f"{self.work} ({self.variant}), c = {self.concurrency}"


def measure_acceptance(plan: Plan, works: Sequence[str], say: Say) -> list[Run]:
    """All runs of those `works` that have targets, in those executions of the plan that have. Raises BenchFailed."""
    runs: list[Run] = []
    for work, executions in EXECUTIONS.items():
        wanted = tuple(execution for execution in executions if execution in plan.executions)
        if work in works and wanted:
            runs += measure_work(WORKS[work], replace(plan, executions=wanted), say)[0]
    return runs


def compared(runs: Sequence[Run]) -> list[Line]:
    """One line for each load of flowserve."""
    groups: dict[tuple[str, str, Variant, int], dict[int, Run]] = {}
    for run in runs:
        groups.setdefault((run.server, run.work, run.variant, run.concurrency), {})[run.round] = run
    lines = []
    for (server, work, variant, concurrency), ours in groups.items():
        if server != FLOWSERVE:
            continue
        triton = groups.get((TRITON, work, variant.of_peer(), concurrency), {})
        before = groups.get((BEFORE, work, variant, concurrency), {})
        varying = groups.get((FLOWSERVE, work, replace(variant, dims="varying"), concurrency), {})
        checks = []
        # In an open loop the rate is given: only latencies can be compared.
        closed = not variant.arrivals
        if triton and closed:
            target = _throughput_target(work, variant, concurrency)
            checks.append(Check("over Triton", _spread(ours, triton, _speed), target))
        if triton:
            p99_target = P99 if variant.plain and variant.dims == "varying" else None
            checks.append(Check("p99 over Triton", _spread(ours, triton, _p99), p99_target, most=True))
        if varying and closed and variant.dims == "fixed":
            spread = _spread(ours, varying, _speed)
            checks.append(Check("fixed over varying", spread, FIXED_OVER_VARYING, most=True))
        if before and closed:
            checks.append(Check("over before", _spread(ours, before, _speed)))
        if before:
            checks.append(Check("p99 over before", _spread(ours, before, _p99)))
        found = ((FLOWSERVE, ours), (TRITON, triton), (BEFORE, before))
        servers = {name: (_median(group, _speed), _median(group, _cpu)) for name, group in found if group}
        lines.append(Line(work, variant, concurrency, servers, tuple(checks)))
    return sorted(lines, key=_order)


def _order(line: Line) -> tuple[object, ...]:
    variant = line.variant
    return line.work, variant.execution == "inline", variant.dims == "fixed", str(variant), line.concurrency


def table(lines: Sequence[Line], plan: Plan) -> Table:
    """The lines, missed targets in red."""
    title = (
        f"acceptance: requests/s and p99 as ratios, medians of {plan.rounds} rounds of {plan.seconds:g} s "
        "(lowest–highest), with their targets"
    )
    found = Table(title=title, title_justify="left")
    found.add_column("load", no_wrap=True)
    found.add_column("c", justify="right")
    servers = list(dict.fromkeys(server for line in lines for server in line.servers))
    for server in servers:
        found.add_column(f"{server}\nreq/s", justify="right")
        found.add_column("CPU us", justify="right")
    checks = list(dict.fromkeys(check.what for line in lines for check in line.checks))
    for what in checks:
        found.add_column(what, justify="right", no_wrap=True)
    previous: tuple[str, Variant] | None = None
    for line in lines:
        if previous not in (None, (line.work, line.variant)):
            found.add_section()
        previous = (line.work, line.variant)
        cells = []
        for server in servers:
            speed, cpu_us = line.servers.get(server, (None, None))
            cells += ["" if speed is None else f"{speed:,.0f}", "" if cpu_us is None else f"{cpu_us:,.0f}"]
        by_name = {check.what: check for check in line.checks}
        for what in checks:
            check = by_name.get(what)
            style = "" if check is None or check.target is None else "green" if check.reached else "red"
            cells.append("" if check is None else f"[{style}]{check}[/]" if style else str(check))
        found.add_row(f"{line.work} ({line.variant})", str(line.concurrency), *cells)
    return found


def verdict(lines: Sequence[Line]) -> list[str]:
    """How many targets were reached, and each that was missed."""
    checks = [(line, check) for line in lines for check in line.checks if check.target is not None]
    missed = [
        f"missed: {line.place}: {check.what} {_text(check.spread)}, target {check.limit}"
        for line, check in checks
        if not check.reached
    ]
    return [f"{len(checks) - len(missed)} of {len(checks)} targets reached", *missed]


def _throughput_target(work: str, variant: Variant, concurrency: int) -> float | None:
    if not variant.plain:
        return None
    if variant.dims == "fixed":
        return FIXED.get(concurrency) if (work, variant.execution) == ("chain", "process") else None
    target = THROUGHPUT[variant.execution].get((work, concurrency))
    return target.must if target else None


def _spread(ours: Mapping[int, Run], theirs: Mapping[int, Run], read: Read) -> Spread:
    """The ratio of each round that both have."""
    ratios = [read(run) / read(theirs[number]) for number, run in ours.items() if number in theirs]
    return Spread.of(ratios)


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _median(group: Mapping[int, Run], read: Read) -> float:
    return statistics.median(map(read, group.values()))


def _speed(run: Run) -> float:
    return run.requests_per_second


def _cpu(run: Run) -> float:
    return run.server_cpu_us


def _p99(run: Run) -> float:
    return run.p99_ms
