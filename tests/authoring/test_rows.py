"""Graphs in Python whose steps run for some rows, or for each item: what they answer, and that files say the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve import Engine, Graph, Problems, model
from flowserve.errors import Internal, Invalid, ModelFailed
from flowserve.memory import rows
from flowserve.testing import Arrival, Faked, FakeModel, simulate
from flowserve.values import Array


@model({"IMAGE": "FP32[2]"}, {"CROPS": "FP32[-1,2]", "KIND": "INT32[-1,1]"}, max_batch_size=8)
def find(images: Any) -> Any:
    """As many things as the first number says; every second is a car."""
    count = int(images[0, 0])
    crops = np.stack([images + number for number in range(count)], axis=1) if count else np.zeros((len(images), 0, 2))
    kinds = np.tile((np.arange(count) % 2)[None, :, None], (len(images), 1, 1))
    return crops.astype(np.float32), kinds.astype(np.int32)


@model({"X": "FP32[2]"}, {"LABEL": "INT32[1]"}, max_batch_size=4)
def name_person(crops: Any) -> Any:
    return (crops[:, 1:] + 100).astype(np.int32)


@model({"X": "FP32[2]"}, {"LABEL": "INT32[1]"}, max_batch_size=4)
def name_car(crops: Any) -> Any:
    if (crops[:, 1] > 50).any():
        raise ValueError("no such car")
    return (crops[:, 1:] + 200).astype(np.int32)


@model({"LABELS": "INT32[-1,1]"}, {"TOTAL": "INT32[1]"}, max_batch_size=8)
def total(labels: Any) -> Any:
    return np.maximum(labels, 0).sum(axis=1).astype(np.int32)


@model({"X": "FP32[2]"}, {"Y": "FP32[1]", "SURE": "BOOL[1]"}, max_batch_size=8)
def small(x: Any) -> Any:
    return x[:, :1], x[:, :1] > 0.5


@model({"X": "FP32[2]"}, {"Y": "FP32[1]"}, max_batch_size=8)
def large(x: Any) -> Any:
    return x[:, :1] * -100


def people() -> Graph:
    graph = Graph("people", max_batch_size=8)
    found = find(graph.input("IMAGE", "FP32[2]"))
    with graph.each(found.CROPS, found.KIND, at_most=10) as (crop, kind):
        with graph.when(kind == 0):
            person = name_person(crop)
        with graph.when(kind == 1):
            car = name_car(crop)
        label = graph.merge(person, car, otherwise=-1)
    graph.output("LABELS", label)
    graph.output("TOTAL", total(label))
    return graph


def cascade() -> Graph:
    graph = Graph("cascade", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    quick = small(x)
    with graph.when(~(quick.SURE == True)):  # noqa: E712  # a test, not a comparison
        slow = large(x)
    graph.output("Y", graph.merge(slow, otherwise=quick.Y))
    return graph


def answers(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with Engine(graph) as engine:
        return {name: array.tolist() for name, array in engine.infer(graph.name, inputs).items()}


def image(count: int, number: float = 0.0) -> dict[str, Array]:
    return {"IMAGE": np.array([[count, number]], np.float32)}


def test_each_item_takes_its_own_branch_and_they_are_gathered_in_order() -> None:
    assert answers(people(), image(5)) == {"LABELS": [[[100], [201], [102], [203], [104]]], "TOTAL": [[710]]}


def test_no_item_is_an_answer() -> None:
    assert answers(people(), image(0)) == {"LABELS": [[]], "TOTAL": [[0]]}


def nested(inner: float, outer: float) -> Graph:
    """A condition within another one, each with a value for its other rows."""
    graph = Graph("nested", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    first = small(x)
    with graph.when(first.Y > 0.25):
        second = large(x)
        with graph.when(second < -50):
            third = large(x)
        fourth = graph.merge(third, otherwise=inner)
    graph.output("Y", graph.merge(fourth, otherwise=outer))
    return graph


def test_a_tensor_has_one_value_where_no_step_writes_it() -> None:
    rows = {"X": np.array([[0.125, 0], [0.5, 0], [0.75, 0]], np.float32)}
    assert answers(nested(3, 3), rows) == {"Y": [[3], [3], [-75]]}
    with pytest.raises(
        Problems, match=r"test_rows.py:\d+:\d+: a tensor has one value where no step writes it, not 3 and 4"
    ):
        nested(3, 4).check()


def test_a_range_may_test_an_output_by_its_name_or_as_the_only_one() -> None:
    graph = Graph("between", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    quick, slow = small(x), large(x)
    with graph.when((quick.Y > 0.2) & (quick.Y < 0.8)):
        named = large(x)
    with graph.when((slow > -20) & (slow < 0)):
        only = large(x)
    graph.output("NAMED", graph.merge(named, otherwise=1))
    graph.output("ONLY", graph.merge(only, otherwise=1))
    rows = {"X": np.array([[0.125, 0], [0.5, 0]], np.float32)}
    assert answers(graph, rows) == {"NAMED": [[1], [-50]], "ONLY": [[-12.5], [1]]}


def test_a_cascade_runs_the_large_model_for_the_rows_that_need_it() -> None:
    seen = FakeModel(lambda x: x[:, :1] * -100)
    rows = np.array([[0.9, 0], [0.2, 0], [0.8, 0], [0.1, 0]], np.float32)
    with Engine(Faked(cascade(), {"large": seen})) as engine:
        found = engine.infer("cascade", {"X": rows})["Y"]
        np.testing.assert_allclose(found.ravel(), [0.9, -20.0, 0.8, -10.0], rtol=1e-6)
        assert seen.rows == [2]
        engine.infer("cascade", {"X": rows[:1]})
        assert seen.rows == [2]


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    for graph in (people(), cascade()):
        graph.save(tmp_path / graph.name)
        again = Graph.load(tmp_path / graph.name)
        assert again.config() == graph.config()
        again.check()


def test_the_error_of_an_item_names_it() -> None:
    with Engine(people()) as engine, pytest.raises(Exception, match=r"no such car") as caught:
        engine.infer("people", image(3, 50))
    assert "step 'name_car', item 1 of 3 at tests/authoring/test_rows.py" in str(caught.value)
    assert "inputs X [1,2]" in str(caught.value)


def test_a_request_with_too_many_items_names_the_place() -> None:
    with Engine(people()) as engine, pytest.raises(Invalid, match="the request has 11 items, at most 10") as caught:
        engine.infer("people", image(11))
    assert "`each find.CROPS, find.KIND`" in str(caught.value)
    assert "test_rows.py" in str(caught.value)


def test_items_of_many_requests_share_batches() -> None:
    """Three persons each, of eight requests at once: batches of four although a request never has four."""
    found = simulate(
        people(),
        arrivals=[Arrival(0.0)] * 8,
        items={"find.CROPS, find.KIND": 6},
        taken={"find.KIND = 0": 0.5, "find.KIND = 1": 0.5},
        takes_ms={"name_person": 5.0},
    )
    rows = [batch.rows for batch in found.batches_of("name_person")]
    assert sum(rows) == 24
    assert sum(rows) / len(rows) >= 3


def test_shares_and_items_of_a_simulation_are_those_of_the_graph() -> None:
    with pytest.raises(Invalid, match=r"taken names 'kind = 0', which is not in the graph \(did you mean"):
        simulate(people(), arrivals=[0], taken={"kind = 0": 0.5})
    with pytest.raises(Invalid, match="is a share from 0 to 1, not 2"):
        simulate(people(), arrivals=[0], taken={"find.KIND = 0": 2})
    with pytest.raises(Invalid, match="is a whole number from 0 on, not -1"):
        simulate(people(), arrivals=[0], items={"find.CROPS, find.KIND": -1})


def test_a_test_is_no_truth_value() -> None:
    graph = Graph("g")
    found = find(graph.input("IMAGE", "FP32[2]"))
    with pytest.raises(Invalid, match="a test has no value before a request is there"):
        bool(found.KIND == 0)


def test_conditions_of_numbers_are_joined() -> None:
    graph = Graph("g")
    score = small(graph.input("X", "FP32[2]")).Y
    assert ((score > 0.2) & (score < 0.8)).as_json() == {"tensor": "small.Y", "above": 0.2, "below": 0.8}
    assert (~(score < 1)).as_json() == {"tensor": "small.Y", "not": True, "below": 1}
    assert score.is_in(1, 2).as_json() == {"tensor": "small.Y", "equals": [1, 2]}
    with pytest.raises(Invalid, match="conditions in each other test two tensors"):
        (score > 0.2) & (score > 0.8)


def test_mistakes_have_the_line_of_python() -> None:
    graph = Graph("g", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    quick = small(x)
    with graph.when(quick.SURE):
        slow = large(x)
    graph.output("Y", slow)
    with pytest.raises(Problems, match=r"test_rows.py:\d+:5: in ensemble g, tensor 'Y' exists for some rows only"):
        graph.check()


def test_a_tensor_that_others_read_cannot_stand_for_the_rest() -> None:
    graph = Graph("g", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    with pytest.raises(Problems, match="`each` takes at least one tensor apart"), graph.each():
        pass
    graph.merge(x, otherwise=0)
    assert "input 'X' cannot be merged" in graph.problems[0].message


@model({"X": "FP32[2]"}, {"WORD": "INT32[-1]"}, max_batch_size=1)
def spell(crops: Any) -> Any:
    return np.zeros((1, 1 + int(crops[0, 0]) % 2), np.int32)


def test_a_request_whose_items_cannot_be_one_tensor_fails() -> None:
    graph = Graph("words", max_batch_size=8)
    found = find(graph.input("IMAGE", "FP32[2]"))
    with graph.each(found.CROPS) as crop:
        word = spell(crop).WORD
    graph.output("WORDS", word)
    with Engine(graph, python_execution="inline") as engine:
        with pytest.raises(ModelFailed, match=r"rows of tensor 'WORD' have different shapes, \[1\] and \[2\]"):
            engine.infer("words", {"IMAGE": [[2, 0]]})
        assert engine.infer("words", {"IMAGE": [[1, 0]]})["WORDS"].shape == (1, 1, 2)


TENFOLD = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array * 10)]) for array in arrays]
"""
RESHAPED = {
    "tenfold": 'backend: "python" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 4 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 4 }',
    "pairs": 'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 4 }'
    ' output { name: "P" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: 4 } } ensemble_scheduling {'
    ' step { model_name: "tenfold" model_version: -1'
    ' input_map { key: "X" value: "X" } output_map { key: "Y" value: "P" } } }',
    "twofold": 'backend: "python" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 2 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 2 }',
    "apart": 'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 4 }'
    ' output { name: "Z" data_type: TYPE_FP32 dims: [ -1, 2 ] } ensemble_scheduling {'
    ' step { model_name: "pairs" model_version: -1'
    ' input_map { key: "X" value: "X" } output_map { key: "P" value: "pairs" } }'
    ' step { model_name: "twofold" model_version: -1 each { tensor: "pairs" }'
    ' input_map { key: "X" value: "pairs" } output_map { key: "Y" value: "Z" } } }',
    "gathered": 'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }'
    ' output { name: "Z" data_type: TYPE_FP32 dims: [ -1, 2, 2 ] } ensemble_scheduling {'
    ' step { model_name: "pairs" model_version: -1 each { tensor: "X" }'
    ' input_map { key: "X" value: "X" } output_map { key: "P" value: "Z" } } }',
}


