"""The backend `callable`: arguments of functions, and their results and exceptions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve.backends.base import ModelFiles, Results, Work
from flowserve.backends.functions import CallableBackend, LoadedFunction, offer
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.errors import Invalid, ModelFailed, Problems
from flowserve.graph.function_model import FunctionModel, model
from flowserve.memory import raw
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, Request
from tests.support.backends import tensors


def config(declared: FunctionModel, **parameters: str) -> ModelConfig:
    return ModelConfig(
        name=declared.name,
        backend="callable",
        platform="",
        max_batch_size=declared.max_batch_size,
        inputs=declared.inputs,
        outputs=declared.outputs,
        source=SourceMap("m/config.pbtxt"),
        parameters=parameters,
    )


def run(declared: FunctionModel, *members: list[Array]) -> Results:
    """Runs one batch. A member is a list of arrays, one per input."""
    written = config(declared)
    instance = LoadedFunction(written, declared).instance("m_0", InstanceGroup("m"))
    instance.open()
    batches = declared.max_batch_size > 0
    block = [np.concatenate(column) if batches else column[0] for column in zip(*members, strict=True)]
    rows = [len(member[0]) if batches else 1 for member in members]
    stops = np.cumsum([0, *rows]).tolist()
    inputs: list[list[Tensor | None]] = [
        [Tensor(one, a, b) if batches else Tensor(one) for a, b in pairwise(stops)] for one in block
    ]
    names = tuple(spec.name for spec in declared.outputs)
    counts = [max(count, 1) for count in rows]
    work = Work(
        [Column.of([*column], counts) for column in inputs], counts, [Request({})] * len(rows), [names] * len(rows)
    )
    results = instance.run(work, lambda: 0)
    instance.close()
    return results


def arrays(results: Results, output: int = 0) -> list[Any]:
    return [tensor.array.tolist() for tensor in results.outputs[output] if tensor is not None]


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def function(answer: Callable[..., Any], outputs: dict[str, str] | None = None, **more: Any) -> FunctionModel:
    return model({"X": "FP32[2]"}, outputs or {"Y": "FP32[2]"}, name="m", **{"max_batch_size": 8, **more})(answer)


def test_a_batch_is_one_array_without_a_copy() -> None:
    seen: list[Array] = []

    def double(x: Array) -> Array:
        seen.append(x)
        return x * 2

    results = run(function(double), [row(1, 2)], [np.ones((2, 2), np.float32)])
    assert [x.shape for x in seen] == [(3, 2)]
    assert arrays(results) == [[[2, 4]], [[2, 2], [2, 2]]]
    assert list(results.copied) == [0]


def test_a_masked_array_is_read_as_its_elements() -> None:
    results = run(function(lambda x: np.ma.masked_array(x * 2, mask=x > 1)), [row(1, 2)])
    assert np.frombuffer(raw.block(tensors(results.outputs[0])[0].array), np.float32).tolist() == [2, 4]


def test_inputs_are_read_only() -> None:
    def spoil(x: Array) -> Array:
        x[0] = 0
        return x

    with pytest.raises(ModelFailed, match="model 'm' failed: ValueError: assignment destination is read-only"):
        run(function(spoil), [row(1, 2)])


def test_without_batching_a_function_gets_one_request() -> None:
    results = run(function(lambda x: x + 1, max_batch_size=0), [np.zeros(2, np.float32)])
    assert arrays(results) == [[1, 1]]


def test_a_member_without_rows_gets_no_rows_back() -> None:
    results = run(function(lambda x: x + 1), [np.zeros((0, 2), np.float32)], [row(1, 2)])
    assert arrays(results) == [[], [[2, 3]]]


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: (x, x.sum(1, keepdims=True)),
        lambda x: [x, x.sum(1, keepdims=True)],
        lambda x: {"SUM": x.sum(1, keepdims=True), "Y": x},
    ],
)
def test_several_outputs_are_a_tuple_or_a_mapping(answer: Callable[[Array], Any]) -> None:
    results = run(function(answer, {"Y": "FP32[2]", "SUM": "FP32[1]"}), [row(1, 2)])
    assert (arrays(results, 0), arrays(results, 1)) == ([[[1, 2]]], [[[3]]])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x.astype(np.float64), "output 'Y': its function promises FP32 and returned float64"),
        (lambda x: x[:, :1], r"output 'Y': its function promises shape \[1,2\] and returned \[1,1\]"),
        (lambda x: np.concatenate([x, x]), r"promises shape \[1,2\] and returned \[2,2\]"),
        (lambda x: (x, x), "its function returned 2 arrays; its outputs are Y"),
        (lambda x: {"Z": x}, "its function returned no Y; it has Z"),
        (lambda x: None, "returned NoneType where an array was expected"),
        (lambda x: 1 / 0, "model 'm' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_an_invalid_result_is_a_failure_of_the_model(answer: Callable[[Array], Any], said: str) -> None:
    with pytest.raises(ModelFailed, match=said):
        run(function(answer), [row(1, 2)])


def test_a_function_that_ends_the_program_ends_only_its_batch() -> None:
    def leave(x: Array) -> Array:
        raise SystemExit(3)

    with pytest.raises(ModelFailed, match="SystemExit: 3"):
        run(function(leave), [row(1, 2)])


def test_strings_are_returned_as_bytes_and_other_objects_are_refused() -> None:
    declared = function(lambda x: np.array([["größe", b"b"]], object), {"Y": "BYTES[2]"})
    assert arrays(run(declared, [row(1, 2)])) == [[["größe".encode(), b"b"]]]
    fixed = function(lambda x: np.array([["a", "b"]]), {"Y": "BYTES[2]"})
    assert arrays(run(fixed, [row(1, 2)])) == [[[b"a", b"b"]]]
    with pytest.raises(ModelFailed, match="returned int in an array of BYTES"):
        run(function(lambda x: np.array([[1, 2]], object), {"Y": "BYTES[2]"}), [row(1, 2)])


@pytest.mark.parametrize("answer", [lambda kept: kept, lambda kept: kept[:], lambda kept: kept.reshape(1, 2)])
def test_an_array_that_a_function_keeps_is_copied(answer: Callable[[Array], Array]) -> None:
    kept = np.zeros((1, 2), np.float32)
    results = run(function(lambda x: answer(kept)), [row(1, 2)])
    kept[...] = 7
    assert arrays(results) == [[[0, 0]]]


@pytest.mark.parametrize("answer", [lambda x: (x + 1,) * 2, lambda x: ((y := x + 1), y[:, ::-1])])
@pytest.mark.parametrize("is_pure", [True, False])
def test_outputs_share_no_memory_since_readers_may_write_to_them(answer: Callable[[Array], Any], is_pure: bool) -> None:
    results = run(function(answer, {"Y": "FP32[2]", "Z": "FP32[2]"}, is_pure=is_pure), [row(1, 2)])
    first, second = (column[0] for column in results.outputs)
    assert first is not None
    assert second is not None
    assert not np.shares_memory(first.array, second.array)


@pytest.mark.parametrize("answer", [lambda made: made, lambda made: made.ravel().reshape(1, 2)])
def test_a_new_array_is_taken_without_a_copy(answer: Callable[[Array], Array]) -> None:
    addresses: list[int] = []

    def fresh(x: Array) -> Array:
        made = x + 1
        addresses.append(made.ctypes.data)
        return answer(made)

    tensor = run(function(fresh), [row(1, 2)]).outputs[0][0]
    assert tensor is not None
    assert [tensor.block.ctypes.data] == addresses


@pytest.mark.parametrize(
    ("declared", "written", "inline"),
    [("thread", None, False), ("auto", None, True), ("inline", None, True), ("inline", "thread", False)],
)
def test_a_function_runs_inline_only_if_it_is_declared_so(declared: Any, written: str | None, inline: bool) -> None:
    made = function(lambda x: x, execution=declared)
    parameters = {"execution": written} if written else {}
    assert LoadedFunction(config(made, **parameters), made).may_run_inline is inline


def loaded_from(folder: Path, text: str) -> LoadedFunction:
    (folder / "m" / "1").mkdir(parents=True, exist_ok=True)
    (folder / "m" / "1" / "model.py").write_text(text)
    written = ModelConfig("m", "callable", "", 0, (), (), SourceMap("m/config.pbtxt"))
    return CallableBackend().load(written, ModelFiles(folder, folder / "m", 1), {})


WRITTEN = """
import numpy as np
from flowserve import model

