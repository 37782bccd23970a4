"""Graphs written in Python: wiring, mistakes and their places, pictures."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowserve
from flowserve import Graph, Problems, model, model_folder, onnx_model
from flowserve.errors import Invalid, Problem
from flowserve.render.formats import SUFFIXES
from flowserve.repository.layout import scan
from flowserve.runtime.loading.reading import read_repositories
from flowserve.testing import Faked, FakeModel
from flowserve.values import Array
from tests.support.onnx_files import onnx_identity


@model({"X": "FP32[4]"}, {"Y": "FP32[4]", "SUM": "FP32[1]"}, max_batch_size=8)
def halve(x: Array) -> tuple[Array, Array]:
    return x / 2, x.sum(1, keepdims=True)


@model({"A": "FP32[4]", "B": "FP32[1]"}, {"Z": "FP32[4]"}, max_batch_size=4)
def scale(a: Array, b: Array) -> Array:
    return a * b


def line(offset: int = 0) -> int:
    """The line of the call, `before` lines earlier."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno - offset


def mistakes(graph: Graph) -> list[Problem]:
    with pytest.raises(Problems) as refused:
        graph.check()
    return [*refused.value.problems]


def good(name: str = "g") -> Graph:
    graph = Graph(name)
    half, total = halve(graph.input("X", "FP32[4]"))
    graph.output("Z", scale(half, total))
    return graph


def test_a_step_can_be_called_in_order_or_by_name_or_wired_by_names() -> None:
    by_name = Graph("g")
    made = halve(X=by_name.input("X", "FP32[4]"))
    by_name.output("Z", scale(B=made["SUM"], A=made.Y))
    as_a_file = Graph("g")
    as_a_file.input("X", "FP32[4]")
    as_a_file.step(halve, {"X": "X"}, {"Y": "halve.Y", "SUM": "halve.SUM"})
    as_a_file.step(scale, {"A": "halve.Y", "B": "halve.SUM"}, {"Z": "Z"})
    as_a_file.output("Z")
    assert good() == by_name == as_a_file
    assert good().to_text() == by_name.to_text() == as_a_file.to_text()


def test_graphs_with_different_files_are_not_equal() -> None:
    other = good()
    other.output("SUM", scale(other.input("A", "FP32[4]"), other.input("B", "FP32[1]")))
    assert good() != other
    assert good("g") != good("h")
    assert good() != Graph("g", max_batch_size=1)


def test_a_graphs_batch_size_is_its_models_minimum_by_default() -> None:
    assert good().max_batch_size == 4
    smaller = Graph("g", max_batch_size=2)
    smaller.output("Z", scale(smaller.input("A", "FP32[4]"), smaller.input("B", "FP32[1]")))
    assert smaller.to_text().startswith("ensemble g, version 1, batches up to 2")


def test_the_second_step_of_a_model_has_its_own_tensors() -> None:
    graph = Graph("g")
    once = halve(graph.input("X", "FP32[4]"))
    again = halve(once.Y)
    graph.output("Z", scale(again.Y, once.SUM))
    assert "halve#2" in graph.to_text()
    assert graph.config()["ensemble_scheduling"]["step"][1]["output_map"] == {"Y": "halve#2.Y"}


def test_graphs_nest_and_the_inner_one_is_checked_with_the_outer() -> None:
    outer = Graph("outer")
    outer.output("Z", good("inner")(outer.input("X", "FP32[4]")))
    assert [node["ensemble"] for node in json.loads(outer.to_json())["nodes"]] == ["inner", "inner"]
    inner = good("inner")
    inner.output("LOST")
    broken_at = line(1)
    outer = Graph("outer")
    outer.output("Z", inner(outer.input("X", "FP32[4]")).Z)
    first, second = mistakes(outer)
    assert (first.rule, first.place and first.place.line) == ("G10", broken_at)
    assert second.rule == "G3"


