"""The table of `python -m bench --acceptance`: ratios of each round, targets, verdicts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from bench import acceptance
from bench.__main__ import main
from bench.load import Measured
from bench.runs import Plan, Run, Variant

PROCESS = Variant("process", "varying")
FIXED = Variant("process", "fixed")


def run(server: str, speed: int, number: int, variant: Variant, concurrency: int = 8, p99_ms: float = 1.0) -> Run:
    measured = Measured(speed, 1.0, 0.5, p99_ms, 0.1, 1.0)
    return Run.of("chain", variant, server, concurrency, number, measured, {})


def rounds(triton: tuple[int, ...], ours: tuple[int, ...], fixed: tuple[int, ...] = ()) -> list[Run]:
    runs = [run("triton", speed, i, PROCESS.of_peer(), p99_ms=2.0) for i, speed in enumerate(triton)]
    runs += [run("flowserve", speed, i, PROCESS) for i, speed in enumerate(ours)]
    runs += [run("flowserve", speed, i, FIXED) for i, speed in enumerate(fixed)]
    return runs + [run("triton", 1000, i, FIXED.of_peer()) for i in range(len(fixed))]


def test_the_ratio_is_the_median_of_the_rounds_and_not_that_of_the_medians() -> None:
    (line,) = acceptance.compared(rounds((1000, 2000, 4000), (2000, 3000, 4000)))
    speed, p99 = line.checks
    assert (speed.spread.low, speed.spread.median, speed.spread.high) == (1.0, 1.5, 2.0)
    assert (speed.target, speed.reached) == (1.7, False)
    assert (p99.spread.median, p99.reached) == (0.5, True)
    assert line.servers["flowserve"] == (3000, pytest.approx(1e6 / 3000))


def test_fixed_dims_are_compared_with_varying_dims_and_with_earlier_figures() -> None:
    varying, fixed = acceptance.compared(rounds((1000,), (2000,), (2400,)))
    assert [check.what for check in varying.checks] == ["over Triton", "p99 over Triton"]
    speed, p99, over_varying = fixed.checks
    assert (round(speed.target or 0, 2), speed.reached) == (1.75, True)
    assert (p99.target, over_varying.spread.median, over_varying.reached) == (None, 1.2, False)


def test_another_flowserve_is_shown_without_a_target() -> None:
    runs = [run("flowserve", 1200, 0, PROCESS), run("before", 1000, 0, PROCESS)]
    (line,) = acceptance.compared(runs)
    assert [(check.what, check.spread.median, check.target) for check in line.checks] == [
        ("over before", 1.2, None),
        ("p99 over before", 1.0, None),
    ]


def test_an_open_loop_compares_latencies_only_and_other_loads_have_no_targets() -> None:
    loads = (replace(PROCESS, arrivals="500/s"), replace(PROCESS, shapes="rows"))
    runs = [run("flowserve", 2000, 0, load) for load in loads]
    runs += [run("triton", 1000, 0, load.of_peer()) for load in loads]
    rows, arrivals = acceptance.compared(runs)
    assert [(check.what, check.target) for check in rows.checks] == [("over Triton", None), ("p99 over Triton", None)]
    assert [(check.what, check.target) for check in arrivals.checks] == [("p99 over Triton", None)]


def test_a_selection_without_targets_is_refused() -> None:
    with pytest.raises(SystemExit, match="no load with targets"):
        main(["--acceptance", "--only", "mlp"])


def test_the_table_shows_both_servers_and_the_summary_names_each_missed_target() -> None:
    lines = acceptance.compared(rounds((1000,), (1500,)))
    output = io.StringIO()
    Console(file=output, width=200).print(acceptance.table(lines, Plan((8,), 1.0, 1)))
    for text in ("flowserve", "triton", "req/s", "CPU us", "1.50 (1.50–1.50) ≥ 1.70"):
        assert text in output.getvalue()
    assert acceptance.verdict(lines) == [
        "1 of 2 targets reached",
        "missed: chain (process, varying), c = 8: over Triton 1.50 (1.50–1.50), target ≥ 1.70",
    ]
