"""Figures computed from raw runs: medians, ratios, verdicts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.batches import EdgeBytes
from bench.load import Measured
from bench.measure import offered_rate
from bench.processes import cpu_seconds
from bench.ratios import Ratio, Target, compare, echo_ratio, together
from bench.report import Results, as_json, write_plot
from bench.runs import Best, Limit, Plan, Run, Variant, best_limits, summarise
from bench.servers import BenchFailed, other_flowserve, serving

INLINE = Variant("inline", "varying")
PROCESS = Variant("process", "varying")
VARYING = Variant("", "varying")


def run(
    server: str,
    requests: int,
    number: int = 0,
    work: str = "chain",
    concurrency: int = 32,
    mean_batch: tuple[float, ...] = (2.0,),
    edges: dict[str, EdgeBytes] | None = None,
    cpu_s: float = 1.0,
    variant: Variant | None = None,
) -> Run:
    measured = Measured(requests, 2.0, 1.0, 4.0 if server == "triton" else 1.0, 0.5, cpu_s)
    means = {f"node{i}": mean for i, mean in enumerate(mean_batch)}
    if variant is None:
        variant = {"triton": VARYING, "echo": Variant(), "uvicorn": Variant()}.get(server, INLINE)
    return Run.of(work, variant, server, concurrency, number, measured, means, edges)


def figures(ratios: list[Ratio]) -> dict[str, tuple[float, str | None]]:
    return {ratio.what: (round(ratio.figure, 3), ratio.verdict) for ratio in ratios}


def test_one_slow_round_does_not_change_the_median() -> None:
    (row,) = summarise([run("flowserve", 1000), run("flowserve", 10, 1), run("flowserve", 1002, 2)])
    assert row.requests_per_second == 500.0
    assert row.server_cpu_us == pytest.approx(1000.0)
    assert row.load_busy == 0.25


def test_the_limit_is_the_batch_size_whose_median_is_best() -> None:
    limits = [
        Limit("chain", 1, 0, 90.0, 1.0),
        Limit("chain", 8, 0, 10.0, 2.0),
        Limit("chain", 1, 1, 20.0, 1.0),
        Limit("chain", 8, 1, 200.0, 4.0),
    ]
    assert best_limits(limits) == {"chain": Best(8, 105.0, 3.0)}


def test_trusted_nodes_are_compared_with_their_targets_and_threads_are_not() -> None:
    rows = summarise([run("flowserve", 6800), run("triton", 2000)])
    inline = {ratio.what: ratio for ratio in compare(rows, {})}
    assert inline["requests/s over Triton's"].figure == 3.4
    assert inline["requests/s over Triton's"].verdict == "must"
    assert inline["p99 over Triton's"].verdict == "want"
    rows = summarise([run("flowserve", 6800, variant=Variant("thread", "varying")), run("triton", 2000)])
    assert {ratio.verdict for ratio in compare(rows, {})} == {None}


def test_nodes_in_processes_are_compared_with_targets_of_their_own() -> None:
    rows = summarise([run("flowserve", 4400, variant=PROCESS), run("triton", 2000)])
    found = {ratio.what: ratio for ratio in compare(rows, {})}["requests/s over Triton's"]
    assert (found.must, found.want, found.verdict) == (2.1, 3.0, "must")


def test_other_loads_than_the_plain_one_have_no_targets_and_an_open_loop_no_throughput() -> None:
    def ratios(**fields: str) -> dict[str, tuple[float, str | None]]:
        ours, peer = replace(INLINE, **fields), replace(VARYING, **fields)
        rows = summarise([run("flowserve", 4000, variant=ours), run("triton", 2000, variant=peer)])
        return figures(compare(rows, {"chain": Best(8, 1000.0, 1900.0)}))

    both = {"requests/s over Triton's": (2.0, None), "p99 over Triton's": (0.25, None)}
    assert ratios(shapes="rows") == ratios(heads="changing") == both
    assert ratios(arrivals="60%") == {"p99 over Triton's": (0.25, None)}


def test_fixed_and_varying_dims_are_different_loads() -> None:
    runs = [run("flowserve", 4000), run("flowserve", 8000, variant=replace(INLINE, dims="fixed")), run("triton", 2000)]
    rows = summarise(runs)
    assert [row.requests_per_second for row in rows] == [2000.0, 4000.0, 1000.0]
    assert [ratio.figure for ratio in compare(rows, {}) if ratio.what == "requests/s over Triton's"] == [2.0]


def test_an_ensemble_is_compared_with_its_slowest_step_and_with_another_flowserve() -> None:
    runs = [run("flowserve", 900), run("slowest alone", 1000), run("before", 1000)]
    assert figures(compare(summarise(runs), {})) == {
        "requests/s over its slowest step's": (0.9, "want"),
        "requests/s over before's": (0.9, "below"),
    }


def test_the_cost_of_a_workload_excludes_that_of_an_echo() -> None:
    runs = [run("flowserve", 1000, work="cnn", cpu_s=3.0), run("echo", 1000, work="cnn", cpu_s=1.0)]
    limits = {"cnn": Best(8, 1000.0, 1900.0)}
    share = figures(compare(summarise(runs), limits))["direct CPU over the server's less an echo's"]
    assert share == (0.95, "want")


def test_batches_that_stay_together_are_distinguished_from_split_ones() -> None:
    edges = {"request > a": EdgeBytes(0, 256, 0, 0), "a > b": EdgeBytes(256, 0, 0, 256)}
    whole = run("flowserve", 1000, mean_batch=(16.0, 16.0, 15.9), edges=edges)
    assert figures(together(summarise([whole]))) == {
        "rows per batch of the first node": (16.0, "want"),
        "the last node's over them": (0.994, "must"),
        "bytes/request copied out of one batch": (0.0, "want"),
    }
    apart = run("flowserve", 1000, mean_batch=(7.0, 3.0, 1.0), edges={"a > b": EdgeBytes(0, 256, 256, 256)})
    assert [verdict for _, verdict in figures(together(summarise([apart]))).values()] == ["below"] * 3
    assert together(summarise([run("flowserve", 1000, concurrency=8), run("flowserve", 1000, work="cnn")])) == []


def test_an_extra_step_costs_half_of_what_two_more_steps_cost() -> None:
    rows = summarise([run("flowserve", 100_000, work="identity"), run("flowserve", 50_000)])
    (step,) = compare(rows, {})
    assert (step.what, round(step.figure, 3), step.verdict) == ("CPU us of an extra step", 5.0, "must")


def test_noise_that_makes_three_steps_cheaper_than_one_gets_no_verdict() -> None:
    rows = summarise([run("flowserve", 50_000, work="identity"), run("flowserve", 100_000)])
    (step,) = compare(rows, {})
    assert step.figure < 0
    assert step.verdict is None


def test_the_echo_is_compared_with_uvicorns() -> None:
    rows = summarise([run("flowserve", 900, work="echo"), run("uvicorn", 1000, work="echo")])
    (ratio,) = echo_ratio(rows)
    assert (ratio.figure, ratio.verdict) == (0.9, "must")
    assert echo_ratio(rows[:1]) == []


@pytest.mark.parametrize(("figure", "verdict"), [(5.1, "below"), (5.0, "must"), (2.1, "must"), (2.0, "want")])
def test_verdicts_are_reversed_where_less_is_better(figure: float, verdict: str) -> None:
    assert Target(5.0, 2.0, less_is_better=True).verdict(figure) == verdict


def results() -> Results:
    runs = [run("flowserve", 6000), run("triton", 2000), run("flowserve", 10, work="cnn", concurrency=8)]
    return Results.of(Plan((8, 32), 2.0, 1), 0.1, ["flowserve: here"], runs, [Limit("cnn", 1, 0, 10.0, 5.0)])


def test_the_json_holds_the_raw_runs_and_the_derived_figures() -> None:
    record = json.loads(json.dumps(as_json(results())))
    assert record["schema"] == 2
    assert record["limits"] == {"cnn": {"batch": 1, "rows_per_second": 10.0, "cpu_us": 5.0}}
    assert {row["server"] for row in record["summary"]} == {"flowserve", "triton"}
    assert len(record["runs"]) == 3
    assert record["options"]["executions"] == ["inline"]
    assert record["runs"][0]["variant"]["dims"] == "varying"
    assert record["configuration"] == ["flowserve: here"]


@pytest.mark.slow
def test_the_plot_is_drawn_without_a_display(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(results(), tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.server
def test_the_cpu_time_of_children_counts() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        # The system counts whole ticks of 10 ms, and leaves out parts of ticks.
        assert cpu_seconds(process.pid) >= 0.2
        process.communicate(b"\n")


@pytest.mark.server
def test_a_server_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such repository')"]
    with (
        pytest.raises(BenchFailed, match="status 1:\nno such repository"),
        serving("x", command, tmp_path / "log", environment={}),
    ):
        pass


def test_another_flowserve_is_a_checkout_a_python_or_a_command(tmp_path: Path) -> None:
    here = [sys.executable, "-m", "flowserve"]
    assert other_flowserve(str(tmp_path)) == (here, tmp_path.resolve())
    python = tmp_path / "python3"
    python.touch()
    # Not in the current folder, whose flowserve it would import instead of the installed one.
    assert other_flowserve(str(python)) == ([str(python), "-m", "flowserve"], tmp_path)
    assert other_flowserve("docker run image flowserve") == (["docker", "run", "image", "flowserve"], None)


@pytest.mark.parametrize("arrivals", ["60%", "1500/s"])
def test_a_rate_is_a_share_of_the_capacity_or_absolute(arrivals: str) -> None:
    assert offered_rate(arrivals, 2000.0) == {"60%": 1200.0, "1500/s": 1500.0}[arrivals]


def beside(root: Path, folder: Path) -> tuple[str, Any]:
    """What is printed of one run beside another, and its record."""
    (folder / "flowserve").symlink_to(root / "flowserve")
    arguments = ["--work", "chain", "--concurrency", "32", "--seconds", "0.3", "--rounds", "1"]
    files = ["--json", str(folder / "bench.json"), "--plot", str(folder / "bench.svg")]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "--against", str(folder), *files],
        cwd=root,
        env={name: value for name, value in os.environ.items() if name != "TRITONSERVER"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, json.loads((folder / "bench.json").read_text())


@pytest.mark.server
@pytest.mark.slow
def test_a_checkout_of_another_flowserve_is_measured_interleaved_with_this_one(done_beside: tuple[str, Any]) -> None:
    printed, record = done_beside
    assert [run["server"] for run in record["runs"]] == ["flowserve", "before"]
    assert set(record["runs"][0]["edges"]) == {
        "request > chain_double",
        "chain_double > chain_add",
        "chain_add > chain_subtract",
    }
    assert "do batches stay together?" in printed
    assert "requests/s over before's" in printed
    assert f"flowserve: Python {platform.python_version()}" in printed
    assert f"before: Python {platform.python_version()}" in printed
