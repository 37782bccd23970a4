"""Nested ensembles with `reshape` whose inputs come from models with and without a batch dimension, and steps for some
rows of which one returns other rows than it got, and cached outputs that differ from their configuration.

All expectations of `NESTED` hold for Triton too, unless it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.triton_models import python_config, spec, write_model

BATCHES = "max_batch_size: 4"
DELAYED = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
X = spec("X", "FP32", "1")
RETURNS = """
def execute(self, requests):
    shape = {shape}
    return [respond(Y=np.full(shape, given(request, "X").flat[0], np.float32)) for request in requests]
"""
BY_VALUE = """
def execute(self, requests):
    shapes = {1: (1, 3), 2: (3, 1)}
    lead = (1,) * (given(requests[0], "X").ndim - 1)
    values = [given(request, "X").flat[0] for request in requests]
    return [respond(Y=np.full(lead + shapes[int(value)], value, np.float32)) for value in values]
"""
ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
TWICE = """
def execute(self, requests):
    return [respond(Y=np.concatenate([given(request, "X")] * 2)) for request in requests]
"""


SMALL = """
def execute(self, requests):
    arrays = [np.array(1, np.float32), np.ones((1, 1), np.int64), np.ones(5, np.float32), np.ones((1, 3), np.float32)]
    return [respond(Y=arrays[int(given(request, "X").flat[0])]) for request in requests]
