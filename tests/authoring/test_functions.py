"""Functions with optional inputs, ragged inputs and several responses, in an engine: served directly, saved, loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from flowserve import Engine, Graph, Problems, model
from flowserve.errors import Invalid, ModelFailed, Unsupported
from flowserve.values import Array

# In a module, so that they can be saved.
FUNCTIONS = """
import threading
import numpy as np
from flowserve import Graph, model

seen, closed = [], threading.Event()


@model({"X": "FP32[2]?", "Y": "FP32[2]?"}, {"SUM": "FP32[2]"}, max_batch_size=8, max_queue_delay_us=100_000)
def add(x, y):
    seen.append([None if one is None else len(one) for one in (x, y)])
    if x is None and y is None:
        return np.zeros((1, 2), np.float32)
    return sum(one for one in (x, y) if one is not None) + 0


@model({"WORDS": "FP32[*]", "SCALE": "FP32[1]?"}, {"TOTAL": "FP32[1]", "SORTED": "FP32[*]"}, max_batch_size=8,
       max_queue_delay_us=100_000)
def sums(words, scale):
    seen.append([one.shape for one in words])
    total = np.concatenate([one.sum(1, keepdims=True) for one in words])
    return total if scale is None else total * scale, [np.sort(one, axis=1) for one in words]


@model({"WORDS": "FP32[*]"}, {"SORTED": "FP32[*]"}, max_batch_size=4)
def in_order(words):
    return [np.sort(one, axis=1) for one in words]


@model({"TO": "INT32[1]"}, {"NUMBER": "INT32[1]", "HALF": "FP32[1]"}, max_batch_size=4, decoupled=True)
def count(to):
    made = np.zeros((len(to), 1), np.int32)  # the same array each time: what was answered is not changed by it
    try:
        for number in range(int(to.max())):
            if number == 13:
                raise ValueError("thirteen")
            made[:] = number
            yield made, made.astype(np.float32) / 2
    finally:
        closed.set()


@model({"N": "INT32[1]", "PLUS": "INT32[1]?"}, {"SQUARE": "INT32[1]"}, max_batch_size=4)
def square(n, plus):
    return n * n if plus is None else n * n + plus


squares = Graph("squares")
made = count(squares.input("TO", "INT32[1]"))
squares.output("SQUARE", square(made.NUMBER, squares.input("PLUS", "INT32[1]?")))

ragged = Graph("ragged")
both = sums(ragged.input("WORDS", "FP32[-1]"), ragged.input("SCALE", "FP32[1]?"))
ragged.output("TOTAL", both.TOTAL)
ragged.output("SORTED", in_order(both.SORTED))

optional = Graph("optional")
optional.output("SUM", add(X=optional.input("X", "FP32[2]?"), Y=optional.input("Y", "FP32[2]?")))

