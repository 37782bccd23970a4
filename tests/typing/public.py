"""Read by mypy and never executed: the types of the public API."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

from flowserve import Engine
from flowserve.errors import FlowserveError, Invalid, Place, Problem, Problems, Unavailable
from flowserve.values import DType, Request, Response, TensorSpec


def a_spec_says_its_type_and_shape(spec: TensorSpec) -> None:
    assert_type(spec.dtype, DType)
    assert_type(spec.dims, tuple[int, ...])
    assert_type(spec.dtype.numpy, np.dtype[Any])


def a_request_is_arrays_by_name(image: np.ndarray[Any, np.dtype[Any]]) -> Request:
    return Request({"IMAGE": image}, outputs=("TEXT",), timeout_us=1_000)


def a_response_is_arrays_by_name(response: Response) -> None:
    assert_type(response.outputs, dict[str, np.ndarray[Any, np.dtype[Any]]])


def every_failure_is_one_family(error: Invalid | Unavailable) -> FlowserveError:
    return error


def problems_keep_their_places(problems: Problems) -> list[Place | None]:
    assert_type(problems.problems, tuple[Problem, ...])
    return [problem.place for problem in problems.problems]


def a_blocking_engine_answers_at_once(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    with Engine("models") as engine:
        assert_type(engine.infer("m", {"X": array}, priority=1), dict[str, np.ndarray[Any, np.dtype[Any]]])
        for answer in engine.stream("m", {"X": array}):
            assert_type(answer["Y"], np.ndarray[Any, np.dtype[Any]])


async def an_engine_under_trio_is_awaited(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    async with Engine("models", load=["m"]) as engine:
        assert_type(await engine.infer("m", {"X": array}), dict[str, np.ndarray[Any, np.dtype[Any]]])
        engine.infer("m", {"X": array}, prority=1)  # type: ignore[call-arg, unused-coroutine]  # a typo is seen