def write(folder: Path, configs: Mapping[str, str], **programs: str) -> None:
    """A repository of these configurations; `programs` are the model.py of the Python models."""
    for name, config in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    for name, program in programs.items():
        (folder / name / "1/model.py").write_text(program)


def test_items_are_of_the_shape_that_a_nested_ensemble_has_outside(tmp_path: Path) -> None:
    write(tmp_path, RESHAPED, tenfold=TENFOLD, twofold=TENFOLD)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with Engine(tmp_path, python_execution="inline") as engine:
        assert engine.infer("apart", {"X": rows})["Z"].tolist() == (rows * 100).reshape(2, 2, 2).tolist()
        found = engine.infer("gathered", {"X": np.stack([rows, rows + 1, rows], axis=1)})["Z"]
    wanted = np.stack([rows, rows + 1, rows], axis=1) * 10
    assert found.tolist() == wanted.reshape(2, 3, 2, 2).tolist()


ONE_BY_ONE = {
    "double": 'backend: "python" max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 5 } }'
    ' input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }',
    "list": 'platform: "ensemble" max_batch_size: 1 input { name: "X" data_type: TYPE_FP32 dims: [ -1, 1 ] }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 1 ] } ensemble_scheduling {'
    ' step { model_name: "double" model_version: -1 each { tensor: "X" }'
    ' input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }',
}
DOUBLE = TENFOLD.replace("* 10", "* 2")