half = Graph("half")
half.output("SUM", add(half.input("X", "FP32[2]")))
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("functions")
    (home / "functions_of_all_kinds.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(home))
    import functions_of_all_kinds as module  # type: ignore[import-not-found]

    yield module
    sys.path.remove(str(home))


@pytest.fixture(scope="module")
def engine(functions: Any) -> Iterator[Engine]:
    with Engine(functions.squares, functions.ragged, functions.optional, functions.half) as engine:
        yield engine


@pytest.fixture
def seen(functions: Any) -> list[Any]:
    functions.seen.clear()
    found: list[Any] = functions.seen
    return found


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def to(number: int) -> dict[str, Array]:
    return {"TO": np.array([[number]], np.int32)}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of concurrent calls."""
    made: list[Any] = [None] * len(calls)

    def one(n: int) -> None:
        made[n] = calls[n]()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made


def test_a_missing_optional_input_is_none(engine: Engine) -> None:
    assert engine.infer("optional", {"X": row(1, 2), "Y": row(10, 20)})["SUM"].tolist() == [[11, 22]]
    assert engine.infer("optional", {"Y": row(10, 20)})["SUM"].tolist() == [[10, 20]]
    assert engine.infer("optional", {})["SUM"].tolist() == [[0, 0]]
    assert engine.infer("half", {"X": row(1, 2)})["SUM"].tolist() == [[1, 2]]


def test_all_members_of_a_batch_have_an_optional_input_or_none_has(engine: Engine, seen: list[Any]) -> None:
    calls = [lambda: engine.infer("add", {"X": row(1, 1)})] * 2
    calls += [lambda: engine.infer("add", {"X": row(1, 1), "Y": row(2, 2)})] * 2
    assert sorted(answer["SUM"][0, 0] for answer in together(*calls)) == [1, 1, 3, 3]
    assert all(pair in ([1, None], [2, None], [1, 1], [2, 2]) for pair in seen)


def test_requests_of_any_length_are_one_batch_of_a_ragged_function(engine: Engine, seen: list[Any]) -> None:
    rows = [np.array([[3, 1, 2]], np.float32), np.array([[5]], np.float32), np.array([[2, 1], [4, 3]], np.float32)]
    answers = together(*(lambda one=one: engine.infer("ragged", {"WORDS": one}) for one in rows))
    assert [answer["TOTAL"].tolist() for answer in answers] == [[[6]], [[5]], [[3], [7]]]
    assert [answer["SORTED"].tolist() for answer in answers] == [[[1, 2, 3]], [[5]], [[1, 2], [3, 4]]]
    assert [sorted(shapes) for shapes in seen] == [[(1, 1), (1, 3), (2, 2)]]
    scaled = engine.infer("ragged", {"WORDS": rows[0], "SCALE": row(2)})
    assert (scaled["TOTAL"].tolist(), scaled["SORTED"].tolist()) == ([[12]], [[[1, 2, 3]]][0])


def test_a_generator_sends_one_response_per_yield(engine: Engine) -> None:
    answers = list(engine.stream("count", to(4)))
    assert [(int(one["NUMBER"][0, 0]), float(one["HALF"][0, 0])) for one in answers] == [
        (0, 0),
        (1, 0.5),
        (2, 1),
        (3, 1.5),
    ]
    assert list(engine.stream("count", to(0))) == []
    plus = {**to(4), "PLUS": np.array([[1]], np.int32)}
    assert [one["SQUARE"].tolist() for one in engine.stream("squares", plus)] == [[[1]], [[2]], [[5]], [[10]]]
    assert [one["SQUARE"].tolist() for one in engine.stream("squares", to(2))] == [[[0]], [[1]]]
    assert [*engine.stream("count", to(2), outputs=("HALF",))][1].keys() == {"HALF"}
    with pytest.raises(Unsupported, match=r"decoupled transaction policy: .* an engine's stream\(\)"):
        engine.infer("count", to(1))


def test_a_generators_exception_follows_its_responses_and_the_next_request_is_served(engine: Engine) -> None:
    answers = engine.stream("count", to(20))
    assert [int(next(answers)["NUMBER"][0, 0]) for _ in range(13)] == [*range(13)]
    with pytest.raises(ModelFailed, match="model 'count' failed: ValueError: thirteen"):
        next(answers)
    assert len(list(engine.stream("count", to(3)))) == 3


def test_a_generator_is_closed_when_its_caller_leaves(engine: Engine, functions: Any) -> None:
    functions.closed.clear()
    answers = engine.stream("squares", to(12))
    next(answers)
    answers.close()
    assert functions.closed.wait(30)


async def test_invalid_results_fail_only_their_request() -> None:
    wrong: dict[str, Any] = {
        "not one of": lambda x: x,
        "too few": lambda x: iter([(x,)]),
        "another type": lambda x: iter([(x, x.astype(np.float64))]),
        "uneven": lambda x: iter([(x, np.concatenate([x, x]))]),
    }
    said = {
        "not one of": "returned ndarray where an iterator over answers was expected",
        "too few": "returned 1 arrays; its outputs are Y, Z",
        "another type": "output 'Z': its function promises FP32 and returned float64",
        "uneven": "gave outputs of different numbers of rows in one answer: 1 of Y, 2 of Z",
    }

    @model({"X": "FP32[2]"}, {"Y": "FP32[2]", "Z": "FP32[2]"}, max_batch_size=4, decoupled=True)
    def behaves(x: Array) -> Any:
        return wrong[kind](x) if kind else [(x, x)]

    graph = Graph("g")
    made = behaves(graph.input("X", "FP32[2]"))
    graph.output("Y", made.Y)
    graph.output("Z", made.Z)
    with trio.fail_after(60):
        async with Engine(graph) as engine:
            for kind in wrong:
                async with engine.stream("g", {"X": row(1, 2)}) as answers:
                    with pytest.raises(ModelFailed, match=said[kind]):
                        await anext(answers)
            kind = ""
            async with engine.stream("g", {"X": row(1, 2)}) as answers:
                assert [answer["Z"].tolist() async for answer in answers] == [[[1, 2]]]


@pytest.mark.parametrize(("place", "company"), [("inline", 0), ("inline", 3), ("thread", 0), ("thread", 3)])
async def test_an_exception_of_a_function_is_logged_once_for_all_retries(
    caplog: pytest.LogCaptureFixture, place: Any, company: int
) -> None:
    tried: list[int] = []

    @model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=8, execution=place, is_pure=True)
    def picky(x: Array) -> Array:
        tried.append(len(x))
        if (x < 0).any():
            raise ValueError("below zero")
        return x

    graph = Graph("g")
    graph.output("Y", picky(graph.input("X", "FP32[2]")))
    with trio.fail_after(60):
        async with Engine(graph) as engine:
            for _ in range(40):  # so often that its place is chosen by measurement
                await engine.infer("picky", {"X": row(1, 2)})
                await wait_all_tasks_blocked()
            tried.clear()

            async def ask(value: float) -> None:
                with pytest.raises(ModelFailed, match="model 'picky' failed: ValueError: below zero") as failed:
                    await engine.infer("picky", {"X": row(value, 2)})
                assert failed.type is ModelFailed

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, -1)
                for _ in range(company):
                    nursery.start_soon(engine.infer, "picky", {"X": row(1, 2)})
    assert len(tried) > 1 or not company
    (told,) = caplog.records
    assert told.getMessage() == "a request to 'picky' failed: model 'picky' failed: ValueError: below zero"
    assert caplog.text.count("in picky") == 1


def test_a_ragged_output_is_a_list_with_an_array_for_each_request() -> None:
    answers: list[Any] = []

    @model({"X": "FP32[*]"}, {"Y": "FP32[*]"}, max_batch_size=4)
    def behaves(x: list[Array]) -> Any:
        return answers[0] if answers else (x,)

    graph = Graph("g")
    graph.output("Y", behaves(graph.input("X", "FP32[-1]")))
    with Engine(graph) as engine:
        assert engine.infer("g", {"X": row(1, 2, 3)})["Y"].tolist() == [[1, 2, 3]]
        for answer, text in (
            (row(1, 2), "returned ndarray where a list of 1 arrays was expected, one a request"),
            ([row(1), row(2)], "returned 2 where a list of 1 arrays was expected"),
            ([np.ones((2, 1), np.float32)], r"promises shape \[1,-1\] and returned \[2,1\]"),
        ):
            answers[:] = [answer]
            with pytest.raises(ModelFailed, match=f"output 'Y': its function {text}"):
                engine.infer("g", {"X": row(1)})


def test_graphs_that_share_a_function_share_it_in_one_engine_and_others_of_its_name_are_refused(
    functions: Any, engine: Engine
) -> None:
    assert [row["name"] for row in engine.index()].count("add") == 1
    with pytest.raises(Problems, match=r"two parts of graph 'half' and graph 'other' are called 'add'"):
        with Engine(functions.half, other_add()):
            pass


def other_add() -> Graph:
    @model({"X": "FP32[2]"}, {"SUM": "FP32[2]"}, name="add")
    def add(x: Array) -> Array:
        return x

    graph = Graph("other")
    graph.output("SUM", add(graph.input("X", "FP32[2]")))
    return graph


def test_functions_round_trip_through_save_and_load(functions: Any, tmp_path: Path) -> None:
    graphs = [functions.squares, functions.ragged, functions.optional]
    for graph in graphs:
        graph.save(tmp_path / graph.name)
        loaded = Graph.load(tmp_path / graph.name)
        assert loaded == graph
        assert loaded.to_text() == graph.to_text()
        loaded.save(tmp_path / "again" / graph.name)
        assert Graph.load(tmp_path / "again" / graph.name) == graph
    assert "allow_ragged_batch: true" in (tmp_path / "ragged/sums/config.pbtxt").read_text()
    for file in ("ragged/sums", "optional/add"):  # the decorator declares the rest
        (tmp_path / file / "config.pbtxt").write_text('backend: "callable"\n')
    (tmp_path / "squares/count/config.pbtxt").write_text('backend: "callable"\n')
    with Engine(*(tmp_path / graph.name for graph in graphs)) as engine:
        assert [one["SQUARE"].tolist() for one in engine.stream("squares", to(3))] == [[[0]], [[1]], [[4]]]
        assert engine.infer("optional", {"X": row(1, 2)})["SUM"].tolist() == [[1, 2]]
        assert engine.infer("ragged", {"WORDS": row(3, 1)})["SORTED"].tolist() == [[1, 3]]


def test_a_configuration_that_contradicts_the_function_is_refused(functions: Any, tmp_path: Path) -> None:
    functions.squares.save(tmp_path)
    for name, old, new, said in (
        ("square", "dynamic_batching", "model_transaction_policy { decoupled: true } dynamic_batching", "answers once"),
        ("square", "dims: 1", "dims: 1 allow_ragged_batch: true", "its function takes it as one array"),
    ):
        config = tmp_path / name / "config.pbtxt"
        right = config.read_text()
        assert old in right
        config.write_text(right.replace(old, new, 1))
        with pytest.raises(Invalid, match=said), Engine(tmp_path, load=[name]):
            pass
        config.write_text(right)


def test_an_edited_function_is_reloaded(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "callable"\n')
    declared = "@model({'X': 'FP32[2]'}, {'Y': 'FP32[2]'})"
    text = f"from flowserve import model\n\n{declared}\ndef function(x):\n    return x + 1\n"
    file = tmp_path / "m" / "1" / "model.py"
    file.write_text(text)
    with Engine(tmp_path) as engine:
        assert engine.infer("m", {"X": row(1, 2)[0]})["Y"].tolist() == [2, 3]
        file.write_text(text.replace("x + 1", "x + 2"))  # as long as before, and perhaps in the same second
        engine.load("m")
        assert engine.infer("m", {"X": row(1, 2)[0]})["Y"].tolist() == [3, 4]
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_model_is_shown_in_notebooks_as_a_table_of_its_tensors() -> None:
    @model({"A<B": "FP32[3,-1]"}, {"TEXT": "BYTES[1]"}, max_batch_size=8)
    def told(a: Any) -> Any:
        return a

    shown = told._repr_mimebundle_()
    assert shown["text/plain"] == repr(told)
    for part in ("<b>told</b>, batches of up to 8", "<td>A&lt;B</td><td>FP32[3, -1]</td>", "<td>TEXT</td>"):
        assert part in shown["text/html"]