@model({"X": "FP32[2]"}, {"Y": "FP32[2]"}, max_batch_size=4, is_pure=False)
def function(x):
    return x
"""


def test_a_model_py_has_the_function_and_its_decorator_completes_the_configuration(tmp_path: Path) -> None:
    assert not loaded_from(tmp_path, WRITTEN).is_pure
    bare = ModelConfig("m", "callable", "", 0, (), (), SourceMap("m/config.pbtxt"))
    said = CallableBackend().complete(bare, ModelFiles(tmp_path, tmp_path / "m", 1))
    assert (said.max_batch_size, said.dynamic_batching) == (4, True)
    assert said.inputs is not None
    assert [str(spec.dtype) for spec in said.inputs] == ["FP32"]


@pytest.mark.parametrize(
    ("declared", "written", "is_pure"),
    [(True, None, True), (False, None, False), (True, "false", False), (False, "true", True)],
)
def test_a_function_may_run_again_unless_its_decorator_or_the_configuration_forbids_it(
    declared: bool, written: str | None, is_pure: bool
) -> None:
    made = function(lambda x: x, is_pure=declared)
    parameters = {} if written is None else {"pure": written}
    assert LoadedFunction(config(made, **parameters), made).is_pure is is_pure
    saved = made.config()["parameters"]
    assert saved.get("pure", {}) == ({} if declared else {"string_value": "false"})


def test_another_value_of_pure_is_refused_with_its_place(tmp_path: Path) -> None:
    made = function(lambda x: x)
    files = ModelFiles(tmp_path, tmp_path / "m", 1)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(offer(made))
    with pytest.raises(Problems, match="parameter 'pure' must be true or false, found 'no'"):
        CallableBackend().verify(config(made, pure="no"), files)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import no_such_module",
            "m/1/model.py needs the module 'no_such_module', which cannot be found; put its folder",
        ),
        ("1 / 0", "m/1/model.py cannot be imported: ZeroDivisionError"),
        ("def function(x): return x", "m/1/model.py has function called 'function'; it has to be a function decorated"),
        ("", "m/1/model.py has nothing called 'function'"),
    ],
)
def test_a_model_py_without_a_function_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        loaded_from(tmp_path, text)


def test_a_function_of_this_process_is_found_while_it_is_referenced(tmp_path: Path) -> None:
    declared = function(lambda x: x)
    text = offer(declared)
    assert loaded_from(tmp_path, text).is_pure
    del declared
    with pytest.raises(Invalid, match="model 'm': its function is gone"):
        loaded_from(tmp_path, text)


def test_a_read_only_view_of_a_buffer_that_the_function_fills_again_is_copied() -> None:
    buffer = np.zeros((8, 2), np.float32)

    def fill(x: Array) -> Array:
        buffer[: len(x)] = x + 1
        view = buffer[: len(x)]
        view.flags.writeable = False
        return view

    declared = function(fill)
    first = run(declared, [row(1, 2)])
    run(declared, [row(5, 6)])
    assert arrays(first) == [[[2, 3]]]


def test_constants_and_arguments_are_returned_without_a_copy() -> None:
    constant = np.ones((1, 2), np.float32)
    constant.flags.writeable = False
    seen: list[Array] = []

    def both(x: Array) -> tuple[Array, Array]:
        seen.append(x)
        return x[:1], constant

    results = run(function(both, {"Y": "FP32[2]", "Z": "FP32[2]"}), [row(1, 2)])
    for column, given in zip(results.outputs, (seen[0], constant), strict=True):
        assert np.shares_memory(tensors(column)[0].array, given)


def test_the_names_that_a_function_returned_are_not_told_to_the_clients_of_a_shared_batch() -> None:
    declared = function(lambda x: {str(value): x for value in x.ravel().tolist()})
    with pytest.raises(ModelFailed) as failed:
        run(declared, [row(1, 2)], [row(3, 4)])
    assert "its function returned no Y; it has 4 outputs" in str(failed.value)
