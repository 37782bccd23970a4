"""A model that responds ten times faster than the next step reads, on a real server: with in-flight limits of 1, 4, 16
and 0, for one request and many at once, read to the end and cancelled.

One server for all of it. The producer has a process of its own and responds from threads; each limit has a slow step of
its own, so that they run side by side.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

LIMITS = [1, 4, 16, 0]
PRODUCE = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        count, size = (int(number) for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
        for n in range(count):
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(size, n, np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STEP = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(SECONDS)
        values = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", MADE)]) for value in values]
"""
DECOUPLED = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
PLAIN = """
backend: "python" parameters { key: "execution" value { string_value: "thread" } }
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def chain(limit: int, models: list[str], scope: str = "request") -> str:
    names = ["IN", *(f"t{number}" for number in range(len(models) - 1)), "OUT"]
    steps = " ".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "IN" value: "{names[i]}" }} '
        f'output_map {{ key: "OUT" value: "{names[i + 1]}" }} }}'
        for i, model in enumerate(models)
    )
    return f"""
    platform: "ensemble" parameters {{ key: "max_inflight_scope" value {{ string_value: "{scope}" }} }}
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }} output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
    ensemble_scheduling {{ max_inflight_requests: {limit} {steps} }}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path]) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")

    def step(seconds: float, made: str) -> dict[str, str]:
        return {"1/model.py": STEP.replace("SECONDS", str(seconds)).replace("MADE", made)}

    add_model(folder, "produce", DECOUPLED, {"1/model.py": PRODUCE})
    add_model(folder, "quick", PLAIN, step(0, "value + 1"))
    for limit in LIMITS:
        add_model(folder, f"slow_{limit}", PLAIN, step(0.001, "value[:1] * 2"))
        add_model(folder, f"two_{limit}", chain(limit, ["produce", f"slow_{limit}"]))
    for limit in (4, 16):
        add_model(folder, f"three_{limit}", chain(limit, ["produce", "quick", f"slow_{limit}"]))
    add_model(folder, "shared", chain(4, ["produce", "slow_4"], "shared"))
    with serving(folder) as served:
        yield served


def begin(server: Served, model: str, count: int, size: int = 1) -> Any:
    body = json.dumps({"IN": [count, size]}).encode()
    return urlopen(f"{server.base_url}/v2/models/{model}/generate_stream", body, timeout=60)


def read(response: Any) -> list[float]:
    with response:
        return [json.loads(line[6:])["OUT"] for line in response if line != b"\n"]


def get(server: Served, path: str) -> str:
    with urlopen(f"{server.base_url}/{path}", timeout=60) as response:
        text: str = response.read().decode()
        return text


def most_inflight(server: Served, model: str) -> dict[str, int]:
    """The high-water mark of each node of a graph."""
    start = f'flowserve_node_inflight_most{{graph="{model}"'
    lines = [line for line in get(server, "metrics").splitlines() if line.startswith(start)]
    return {line.split('node="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines}


def resident_bytes(server: Served) -> int:
    """The memory of the server and its children; shared pages count once."""

    def of(pid: str) -> int:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return 0
        (own,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
        return own + sum(map(of, children))

    return of(str(server.pid))


@pytest.mark.fault("P7")
def test_a_thousand_responses_arrive_in_order_within_the_inflight_limit(server: Served) -> None:
    """Two nodes, and three of which only the last is slow, all at the same time."""
    models = [*(f"two_{limit}" for limit in LIMITS), "three_4", "three_16"]
    with ThreadPoolExecutor(len(models)) as pool:
        got = [*pool.map(lambda model: read(begin(server, model, 1000)), models)]
    for model, values in zip(models, got, strict=True):
        more = 1 if model.startswith("three") else 0
        assert values == [2.0 * (n + more) for n in range(1000)], model
        limit = int(model.split("_")[1])
        seen = most_inflight(server, model)
        assert max(seen.values(), default=0) <= limit, f"{model}: {seen}"
        assert not limit or seen[f"slow_{limit}"] > limit // 2, f"{model}: {seen}: it was never behind"


@pytest.mark.fault("P10")
def test_sixteen_requests_get_a_hundred_responses_each(server: Served) -> None:
    models = [f"two_{limit}" for limit in LIMITS] * 16
    with ThreadPoolExecutor(len(models)) as pool:
        got = [*pool.map(lambda model: read(begin(server, model, 100)), models)]
    assert all(values == [2.0 * n for n in range(100)] for values in got)
    for limit in LIMITS:
        most = max(most_inflight(server, f"two_{limit}").values(), default=0)
        assert limit // 2 <= most <= limit


def test_with_a_limit_memory_does_not_grow_with_the_number_of_responses(server: Served) -> None:
    size = 65_536
    read(begin(server, "three_4", 50, size))  # now memory that is kept for later requests is allocated
    before = resident_bytes(server)
    most = before
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.02):
            most = max(most, resident_bytes(server))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert len(read(begin(server, "three_4", 800, size))) == 800
    is_over.set()
    watcher.join()
    through = 800 * size * 4
    assert most - before < through / 10, f"{(most - before) >> 20} of {through >> 20} MiB were resident"


@pytest.mark.fault("P8")
def test_cancelled_streams_return_every_slot(server: Served) -> None:
    """The slots are shared by all requests to the graph, so that a slot that is not returned blocks later ones."""
    for _ in range(16):
        with begin(server, "shared", 100_000) as response:
            assert response.readline().startswith(b"data: ")
    with ThreadPoolExecutor(4) as pool:
        got = [*pool.map(lambda _: read(begin(server, "shared", 100)), range(4))]
    assert all(values == [2.0 * n for n in range(100)] for values in got)
    assert 2 <= most_inflight(server, "shared")["slow_4"] <= 4
    assert waiting(server) == 0


def waiting(server: Served) -> int:
    """The number of steps waiting for the slow model; polled until 0, since withdrawal takes a moment."""
    for _ in range(200):
        lines = get(server, "metrics").splitlines()
        (line,) = [line for line in lines if line.startswith('nv_inference_pending_request_count{model="slow_4"')]
        if not float(line.split()[-1]):
            return 0
        time.sleep(0.01)
    return int(float(line.split()[-1]))


def test_responses_are_counted_by_position(server: Served) -> None:
    before = responses(server)
    read(begin(server, "produce", 3))
    after = responses(server)

    def more(place: str, what: str) -> tuple[int, int]:
        now, then = after[place][what], before[place][what]
        return now["count"] - then["count"], now["ns"] - then["ns"]

    assert [more(place, "success")[0] for place in "0123"] == [1, 1, 1, 0]
    assert [more(place, "empty_response")[0] for place in "0123"] == [0, 0, 0, 1]
    for place in "012":
        infer, output, both = (more(place, what) for what in ("compute_infer", "compute_output", "success"))
        assert infer[0] == output[0] == 1
        assert infer[1] + output[1] == both[1]
        assert 0 < both[1] < 1_000_000_000


def responses(server: Served) -> dict[str, Any]:
    (row,) = json.loads(get(server, "v2/models/produce/stats"))["model_stats"]
    found: dict[str, Any] = row["response_stats"]
    return found
