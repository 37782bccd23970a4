"""Bad requests to functions of a graph, in an engine: who fails, with which error, what is logged and counted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import trio

import flowserve
from flowserve import Engine, Graph, model, model_folder
from flowserve.errors import ModelFailed
from flowserve.values import Array

TOGETHER = 8  # requests of one batch
SECRET = 41.5  # a value of a bad request


def row(value: float) -> Array:
    return np.array([[value, value]], np.float32)


def pick(array: Array, error: type[Exception] = ValueError) -> Array:
    """The array; raises an error with the values below zero."""
    if (array < 0).any():
        raise error(f"below zero: {array[array < 0].tolist()}")
    return array + 1


def graph_of(
    function: Callable[[Array], Any], seen: list[int] | None = None, *, is_chain: bool = True, **declared: Any
) -> Graph:
    """The function as the model `picky`; in a chain with a model before it and one behind it if `is_chain`."""

    def double(array: Array) -> Array:
        return array * 2

    def picky(array: Array) -> Any:
        if seen is not None:
            seen.append(len(array))
        return function(array)

    sides = {"X": "FP32[2]"}, {"Y": "FP32[2]"}
    whole = {"max_batch_size": TOGETHER, "max_queue_delay_us": 500_000}
    graph = Graph("g")
    made: Any = graph.input("X", "FP32[2]")
    if is_chain:
        made = model(*sides, name="first", **{**whole, **declared})(double)(made)
    made = model(*sides, **{**whole, **declared})(picky)(made)
    if is_chain:
        made = model(*sides, name="last", **{**whole, **declared})(double)(made)
    graph.output("Y", made)
    return graph


async def ask_together(engine: Any, name: str, values: Sequence[float]) -> list[Any]:
    """The output, or the error, of one request for each value, in one batch."""
    made: list[Any] = [None] * len(values)

    async def ask(n: int) -> None:
        try:
            made[n] = (await engine.infer(name, {"X": row(values[n])}))["Y"][0, 0]
        except flowserve.FlowserveError as error:
            made[n] = error

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for n in range(len(values)):
                nursery.start_soon(ask, n)
    return made


def values_with(bad: Collection[int], count: int = TOGETHER) -> list[float]:
    return [-SECRET - n if n in bad else float(n) for n in range(count)]


def counts(engine: Any, name: str) -> tuple[int, int]:
    """Requests of a deployment that succeeded, and that failed."""
    (counted,) = engine.statistics(name)
    return counted["inference_stats"]["success"]["count"], counted["inference_stats"]["fail"]["count"]


@pytest.mark.parametrize("place", ["thread", "inline", "auto"])
@pytest.mark.parametrize("bad", [(), (3,), (0, 7), (1, 2, 3, 5), range(TOGETHER)], ids=len)
@pytest.mark.parametrize("error", [ValueError, flowserve.Invalid])
async def test_each_bad_request_of_a_batch_fails_alone_with_its_own_error(
    caplog: pytest.LogCaptureFixture, place: Any, bad: Collection[int], error: type[Exception]
) -> None:
    seen: list[int] = []
    graph = graph_of(lambda array: pick(array, error), seen, execution=place)
    async with Engine(graph) as engine:
        answers = await ask_together(engine, "g", values_with(bad))
        for n, answer in enumerate(answers):
            if n not in bad:
                assert answer == (2 * n + 1) * 2
                continue
            own = f"below zero: {[2 * (-SECRET - n)] * 2}"
            assert own in str(answer)
            assert str(answer).count("below zero") == 1
            assert type(answer) is (ModelFailed if error is ValueError else flowserve.Invalid)
        assert max(seen) == TOGETHER
        assert len(seen) <= 1 + 6 * len(bad)
        assert counts(engine, "picky") == counts(engine, "g") == (TOGETHER - len(bad), len(bad))
        assert counts(engine, "last") == (TOGETHER - len(bad), 0)
    logged = [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert len(logged) == (len(bad) if error is ValueError else 0)
    assert caplog.text.count("Traceback") == len(logged)


@pytest.mark.parametrize("place", ["thread", "inline"])
async def test_a_result_that_does_not_fit_the_batch_fails_only_the_request_that_causes_it(place: Any) -> None:
    graph = graph_of(lambda array: array[(array >= 0).all(axis=1)], is_chain=False, execution=place)
    async with Engine(graph) as engine:
        answers = await ask_together(engine, "picky", values_with((2, 6)))
        assert [answer for n, answer in enumerate(answers) if n not in (2, 6)] == [0, 1, 3, 4, 5, 7]
        for n in (2, 6):
            assert "promises shape [1,2] and returned [0,2]" in str(answers[n])
        assert counts(engine, "picky") == (6, 2)


@pytest.mark.parametrize("place", ["thread", "inline"])
@pytest.mark.parametrize("error", [ValueError, flowserve.Invalid])
async def test_a_function_that_is_not_pure_runs_once_and_no_client_gets_the_text_of_a_shared_batch(
    caplog: pytest.LogCaptureFixture, place: Any, error: type[Exception]
) -> None:
    seen: list[int] = []
    graph = graph_of(lambda array: pick(array, error), seen, is_chain=False, execution=place, is_pure=False)
    async with Engine(graph) as engine:
        answers = await ask_together(engine, "picky", values_with((3,)))
        assert seen == [TOGETHER]
        assert counts(engine, "picky") == (0, TOGETHER)
        texts = {
            ValueError: "model 'picky' failed: ValueError in a batch of 8 requests; its text is in the server's log",
            flowserve.Invalid: "model 'picky' refused a request of a batch of 8; the server's log has the reason",
        }
        assert {(type(answer), str(answer)) for answer in answers} == {(ModelFailed, texts[error])}
        assert caplog.text.count("below zero: [") == 1
        assert len(caplog.records) == TOGETHER
        (alone,) = await ask_together(engine, "picky", [-SECRET])
        assert str(alone).endswith(f"below zero: {[-SECRET] * 2}")
        assert type(alone) is (ModelFailed if error is ValueError else flowserve.Invalid)


async def test_any_kind_of_invalid_is_a_plain_one_for_the_caller() -> None:
    class Unreadable(flowserve.Invalid):
        def __init__(self, place: int, why: str) -> None:
            super().__init__(f"{why} at {place}")

    def refuse(array: Array) -> Array:
        raise Unreadable(3, "no digit")

    async with Engine(graph_of(refuse)) as engine:
        (answer,) = await ask_together(engine, "picky", [1])
        assert (type(answer), str(answer)) == (flowserve.Invalid, "no digit at 3")
        (answer,) = await ask_together(engine, "g", [1])
        assert type(answer) is flowserve.Invalid
        assert str(answer).startswith("in ensemble 'g', no digit at 3")


async def test_a_generator_refuses_its_request_after_responses(caplog: pytest.LogCaptureFixture) -> None:
    @model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=4, decoupled=True)
    def sends(array: Array) -> Any:
        yield array
        raise flowserve.Invalid("no more than one")

    graph = Graph("g")
    graph.output("Y", sends(graph.input("X", "FP32[2]")))
    with trio.fail_after(60):
        async with Engine(graph) as engine, engine.stream("sends", {"X": row(1)}) as answers:
            assert (await anext(answers))["Y"].tolist() == [[1, 1]]
            with pytest.raises(flowserve.Invalid, match=r"^no more than one$"):
                await anext(answers)
    assert not caplog.records


async def test_ragged_requests_run_again_in_halves_too() -> None:
    @model({"X": "FP32[*]"}, {"Y": "FP32[1]"}, max_batch_size=TOGETHER, max_queue_delay_us=500_000)
    def sums(rows: list[Array]) -> Array:
        return np.concatenate([pick(one).sum(1, keepdims=True) for one in rows])

    graph = Graph("g")
    graph.output("Y", sums(graph.input("X", "FP32[-1]")))
    made: dict[int, Any] = {}

    async def ask(engine: Any, n: int) -> None:
        try:
            made[n] = (await engine.infer("g", {"X": np.full((1, n + 1), -1 if n == 4 else 1, np.float32)}))["Y"][0, 0]
        except flowserve.FlowserveError as error:
            made[n] = str(error)

    async with Engine(graph) as engine:
        async with trio.open_nursery() as nursery:
            for n in range(TOGETHER):
                nursery.start_soon(ask, engine, n)
    assert "below zero: [-1.0, -1.0, -1.0, -1.0, -1.0]" in made.pop(4)
    assert made == {n: 2 * (n + 1) for n in range(TOGETHER) if n != 4}


SAVED = """
import numpy as np
from flowserve import Graph, Invalid, model