def test_more_items_than_a_queue_holds_wait_for_each_other(tmp_path: Path) -> None:
    write(tmp_path, ONE_BY_ONE, double=DOUBLE)
    with Engine(tmp_path, python_execution="inline") as engine:
        items = np.arange(40, dtype=np.float32).reshape(1, 40, 1)
        assert engine.infer("list", {"X": items})["Y"].tolist() == (items * 2).tolist()


OPTIONAL = {
    "double": 'backend: "python" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 1 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 }',
    "perhaps": 'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 1 }'
    ' input { name: "LISTS" data_type: TYPE_FP32 dims: [ -1, 1 ] optional: true }'
    ' input { name: "MORE" data_type: TYPE_FP32 dims: [ -1, 1 ] optional: true }'
    ' input { name: "COUNT" data_type: TYPE_INT32 dims: 1 optional: true }'
    ' input { name: "SKIP" data_type: TYPE_BOOL dims: 1 optional: true }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 } output { name: "Z" data_type: TYPE_FP32 dims: 1 }'
    ' output { name: "ITEMS" data_type: TYPE_FP32 dims: [ -1, 1 ] } ensemble_scheduling {'
    ' step { model_name: "double" model_version: -1 when { tensor: "SKIP" }'
    ' input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
    ' step { model_name: "double" model_version: -1 when { tensor: "SKIP" otherwise: true }'
    ' input_map { key: "X" value: "X" } output_map { key: "Y" value: "Z" } }'
    ' step { model_name: "double" model_version: -1 each { tensor: [ "LISTS", "MORE" ] count: "COUNT" }'
    ' input_map { key: "X" value: "LISTS" } output_map { key: "Y" value: "ITEMS" } }'
    ' fill { tensor: "Y" value: -1 } fill { tensor: "Z" value: -1 } }',
}


