"""What becomes of the raw runs: medians, ratios, verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load import Measured
from bench.measure import Limit, Plan, Run, best_limits, summarise
from bench.processes import cpu_seconds
from bench.ratios import compare, echo_ratio
from bench.report import Results, as_json, write_plot
from bench.servers import BenchFailed, serving
from bench.targets import Target


def run(server: str, requests: int, number: int = 0, work: str = "chain", concurrency: int = 32) -> Run:
    measured = Measured(requests, 2.0, 1.0, 4.0 if server == "triton" else 1.0, 0.5, 1.0)
    return Run.of(work, server, concurrency, number, measured, {"a": 2.0})


def test_one_bad_round_does_not_move_the_median() -> None:
    (row,) = summarise([run("flowserve", 1000), run("flowserve", 10, 1), run("flowserve", 1002, 2)])
    assert row.requests_per_second == 500.0
    assert row.server_cpu_us == pytest.approx(1000.0)
    assert row.load_busy == 0.25


def test_the_limit_is_the_batch_size_whose_median_is_best() -> None:
    limits = [
        Limit("chain", 1, 0, 90.0),
        Limit("chain", 8, 0, 10.0),
        Limit("chain", 1, 1, 20.0),
        Limit("chain", 8, 1, 200.0),
    ]
    assert best_limits(limits) == {"chain": (8, 105.0)}


def test_trusted_nodes_are_held_against_their_targets_and_threads_are_not() -> None:
    rows = summarise([run("flowserve", 6000), run("triton", 2000)])
    inline = {ratio.what: ratio for ratio in compare(rows, {}, "inline")}
    assert inline["requests/s over Triton's"].figure == 3.0
    assert inline["requests/s over Triton's"].verdict == "must"
    assert inline["p99 over Triton's"].verdict == "want"
    assert {ratio.verdict for ratio in compare(rows, {}, "thread")} == {None}


def test_an_extra_step_costs_half_of_what_two_more_steps_cost() -> None:
    rows = summarise([run("flowserve", 100_000, work="identity"), run("flowserve", 50_000)])
    (step,) = compare(rows, {}, "inline")
    assert (step.what, round(step.figure, 3), step.verdict) == ("CPU us of an extra step", 5.0, "must")


def test_noise_that_makes_three_steps_cheaper_than_one_is_shown_and_not_judged() -> None:
    rows = summarise([run("flowserve", 50_000, work="identity"), run("flowserve", 100_000)])
    (step,) = compare(rows, {}, "inline")
    assert step.figure < 0
    assert step.verdict is None


def test_the_echo_is_compared_with_uvicorns() -> None:
    rows = summarise([run("flowserve", 900, work="echo"), run("uvicorn", 1000, work="echo")])
    (ratio,) = echo_ratio(rows)
    assert (ratio.figure, ratio.verdict) == (0.9, "must")
    assert echo_ratio(rows[:1]) == []


@pytest.mark.parametrize(("figure", "verdict"), [(5.1, "below"), (5.0, "must"), (2.1, "must"), (2.0, "want")])
def test_where_less_is_better_the_verdicts_turn_round(figure: float, verdict: str) -> None:
    assert Target(5.0, 2.0, less_is_better=True).verdict(figure) == verdict


def results() -> Results:
    runs = [run("flowserve", 6000), run("triton", 2000), run("flowserve", 10, work="cnn", concurrency=8)]
    return Results.of(Plan((8, 32), 2.0, 1, "inline"), 0.1, runs, [Limit("cnn", 1, 0, 10.0)])


def test_the_json_holds_the_raw_runs_and_what_was_made_of_them() -> None:
    record = json.loads(json.dumps(as_json(results())))
    assert record["schema"] == 1
    assert record["limits"] == {"cnn": {"batch": 1, "rows_per_second": 10.0}}
    assert {row["server"] for row in record["summary"]} == {"flowserve", "triton"}
    assert len(record["runs"]) == 3
    assert record["options"]["python_execution"] == "inline"


@pytest.mark.slow
def test_the_plot_is_drawn_without_a_display(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(results(), tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.server
def test_the_cpu_time_of_children_counts() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert cpu_seconds(process.pid) >= 0.2
        process.communicate(b"\n")


@pytest.mark.server
def test_a_server_that_does_not_start_is_reported_with_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such repository')"]
    with (
        pytest.raises(BenchFailed, match="status 1:\nno such repository"),
        serving("x", command, tmp_path / "log", environment={}),
    ):
        pass
