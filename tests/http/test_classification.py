"""Classification outputs: ranking and the format of a class."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flowserve.errors import Invalid
from flowserve.memory import raw
from flowserve.runtime.engine.classification import ELEMENTS_MAX, check_classifiable, classify
from flowserve.runtime.engine.engine import Engine
from flowserve.values import DType
from tests.support.engine import add_function


def ranked(values: Any, count: int, labels: list[str] | None = None, *, batching: bool = True) -> Any:
    return classify("OUT", np.asarray(values), count, labels or [], batching=batching).tolist()


def test_each_row_is_ranked_by_itself_and_printed_as_cpp_prints_it() -> None:
    rows = np.array([[0.25, 1.5, -3.0], [1e7, 2.0, 3.0]], np.float32)
    assert ranked(rows, 2) == [[b"1.500000:1", b"0.250000:0"], [b"10000000.000000:0", b"3.000000:2"]]
    assert ranked(np.array([[7, 9]], np.int64), 1) == [[b"9:1"]]


def test_labels_follow_the_index_where_there_is_one() -> None:
    assert ranked([[1.0, 3.0, 2.0]], 3, ["cat", "dog"]) == [[b"3.000000:1:dog", b"2.000000:2", b"1.000000:0:cat"]]


def test_at_most_all_values_are_classes_and_other_dimensions_are_flattened() -> None:
    assert ranked([[[1, 4], [3, 2]]], 9) == [[b"4:1", b"3:2", b"2:3", b"1:0"]]
    assert ranked([[[1, 4], [3, 2]]], 1, batching=False) == [b"4:1"]
    assert classify("OUT", np.empty((0, 3)), 2, [], batching=True).shape == (0, 2)
    assert classify("OUT", np.empty((2, 0)), 2, [], batching=True).shape == (2, 0)


def test_equal_values_keep_their_order_and_nan_is_last() -> None:
    assert ranked([[2, 5, 5, 2]], 4) == [[b"5:1", b"5:2", b"2:0", b"2:3"]]
    assert ranked([[float("nan"), -float("inf"), 1.0]], 3) == [[b"1.000000:2", b"-inf:1", b"nan:0"]]


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_the_limits_of_every_integer_type_are_ranked_correctly(kind: str) -> None:
    ends = np.iinfo(kind)
    values = np.array([[0, ends.max, ends.min, 1, ends.max - 1]], kind)
    indices = [int(one.split(b":")[1]) for one in ranked(values, 5)[0]]
    assert values[0][indices].tolist() == sorted(values[0].tolist(), reverse=True)


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.BYTES, DType.FP16, DType.BF16])
def test_types_without_largest_values_are_refused(dtype: DType) -> None:
    with pytest.raises(Invalid, match=f"class result not available for output due to unsupported type '{dtype}'"):
        check_classifiable("OUT", dtype)
    with pytest.raises(Invalid, match="unsupported type"):
        classify("OUT", np.zeros((1, 2), dtype.numpy), 1, [], batching=True)
    assert np.dtype(ml_dtypes.bfloat16) == DType.BF16.numpy


def test_rows_that_take_long_to_rank_are_refused() -> None:
    with pytest.raises(Invalid, match=f"{ELEMENTS_MAX + 1} elements in a row"):
        classify("OUT", np.zeros((1, ELEMENTS_MAX + 1), np.int8), 1, [], batching=True)


def test_too_many_classes_for_the_event_loop_are_refused_for_any_number_of_rows() -> None:
    scores = np.zeros((8, ELEMENTS_MAX // 4), np.int8)
    with pytest.raises(Invalid, match="8 rows of 250000 classes"):
        classify("OUT", scores, ELEMENTS_MAX, [], batching=True)
    assert classify("OUT", scores, 2, [], batching=True).shape == (8, 2)


async def test_a_client_gets_classes_as_json_and_binary(engine: Engine, api: Any) -> None:
    add_function(engine, "score", [lambda array: array], dims=(3,))
    one = {"name": "IN", "datatype": "FP32", "shape": [2, 3], "data": [0.5, 3, 1, -1, -2, -3]}

    async def ask(**parameters: Any) -> Any:
        outputs = [{"name": "OUT", "parameters": {"classification": 2, **parameters}}]
        body = json.dumps({"inputs": [one], "outputs": outputs}).encode()
        client = await api.connect()
        head = f"POST /v2/models/score/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = await client.ask(head.encode() + body)
        assert answer.status == 200, answer.body
        return answer

    expected = ["3.000000:1", "1.000000:2", "-1.000000:0", "-2.000000:1"]
    answer = await ask()
    assert json.loads(answer.body)["outputs"] == [
        {"name": "OUT", "datatype": "BYTES", "shape": [2, 2], "data": expected}
    ]
    answer = await ask(binary_data=True)
    cut = int(answer.headers["inference-header-content-length"])
    block = answer.body[cut:]
    (told,) = json.loads(answer.body[:cut])["outputs"]
    size = {"binary_data_size": len(block)}
    assert told == {"name": "OUT", "datatype": "BYTES", "shape": [2, 2], "parameters": size}
    assert [each.decode() for each in raw.decode_bytes(block, 4, name="OUT", model="score")] == expected