def test_three_mistakes_are_reported_at_once_with_their_lines() -> None:
    graph = Graph("broken")
    whole = graph.input("WHOLE", "INT64[4]")
    made = halve(whole)
    wrong_type = line(1)
    graph.output("Z", scale(made.Y, BB=made.SUM))
    typo = line(1)
    graph.output("LOST")
    no_producer = line(1)
    found = [(problem.rule, problem.place and problem.place.line) for problem in mistakes(graph)]
    assert found == [("G14", wrong_type), ("G5", typo), ("G7", typo), ("G10", no_producer)]
    places = {problem.place.file for problem in mistakes(graph) if problem.place}
    assert places == {"tests/authoring/test_graph.py" if Path("tests/authoring").is_dir() else "test_graph.py"}


def test_the_same_mistakes_in_files_have_the_same_messages(tmp_path: Path) -> None:
    good("broken").save(tmp_path)
    config = tmp_path / "broken" / "config.pbtxt"
    text = config.read_text()
    text = text.replace("TYPE_FP32", "TYPE_INT64", 1).replace('key: "B"', 'key: "BB"')
    config.write_text(text + 'output { name: "LOST" data_type: TYPE_FP32 dims: -1 }')
    graph = Graph("broken")
    made = halve(graph.input("X", "INT64[4]"))
    graph.output("Z", scale(made.Y, BB=made.SUM))
    graph.output("LOST")
    refused = read_repositories([tmp_path]).resolution.failed["broken"]
    assert isinstance(refused, Problems)
    in_files = sorted((problem.rule, problem.message, problem.hint) for problem in refused.problems)
    in_python = sorted((problem.rule, problem.message, problem.hint) for problem in mistakes(graph))
    assert in_files == in_python
    assert [rule for rule, *_ in in_python] == ["G10", "G14", "G5", "G7"]


def test_an_output_that_a_part_does_not_have_is_a_mistake_like_the_others() -> None:
    graph = Graph("g")
    made = halve(graph.input("X", "FP32[4]"))
    graph.output("Z", scale(made.Y, made.SUMM))
    (problem,) = mistakes(graph)
    assert (problem.rule, problem.hint) == ("G6", 'did you mean "SUM"?')


def test_mistakes_specific_to_python_are_reported_with_the_others() -> None:
    other, graph = Graph("other"), Graph("g")
    x = graph.input("X", "FP32[4]")
    graph.input("X", "FP32[4]")
    graph.input("Q", "FLOAT[4]")
    made = halve(x, x)
    graph.output("COPY", x)
    graph.output("A", made.Y)
    graph.output("B", made.Y)
    graph.output("C", made)
    graph.output("D", scale(other.input("A", "FP32[4]"), made.SUM).Z)
    scale(made.Y, other.input("B", "FP32[1]"), A=made.Y)
    texts = [str(problem) for problem in mistakes(graph) if problem.rule == "B2"]
    for expected in (
        "graph 'g' has input 'X' already",
        "tensor 'Q': there is no data type 'FLOAT'",
        "'halve' has 1 inputs (X), and is called on 2",
        "input 'X' cannot be output as it is",
        "a tensor has one name: output 'B' is 'A' already",
        "'halve' has 2 outputs; say which: Y, SUM",
        "input 'A' of 'scale' is given twice",
        "tensor 'B' is of graph 'other', not of 'g'",
    ):
        assert any(expected in text for text in texts), expected


def test_a_graph_that_would_contain_itself_is_refused_at_its_line() -> None:
    outer, inner = good("outer"), good("inner")
    outer.output("W", inner(outer.input("W2", "FP32[4]")))
    for graph in (inner, outer):
        with pytest.raises(Problems, match=f"graph '{graph.name}' cannot contain itself"):
            outer(graph.input("V", "FP32[4]"), graph.input("W", "FP32[4]"))