def test_tensors_that_the_request_may_omit_decide_by_their_absence(tmp_path: Path) -> None:
    write(tmp_path, OPTIONAL, double=DOUBLE)
    x = {"X": np.array([[1], [2]], np.float32)}
    lists = {"LISTS": np.ones((2, 3, 1), np.float32), "MORE": np.ones((2, 3, 1), np.float32)}
    with Engine(tmp_path, python_execution="inline") as engine:

        def ask(**given: Any) -> dict[str, Any]:
            return {name: array.tolist() for name, array in engine.infer("perhaps", {**x, **given}).items()}

        assert ask() == {"Y": [[-1], [-1]], "Z": [[2], [4]], "ITEMS": [[], []]}
        assert ask(SKIP=np.array([[True], [False]]))["Y"] == [[2], [-1]]
        assert ask(**lists)["ITEMS"] == [[[2]] * 3] * 2
        assert ask(**lists, COUNT=np.array([[3], [1]], np.int32))["ITEMS"] == [[[2]] * 3, [[2], [0], [0]]]
        for given, text in (
            ({"LISTS": lists["LISTS"]}, "'LISTS', 'MORE' are taken apart together, and 'MORE' was not given"),
            ({**lists, "COUNT": np.array([[3], [4]], np.int32)}, "the count 'COUNT' is 4 of 3 items in row 1"),
            ({**lists, "MORE": np.ones((2, 2, 1), np.float32)}, "'LISTS' and 'MORE' are taken apart together"),
        ):
            with pytest.raises(Invalid, match=text) as caught:
                ask(**given)
            assert "`each LISTS, MORE`" in str(caught.value)


LEFT_OUT = {
    "base": 'backend: "python" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 1 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 } output { name: "K" data_type: TYPE_FP32 dims: 1 }',
    "silent": 'backend: "python" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 1 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 }',
    "maybe": 'platform: "ensemble" max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 1 }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 } ensemble_scheduling {'
    ' step { model_name: "base" model_version: -1 input_map { key: "X" value: "X" }'
    ' output_map { key: "Y" value: "Y" } output_map { key: "K" value: "K" } }'
    ' step { model_name: "silent" model_version: -1 when { tensor: "K" above: 0 }'
    ' input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }',
}


