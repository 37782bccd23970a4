"""Priorities, queue policies and order as clients see them. Models wait for a file that the test creates."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

CLOSED = -1.0  # a request that holds this keeps its instance busy until the release file exists
AT_ONCE_S = 0.3  # far less than any wait here, and far more than a refusal takes

ANSWER = """
        import os
        numbers = given("IN")
        self.runs = getattr(self, "runs", 0) + 1
        runs = self.runs
        if (numbers == 13).any():
            return refuse("thirteen is not for me")
        if (numbers > 1000).any():
            raise ValueError("too much for me")
        while (numbers < 0).any() and not os.path.exists("RELEASE_FILE"):
            time.sleep(0.002)
        return answer(OUT=numbers * 0 + runs)
"""
CONFIG = """
max_batch_size: %d
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { %s }
instance_group [ { count: %d kind: KIND_CPU } ]
"""
# Name -> settings of its batcher, number of instances, maximum batch size.
MODELS: dict[str, tuple[str, int, int]] = {
    "small": ("default_queue_policy { max_queue_size: 2 }", 1, 1),
    "hasty": ("default_queue_policy { default_timeout_microseconds: 400000 allow_timeout_override: true }", 1, 1),
    "deaf": ("default_queue_policy { default_timeout_microseconds: 60000000 }", 1, 1),
    "timeless": ("default_queue_policy { allow_timeout_override: true }", 1, 1),
    "delays": ("default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 50000 }", 1, 1),
    "urgent": ("priority_levels: 3 default_priority_level: 2", 1, 1),
    "ordered": ("preserve_ordering: true", 2, 1),
    "batches": ("max_queue_delay_microseconds: 300000 preferred_batch_size: [ 3 ]", 1, 3),
}
PIPE = """
platform: "ensemble"
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "OTHER" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step { model_name: "small" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
  step { model_name: "deaf" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OTHER" } }
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def release_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release_files")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, release_files: Path, add_model: Callable[..., Path], make_python: Any
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("queues")
    for name, (batching, instances, limit) in MODELS.items():
        file = make_python(ANSWER.replace("RELEASE_FILE", str(release_files / name)))
        add_model(folder, name, CONFIG % (limit, batching, instances), file)
    add_model(folder, "pipe", PIPE)
    with serving(folder) as running:
        yield running
        assert running.process.poll() is None, running.log


@pytest.fixture
def wire(server: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(server)


class ModelClients:
    """Requests to one model, each on a connection of its own, sent one after the other."""

    def __init__(self, wire: Any, model: str, release_file: Path) -> None:
        self.wire = wire
        self.model = model
        self.release_file = release_file
        self.sockets: list[socket.socket] = []

    def send(self, number: float = 0.0, model: str = "", **parameters: Any) -> socket.socket:
        """Send a request; returns when the server has it, so that later requests are queued behind it."""
        connection: socket.socket = self.wire.connect()
        self.sockets.append(connection)
        connection.sendall(self.wire.infer_request(model or self.model, [[number]], parameters=parameters))
        assert self.wire.get("/v2/health/live").status == 200
        return connection

    def keep_busy(self) -> socket.socket:
        """The instance has work until the release file exists."""
        first = self.send(CLOSED)
        self.wire.until(lambda: self.wire.waiting(self.model) == 0, "the first one runs")
        return first

    def open(self) -> None:
        self.release_file.touch()

    def answers(self) -> list[Any]:
        """Of all, in the order they were sent."""
        return self.wire._read_all(self.sockets, time.monotonic())  # type: ignore[no-any-return]

    def answer(self, connection: socket.socket) -> Any:
        """Of one; the others may still be waiting."""
        return self.wire._read_all([connection], time.monotonic())[0]


@pytest.fixture
def clients_of(wire: Any, release_files: Path) -> Iterator[Callable[[str], ModelClients]]:
    opened: list[ModelClients] = []

    def gather(model: str) -> ModelClients:
        opened.append(ModelClients(wire, model, release_files / model))
        return opened[-1]

    yield gather
    for one in opened:
        one.open()
        for connection in one.sockets:
            connection.close()
        wire.until(lambda one=one: not _is_busy(wire, one.model), "the instances are free again")
        one.release_file.unlink()


def _is_busy(wire: Any, model: str) -> bool:
    before = wire.statistics(model)["execution_count"]
    assert wire.infer(model, [[0.0]]).status == 200  # after the requests that run there
    return bool(wire.waiting(model) or wire.statistics(model)["execution_count"] != before + 1)


@contextmanager
def counted(wire: Any, model: str) -> Iterator[dict[str, int]]:
    """How many more failures of each reason the model counts when the block is over."""
    before = wire.graph_statistics(model)["failures"]
    grown: dict[str, int] = {}
    yield grown
    after = wire.graph_statistics(model)["failures"]
    grown.update({reason: count - before[reason] for reason, count in after.items() if count != before[reason]})


# ------------------------------------------------------------------------------------------------------------- refusal


@pytest.mark.fault("D1")
def test_a_full_queue_refuses_new_requests_and_serves_waiting_ones(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    small = clients_of("small")
    with counted(wire, "small") as failures:
        small.keep_busy()
        small.send()
        small.send()
        refused = small.answer(small.send())
        assert refused.status == 503
        assert refused.error == "Exceeds maximum queue size: the queue of model 'small' has room for 2; try again later"
        assert refused.seconds < AT_ONCE_S
        small.open()
        assert [small.answer(one).status for one in small.sockets[:3]] == [200, 200, 200]
    assert failures == {"REJECTED": 1}


@pytest.mark.fault("E10")
def test_a_full_inner_queue_fails_the_request_of_the_ensemble_and_withdraws_its_other_branch(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    small, deaf = clients_of("small"), clients_of("deaf")
    deaf.keep_busy()
    small.keep_busy()
    small.send()
    small.send()
    with counted(wire, "small") as failures:
        for _ in range(16):
            refused = small.answer(small.send(model="pipe"))
            assert refused.status == 503
            assert refused.error.startswith(
                "in ensemble 'pipe', Exceeds maximum queue size: the queue of model 'small'"
            )
    assert failures == {"REJECTED": 16}
    assert wire.waiting("deaf") == 0  # the other branch is out of its queue
    small.open()
    deaf.open()
    wire.until(lambda: wire.waiting("small") == 0, "those before are served")
    assert small.answer(small.send(model="pipe")).status == 200


# ------------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.fault("D2")
def test_a_request_fails_at_its_timeout_while_the_instance_is_busy(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    hasty = clients_of("hasty")
    with counted(wire, "hasty") as failures:
        busy = hasty.keep_busy()
        default = hasty.send()
        own: list[int] = []
        while not own or (own[-1] >= 300 and len(own) < 3):  # repeated if the machine was too busy
            own.append(_waited_ms(hasty.answer(hasty.send(timeout=100_000))))
        assert 100 <= own[-1] < 300
        assert _waited_ms(hasty.answer(default)) >= 400
        hasty.open()
        assert hasty.answer(busy).status == 200  # a running request never times out
    assert failures == {"REJECTED": 1 + len(own)}


def _waited_ms(refused: Any) -> int:
    assert refused.status == 503
    assert refused.error.startswith("Request timeout expired: it waited ")
    return int(refused.error.partition(" it waited ")[2].split()[0])


@pytest.mark.fault("D2")
def test_a_client_timeout_above_the_default_is_ignored(clients_of: Callable[[str], ModelClients]) -> None:
    hasty = clients_of("hasty")
    hasty.keep_busy()
    began = time.monotonic()
    assert hasty.answer(hasty.send(timeout=60_000_000)).status == 503
    assert 0.3 < time.monotonic() - began < 2.0


@pytest.mark.fault("D4")
@pytest.mark.parametrize("model", ["deaf", "timeless"], ids=["without permission", "without a default"])
def test_a_client_timeout_is_ignored(clients_of: Callable[[str], ModelClients], model: str) -> None:
    ignores = clients_of(model)
    ignores.keep_busy()
    ignores.send(timeout=1)
    ignores.open()
    assert [answer.status for answer in ignores.answers()] == [200, 200]


@pytest.mark.fault("D3")
def test_a_request_past_its_delay_timeout_is_served_after_the_others(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    delays = clients_of("delays")
    delays.keep_busy()
    late = delays.send()
    time.sleep(0.1)  # its 50 ms
    others = [delays.send(), delays.send()]
    delays.open()
    runs = [delays.answer(one).data[0] for one in (*others, late)]
    assert runs == sorted(runs)


# ---------------------------------------------------------------------------------------------------------- priorities


@pytest.mark.fault("D8")
def test_higher_priorities_run_first_and_invalid_ones_mean_the_default(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    urgent = clients_of("urgent")
    urgent.keep_busy()
    low = urgent.send(priority=3)
    usual = [urgent.send(), urgent.send(priority=0), urgent.send(priority=99)]
    high = urgent.send(priority=1)
    urgent.open()
    runs = [urgent.answer(one).data[0] for one in (high, *usual, low)]
    assert runs == sorted(runs)
    negative = wire.infer("urgent", [[0.0]], parameters={"priority": -1})
    assert negative.status == 400


@pytest.mark.fault("D12")
def test_a_closed_connection_frees_its_place_in_the_queue(wire: Any, clients_of: Callable[[str], ModelClients]) -> None:
    small = clients_of("small")
    with counted(wire, "small") as failures:
        small.keep_busy()
        small.send()
        cancelled = small.send()
        small.sockets.remove(cancelled)
        cancelled.close()
        wire.until(lambda: wire.waiting("small") == 1, "the place is free")
        small.send()
        small.open()
        assert [answer.status for answer in small.answers()] == [200, 200, 200]
    assert failures == {"CANCELED": 1}


# ---------------------------------------------------------------------------------------- order


@pytest.mark.fault("D11")
def test_ordered_responses_keep_the_order_of_arrival_with_a_faster_second_instance(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    ordered = clients_of("ordered")
    before = wire.statistics("ordered")["execution_count"]
    ordered.send(CLOSED)
    for _ in range(8):
        ordered.send()
    wire.until(lambda: wire.statistics("ordered")["execution_count"] == before + 8, "the other instance ran them all")
    arrived: list[int] = []
    with selectors.EpollSelector() as selector:
        for n, connection in enumerate(ordered.sockets):
            selector.register(connection, selectors.EVENT_READ, n)
        assert selector.select(0) == [], "an answer has overtaken the first"
        ordered.open()
        while len(arrived) < len(ordered.sockets):
            ready = selector.select(30)  # the kernel lists them in the order they became readable
            assert ready
            for key, _ in ready:
                arrived.append(key.data)
                selector.unregister(key.fileobj)
    assert arrived == sorted(arrived)
    assert [answer.status for answer in ordered.answers()] == [200] * 9


@pytest.mark.fault("D11")
def test_an_ordered_response_does_not_wait_for_a_closed_connection(
    wire: Any, clients_of: Callable[[str], ModelClients]
) -> None:
    ordered = clients_of("ordered")
    slow = ordered.send(CLOSED)
    fast = ordered.send()
    ordered.sockets.remove(slow)
    slow.close()
    assert ordered.answer(fast).status == 200


# ------------------------------------------------------------------------------------------------- members of a batch


@pytest.mark.fault("D5")
def test_a_request_refused_by_its_model_fails_alone(wire: Any) -> None:
    requests = [wire.infer_request("batches", [[number]]) for number in (1.0, 13.0, 2.0)]
    answers, batches = wire.batches_during(["batches"], lambda: wire.together(requests))
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert "thirteen is not for me" in answers[1].error
    assert batches == {"batches": {3: 1}}


@pytest.mark.fault("D6")
def test_a_model_that_raises_fails_only_its_batch(wire: Any) -> None:
    requests = [wire.infer_request("batches", [[number]]) for number in (1.0, 2000.0, 2.0)]
    with counted(wire, "batches") as failures:
        answers = wire.together(requests)
    assert [answer.status for answer in answers] == [500, 500, 500]
    assert all("ValueError in a batch of 3 requests" in answer.error for answer in answers), answers[0].error
    assert failures == {"BACKEND": 3}
    fine = [wire.infer_request("batches", [[1.0]])] * 3
    assert [answer.status for answer in wire.together(fine)] == [200, 200, 200]
