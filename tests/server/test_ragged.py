"""Ragged batches as clients see them: requests of different lengths in one run of an ONNX model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowserve.values import DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

FIVE_TOGETHER = "dynamic_batching { preferred_batch_size: [ 5 ] max_queue_delay_microseconds: 300000 }"

# Each request gets the whole batch: all its elements, and the batch input.
TELL = """
max_batch_size: 16
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "ALL" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INDICES" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32 source_input: "INPUT" }
]
%s
"""

DOUBLE = """
max_batch_size: 16
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_output [ { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" } ]
%s
"""

PIPE = """
platform: "ensemble"
max_batch_size: 16
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "LENGTH" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "py_drop_first" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "rest" } },
  { model_name: "double" model_version: -1
    input_map { key: "IN" value: "rest" } output_map { key: "OUT" value: "twice" } },
  { model_name: "double" model_version: -1
    input_map { key: "IN" value: "twice" } output_map { key: "OUT" value: "OUT" } },
  { model_name: "length" model_version: -1
    input_map { key: "IN" value: "twice" } output_map { key: "LENGTH" value: "length" } },
  { model_name: "py_add_half" model_version: -1
    input_map { key: "IN" value: "length" } output_map { key: "OUT" value: "LENGTH" } }
] }
"""

LENGTH = """
max_batch_size: 16
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "LENGTH" data_type: TYPE_FP32 dims: [ 1 ] } ]
batch_input [ { kind: BATCH_ITEM_SHAPE target_name: "SHAPE" data_type: TYPE_FP32 source_input: "IN" } ]
dynamic_batching { }
"""

PY_RAGGED = """
max_batch_size: 16
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
%s
"""


def tell_file() -> bytes:
    """ALL and INDICES have a row for each request: the same whole list in each."""
    nodes = [
        onnx_node("Shape", ["INDEX"], ["requests"]),
        onnx_node("Constant", [], ["one"], value_ints=[1]),
        onnx_node("Concat", ["requests", "one"], ["rows"], axis=0),
        onnx_node("Unsqueeze", ["INPUT", "zero"], ["flat"]),
        onnx_node("Unsqueeze", ["INDEX", "zero"], ["index"]),
        onnx_node("Tile", ["flat", "rows"], ["ALL"]),
        onnx_node("Tile", ["index", "rows"], ["INDICES"]),
    ]
    nodes.insert(0, onnx_node("Constant", [], ["zero"], value_ints=[0]))
    inputs = [onnx_value("INPUT", DType.FP32, ["N"]), onnx_value("INDEX", DType.FP32, ["R"])]
    outputs = [onnx_value("ALL", DType.FP32, ["R", "N"]), onnx_value("INDICES", DType.FP32, ["R", "S"])]
    return onnx_model(nodes, inputs, outputs)


def double_file() -> bytes:
    flat = [onnx_value(name, DType.FP32, ["N"]) for name in ("IN", "OUT")]
    return onnx_model([onnx_node("Add", ["IN", "IN"], ["OUT"])], flat[:1], flat[1:])


def length_file() -> bytes:
    """LENGTH is the batch input; the elements are not read."""
    nodes = [
        onnx_node("ReduceSum", ["IN"], ["sum"], keepdims=0),
        onnx_node("Sub", ["sum", "sum"], ["nothing"]),
        onnx_node("Add", ["SHAPE", "nothing"], ["LENGTH"]),
    ]
    inputs = [onnx_value("IN", DType.FP32, ["N"]), onnx_value("SHAPE", DType.FP32, ["R", 1])]
    return onnx_model(nodes, inputs, [onnx_value("LENGTH", DType.FP32, ["R", 1])])


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory, add_model: Any, make_python: Any, wire_to: Any) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("ragged")
    three = FIVE_TOGETHER.replace("5", "3")
    add_model(folder, "tell", TELL % three, {"1/model.onnx": tell_file()})
    add_model(folder, "double", DOUBLE % "dynamic_batching { }", {"1/model.onnx": double_file()})
    add_model(folder, "double_five", DOUBLE % FIVE_TOGETHER, {"1/model.onnx": double_file()})
    add_model(folder, "length", LENGTH, {"1/model.onnx": length_file()})
    add_model(folder, "py_drop_first", PY_RAGGED % FIVE_TOGETHER, make_python('return answer(OUT=given("IN")[:, 1:])'))
    half = PY_RAGGED.replace("dims: [ -1 ]", "dims: [ 1 ]").replace(" allow_ragged_batch: true", "")
    add_model(folder, "py_add_half", half % "dynamic_batching { }", make_python('return answer(OUT=given("IN") + 0.5)'))
    add_model(folder, "pipe", PIPE)
    with serving(folder) as served:
        yield wire_to(served)


def request(wire: Any, model: str, rows: list[list[float]], name: str = "IN") -> bytes:
    flat = [number for row in rows for number in row]
    tensor = {"name": name, "shape": [len(rows), len(rows[0])], "datatype": "FP32", "data": flat}
    body: bytes = wire.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
    return body


def outputs(answer: Any) -> dict[str, tuple[list[int], list[float]]]:
    """Name -> shape and values."""
    assert answer.status == 200, answer.body
    return {each["name"]: (each["shape"], each["data"]) for each in answer.json["outputs"]}


def test_three_requests_of_three_four_and_five_elements_are_one_list_of_twelve(wire: Any) -> None:
    rows = [[[1.0] * 3], [[2.0] * 4], [[3.0] * 5]]
    requests = [request(wire, "tell", row, "INPUT") for row in rows]
    answers, batches = wire.batches_during(["tell"], lambda: wire.together(requests))
    assert batches == {"tell": {3: 1}}
    told = [outputs(answer) for answer in answers]
    assert told[0] == told[1] == told[2], "they were all told of the one batch"
    shape, elements = told[0]["ALL"]
    assert shape == [1, 12]
    # The order of arrival on three connections varies; the elements of one request stay together.
    order = list(dict.fromkeys(elements))
    assert elements == [number for number in order for _ in range({1.0: 3, 2.0: 4, 3.0: 5}[number])]
    ends = [sum(int(number) + 2 for number in order[: position + 1]) for position in range(3)]
    assert told[0]["INDICES"] == ([1, 3], ends)
    assert ends[-1] == 12


@pytest.mark.fault("D13")
def test_each_request_of_a_ragged_batch_gets_its_own_list(wire: Any) -> None:
    lists = [[1.0, 2.0], [], [3.0, 4.0, 5.0, 6.0], [7.0], [8.0, 9.0, 10.0]]
    requests = [request(wire, "double_five", [each]) for each in lists]
    answers, batches = wire.batches_during(["double_five"], lambda: wire.together(requests))
    assert batches == {"double_five": {5: 1}}
    assert [outputs(answer)["OUT"] for answer in answers] == [([1, len(e)], [2 * x for x in e]) for e in lists]


def test_a_request_of_two_rows_shares_a_batch_and_keeps_its_rows(wire: Any) -> None:
    given = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0]], [[8.0, 9.0], [10.0, 11.0]]]
    requests = [request(wire, "double_five", rows) for rows in given]
    answers, batches = wire.batches_during(["double_five"], lambda: wire.together(requests))
    assert batches == {"double_five": {5: 1}}
    assert [outputs(answer)["OUT"] for answer in answers] == [
        ([2, 3], [2, 4, 6, 8, 10, 12]),
        ([1, 1], [14]),
        ([2, 2], [16, 18, 20, 22]),
    ]


def test_batches_stay_whole_in_a_pipeline_with_ragged_steps(wire: Any) -> None:
    lists = [[0.0, 1.0, 2.0], [0.0], [0.0, 3.0, 4.0, 5.0, 6.0], [0.0, 7.0], [0.0, 8.0, 9.0, 10.0]]
    requests = [request(wire, "pipe", [each]) for each in lists]
    steps = ["py_drop_first", "double", "length", "py_add_half"]
    answers, batches = wire.batches_during(steps, lambda: wire.together(requests))
    found = [outputs(answer) for answer in answers]
    assert [each["OUT"] for each in found] == [([1, len(e) - 1], [4 * x for x in e[1:]]) for e in lists]
    assert [each["LENGTH"] for each in found] == [([1, 1], [len(e) - 0.5]) for e in lists]
    assert batches == {"py_drop_first": {5: 1}, "double": {5: 2}, "length": {5: 1}, "py_add_half": {5: 1}}