SIDES = {"X": "FP32[2]"}, {"Y": "FP32[2]"}


@model(*SIDES, max_batch_size=8, max_queue_delay_us=500_000)
def picky(array):
    if (array < 0).any():
        raise Invalid(f"below zero: {array[array < 0].tolist()}")
    return array + 1


@model(*SIDES, max_batch_size=8, max_queue_delay_us=500_000, is_pure=False)
def stores(array):
    if (array > 5).any():
        raise ValueError(f"too large: {array.max()}")
    return array


graph = Graph("g")
graph.output("Y", stores(picky(graph.input("X", "FP32[2]"))))
"""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a graph whose second function is not pure."""
    (tmp_path / "functions_to_isolate.py").write_text(SAVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("functions_to_isolate", tmp_path / "functions_to_isolate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "functions_to_isolate", module)
    spec.loader.exec_module(module)
    return module


async def test_a_saved_graph_isolates_bad_requests_as_the_graph_does(saved: ModuleType, tmp_path: Path) -> None:
    saved.graph.save(tmp_path / "models")
    assert Graph.load(tmp_path / "models") == saved.graph
    assert 'key: "pure"' in (tmp_path / "models/stores/config.pbtxt").read_text()
    assert 'key: "pure"' not in (tmp_path / "models/picky/config.pbtxt").read_text()
    async with Engine(tmp_path / "models") as engine:
        answers = await ask_together(engine, "g", values_with((1,), 4))
        assert str(answers[1]).startswith(f"in ensemble 'g', below zero: {[-SECRET - 1] * 2}")
        assert [answer for n, answer in enumerate(answers) if n != 1] == [1, 3, 4]
        answers = await ask_together(engine, "g", range(8))
        assert all("ValueError in a batch of 8 requests" in str(answer) for answer in answers)
    config = tmp_path / "models/stores/config.pbtxt"
    config.write_text(config.read_text().replace('"false"', '"true"'))
    async with Engine(tmp_path / "models") as engine:
        answers = await ask_together(engine, "g", range(8))
        assert answers[:5] == [1, 2, 3, 4, 5]
        assert ["too large: " in str(answer) for answer in answers[5:]] == [True] * 3


@pytest.mark.parametrize("place", ["process", "thread", "inline"])
async def test_a_model_py_in_a_graph_refuses_its_request_and_fails_a_shared_batch_without_its_text(
    tmp_path: Path, place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
import flowserve
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        for array in arrays:
            if (array < 0).any():
                raise flowserve.Invalid(f"below zero: {array.tolist()}")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array + 1)]) for array in arrays]
"""
    (tmp_path / "strict/1").mkdir(parents=True)
    (tmp_path / "strict/1/model.py").write_text(code)
    (tmp_path / "strict/config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 300000 }\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]'
    )
    graph = Graph("g")
    graph.output("Y", model_folder(tmp_path / "strict")(graph.input("X", "FP32[2]")))
    async with Engine(graph, python_execution=place) as engine:
        (alone,) = await ask_together(engine, "strict", [-SECRET])
        assert (type(alone), str(alone)) == (flowserve.Invalid, f"below zero: {[[-SECRET] * 2]}")
        assert not caplog.records
        answers = await ask_together(engine, "g", values_with((3,)))
        text = "in ensemble 'g', Failed to process the request(s) for model instance 'strict_0', message: Invalid in a "
        assert {type(answer) for answer in answers} == {ModelFailed}
        assert all(str(answer).startswith(text) and "below zero" not in str(answer) for answer in answers)
        assert (counts(engine, "strict"), counts(engine, "g")) == ((0, 1 + TOGETHER), (0, TOGETHER))
    assert caplog.text.count("below zero: [") == 1
    assert caplog.text.count("Traceback") == 1
