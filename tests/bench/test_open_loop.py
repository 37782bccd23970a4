"""The table of `python -m bench --latency`, and the command at a tiny scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import __main__ as command
from bench.load import Measured
from bench.open_loop import latencies
from bench.runs import Run, Variant


def run(server: str, share: str, number: int, p50_ms: float, p99_ms: float, execution: str = "") -> Run:
    measured = Measured(100, 1.0, p50_ms, p99_ms, 0.1, 0.5)
    return Run.of("chain", Variant(execution, "varying", arrivals=share), server, 128, number, measured, {})


def test_a_line_has_both_servers_and_the_ratio_of_each_round() -> None:
    runs = []
    for number, theirs in enumerate((2.0, 4.0, 8.0)):
        runs.append(run("triton", "30%", number, theirs, 10.0))
        runs.append(run("flowserve", "30%", number, 1.0, 11.0, "inline"))
    runs.append(run("triton", "", 0, 9.0, 9.0))  # the closed loop, which gives the capacity
    assert latencies(runs).splitlines() == [
        (
            "| workload | mode | share | requests/s | Triton's "
            "| p50 ms | Triton's | ratio of p50 | p99 ms | Triton's | ratio of p99 |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| chain | inline | 30% | 100 | 100 | 1.00 | 4.00 (2.00 to 8.00) | 0.25 | 11.0 | 10.0 | **1.10** |",
    ]


def test_lines_are_ordered_by_mode_and_share_and_can_be_without_triton() -> None:
    runs = [
        run("flowserve", share, 0, 1.0, 2.0, execution)
        for share in ("30%", "60%")
        for execution in ("process", "inline")
    ]
    lines = [line.split("|") for line in latencies(runs).splitlines()[2:]]
    assert [(line[2].strip(), line[3].strip()) for line in lines] == [
        ("process", "30%"),
        ("process", "60%"),
        ("inline", "30%"),
        ("inline", "60%"),
    ]
    assert {line[5].strip() for line in lines} == {""}


@pytest.mark.server
def test_each_mode_is_measured_at_each_share_of_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITONSERVER", raising=False)
    options = ["--work", "identity", "--concurrency", "2", "--rounds", "1", "--seconds", "0.3"]
    command.main(["--latency", *options, "--results", str(tmp_path)])
    lines = [line.split("|") for line in (tmp_path / "latency.md").read_text().splitlines() if line.startswith("| id")]
    assert [(line[2].strip(), line[3].strip()) for line in lines] == [
        (mode, share) for mode in ("process", "inline") for share in ("30%", "60%", "85%")
    ]
    rates = [float(line[4].replace(",", "")) for line in lines[:3]]
    assert rates == sorted(rates)
    assert all(0 < float(line[6]) <= float(line[9]) for line in lines)
    assert "--latency" in capsys.readouterr().out