def test_the_cost_of_nested_graphs_is_not_exponential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two outputs each, and two steps each of the inner graph: a naive lookup would quadruple at every level."""
    asked = 0

    def counted(name: str) -> property:
        def ask(part: object) -> Any:
            nonlocal asked
            asked += 1
            return vars(part)[name]

        return property(ask)

    for name in ("outputs", "max_batch_size"):
        monkeypatch.setattr(type(halve), name, counted(name), raising=False)

    def asks(depth: int) -> int:
        nonlocal asked
        asked = 0
        inner: Any = halve
        for level in range(depth):
            outer = Graph(f"level{level}")
            once, _ = inner(outer.input("X", "FP32[4]"))
            twice, total = inner(once)
            outer.output("Y", twice)
            outer.output("SUM", total)
            inner = outer
        inner.config()
        return asked

    assert asks(8) <= 3 * asks(4)


def test_graphs_nested_too_deeply_are_refused_at_their_line() -> None:
    part: Any = good("g0")
    with pytest.raises(Problems, match="graph 'g100' nests graphs 101 deep; at most 100 are allowed"):
        for number in range(1, 1100):
            graph = Graph(f"g{number}")
            graph.output("Z", part(graph.input("X", "FP32[4]")))
            part = graph


def test_an_input_used_directly_as_an_output_is_one_mistake() -> None:
    graph = Graph("g")
    graph.output("Y", graph.input("X", "FP32[4]"))
    with pytest.raises(Problems) as raised:
        graph.check()
    assert [problem.rule for problem in raised.value.problems] == ["B2"]


def test_two_parts_of_one_name_are_a_mistake() -> None:
    inner = good("scale")
    graph = Graph("g")
    made = inner(graph.input("X", "FP32[4]"))
    graph.output("Z", scale(made, graph.input("B", "FP32[1]")))
    assert "two parts of graph 'g' are called 'scale'" in str(mistakes(graph)[0])


@pytest.mark.parametrize("name", ["../outside", "a/b", "", ".."])
def test_a_name_that_is_no_valid_folder_name_is_a_mistake(name: str, tmp_path: Path) -> None:
    assert mistakes(good(name))[0].rule == "B9"
    (tmp_path / "net.onnx").write_bytes(onnx_identity())
    if name:
        with pytest.raises(Problems, match="cannot be the name of a model"):
            onnx_model(tmp_path / "net.onnx", name=name)


def test_the_error_of_a_part_called_on_arrays_names_the_correct_call() -> None:
    with pytest.raises(Problems, match=r"called on tensors of a graph, not on ndarray \(a model's function computes"):
        halve(np.zeros((1, 4), np.float32))  # type: ignore[arg-type]
    with pytest.raises(Problems, match="not without any"):
        halve()
    np.testing.assert_array_equal(halve.function(np.ones((1, 4), np.float32))[1], [[4]])


def wrong_type(value: object) -> Any:
    """The value, as an argument of a type that mypy would refuse."""
    return value


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda g, x: Graph(wrong_type(None)), "the name of a graph is a text, and not NoneType"),
        (lambda g, x: g.input(3, "FP32[4]"), "the name of an input is a text, and not int"),
        (lambda g, x: g.output(3, x), "the name of an output is a text, and not int"),
        (lambda g, x: g.output("Y", np.zeros(3)), "what is read is a tensor of the graph, and not ndarray"),
        (
            lambda g, x: g.step(len, {}, {}),
            "a step is of a model or a graph, and not builtin_function_or_method (@flow",
        ),
        (lambda g, x: g.step(halve, "X", {}), "the inputs of a step are a dict, and not str"),
        (lambda g, x: g.step(halve, {"X": x}, {"Y": x}), "the name of a tensor is a text, and not Tensor"),
        (
            lambda g, x: model(wrong_type(["FP32[4]"]), {}),
            "the tensors of a function are a dict, and not list (as in {'X': ",
        ),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_at_its_line(wrong: Callable[[Any, Any], object], said: str) -> None:
    graph = Graph("g")
    x = graph.input("X", "FP32[4]")
    with pytest.raises(Problems) as refused:
        wrong(graph, x)
    assert said in str(refused.value)
    assert refused.value.problems[0].rule == "B1"
    assert Path(__file__).name in str(refused.value.problems[0].place)


def test_a_runtime_failure_names_the_users_line_of_python() -> None:
    graph = Graph("g")
    half, _ = halve(graph.input("X", "FP32[4]"))
    graph.output("Z", scale(half, graph.input("B", "FP32[1]")))
    wired = f"{Path(__file__).name}:{line(1)}:"
    given = {"X": np.ones((1, 4), np.float32), "B": np.ones((1, 1), np.float32)}
    with flowserve.Engine(Faked(graph, {"scale": FakeModel(ValueError("no luck"))})) as engine:
        with pytest.raises(flowserve.FlowserveError, match="no luck") as failed:
            engine.infer("g", given)
    assert re.search(rf"\(step 'scale' at \S*{re.escape(wired)}", str(failed.value))


def test_an_unfinished_graph_is_reported_in_terms_of_python() -> None:
    assert {(problem.rule, problem.hint) for problem in mistakes(Graph("empty"))} == {
        ("M33", "graph.output(name, tensor) says what it answers"),
        ("M83", "a model that is called on tensors of the graph is a step"),
    }
    graph = Graph("g")
    halve(graph.input("X", "FP32[4]"))
    called = line(1)
    unread = [problem for problem in mistakes(graph) if problem.rule == "M84"]
    assert [(problem.hint, problem.place and problem.place.line) for problem in unread] == [
        ("its outputs have no reader", called)
    ]


def test_an_engine_takes_graphs_but_no_parts() -> None:
    with pytest.raises(Invalid, match="an engine is of repositories' folders and of graphs, not of <model 'halve'"):
        flowserve.Engine(halve)  # type: ignore[arg-type]


def test_a_value_that_a_configuration_cannot_hold_is_reported_at_its_line() -> None:
    graph = Graph("g", max_inflight_requests=-1, max_batch_size=np.int64(4))  # type: ignore[arg-type]
    made = line(1)
    graph.output("Z", scale(graph.input("A", "FP32[99999999999999999999]"), graph.input("B", None)))  # type: ignore[arg-type]  # both are the mistakes
    wired = line(1)
    told = sorted((problem.place.line, problem.message) for problem in mistakes(graph) if problem.place)
    assert [at for at, _ in told] == [made, wired, wired]
    assert "Integer out of range (-1)" in told[0][1]
    assert "Integer out of range (99999999999999999999)" in told[1][1]
    assert "tensor 'B': None is not a data type with dims" in told[2][1]


def test_a_declaration_needs_integers_and_no_coroutine_function() -> None:
    async def later(x: Array) -> Array:
        return x

    numbers: dict[str, Any] = {"max_batch_size": "4", "instances": -1, "max_queue_delay_us": 1.5}
    with pytest.raises(Problems) as refused:
        model({"X": "FP32[4]"}, {"Z": "FP32[4]"}, **numbers)(later)
    said = [problem.message for problem in refused.value.problems]
    assert said == [
        "max_batch_size is a whole number from 0 on, not '4'",
        "max_queue_delay_us is a whole number from 0 on, not 1.5",
        "instances is a whole number from 0 on, not -1",
        "function 'later' is async; an ordinary one may block, for it has a thread",
    ]


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({"X": "FP32[4]", "Y": "FP32[4]"}, {"Z": "FP32[4]"}, "function 'once' does not take 2 arrays: it is once(x"),
        ({"X": "FP23[4]"}, {"Z": "FP32[4]"}, "there is no data type 'FP23' (did you mean \"FP32\"?)"),
        ({"X": "STRING[1]"}, {"Z": "FP32[4]"}, "there is no data type 'STRING' (strings are BYTES here)"),
        ({"X": "FP32[4]"}, {"Z": "FP32[4]?"}, "output 'Z' is optional; a function returns all of its outputs"),
        ({"X": "FP32[*]"}, {"Z": "FP32[4]"}, "tensor 'X' is ragged ([*]), and nothing is batched: write -1"),
        ({"X": "FP32"}, {"Z": "FP32[4"}, "tensor 'X': 'FP32' is not a data type with dims"),
    ],
)
def test_a_wrong_declaration_is_refused_at_its_line(inputs: dict[str, str], outputs: dict[str, str], said: str) -> None:
    def once(x: Array) -> Array:
        return x

    with pytest.raises(Problems) as refused:
        model(inputs, outputs)(once)
    declared = line(1)
    assert said in str(refused.value)
    assert all(problem.place and problem.place.line == declared for problem in refused.value.problems)


def test_a_generator_function_is_declared_decoupled_and_has_no_batching_options() -> None:
    def some(x: Array) -> Iterator[Array]:
        yield x

    with pytest.raises(Problems, match=r"function 'some' yields its answers: say decoupled=True \[B3\]"):
        model({"X": "FP32[4]"}, {"Z": "FP32[4]"})(some)
    with pytest.raises(Problems) as refused:
        declare = model(
            {"X": "FP32[*]"},
            {"Z": "FP32[4]"},
            max_batch_size=4,
            max_queue_delay_us=5,
            execution="inline",
            decoupled=True,
        )
        declare(some)
    said = str(refused.value)
    for text in (
        "tensor 'X' is ragged ([*])",
        "max_queue_delay_us waits for a larger batch",
        "on a thread, not inline",
    ):
        assert text in said


def test_a_graphs_own_tensors_are_not_ragged_and_its_outputs_not_optional() -> None:
    graph = good()
    graph.input("R", "FP32[*]")
    graph.output("O", spec="FP32[4]?")
    said = [str(problem) for problem in mistakes(graph)]
    assert any("tensor 'R' of graph 'g' is ragged: 'FP32[*]' (only models batch; write -1)" in text for text in said)
    assert any("output 'O' of graph 'g' is optional" in text for text in said)


def test_rules_about_one_configuration_hold_for_python_too() -> None:
    graph = Graph("g", max_batch_size=-1)
    graph.output("Z", scale(graph.input("A", "FP32[4]"), graph.input("B", "FP32[0]")))
    found = {problem.rule for problem in mistakes(graph)}
    assert {"M8", "M23"} <= found


def test_an_onnx_file_is_a_part_whose_tensors_are_the_files(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(onnx_identity())
    net = onnx_model(tmp_path / "net.onnx", max_batch_size=16, max_queue_delay_us=50, instances=3)
    assert (net.name, net.max_batch_size) == ("net", 16)
    graph = Graph("g")
    graph.output("OUT", net(graph.input("IN", f"{net.inputs[0].dtype}[{','.join(map(str, net.inputs[0].dims))}]")))
    assert "net/1, onnxruntime, dynamic batches up to 16, waits 50 us, 3 instances on CPU" in graph.to_text()
    graph.save(tmp_path / "saved")
    assert not (tmp_path / "saved/net/1/model.onnx").is_symlink()
    assert Graph.load(tmp_path / "saved") == graph


def test_a_model_folder_whose_file_contradicts_its_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net/1").mkdir(parents=True)
    (tmp_path / "net/1/model.onnx").write_bytes(onnx_identity())
    (tmp_path / "net/config.pbtxt").write_text(
        'input { name: "NONE" data_type: TYPE_FP32 dims: 4 }\noutput { name: "Y" data_type: TYPE_FP32 dims: 4 }\n'
    )
    with pytest.raises(Problems, match=r"net/config.pbtxt:1:9: unexpected inference input 'NONE'"):
        model_folder(tmp_path / "net")


def test_a_part_that_cannot_be_read_is_refused_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"there is no file '.*none.onnx'") as refused:
        onnx_model(tmp_path / "none.onnx")
    assert refused.value.problems[0].place is not None
    assert refused.value.problems[0].place.line == line(2)
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(Problems, match=r'did you mean "bad\.onnx"'):
        onnx_model(tmp_path / "bat.onnx")
    with pytest.raises(Problems, match="a relative path starts at the current folder, "):
        onnx_model("nowhere/none.onnx")
    with pytest.raises(Problems) as refused:
        onnx_model(tmp_path / "bad.onnx")
    assert refused.value.problems[0].place is not None
    assert refused.value.problems[0].place.line == line(2)
    with pytest.raises(Problems, match="is no model's folder"):
        model_folder(tmp_path)
    good().save(tmp_path / "saved")
    with pytest.raises(Problems, match=r"is the folder of a graph \(flowserve.Graph.load makes it a part"):
        model_folder(tmp_path / "saved" / "g")


def test_the_examples_are_parts_and_graphs(root: Path) -> None:
    label = model_folder(root / "graphs/detect_language_label")
    assert label.name == "detect_language_label"
    loaded = Graph.load(root / "graphs/read_text")
    reading = read_repositories([root / "graphs"])
    graphs = reading.resolution.graphs
    assert loaded.to_text() == flowserve_text(graphs["read_text"][1], reading.configs)


def flowserve_text(graph: object, configs: object) -> str:
    from flowserve.render.text import render_text

    return render_text(graph, configs)  # type: ignore[arg-type]


def test_a_graph_is_drawn_in_every_format(tmp_path: Path) -> None:
    graph = good()
    for suffix in set(SUFFIXES) - {".png"}:
        graph.draw(tmp_path / f"g{suffix}")
    assert (tmp_path / "g.svg").read_text() == graph.to_svg() == graph._repr_svg_()
    assert (tmp_path / "g.mmd").read_text() == graph.to_mermaid()
    assert (tmp_path / "g.gv").read_text() == graph.to_dot()
    assert (tmp_path / "g.html").read_text() == graph.to_html()
    pytest.importorskip("resvg_py", reason="needs resvg")
    assert graph.to_png().startswith(b"\x89PNG")


def test_a_notebook_shows_the_picture_or_the_mistakes() -> None:
    shown = good()._repr_mimebundle_()
    assert set(shown) == {"image/svg+xml", "text/vnd.mermaid", "text/plain"}
    broken = good()
    broken.output("LOST")
    assert "[G10]" in broken._repr_mimebundle_()["text/plain"]


def test_saving_overwrites_nothing_and_writes_all_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "scale").mkdir()
    with pytest.raises(Problems, match=r"scale' exists already \(nothing is overwritten"):
        good().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["scale"]
    broken = good()
    broken.output("LOST")
    with pytest.raises(Problems, match="G10"):
        broken.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_functions_that_cannot_be_imported_cannot_be_saved_but_can_be_served(tmp_path: Path) -> None:
    factor = 2.0

    @model({"X": "FP32[4]"}, {"Y": "FP32[4]"})
    def closure(x: Array) -> Array:
        return x * factor

    short = model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, name="short")(lambda x: x)
    graph = Graph("g")
    graph.output("Y", short(closure(graph.input("X", "FP32[4]"))))
    with pytest.raises(Problems) as refused:
        graph.save(tmp_path / "saved")
    text = str(refused.value)
    assert "the function of model 'closure' cannot be saved: it is defined inside test_functions_that" in text
    assert "the function of model 'short' cannot be saved: it is a lambda" in text
    assert not (tmp_path / "saved").exists()
    private = graph.write_private()
    assert {folder.name for folder in scan(private.path)} == {"closure", "short", "g"}
    assert not read_repositories([private.path]).resolution.failed


def test_a_private_repository_is_removed_with_its_owner() -> None:
    private = good().write_private()
    path = private.path
    assert path.is_dir()
    del private
    assert not path.exists()


def test_errors_of_graph_load(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"which graph of .* there is none"):
        Graph.load(tmp_path)
    good().save(tmp_path)
    good("h").save(tmp_path / "more")
    with pytest.raises(Problems, match="'scale' is a model and no graph"):
        Graph.load(tmp_path / "scale")
    with pytest.raises(Problems, match=r"there is no graph 'another' in .* \(it has g, halve, scale\) \[B8\]"):
        Graph.load(tmp_path, "another")
    (tmp_path / "scale" / "config.pbtxt").unlink()
    (tmp_path / "scale" / "1" / "model.py").unlink()
    (tmp_path / "scale" / "1").rmdir()
    with pytest.raises(Problems, match="contains models that are not available or ambiguous: scale"):
        Graph.load(tmp_path)
    config = tmp_path / "g" / "config.pbtxt"
    config.write_text(re.sub(r"data_type: \w+", "", config.read_text(), count=1))
    with pytest.raises(Problems, match=r"g/config.pbtxt:\d+:\d+: tensor 'X' has no data type \[B8\]"):
        Graph.load(tmp_path)


def test_the_public_api_is_complete() -> None:
    assert all(getattr(flowserve, name) is not None for name in flowserve.__all__)
    assert set(dir(flowserve)) >= {"Graph", "model"}
    with pytest.raises(AttributeError, match="has no attribute 'Grph'"):
        flowserve.Grph  # noqa: B018
