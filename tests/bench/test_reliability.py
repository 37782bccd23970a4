"""`python -m bench --figures`, `--chaos` and `--soak` on a small scale, and that they notice what they look for."""

from __future__ import annotations

import json

import pytest
import trio

from bench.__main__ import main
from bench.reliability.figures import FIGURES, Figure, measure_figures
from bench.reliability.soak import soak
from bench.reliability.world import Response, Tally
from flowserve.runtime.processes.children import SUPPORTED

pytestmark = [pytest.mark.server, pytest.mark.skipif(not SUPPORTED, reason="models in processes need Linux")]


def met(name: str, length: float, attempts: int = 3) -> list[Figure]:
    """The figure, measured again where its latencies were those of a machine that was busy with something else."""
    figures: list[Figure] = []
    for _ in range(attempts):
        figures = measure_figures([name], length, lambda _: None)
        if all(figure.is_met for figure in figures):
            return figures
    raise AssertionError(figures)


@pytest.mark.fault("O4")
def test_three_times_the_capacity_is_answered_or_refused() -> None:
    held, _ = measure_figures(["overload"], 0.3, lambda _: None)  # how fast depends on the machine
    assert held.is_met, held


@pytest.mark.fault("O5")
def test_a_saturated_model_leaves_its_neighbours_as_they_are() -> None:
    met("saturated", 0.4)


@pytest.mark.fault("O6")
def test_a_thousand_idle_connections_take_little_memory() -> None:
    met("idle", 1)


@pytest.mark.fault("O8")
def test_a_model_that_stalled_answers_again_in_spite_of_a_storm_of_retries() -> None:
    met("retries", 0.3)


@pytest.mark.fault("R12")
def test_what_a_response_cache_has_no_room_for_is_served() -> None:
    met("cache", 0.3)


def test_partial_sums_and_limits_are_checked() -> None:
    direct, oldest = met("sequences", 0.2)
    assert "direct" in direct.goal
    assert "oldest" in oldest.goal
    assert [figure.goal.split(":")[0] for figure in met("backpressure", 0.1)] == [
        f"max_inflight_requests {limit}" for limit in (1, 4, 16)
    ]


def test_a_goal_that_is_missed_is_printed_and_is_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missed(length: float) -> list[Figure]:
        return [Figure("G0", "a goal", f"length {length:g}", False)]

    async def failing(length: float) -> list[Figure]:
        raise OSError("the server is gone")

    monkeypatch.setitem(FIGURES, "load", missed)
    monkeypatch.setitem(FIGURES, "drain", failing)
    with pytest.raises(SystemExit, match="goals missed: G0, drain"):
        main(["--figures", "2", "--select", "load,drain"])
    printed = capsys.readouterr().out
    assert "length 2" in printed
    assert "the server is gone" in printed


def test_a_short_chaos_run_injects_faults_and_checks_responses(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--chaos", "2", "--seed", "3"])
    assert "seed 3" in capsys.readouterr().out


def test_a_short_soak_compares_memory_and_responses() -> None:
    mix, memory = trio.run(soak, 0.05, lambda _: None)
    assert mix.is_met, mix
    assert "to the last" in memory.measured


def right(response: Response) -> bool:
    return response.outputs()["Y"] == [4]


def response(status: int, **body: object) -> Response:
    return Response(status, b"", json.dumps(body).encode())


def test_each_response_is_right_refused_or_wrong() -> None:
    tally = Tally(sent=5)
    for one in (
        response(200, outputs=[{"name": "Y", "data": [4]}]),
        response(503, error="busy"),
        response(200, outputs=[{"name": "Y", "data": [5]}]),
        response(503, outputs=[]),
        response(400, error="no"),
    ):
        tally.count(one, right, 0.1, "x")
    assert (tally.right, len(tally.refused_s), len(tally.wrong)) == (1, 1, 3)
    assert not tally.is_complete


def test_a_request_without_a_response_is_missed() -> None:
    tally = Tally(sent=2)
    tally.count(response(200, outputs=[{"name": "Y", "data": [4]}]), right, 0.1, "x")
    assert not tally.is_complete
