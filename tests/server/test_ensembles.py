"""Ensembles over HTTP: batches stay together, models are shared, failures name their step, invalid ensembles are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

ROW = [1.0, 2.0, 3.0, 4.0]


def row(number: float) -> list[list[float]]:
    return [[number] * 4]


def direct(number: float) -> list[float]:
    return [2 * number] * 4


def chain(number: float) -> list[float]:
    return [(2 * number + 1) * 3] * 4


def diamond(number: float) -> list[float]:
    return [(2 * number + 1) + 3 * (2 * number)] * 4


# ------------------------------------------------------------------------------------------------------------- batches


def test_concurrent_requests_stay_one_batch_through_a_chain(wire: Any) -> None:
    requests = [wire.infer_request("chain", row(number)) for number in range(16)]
    models = ["gather", "plus_one", "times_three"]
    answers, batches = wire.batches_during(models, lambda: wire.together(requests))
    assert [answer.data for answer in answers] == [chain(number) for number in range(16)]
    assert batches == {model: {16: 1} for model in models}


def test_concurrent_requests_stay_one_batch_through_a_fork_and_its_join(wire: Any) -> None:
    requests = [wire.infer_request("diamond", row(number)) for number in range(16)]
    models = ["gather", "plus_one", "times_three", "join"]
    answers, batches = wire.batches_during(models, lambda: wire.together(requests))
    assert [answer.data for answer in answers] == [diamond(number) for number in range(16)]
    assert batches == {model: {16: 1} for model in models}


def test_two_ensembles_and_a_direct_caller_share_a_models_queue(wire: Any) -> None:
    requests = [wire.infer_request(("chain", "diamond", "gather", "gather")[i % 4], row(i)) for i in range(16)]
    answers, batches = wire.batches_during(["gather", "plus_one"], lambda: wire.together(requests))
    expected = [(chain, diamond, direct, direct)[i % 4](i) for i in range(16)]
    assert [answer.data for answer in answers] == expected
    assert batches == {"gather": {16: 1}, "plus_one": {8: 1}}


def test_batches_of_sixteen_closed_loop_clients_stay_whole(wire: Any) -> None:
    def hammer() -> None:
        for turn in range(8):
            numbers = [turn * 16 + i for i in range(16)]
            answers = wire.together([wire.infer_request("chain", row(number)) for number in numbers])
            assert [answer.data for answer in answers] == [chain(number) for number in numbers]

    models = ["gather", "plus_one", "times_three"]
    _, batches = wire.batches_during(models, hammer)
    for model in models:
        assert sum(size * runs for size, runs in batches[model].items()) == 8 * 16
        assert sum(batches[model].values()) == 8, "a batch fell apart"


def test_a_request_of_many_rows_stays_one_request(wire: Any) -> None:
    rows = [[float(i)] * 4 for i in range(16)]
    answer, batches = wire.batches_during(["gather", "join"], lambda: wire.infer("diamond", rows))
    assert answer.data == [value for i in range(16) for value in diamond(i)]
    assert batches == {"gather": {16: 1}, "join": {16: 1}}


# -------------------------------------------------------------------------------------------------------------- shapes


def test_an_ensemble_inside_an_ensemble_is_answered(wire: Any) -> None:
    assert wire.infer("nested", [ROW]).data == [(x + 1) + 3 * x + 1 for x in ROW]


def test_ensembles_and_their_steps_have_statistics_of_their_own(wire: Any) -> None:
    def counts() -> list[int]:
        return [wire.statistics(name)["inference_count"] for name in ("nested", "fork", "plus_one", "join")]

    before = counts()
    wire.infer("nested", [ROW, ROW])
    nested, fork, plus_one, join = (now - then for now, then in zip(counts(), before, strict=True))
    assert (nested, join) == (2, 2)
    assert plus_one == 4, "once inside the inner ensemble, once after it"
    assert fork in (0, 2)


def test_only_the_requested_outputs_are_returned(wire: Any) -> None:
    both = wire.infer("fork", [ROW]).json["outputs"]
    assert {one["name"]: one["data"] for one in both} == {"PLUS": [2, 3, 4, 5], "TIMES": [3, 6, 9, 12]}
    answer = wire.infer("fork", [ROW], outputs=[{"name": "TIMES"}])
    assert [one["name"] for one in answer.json["outputs"]] == ["TIMES"]
    assert answer.data == [3, 6, 9, 12]


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.fault("E7")
@pytest.mark.parametrize(("number", "text"), [(-5.0, "negative numbers are not for me"), (2000.0, "too much for me")])
def test_a_failing_step_fails_its_request_with_its_own_message(wire: Any, number: float, text: str) -> None:
    answer = wire.infer("fragile", row(number))
    assert answer.status == 500
    assert answer.error.startswith("in ensemble 'fragile', ")
    assert text in answer.error
    assert "Traceback" not in answer.error
    assert wire.infer("fragile", row(1)).data == [2.0] * 4


@pytest.mark.fault("E7", "D5")
def test_a_request_refused_by_a_step_affects_no_other_of_its_batch(wire: Any) -> None:
    numbers = [float(i) if i % 4 else -50.0 for i in range(16)]
    answers = wire.together([wire.infer_request("fragile", row(number)) for number in numbers])
    assert [answer.status for answer in answers] == [200 if i % 4 else 500 for i in range(16)]
    assert [answer.data for answer in answers if answer.status == 200] == [[i + 1.0] * 4 for i in range(16) if i % 4]
    assert wire.waiting("grumpy") == 0


# ---------------------------------------------------------------------------------------- refusals

IN, OUT = {"IN": "IN"}, {"OUT": "OUT"}
CIRCLE = [("double", {"IN": "b"}, {"OUT": "a"}), ("double", {"IN": "a"}, {"OUT": "b"})]
TWO_STEPS = [("double", IN, {"OUT": "a"}), ("double", {"IN": "a"}, OUT)]
NARROW = "data_type: TYPE_FP32 dims: [ 3 ]"
WHOLE = "data_type: TYPE_INT32 dims: [ 4 ]"

# name -> (steps, more of make_ensemble's arguments, fragments of the reason)
BROKEN: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
    "e1_dtype": (TWO_STEPS, {"spec": WHOLE}, ["inconsistent data type", "INT32", "FP32"]),
    "e1_shape": (TWO_STEPS, {"spec": NARROW}, ["inconsistent shape", "[-1,3]", "[-1,4]"]),
    "e2_unknown_input": ([("double", {"NOPE": "IN"}, OUT)], {}, ["NOPE"]),
    "e2_unknown_output": ([("double", IN, {"NOPE": "OUT"})], {}, ["NOPE"]),
    "e3_two_producers": ([("double", IN, OUT), ("double", IN, OUT)], {}, ["OUT"]),
    "e3_no_producer": ([("double", {"IN": "ghost"}, OUT)], {}, ["ghost"]),
    "e4_cycle": (CIRCLE, {}, ["cycle", "'a'", "'b'"]),
    "e4_itself": ([("e4_itself", IN, OUT)], {}, ["circular", "e4_itself"]),
    "e4_other": ([("e4_another", IN, OUT)], {}, ["circular", "e4_another"]),
    "e4_another": ([("e4_other", IN, OUT)], {}, ["circular", "e4_other"]),
    "e5_batch": (TWO_STEPS, {"max_batch_size": 64}, ["batch", "64", "16"]),
    "missing_step": ([("nobody", IN, OUT)], {}, ["nobody"]),
}


@pytest.fixture(scope="module")
def half_broken(
    tmp_path_factory: pytest.TempPathFactory,
    add_model: Callable[..., Path],
    make_ensemble: Callable[..., str],
    make_arithmetic: Callable[..., bytes],
) -> Iterator[Served]:
    """A repository in which one model and one ensemble are valid."""
    folder = tmp_path_factory.mktemp("broken")
    add_model(folder, "double", "max_batch_size: 16", {"1/model.onnx": make_arithmetic("Mul", 2)})
    add_model(folder, "sound", make_ensemble(["IN"], ["OUT"], TWO_STEPS))
    for name, (steps, more, _) in BROKEN.items():
        add_model(folder, name, make_ensemble(["IN"], ["OUT"], steps, **more))
    with serving(folder, "--exit-on-error", "false") as served:
        yield served


@pytest.fixture(scope="module")
def broken_wire(half_broken: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(half_broken)


@pytest.fixture(scope="module")
def index(broken_wire: Any) -> dict[str, dict[str, str]]:
    rows = broken_wire.post("/v2/repository/index").json
    return {row["name"]: row for row in rows}


@pytest.mark.fault("E1", "E2", "E3", "E4", "E5")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ensemble_is_not_loaded_and_the_index_has_the_reason(
    index: dict[str, dict[str, str]], name: str
) -> None:
    assert index[name]["state"] == "UNAVAILABLE"
    missing = [part for part in BROKEN[name][2] if part not in index[name]["reason"]]
    assert not missing, index[name]["reason"]


def test_a_request_for_a_broken_ensemble_gets_the_reason(broken_wire: Any) -> None:
    answer = broken_wire.infer("e3_no_producer", [ROW])
    assert answer.status == 503
    assert "ghost" in answer.error
    assert broken_wire.get("/v2/models/e3_no_producer/ready").status == 400


def test_valid_models_are_served_next_to_broken_ones(broken_wire: Any, index: dict[str, dict[str, str]]) -> None:
    assert [name for name, row in index.items() if row["state"] == "READY"] == ["double", "sound"]
    assert broken_wire.infer("sound", [ROW]).data == [4, 8, 12, 16]
    ready_only = broken_wire.post("/v2/repository/index", json.dumps({"ready": True}).encode()).json
    assert [row["name"] for row in ready_only] == ["double", "sound"]


@pytest.mark.fault("L11")
def test_a_server_with_a_broken_model_is_live_and_not_ready(broken_wire: Any) -> None:
    assert broken_wire.get("/v2/health/live").status == 200
    assert broken_wire.get("/v2/health/ready").status == 400