"""


def reads(tensor: str, written: str = "Y") -> str:
    return f'input_map {{ key: "X" value: "{tensor}" }} output_map {{ key: "Y" value: "{written}" }}'


def ensemble(
    repository: Path, name: str, rows: int, given: str, returned: str, *steps: tuple[str, str], more: str = ""
) -> None:
    body = ", ".join(f'{{ model_name: "{step}" model_version: -1 {maps} }}' for step, maps in steps)
    head = f'platform: "ensemble"\nmax_batch_size: {rows}\ninput [ {given} ]\noutput [ {returned} ]\n'
    write_model(repository, name, f"{head}ensemble_scheduling {{ step [ {body} ] {more} }}\n")


def write_models(repository: Path) -> None:
    def model(name: str, given: str, returned: str, body: str, *more: str) -> None:
        config = python_config([spec("X", "FP32", given)], [spec("Y", "FP32", returned)], *more)
        write_model(repository, name, config, body)

    model("rows", "1", "-1", RETURNS.format(shape=(1, 3)), BATCHES)
    model("matrix", "1", "1, -1", RETURNS.format(shape=(1, 3)))
    model("by_value", "1", "-1, -1", BY_VALUE)
    model("varies", "1", "-1, -1", BY_VALUE, BATCHES, DELAYED)
    model("take_vector", "-1", "-1", ECHO)
    model("take_vectors", "-1", "-1", ECHO, BATCHES)
    model("take_rows", "1, -1", "1, -1", ECHO, BATCHES)
    flat = spec("X", "FP32", "1, -1", "reshape { shape: [ -1 ] }")
    deep = spec("X", "FP32", "-1", "reshape { shape: [ 1, -1 ] }")
    ensemble(repository, "flat", 0, flat, spec("Y", "FP32", "-1"), ("take_vector", reads("X")))
    ensemble(repository, "flat_rows", 4, flat, spec("Y", "FP32", "-1"), ("take_vectors", reads("X")))
    ensemble(repository, "deep", 4, deep, spec("Y", "FP32", "1, -1"), ("take_rows", reads("X")))
    for name, rows, step, inner, returned in (
        ("rows_flat", 0, "rows", "flat", "-1"),
        ("matrix_flat", 0, "matrix", "flat", "-1"),
        ("matrix_deep", 0, "matrix", "deep", "-1, 1, -1"),
        ("matrix_deep_rows", 4, "matrix", "deep", "1, -1"),
        ("by_value_flat", 0, "by_value", "flat", "-1"),
        ("varies_flat", 4, "varies", "flat_rows", "-1"),
    ):
        steps = (step, reads("X", "a")), (inner, reads("a"))
        ensemble(repository, name, rows, X, spec("Y", "FP32", returned), *steps)
    model("kept", "1", "-1", SMALL, BATCHES, "response_cache { enable: true }")
    steps = ("kept", reads("X", "a")), ("take_vectors", reads("a"))
    ensemble(repository, "kept_rows", 4, X, spec("Y", "FP32", "-1"), *steps)
    column = spec("Y", "FP32", "-1", "reshape { shape: [ 1, -1 ] }")
    ensemble(repository, "by_value_sent", 0, X, column, ("by_value", reads("X")))


def write_conditions(repository: Path) -> None:
    def model(name: str, body: str) -> None:
        config = python_config([X], [spec("Y", "FP32", "1")], "max_batch_size: 8")
        write_model(repository, name, config, body)

    model("twice", TWICE)
    model("echo", ECHO)
    when = 'when { tensor: "X" above: 0 } '
    fill = 'fill { tensor: "Y" value: -1 }'
    steps = ("twice", when + reads("X", "a")), ("echo", when + reads("a"))
    ensemble(repository, "some_rows_twice", 4, X, spec("Y", "FP32", "1"), *steps, more=fill)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, on_triton: bool, triton_like: Callable[..., str]) -> str:
    repository = tmp_path_factory.mktemp("nested") / "models"
    write_models(repository)
    if not on_triton:
        write_conditions(repository)
    return triton_like(repository, "--cache-config=local,size=1000000")


def ask(url: str, model: str, *values: float, lead: bool = True) -> tuple[int, Any]:
    shape = [len(values), 1] if lead else [len(values)]
    tensor = {"name": "X", "datatype": "FP32", "shape": shape, "data": list(values)}
    answer = httpx.post(f"{url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=30, verify=False)
    found = answer.json()
    if "error" in found:
        return answer.status_code, found["error"]
    return answer.status_code, (found["outputs"][0]["shape"], found["outputs"][0]["data"])


NESTED = {
    "rows_flat": [3],
    "matrix_flat": [3],
    "matrix_deep": [1, 1, 3],
    "matrix_deep_rows": [1, 1, 3],
}


@pytest.mark.server
@pytest.mark.parametrize("model", NESTED)
def test_a_nested_ensemble_reshapes_what_a_model_with_other_batching_returned(url: str, model: str) -> None:
    found = ask(url, model, 7, lead=model.endswith("rows"))
    assert found == (200, (NESTED[model], [7, 7, 7]))


@pytest.mark.server
@pytest.mark.parametrize("model", ["by_value_flat", "by_value_sent", "varies_flat"])
def test_a_tensor_that_cannot_be_reshaped_fails_its_own_request_with_its_shape(
    url: str, model: str, on_triton: bool
) -> None:
    if on_triton:
        pytest.skip("Triton's texts name other shapes, and it sends another shape than its ensemble declares")
    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.map(lambda value: ask(url, model, value, lead=model == "varies_flat"), [1, 2])
    assert good == (200, ([1, 3] if model == "varies_flat" else [3], [1, 1, 1]))
    assert bad[0] == (500 if model == "by_value_sent" else 400)
    assert "3,1]" in bad[1]


@pytest.mark.server
@pytest.mark.parametrize(
    ("value", "made"), [(0, "FP32 of shape []"), (1, "INT64 of shape [1,1]"), (2, "FP32 of shape [5]")]
)
def test_a_step_does_not_read_a_cached_output_that_it_could_not_read_when_it_was_made(
    url: str, value: int, made: str, on_triton: bool
) -> None:
    if on_triton and value == 0:
        pytest.skip("Triton ends")
    assert ask(url, "kept", value)[0] == 200
    assert ask(url, "kept", 3) == ask(url, "kept_rows", 3) == (200, ([1, 3], [1, 1, 1]))
    for _ in range(2):
        status, error = ask(url, "kept_rows", value)
        if on_triton:
            assert status in (400, 500)
        else:
            assert status == 500
            assert f"model 'kept' returned output 'Y' as {made}" in error


@pytest.mark.server
@pytest.mark.parametrize("values", [(1.0,), (1.0, 0.0), (0.0, 1.0, 2.0)])
def test_a_step_for_some_rows_returns_one_for_each(url: str, values: tuple[float, ...], on_triton: bool) -> None:
    if on_triton:
        pytest.skip("Triton has no steps for some rows")
    status, error = ask(url, "some_rows_twice", *values)
    assert status == 500
    count = sum(value > 0 for value in values)
    assert f"a tensor of {count} rows is needed for when, each and what joins them" in error
    assert f"model 'twice' returned output 'Y' as FP32 of shape [{2 * count},1]" in error
