"""The execution place changes no response: in a process, on a thread, on the event loop, or moved there while it
serves.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import triton_to_np_dtype

from flowserve.testing.serve import Served
from tests.support.forked import serving


@pytest.fixture(scope="module")
def elsewhere(repository: Path) -> Iterator[dict[str, Served]]:
    """Two more servers of the same repository, by the place of its Python models, started together."""

    def start(place: str) -> Served:
        return stack.enter_context(serving(repository, "--python-execution", place))

    places = ("thread", "inline")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield dict(zip(places, pool.map(start, places), strict=True))


@pytest.fixture(scope="module")
def inline(elsewhere: dict[str, Served]) -> Served:
    return elsewhere["inline"]


@pytest.fixture(scope="module")
def threaded(elsewhere: dict[str, Served]) -> Served:
    return elsewhere["thread"]


@pytest.fixture(scope="module")
def inline_wire(inline: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(inline)


@pytest.fixture(scope="module")
def threaded_wire(threaded: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(threaded)


EXECUTION = 'parameters { key: "execution" value { string_value: "%s" } }'

TELLS_ITS_PLACE = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1, 1 ] }, { name: "ON_LOOP" data_type: TYPE_BOOL dims: [ 1 ] } ]
"""


def row(*numbers: float) -> list[list[float]]:
    return [list(numbers)]


QUESTIONS: list[tuple[str, list[list[float]]]] = [
    ("join", row()),
    ("grumpy", row(1, 2, 3, 4)),
    ("grumpy", row(-1, 2, 3, 4)),
    ("grumpy", row(1, 2, 3, 4000)),
    ("fragile", row(-10, 2, 3, 4)),
    ("fragile", row(5, 6, 7, 8)),
    ("diamond", row(5, 6, 7, 8)),
    ("nested", row(0.1, 0.2, 0.3, 0.4)),
    ("py_FP64", row(0.1)),
    ("nobody", row(1)),
]


def test_python_models_return_the_same_in_every_execution_place(
    wire: Any, threaded_wire: Any, inline_wire: Any
) -> None:
    for model, rows in QUESTIONS:
        datatype = "FP64" if model == "py_FP64" else "FP32"
        request = wire.infer_request(model, rows, datatype)
        with ThreadPoolExecutor() as pool:
            answered = pool.map(type(wire).together, (wire, threaded_wire, inline_wire), [[request]] * 3)
        told = {(answer.status, _placeless(answer.body)) for (answer,) in answered}
        assert len(told) == 1, (model, told)


def _placeless(body: bytes) -> bytes:
    """The text without the addresses that an error may contain."""
    return re.sub(rb"0x[0-9a-f]+", b"", body)


@pytest.mark.parametrize("place", ["wire", "threaded_wire", "inline_wire"])
def test_batches_of_python_models_stay_whole_in_every_place(place: str, request: pytest.FixtureRequest) -> None:
    wire = request.getfixturevalue(place)
    requests = [wire.infer_request("diamond", row(i, i, i, i)) for i in range(16)]
    models = ["gather", "plus_one", "times_three", "join"]
    answers, batches = wire.batches_during(models, lambda: wire.together(requests))
    assert [answer.data for answer in answers] == [[(2 * i + 1) + 6 * i] * 4 for i in range(16)]
    assert batches == {model: {16: 1} for model in models}


@pytest.mark.parametrize("wire_name", ["BOOL", "INT64", "FP16", "BF16", "BYTES"])
def test_every_data_type_round_trips_in_every_execution_place(
    client: triton.InferenceServerClient, threaded: Served, inline: Served, wire_name: str
) -> None:
    given = triton.InferInput("IN", [2, 3], wire_name)
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(triton_numpy(wire_name))
    given.set_data_from_numpy(array)
    here = client.infer(f"py_{wire_name}", [given]).as_numpy("OUT")
    for served in (threaded, inline):
        with triton.InferenceServerClient(served.address) as other:
            there = other.infer(f"py_{wire_name}", [given]).as_numpy("OUT")
        assert there.dtype == here.dtype
        assert there.tolist() == here.tolist()


def triton_numpy(wire_name: str) -> Any:
    return np.dtype("S1") if wire_name == "BYTES" else triton_to_np_dtype(wire_name)


