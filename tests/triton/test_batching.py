"""How requests form batches, as the statistics count them: {batch size: executions}, queue policies, durations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

X, Y = spec("X", "FP32", "-1"), spec("Y", "FP32", "-1")

# Answers what it is given. A negative number makes it sleep for so many milliseconds first: once for a batch.
ECHO = """
def execute(self, requests):
    arrays = [given(request, "X") for request in requests]
    time.sleep(max(0.0, *(-float(array.min(initial=0)) / 1000 for array in arrays)))
    return [respond(Y=array) for array in arrays]
"""

OPTIONAL = """
def execute(self, requests):
    found = [[given(request, name) for name in ("X", "Z")] for request in requests]
    return [respond(Y=sum(array for array in pair if array is not None)) for pair in found]
"""


def batcher(text: str, size: int = 8) -> tuple[str, str]:
    return f"max_batch_size: {size}", f"dynamic_batching {{ {text} }}"


DELAY = "max_queue_delay_microseconds: 300000"
LONG = "max_queue_delay_microseconds: 5000000"
LEVELS = "priority_levels: 2 default_priority_level: 2"
TIMEOUT = "default_timeout_microseconds: 100000 allow_timeout_override: true"
MODELS = {
    "none": ("max_batch_size: 8",),
    "plain": batcher(""),
    "delays": batcher(DELAY),
    "preferred": batcher("preferred_batch_size: [ 4, 6 ]"),
    "preferred_delays": batcher(f"preferred_batch_size: [ 2, 6 ] {LONG}"),
    "limited": batcher("default_queue_policy { max_queue_size: 2 }", 1),
    "rejects": batcher(f"default_queue_policy {{ timeout_action: REJECT {TIMEOUT} }}", 1),
    "delayed": batcher(f"default_queue_policy {{ timeout_action: DELAY {TIMEOUT} }}", 1),
    "levels": batcher(LEVELS, 1),
    "ordered": batcher(f"preserve_ordering: true preferred_batch_size: [ 4 ] {LONG}"),
}


class Server:
    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._url = url
        self._pool = pool
        self._client = httpx.Client(base_url=f"{url}/v2/", timeout=60, verify=False)

    def close(self) -> None:
        self._client.close()

    def ask(self, model: str, rows: int = 1, width: int = 1, value: float = 1.0, **parameters: Any) -> httpx.Response:
        tensor = {"name": "X", "shape": [rows, width], "datatype": "FP32", "data": [value] * rows * width}
        return self.send(model, [tensor], parameters)

    def send(self, model: str, inputs: Sequence[Any], parameters: Any = None) -> httpx.Response:
        return self._client.post(f"models/{model}/infer", json={"inputs": inputs, "parameters": parameters or {}})

    def later(self, *arguments: Any, **named: Any) -> Any:
        return self._pool.submit(self.ask, *arguments, **named)

    def statistics(self, model: str) -> Any:
        return self._client.get(f"models/{model}/stats").json()["model_stats"][0]

    def batches(self, model: str) -> dict[int, int]:
        return {row["batch_size"]: row["compute_infer"]["count"] for row in self.statistics(model)["batch_stats"]}

    @contextmanager
    def counted(self, model: str) -> Iterator[dict[int, int]]:
        """Receives the batches that ran in the block."""
        before, changed = self.batches(model), dict[int, int]()
        yield changed
        after = self.batches(model)
        for _ in range(200):  # statistics may be written after the response
            if sum(after.values()) > sum(before.values()):
                break
            time.sleep(0.01)
            after = self.batches(model)
        changed |= {size: runs - before.get(size, 0) for size, runs in after.items() if runs != before.get(size, 0)}

    def one_after_another(self, model: str, *sizes: int | tuple[int, int]) -> list[Any]:
        """Requests of so many rows (and columns), in this order, without waiting for the responses."""
        sent = []
        for size in sizes:
            sent.append(self.later(model, *(size if isinstance(size, tuple) else (size,))))
            time.sleep(0.03)  # they arrive in this order
        return sent

    @contextmanager
    def busy(self, model: str, milliseconds: int) -> Iterator[None]:
        """The only instance is at work: requests of the block wait in the queue."""
        began = threading.Event()

        def run() -> httpx.Response:
            began.set()
            return self.ask(model, value=-float(milliseconds))

        running = self._pool.submit(run)
        began.wait()
        time.sleep(0.08)
        yield
        assert running.result().status_code == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("batching")
    for name, more in MODELS.items():
        write_model(repository, name, python_config([X], [Y], *more), ECHO)
    inputs = [spec("X", "FP32", "1", "optional: true"), spec("Z", "FP32", "1", "optional: true")]
    write_model(repository, "optional", python_config(inputs, [spec("Y", "FP32", "1")], *batcher(DELAY)), OPTIONAL)
    with ThreadPoolExecutor(24) as pool:
        server = Server(triton_like(repository), pool)
        yield server
        server.close()


def all_succeed(sent: Sequence[Any]) -> None:
    assert [one.result().status_code for one in sent] == [200] * len(sent)


# ------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("model", "sizes", "expected"),
    [
        ("delays", [1], {1: 1}),
        ("delays", [1, 1, 1], {3: 1}),
        ("delays", [3, 1], {4: 1}),
        ("delays", [4, 4], {8: 1}),
        ("delays", [3, 7], {3: 1, 7: 1}),  # together too large
        ("delays", [(1, 1), (1, 2)], {1: 2}),  # another shape closes a batch
        ("delays", [(1, 1), (1, 1), (1, 2)], {2: 1, 1: 1}),
        ("preferred_delays", [2], {2: 1}),  # a preferred size runs at once
        ("preferred_delays", [6], {6: 1}),
        ("preferred_delays", [7], {7: 1}),  # above the largest preferred size
    ],
)
def test_requests_that_meet_in_the_queue_form_batches(
    server: Server, model: str, sizes: list[Any], expected: dict[int, int]
) -> None:
    with server.counted(model) as batches:
        all_succeed(server.one_after_another(model, *sizes))
    assert batches == expected


@pytest.mark.parametrize(
    ("model", "sizes", "expected"),
    [
        ("none", [1, 1, 1], {1: 3}),  # no batcher: one execution for each request
        ("none", [2, 2], {2: 2}),
        ("plain", [1, 1, 1], {3: 1}),
        ("plain", [4, 4, 4], {8: 1, 4: 1}),
        ("preferred", [1] * 3, {3: 1}),
        ("preferred", [1] * 4, {4: 1}),
        ("preferred", [1] * 5, {4: 1, 1: 1}),
        ("preferred", [1] * 7, {6: 1, 1: 1}),
        ("preferred", [4, 4], {4: 2}),
    ],
)
def test_requests_that_waited_for_an_instance_form_batches(
    server: Server, on_triton: bool, model: str, sizes: list[int], expected: dict[int, int]
) -> None:
    with server.counted(model) as batches:
        with server.busy(model, 500):
            sent = server.one_after_another(model, *sizes)
        all_succeed(sent)
    batches[1] = batches.get(1, 0) - 1  # the one that kept the instance busy
    ran = {size: runs for size, runs in batches.items() if runs}
    if on_triton and len(sizes) == 7:  # it forms a batch ahead, at once with what is there, and then the next one
        assert ran in ({3: 1, 4: 1}, expected)
    else:
        assert ran == expected


def test_a_request_of_too_many_rows_is_refused(server: Server) -> None:
    reply = server.ask("plain", 9)
    assert reply.status_code == 400
    assert "inference request batch-size must be <= 8 for 'plain'" in reply.json()["error"]


def test_requests_with_the_same_optional_inputs_run_together(server: Server) -> None:
    one = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    two = {**one, "name": "Z", "data": [2]}
    for sent, expected in (([[one], [one]], {2: 1}), ([[one], [two]], {1: 2}), ([[one, two], [one, two]], {2: 1})):
        with server.counted("optional") as batches:
            replies = [server._pool.submit(server.send, "optional", inputs) for inputs in sent]
            all_succeed(replies)
        assert batches == expected


# ------------------------------------------------------------------------------------------------------ policies


def test_a_full_queue_refuses_with_503(server: Server) -> None:
    with server.busy("limited", 600):
        sent = server.one_after_another("limited", 1, 1, 1, 1)
        time.sleep(0.05)
    replies = [one.result() for one in sent]
    assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503]
    refused = [reply.json()["error"] for reply in replies if reply.status_code == 503]
    assert all("Exceeds maximum queue size" in text for text in refused)


def test_a_request_that_waited_too_long_is_rejected(server: Server) -> None:
    with server.busy("rejects", 700):
        reply = server.ask("rejects")
    assert reply.status_code == 503
    assert "Request timeout expired" in reply.json()["error"]


def test_a_requests_own_timeout_holds_if_it_is_shorter(server: Server) -> None:
    with server.busy("delays", 500):
        assert server.ask("delays", timeout=1).status_code == 200, "no policy allows it"


def test_a_request_past_its_timeout_is_served_where_the_policy_delays_it(server: Server) -> None:
    with server.busy("delayed", 500):
        sent = server.later("delayed")
    assert sent.result().status_code == 200


def test_a_higher_priority_goes_first(server: Server) -> None:
    order: list[int] = []

    def ask(priority: int) -> None:
        assert server.ask("levels", priority=priority, value=-30.0).status_code == 200
        order.append(priority)

    with server.busy("levels", 500):
        sent = []
        for priority in (2, 2, 1):
            sent.append(server._pool.submit(ask, priority))
            time.sleep(0.03)
        for one in sent:
            one.result()
    assert order.index(1) <= 1, "one of the others may be in a batch that was formed ahead"


def test_an_order_is_preserved_across_batches(server: Server) -> None:
    with server.counted("ordered") as batches:
        all_succeed(server.one_after_another("ordered", *[1] * 12))
    assert batches == {4: 3}


# ------------------------------------------------------------------------------------------------------ statistics


def test_statistics_count_requests_rows_executions_and_failures(server: Server) -> None:
    before = server.statistics("plain")
    with server.busy("plain", 300):
        all_succeed(server.one_after_another("plain", 2, 3))
    server.ask("plain", 9)
    after = server.statistics("plain")
    for _ in range(200):
        if after["inference_count"] - before["inference_count"] == 6:
            break
        time.sleep(0.01)
        after = server.statistics("plain")

    def grown(name: str) -> int:
        count: int = after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
        return count

    assert after["inference_count"] - before["inference_count"] == 6
    assert after["execution_count"] - before["execution_count"] == 2
    assert [grown(name) for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")] == [3] * 5
    assert after["last_inference"] > before["last_inference"]
    waited = after["inference_stats"]["queue"]["ns"] - before["inference_stats"]["queue"]["ns"]
    computed = after["inference_stats"]["compute_infer"]["ns"] - before["inference_stats"]["compute_infer"]["ns"]
    assert waited > 200_000_000, "two requests waited for most of 300 ms"
    assert 290_000_000 < computed < 2_000_000_000
    assert {*after} >= {"name", "version", "inference_stats", "batch_stats", "memory_usage", "response_stats"}
    assert {*after["inference_stats"]} == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"
    }  # fmt: skip
