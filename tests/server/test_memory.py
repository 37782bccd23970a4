"""Memory of a server and its model processes after bursts. A real server, raw sockets and tritonclient."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="memory is released on Linux only")

WITHIN_S = 15.0
MEBIBYTE = 1 << 20
BODY_BYTES = 8 * MEBIBYTE

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "execution" value: { string_value: "EXECUTION" } }
"""

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one * 2)]) for one in tensors]
"""


@pytest.fixture
def served(tmp_path: Path, add_model: Callable[..., Path]) -> Iterator[Served]:
    """A server of `thread` and `process`."""
    for execution in ("thread", "process"):
        add_model(tmp_path, execution, CONFIG.replace("EXECUTION", execution), {"1/model.py": MODEL})
    with serving(tmp_path) as served:
        yield served


def memory(served: Served) -> int:
    """Bytes: resident in the server, and the share of its processes (memory that several map is divided)."""
    pid = served.process.pid
    return kilobytes(pid, "Rss:") * 1024 + sum(kilobytes(one, "Pss:") for one in descendants(pid)) * 1024


def kilobytes(pid: int, figure: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(figure))


def descendants(pid: int) -> list[int]:
    children = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            children.append(int(entry))
    return children + [one for child in children for one in descendants(child)]


def infer(served: Served, model: str, count: int) -> None:
    with triton.InferenceServerClient(served.base_url.removeprefix("http://")) as client:
        tensor = triton.InferInput("IN", [1, count], "FP32")
        tensor.set_data_from_numpy(np.ones((1, count), np.float32))
        output = client.infer(model, [tensor]).as_numpy("OUT")
        assert output is not None
        assert (output == 2).all()


def send_nearly_all(served: Served, model: str, nbytes: int) -> socket.socket:
    """Begin a request whose body never ends."""
    host, _, port = served.base_url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {nbytes}\r\n\r\n"
    sock.sendall(head.encode() + bytes(nbytes * 9 // 10))
    return sock


@pytest.mark.fault("W8")
def test_the_memory_of_bursts_is_returned_within_fifteen_seconds(served: Served) -> None:
    with ThreadPoolExecutor(8) as clients:

        def burst(count: int, requests: int) -> None:
            for model in ("thread", "process"):
                list(clients.map(partial(infer, served, model), [count] * requests))

        burst(1000, 20)
        before = memory(served)
        with ExitStack() as stack:
            for model in ("thread", "process"):
                for _ in range(6):
                    stack.enter_context(send_nearly_all(served, model, BODY_BYTES))
            for _ in range(200):  # slow clients
                stack.enter_context(send_nearly_all(served, "thread", 100_000))
            burst(MEBIBYTE, 8)
            held = memory(served)
            assert held - before > 12 * BODY_BYTES // 2
        ended = time.monotonic()
        while memory(served) > 1.12 * before:  # 1.2 is promised; 1.19 remained with a heap for each thread
            assert time.monotonic() - ended < WITHIN_S, (before, held, memory(served))
            time.sleep(0.2)
        burst(1000, 4)  # it still serves


COUNTING = """
import gc
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.count(request)]) for request in requests]

    def count(self, request):
        if pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0, 0]:
            gc.collect()
        return pb_utils.Tensor("OUT", np.full((1, 1), gc.get_freeze_count(), np.float32))
"""


def test_the_garbage_collector_examines_what_is_loaded_only_after_a_load_or_unload(
    tmp_path: Path, add_model: Callable[..., Path]
) -> None:
    config = CONFIG.replace("EXECUTION", "inline")
    add_model(tmp_path, "counting", config, {"1/model.py": COUNTING})
    add_model(tmp_path, "other", config, {"1/model.py": MODEL})
    with (
        serving(tmp_path, "--model-control-mode", "explicit", "--load-model", "counting") as served,
        triton.InferenceServerClient(served.base_url.removeprefix("http://")) as client,
    ):

        def frozen(*, after_collection: bool = False) -> float:
            tensor = triton.InferInput("IN", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.full((1, 1), after_collection, np.float32))
            output = client.infer("counting", [tensor]).as_numpy("OUT")
            assert output is not None
            return float(output[0, 0])

        assert frozen() > 10_000
        client.load_model("other")
        assert frozen() == 0
        assert frozen(after_collection=True) > 10_000
        client.unload_model("other")
        deadline = time.monotonic() + WITHIN_S
        while frozen() and time.monotonic() < deadline:  # unloaded once its last request has ended
            time.sleep(0.05)
        assert frozen() == 0
