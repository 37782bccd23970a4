"""Decoupled functions in graphs with `when` and `each`: the responses of each row."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flowserve import Engine, Graph, model
from flowserve.errors import ModelFailed
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.values import Array

ONE = "FP32[1]"


@model({"A": ONE}, {"X": ONE}, max_batch_size=4, decoupled=True)
def twice(a: Array) -> Iterator[Array]:
    for k in range(2):
        yield a * 10 + k


@model({"A": ONE}, {"X": ONE}, max_batch_size=4, decoupled=True)
def again(a: Array) -> Iterator[Array]:
    for k in range(2):
        yield a * 10 + k


@model({"A": ONE}, {"X": ONE}, max_batch_size=4, decoupled=True)
def three_rows(a: Array) -> Iterator[Array]:
    yield np.repeat(a, 3, axis=0)


def numbers(graph: Graph, **inputs: Any) -> list[float]:
    with Engine(graph) as engine:
        given = {name: np.array(rows, np.float32) for name, rows in inputs.items()}
        return [float(response["X"].item()) for response in engine.stream(graph.name, given)]


@pytest.mark.parametrize(
    ("tests", "responses"),
    [
        ([1, 0, 1], [-1, 10, 11, 30, 31]),
        ([0, 0, 0], [-1, -1, -1]),
        ([1, 1, 1], [10, 11, 20, 21, 30, 31]),
    ],
)
def test_rows_that_fail_a_test_of_an_input_have_one_response_each(tests: list[int], responses: list[int]) -> None:
    """The rows that are excluded are known before any step of the request runs."""
    graph = Graph("rows")
    a, test = graph.input("A", ONE), graph.input("TEST", ONE)
    with graph.when(test > 0):
        x = twice(a)
    graph.output("X", graph.merge(x, otherwise=-1))
    found = numbers(graph, A=[[1], [2], [3]], TEST=[[one] for one in tests])
    assert sorted(found) == sorted(responses)


def test_rows_that_fail_a_test_behind_a_decoupled_step_have_one_response_for_each_of_its() -> None:
    graph = Graph("rows")
    a, test = graph.input("A", ONE), graph.input("TEST", ONE)
    first = twice(a)
    with graph.when(test > 0):
        x = again(first)
    graph.output("X", graph.merge(x, otherwise=-1))
    found = numbers(graph, A=[[1], [2]], TEST=[[1], [0]])
    assert sorted(found) == [-1, -1, 100, 101, 110, 111]


def test_items_whose_responses_fail_a_test() -> None:
    graph = Graph("items")
    a = graph.input("A", "FP32[-1,1]")
    with graph.each(a) as item:
        first = twice(item)
        with graph.when(first > 15):
            second = again(first)
        x = graph.merge(second, otherwise=-1)
    graph.output("X", x)
    assert sorted(numbers(graph, A=[[[1], [2]]])) == [-1, -1, 200, 201, 210, 211]


def test_a_response_for_an_item_has_one_row() -> None:
    graph = Graph("items")
    a = graph.input("A", "FP32[-1,1]")
    with graph.each(a) as item:
        x = three_rows(item)
    graph.output("X", x)
    with pytest.raises(ModelFailed, match="tensor 'X' has 3 rows for 1 items"):
        numbers(graph, A=[[[1], [2]]])


@model({"A": ONE}, {"X": ONE}, max_batch_size=1)
def no_seven(a: Array) -> Array:
    if (a == 70).any():
        raise ValueError("seven")
    return a


def test_a_request_that_fails_while_its_steps_wait_for_slots_is_in_no_reference_cycle() -> None:
    graph = Graph("items", max_inflight_requests=1)
    a = graph.input("A", "FP32[-1,1]")
    with graph.each(a) as item:
        x = no_seven(twice(item))
    graph.output("X", x)
    plain = Graph("plain")
    plain.output("X", no_seven(plain.input("A", ONE)))
    with Engine(graph, plain) as engine:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(ModelFailed, match="seven"):
                    list(engine.stream("items", {"A": np.array([[[7], [2], [3], [4]]], np.float32)}))
            engine.infer("plain", {"A": np.zeros((1, 1), np.float32)})  # the last decision of the requests is over
            assert not [one for one in gc.get_objects() if isinstance(one, RegionFrame)]
        finally:
            gc.enable()
