"""A burst of BLS calls from one execution: the server stays responsive, ends in time, and withdraws open calls."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from flowserve.cli.serving.shutdown import GRACE_S
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served

pytestmark = pytest.mark.fault("W5")

LIVE_S_MAX = 0.2  # of 19 probes in 20
SLOWEST_S_MAX = 1.0  # of all; more than on an idle machine, since other tests run beside this one
ATTEMPTS = 3  # for the same reason; a blocked event loop exceeds these each time
BURST = 1500

CONFIG = """
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""

FAN = """
import asyncio
import pathlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        calls = [self.call(number) for number in range(count)]
        pathlib.Path(__file__).with_name("sent").touch()
        answers = await asyncio.gather(*calls)
        total = sum(int(pb_utils.get_output_tensor_by_name(one, "OUT").as_numpy()[0]) for one in answers)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([total], np.int32))])

    def call(self, number):
        given = pb_utils.Tensor("IN", np.array([number], np.int32))
        return pb_utils.InferenceRequest(model_name="leaf", inputs=[given], requested_output_names=["OUT"]).async_exec()
"""

LEAF = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        while pathlib.Path(__file__).with_name("hold").exists():
            time.sleep(0.01)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])
"""


@pytest.fixture
def repository(tmp_path: Path, add_model: Callable[..., Path]) -> Path:
    add_model(tmp_path, "fan", CONFIG, {"1/model.py": FAN})
    add_model(tmp_path, "leaf", CONFIG, {"1/model.py": LEAF})
    return tmp_path


def body(count: int) -> bytes:
    return json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [count]}]}).encode()


def burst(served: Served, count: int) -> int:
    """The sum of the numbers that `count` concurrent calls returned."""
    url = f"{served.base_url}/v2/models/fan/infer"
    answer = httpx.post(url, content=body(count), timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    total: int = answer.json()["outputs"][0]["data"][0]
    return total


@contextmanager
def probed(served: Served) -> Iterator[list[float]]:
    """The response times of /v2/health/live, in seconds, as long as the block runs."""
    over = threading.Event()
    found: list[float] = []

    def probe() -> None:
        with httpx.Client(base_url=served.base_url, timeout=60, verify=False) as client:
            while not over.wait(0.005):
                began = time.monotonic()
                assert client.get("/v2/health/live").status_code == 200
                found.append(time.monotonic() - began)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        yield found
    finally:
        over.set()
        prober.join()


@pytest.mark.parametrize("execution", ["thread", *(["process"] if SUPPORTED else [])])
def test_the_server_is_live_during_thousands_of_concurrent_calls(
    repository: Path, serve: Callable[..., Served], execution: str
) -> None:
    served = serve(repository, "--python-execution", execution)
    burst(served, 1)
    for _ in range(ATTEMPTS):
        with probed(served) as times:
            assert burst(served, BURST) == BURST * (BURST - 1) // 2
        times.sort()
        if is_live := times[-1] < SLOWEST_S_MAX and times[len(times) * 19 // 20] < LIVE_S_MAX:
            break
    assert is_live, f"the slowest of {len(times)} probes took {times[-1]:.3f} s"


def begin_burst(served: Served, count: int, begun: int = 20) -> socket.socket:
    """A connection whose request makes `count` calls; returns when some have finished."""
    client = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST /v2/models/fan/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body(count))}\r\n\r\n"
    client.sendall(head.encode() + body(count))
    while statistics(served)["success"]["count"] < begun:
        time.sleep(0.02)
    return client


def statistics(served: Served) -> dict[str, dict[str, int]]:
    """The inference statistics of the called model."""
    answer = httpx.get(f"{served.base_url}/v2/models/leaf/stats", timeout=60, verify=False)
    found: dict[str, dict[str, int]] = answer.json()["model_stats"][0]["inference_stats"]
    return found


def test_the_server_ends_in_time_during_a_burst_of_calls(repository: Path, serve: Callable[..., Served]) -> None:
    for _ in range(ATTEMPTS):
        served = serve(repository, "--exit-timeout-secs", "2")
        with begin_burst(served, 20_000):
            began = time.monotonic()
            served.stop(within_s=20)
            took_s = time.monotonic() - began
            log = served.log
        if is_in_time := took_s < 2 + GRACE_S + 1 and "the event loop does not answer" not in log:
            break
    assert is_in_time, f"it took {took_s:.1f} s: {log}"


def test_a_client_that_leaves_withdraws_all_calls_made_for_it(repository: Path, serve: Callable[..., Served]) -> None:
    """Each call that is withdrawn must not withdraw the next within it: that would exceed the depth of the stack."""
    hold = repository / "leaf/1/hold"
    hold.touch()
    served = serve(repository)
    with begin_burst(served, BURST, begun=0):
        while not (repository / "fan/1/sent").exists():
            time.sleep(0.02)
    while statistics(served)["fail"]["count"] < BURST - 1:  # the first one runs
        time.sleep(0.02)
    hold.unlink()
    assert burst(served, 1) == 0
    assert "RecursionError" not in served.log
