"""Read by mypy and never executed: graphs in Python have types, and wiring mistakes are type errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np

from flowserve import Graph, Tensor, model, model_folder, onnx_model
from flowserve.graph.builder import Outputs
from flowserve.graph.function_model import FunctionModel

Array = np.ndarray[Any, np.dtype[Any]]


@model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8, execution="inline")
def double(x: Array) -> Array:
    return x * 2


def a_decorated_function_is_a_part() -> None:
    assert_type(double, FunctionModel)


def calling_a_part_gives_its_outputs(graph: Graph) -> None:
    tensor = graph.input("X", "FP32[4]")
    assert_type(tensor, Tensor)
    made = double(tensor)
    assert_type(made, Outputs)
    assert_type(made["Y"], Tensor)
    assert_type(made.Y, Tensor)
    graph.output("Y", made)
    first, second = onnx_model("net.onnx", max_batch_size=4)(X=tensor)
    assert_type(first, Tensor)
    graph.output("Z", model_folder("models/z")(first, second))
    graph.output("W", Graph("inner")(tensor))


def arrays_are_not_tensors(array: Array) -> None:
    double(array)  # type: ignore[arg-type]


@model({"TO": "INT32[1]"}, {"NUMBER": "INT32[1]"}, decoupled=True)
def count(to: Array) -> Iterator[Array]:
    yield to


def a_function_of_many_answers_is_a_part_as_others_are() -> None:
    assert_type(count, FunctionModel)


def an_execution_is_one_of_three() -> None:
    model({}, {}, execution="process")  # type: ignore[arg-type]


def pictures_are_text_and_png_is_bytes(graph: Graph) -> None:
    assert_type(graph.to_svg(), str)
    assert_type(graph.to_png(), bytes)
    assert_type(graph.to_svg(direction="TB", fold=True), str)
    graph.to_svg(direction="UP")  # type: ignore[arg-type]
    assert_type(graph.serve(http_port=0), int)