def test_a_conditional_step_that_leaves_its_output_out_gives_no_row_another_value(tmp_path: Path) -> None:
    one = '[pb_utils.Tensor("Y", array * 2)]'
    both = "[pb_utils.Tensor('Y', array), pb_utils.Tensor('K', array)]"
    write(tmp_path, LEFT_OUT, base=DOUBLE.replace(one, both), silent=DOUBLE.replace(one, "[]"))
    with Engine(tmp_path, python_execution="inline") as engine:
        assert engine.infer("maybe", {"X": [[0], [-1]]})["Y"].tolist() == [[0], [-1]]
        assert engine.infer("maybe", {"X": [[1], [2]]}) == {}  # left out as by a model alone
        with pytest.raises(ModelFailed, match="models left out tensor 'Y' for 1 of 2 rows"):
            engine.infer("maybe", {"X": [[0], [1]]})


def test_a_request_without_rows_has_an_answer_without_rows() -> None:
    empty = np.zeros((0, 2), np.float32)
    with Engine(cascade(), python_execution="inline") as engine:
        assert engine.infer("cascade", {"X": empty})["Y"].shape == (0, 1)
    graph = Graph("both", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    kind = graph.input("K", "INT32[1]")
    with graph.when(kind == 0):
        first = large(x)
    with graph.otherwise(kind):
        second = large(x)
    graph.output("Y", graph.merge(first, second))
    with Engine(graph, python_execution="inline") as engine:
        assert engine.infer("both", {"X": empty, "K": np.zeros((0, 1), np.int32)})["Y"].shape == (0, 1)
        found = engine.infer("both", {"X": np.ones((2, 2), np.float32), "K": np.array([[0], [1]], np.int32)})
        assert found["Y"].tolist() == [[-100], [-100]]


def test_an_unexpected_error_at_a_border_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("no such row")

    with Engine(cascade(), python_execution="inline") as engine:
        for name in ("merge", "open_space"):
            with monkeypatch.context() as patched:
                patched.setattr(rows, name, fail)
                patched.setattr(rows, "open_together", fail if name == "open_space" else rows.open_together)
                with pytest.raises(Internal, match=r"rows cannot be chosen or put together: IndexError: no such row"):
                    engine.infer("cascade", {"X": [[0.2, 0], [0.9, 0]]})
            assert engine.infer("cascade", {"X": [[0.2, 0], [0.9, 0]]})["Y"].shape == (2, 1)


async def test_skipped_steps_and_rows_of_spaces_are_counted_for_each_request() -> None:
    async with Engine(cascade(), python_execution="inline") as engine:

        async def ask(*numbers: float) -> None:
            await engine.infer("cascade", {"X": [[number, 0] for number in numbers]})

        async with trio.open_nursery() as nursery:
            for numbers in ((0.9,), (0.2,), (0.9,), (0.9, 0.8), (0.2, 0.9), (0.1,)):
                nursery.start_soon(ask, *numbers)
        (found,) = engine.graph_statistics("cascade")
    skipped = {node["name"]: node.get("skipped_count", 0) for node in found["nodes"]}
    assert skipped == {"small": 0, "large": 3}
    (space,) = found["spaces"]
    assert (space["requests"], space["rows"], space["parent_rows"]) == (6, 3, 8)


@model({"X": "FP32[2]"}, {"Y": "FP32[1]", "SURE": "BOOL[1]"})
def small_for_one(x: Any) -> Any:
    return x[:1], x[:1] > 0.5


def test_what_a_model_without_a_batch_dimension_wrote_for_all_rows_has_one() -> None:
    graph = Graph("cascade", max_batch_size=8)
    x = graph.input("X", "FP32[2]")
    quick = small_for_one(x)
    with graph.when(~(quick.SURE == True)):  # noqa: E712  # a test, not a comparison
        slow = large(x)
    y = graph.merge(slow, otherwise=quick.Y)
    graph.output("Y", y)
    graph.output("Z", large2(y))
    with Engine(graph, python_execution="inline") as engine:
        for x0, y0 in ((0.75, 0.75), (0.25, -25)):
            found = engine.infer("cascade", {"X": [[x0, 0]]})
            assert (found["Y"].tolist(), found["Z"].tolist()) == ([[y0]], [[y0 + 1]])


@model({"X": "FP32[1]"}, {"Y": "FP32[1]"}, max_batch_size=8)
def large2(x: Any) -> Any:
    return x + 1