def test_an_onnx_model_returns_the_same_in_every_execution_place(
    tmp_path: Path,
    serve: Callable[..., Served],
    wire_to: Callable[[Served], Any],
    add_model: Callable[..., Path],
    make_arithmetic: Callable[..., bytes],
) -> None:
    """In three places: always a thread, always the event loop, and the one measured to be cheaper."""
    for place in ("thread", "inline", "auto"):
        config = f"max_batch_size: 16\n{EXECUTION % place}"
        add_model(tmp_path, place, config, {"1/model.onnx": make_arithmetic("Mul", 3)})
    add_model(tmp_path, "unsaid", "", {"1/model.onnx": make_arithmetic("Mul", 3)})
    wire = wire_to(serve(tmp_path))
    for number in range(30):  # well past the runs after which a cheap model is moved
        requests = [wire.infer_request(name, row(*[number] * 4)) for name in ("thread", "inline", "auto", "unsaid")]
        answers = wire.together(requests)
        assert [answer.data for answer in answers] == [[3.0 * number] * 4] * 4


def test_a_cheap_model_that_allows_it_moves_to_the_event_loop(
    tmp_path: Path,
    serve: Callable[..., Served],
    wire_to: Callable[[Served], Any],
    add_model: Callable[..., Path],
    make_python: Callable[..., dict[str, str | bytes]],
) -> None:
    """The model reports its thread: the event loop runs on the main thread."""
    files = make_python("""
        import threading
        on_loop = threading.current_thread() is threading.main_thread()
        return answer(OUT=given("IN"), ON_LOOP=np.array([on_loop]))
    """)
    for place in ("thread", "inline", "auto"):
        add_model(tmp_path, place, TELLS_ITS_PLACE + EXECUTION % place, files)
    wire = wire_to(serve(tmp_path))

    def is_on_loop(name: str) -> bool:
        outputs = {one["name"]: one["data"] for one in wire.infer(name, row(7)).json["outputs"]}
        assert outputs["OUT"] == [7.0]
        (found,) = outputs["ON_LOOP"]
        return bool(found)

    assert not is_on_loop("auto"), "nothing is measured yet"
    wire.until(lambda: is_on_loop("auto"), "the cheap model moves")
    assert is_on_loop("inline")
    assert not any(is_on_loop("thread") for _ in range(10))


SLEEP_NS = 50_000_000
SLEEPS = 'time.sleep(0.05); return answer(OUT=given("IN"))'
# Python code without a pause: other threads must get the interpreter lock in between.
BURNS = """until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
        return answer(OUT=given("IN"))"""
ONE_BY_ONE = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]
instance_group [ { count: 1 } ]
"""


def test_compute_time_and_queue_time_are_separated_in_every_execution_place(
    tmp_path: Path,
    add_model: Callable[..., Path],
    make_python: Callable[[str], dict[str, str | bytes]],
    wire_to: Callable[[Served], Any],
) -> None:
    places = ("process", "thread", "inline")
    for place in places:
        add_model(tmp_path, place, ONE_BY_ONE + EXECUTION % place, make_python(SLEEPS))
    with serving(tmp_path) as served:
        wire = wire_to(served)
        for place in places:
            answers = wire.together([wire.infer_request(place, row(1))] * 2)
            assert [answer.status for answer in answers] == [200, 200]
            stats = wire.statistics(place)["inference_stats"]
            assert 2 * SLEEP_NS <= stats["compute_infer"]["ns"] < 4 * SLEEP_NS, place
            assert stats["compute_input"]["ns"] + stats["compute_output"]["ns"] < SLEEP_NS, place
            # On the loop, a second request is not read before the first is answered, and waits in no queue.
            assert place == "inline" or 0.8 * SLEEP_NS < stats["queue"]["ns"] < 4 * SLEEP_NS, place
            assert stats["success"]["ns"] >= stats["queue"]["ns"] + stats["compute_infer"]["ns"], place


def test_other_models_respond_while_a_model_computes_on_a_thread(
    tmp_path: Path,
    add_model: Callable[..., Path],
    make_python: Callable[[str], dict[str, str | bytes]],
    wire_to: Callable[[Served], Any],
) -> None:
    add_model(tmp_path, "burns", ONE_BY_ONE + EXECUTION % "thread", make_python(BURNS))
    with (
        serving(tmp_path) as served,
        ThreadPoolExecutor() as pool,
        httpx.Client(trust_env=False, verify=False) as client,
    ):
        wire = wire_to(served)
        burning = pool.submit(wire.together, [wire.infer_request("burns", row(1))])
        time.sleep(0.3)
        seconds = []
        while not burning.done():
            began = time.perf_counter()
            client.get(f"{served.base_url}/v2/health/live")
            seconds.append(time.perf_counter() - began)
    assert [answer.status for answer in burning.result()] == [200]
    assert len(seconds) > 20
    assert statistics.median(seconds) < 0.004  # a Python thread computes for 5 ms before another one gets the GIL
