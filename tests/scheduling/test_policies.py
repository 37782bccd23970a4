"""The scheduler with queue policies and ordered models. Each test is a timeline."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from flowserve.errors import ModelFailed, Unavailable
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.batch import Batch, TicketRefused, Withdrawn
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.queue import Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.rate_limit.limiter import Limiter
from flowserve.simulation.deployment import BatchResults
from flowserve.values import DType, TensorSpec
from tests.support.recorder import PORT, Recorder, rows_of, simple_model
from tests.support.strategies import chain_graph, plain_graph

A, B = simple_model(0), simple_model(1)
ALONE = plain_graph(A)
CHAIN = chain_graph("chain", [A, B])
FORK = Graph(
    "fork",
    1,
    PORT,
    PORT * 2,
    16,
    (Node(0, "a", A.key, A.inputs, A.outputs, 16), Node(1, "b", B.key, B.inputs, B.outputs, 16)),
    tuple(Edge("t", *ends) for ends in [(GRAPH, 0, 0, 0), (GRAPH, 0, 1, 0), (0, 0, GRAPH, 0), (1, 0, GRAPH, 1)]),
    is_ensemble=True,
)


def policed(limit: int = 16, delay: int = 0, **policy: Any) -> Queue:
    return Queue(BatchPolicy.simple(limit, delay), Levels(policy=LevelPolicy(**policy)))


@pytest.fixture(params=["without", "with"])
def server(request: pytest.FixtureRequest) -> Recorder:
    """Without and with a rate limiter: it changes the order only under contention."""
    return Recorder(limiter=Limiter() if request.param == "with" else None)


# ------------------------------------------------------------------------------------------------------------- refusal


@pytest.mark.fault("D1")
def failed(server: Recorder) -> list[object]:
    """The requests that are over, all of which failed."""
    return [request for request, _ in cast("list[tuple[object, str]]", server.answered())]


def test_a_request_for_a_full_queue_fails_in_the_same_step(server: Recorder) -> None:
    server.serve(A, policed(max_size=2))
    server.submit(ALONE, "runs")
    server.turn()
    for request in "xyz":
        server.submit(ALONE, request)
    assert server.turn() == []
    (told,) = server.answered()
    assert told == ("z", "Exceeds maximum queue size: the queue of model 'a' has room for 2; try again later")
    assert server.waiting() == {A.key: 2}
    server.done(server.running[0])
    assert server.turn() == [("a", ["x", "y"])]


def test_no_request_is_refused_while_a_free_instance_can_take_one_from_the_queue(server: Recorder) -> None:
    server.serve(A, policed(limit=2, max_size=1), instances=2)
    for request in "wxyz":
        server.submit(ALONE, request)
    assert server.turn() == [("a", ["w"]), ("a", ["x"])]
    assert failed(server) == ["z"]
    assert server.waiting() == {A.key: 1}


def test_a_request_within_its_queue_delay_counts_towards_the_queue_size(server: Recorder) -> None:
    server.serve(A, policed(delay=100, max_size=1))
    server.submit(ALONE, "waits")
    server.submit(ALONE, "refused")
    assert server.turn() == []
    assert failed(server) == ["refused"]
    assert server.turn(at=100) == [("a", ["waits"])]


def test_a_full_queue_of_a_later_node_fails_only_the_request_that_exceeds_it(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, policed(max_size=1))
    server.submit(plain_graph(B), "busy")
    server.submit(CHAIN, "first")
    server.submit(CHAIN, "second")
    assert server.turn() == [("b", ["busy"]), ("a", ["first", "second"])]
    server.done(server.running[1])
    server.turn()
    (told,) = server.answered()
    assert told == ("second", "Exceeds maximum queue size: the queue of model 'b' has room for 1; try again later")
    server.done(server.running[0])
    assert server.turn() == [("b", ["first"])]


def test_a_branch_refused_by_a_full_queue_withdraws_the_other_branch(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy.simple(16, 1000)))
    server.serve(B, policed(delay=1000, max_size=1))
    server.submit(plain_graph(B), "there")
    server.submit(FORK, "refused")
    server.turn()
    assert failed(server) == ["refused"]
    withdrawn = [one.queue for one in server.notices if isinstance(one, Withdrawn)]
    assert withdrawn == [server.queues[A.key]]
    assert server.waiting() == {A.key: 0, B.key: 1}
    assert server.scheduler.in_flight == 1


@pytest.mark.parametrize("depth", [0, 1], ids=["its first steps", "later steps"])
def test_a_request_that_fails_while_its_other_branch_is_queued_is_answered_once(depth: int) -> None:
    runs: list[str] = []

    class Inline(Recorder):
        def run(self, batch: Batch) -> None:
            runs.append(batch.queue.key.name)
            if batch.queue.key == A.key:
                self.scheduler.complete(batch, [], ModelFailed("boom"), 0)
            else:
                self.scheduler.complete(batch, [BatchResults([[rows_of()]])], None, 0)

    server = Inline()
    server.serve(A, policed(limit=1, max_size=1))
    server.serve(B)
    first = [Node(0, "b", B.key, B.inputs, B.outputs, 16)][:depth]
    nodes = (*first, *(Node(i + depth, f"a#{i}", A.key, A.inputs, A.outputs, 16) for i in range(2)))
    source = 0 if depth else GRAPH
    edges = [Edge("in", GRAPH, 0, 0, 0)] * depth
    edges += [Edge("t", source, 0, i + depth, 0) for i in range(2)] + [
        Edge("t", i + depth, 0, GRAPH, i) for i in range(2)
    ]
    server.submit(Graph("twice", 1, PORT, PORT * 2, 16, nodes, tuple(edges), is_ensemble=True), "x")
    server.turn()
    assert [str(frame.record.error) for frame in server.answers] == ["boom"]
    assert runs == ["b"] * depth + ["a"]
    assert server.scheduler.in_flight == 0
    assert server.waiting() == {A.key: 0, B.key: 0}


def test_refusing_a_request_does_not_scan_the_queue(server: Recorder) -> None:
    class Unsearched(Queue):
        def withdraw(self, *frames: Frame) -> int:
            raise AssertionError("the queue was searched")

    policy = LevelPolicy(max_size=1, timeout_ns=50)
    server.serve(A, Unsearched(BatchPolicy.simple(1), Levels(policy=policy)))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.submit(ALONE, "refused")
    server.turn()
    server.turn(at=50)
    assert failed(server) == ["refused", "expires"]


def test_a_refused_request_releases_its_tensors_without_the_collector(server: Recorder) -> None:
    server.serve(A, policed(max_size=1, timeout_ns=50))
    server.submit(ALONE, "runs")
    server.turn()
    gc.disable()
    try:
        expires, refused = rows_of(), rows_of()
        held = [weakref.ref(expires), weakref.ref(refused)]
        server.submit(ALONE, "expires", [expires])
        server.submit(ALONE, "refused", [refused])
        del expires, refused
        server.turn()
        server.turn(at=50)
        assert failed(server) == ["refused", "expires"]
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.fault("D2")
def test_a_request_times_out_at_its_deadline_while_the_instance_is_busy(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50_000_000))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.turn(at=10_000_000)
    assert server.scheduler.next_deadline() == 60_000_000  # although no instance is free
    server.turn(at=59_999_999)
    assert server.answered() == []
    server.turn(at=60_000_000)
    assert server.answered() == [("expires", "Request timeout expired: it waited 50 ms in the queue of model 'a'")]
    assert isinstance(server.answers[0].record.error, Unavailable)
    assert server.scheduler.next_deadline() is None
    server.done(server.running[0])
    assert server.turn(at=70_000_000) == []


def test_a_batch_that_was_taken_is_not_timed_out(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50), is_pure=True)
    server.submit(ALONE, "x")
    server.submit(ALONE, "y")
    server.turn()
    assert server.turn(at=1000) == []
    assert server.raised(server.running[0])
    assert server.turn(at=2000) == [("a", ["x"])]  # retried one by one
    server.done(server.running[0])
    assert server.turn(at=3000) == [("a", ["y"])]


def test_a_request_times_out_when_an_instance_becomes_free_at_its_deadline(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.turn()
    server.done(server.running[0], at=50)
    server.turn(50)
    assert [frame.request for frame in server.answers] == ["runs", "expires"]
    assert server.running == []


def test_a_request_that_times_out_frees_its_place_for_one_that_arrives_then(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, policed(limit=1, max_size=1, timeout_ns=50))
    server.submit(plain_graph(B), "runs")
    server.submit(CHAIN, "comes")
    server.turn()
    server.submit(plain_graph(B), "expires")
    server.turn()
    runs, comes = server.running
    server.done(runs, at=50)
    server.done(comes, at=50)  # before the deadlines are checked
    assert server.turn(at=50) == [("b", ["comes"])]
    assert [told[0] if isinstance(told, tuple) else told for told in server.answered()] == ["runs", "expires"]


def test_a_request_cancelled_before_its_deadline_is_not_answered(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50, delay=1000))
    server.scheduler.cancel(server.submit(ALONE, "early"))
    cancelled = server.submit(ALONE, "late")
    server.turn()
    assert server.waiting() == {A.key: 1}
    for _ in range(2):
        server.scheduler.cancel(cancelled)
        assert server.waiting() == {A.key: 0}
    server.turn(at=50)
    assert server.answered() == []


def test_two_branches_that_expire_together_are_one_failure(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50, delay=1000))
    server.serve(B, policed(timeout_ns=50, delay=1000))
    server.submit(FORK, "x")
    server.turn()
    server.turn(at=50)
    assert failed(server) == ["x"]
    assert server.scheduler.in_flight == 0
    assert server.scheduler.next_deadline() is None


def test_a_refusal_is_reported_with_its_queue(server: Recorder) -> None:
    queue = server.serve(A, policed(max_size=1, timeout_ns=50))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.submit(ALONE, "full")
    server.turn(at=10)
    server.turn(at=60)
    refused = [
        (one.queue, one.ticket.frame.request, str(one.error).partition(":")[0])
        for one in server.notices
        if isinstance(one, TicketRefused)
    ]
    assert refused == [(queue, "full", "Exceeds maximum queue size"), (queue, "expires", "Request timeout expired")]


def test_shutdown_fails_requests_of_every_level(server: Recorder) -> None:
    levels = Levels(2, 2, LevelPolicy(timeout_ns=10, is_delayed=True))
    server.serve(A, Queue(BatchPolicy.simple(1, 1000), levels))
    server.submit(ALONE, "runs")
    server.turn()
    for priority in (1, 2):
        server.submit(ALONE, priority, priority=priority)
    server.turn(at=0)
    server.turn(at=10)
    server.scheduler.fail_all("closing")
    assert server.answered() == [(1, "closing"), (2, "closing")]
    server.turn()
    assert server.scheduler.next_deadline() is None


# ---------------------------------------------------------------------------------------------------------- withdrawal


@pytest.mark.fault("D12")
def test_a_cancellation_that_leaves_a_preferred_size_starts_the_batch(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy(16, (2, 6), 1000)))
    cancelled = server.submit(ALONE, "cancelled")
    server.submit(ALONE, "stayer", [rows_of(2)])
    assert server.turn() == []
    server.scheduler.cancel(cancelled)
    assert server.turn() == [("a", ["stayer"])]  # two rows are a preferred size


@pytest.mark.fault("D12")
def test_a_cancelled_request_frees_a_place_in_a_full_queue(server: Recorder) -> None:
    server.serve(A, policed(max_size=1))
    server.submit(ALONE, "runs")
    server.turn()
    cancelled = server.submit(ALONE, "cancelled")
    server.turn()
    server.scheduler.cancel(cancelled)
    server.submit(ALONE, "comes")
    server.turn()
    assert server.answered() == []
    server.done(server.running[0])
    assert server.turn() == [("a", ["comes"])]


# ----------------------------------------------------------------------------------------------------- optional inputs


@pytest.mark.parametrize("make", [lambda: Queue(BatchPolicy.simple(8, 1000)), lambda: policed(8, 1000, max_size=9)])
def test_another_set_of_optional_inputs_closes_a_batch(server: Recorder, make: Callable[[], Batcher]) -> None:
    model = simple_model(0, inputs=(*PORT, TensorSpec("Y", DType.FP32, (4,), optional=True)))
    server.serve(model, make())
    graph = plain_graph(model)
    for request in ("both", "both too"):
        server.submit(graph, request, [rows_of(), rows_of(width=4)])
    assert server.turn() == []  # equal keys: they wait for a larger batch
    server.submit(graph, "one", [rows_of(), None])
    assert server.turn() == [("a", ["both", "both too"])]
    server.done(server.running[0])
    assert server.turn(at=999) == []  # only the last waits
    assert server.turn(at=1000) == [("a", ["one"])]


# ---------------------------------------------------------------------------------------- order


def serve_in_order(server: Recorder, instances: int = 3, *, is_pure: bool = False) -> None:
    server.serve(A, Queue(BatchPolicy.simple(2)), instances, is_pure=is_pure, keeps_order=True)


def start(server: Recorder, *batches: tuple[object, ...]) -> None:
    """Start these requests, each on its own instance."""
    for batch in batches:
        for request in batch:
            server.submit(ALONE, request)
        assert server.turn() == [("a", [*batch])]


@pytest.mark.fault("D11")
def test_responses_keep_the_order_of_arrival_for_instances_of_any_speed(server: Recorder) -> None:
    serve_in_order(server)
    start(server, (1, 2), (3,), (4,))
    slow, middle, fast = server.running
    server.done(fast)
    server.turn()
    assert server.answered() == []
    server.done(slow)
    server.turn()
    assert server.answered() == [1, 2]
    server.done(middle)
    server.turn()
    assert server.answered() == [1, 2, 3, 4]


def test_the_instance_of_a_held_response_is_free(server: Recorder) -> None:
    serve_in_order(server, instances=2)
    start(server, (1,), (2,))
    server.done(server.running[1])
    server.submit(ALONE, 3)
    assert server.turn() == [("a", [3])]


@pytest.mark.fault("D11")
def test_a_failure_is_delivered_in_order_like_any_response(server: Recorder) -> None:
    serve_in_order(server)
    start(server, (1,), (2, 3), (4,))
    slow, broken, fine = server.running
    server.done(fine, errors={0: ModelFailed("bad picture")})
    server.raised(broken)
    server.turn()
    assert server.answered() == []
    server.done(slow)
    server.turn()
    assert server.answered() == [1, (2, "boom"), (3, "boom"), (4, "bad picture")]


@pytest.mark.fault("D11")
def test_halves_of_a_batch_keep_its_position(server: Recorder) -> None:
    serve_in_order(server, is_pure=True)
    start(server, (1, 2), (3,))
    broken, fine = server.running
    server.done(fine)
    assert server.raised(broken)
    assert server.turn() == [("a", [1]), ("a", [2])]
    first, second = server.running
    server.done(second)
    server.turn()
    assert server.answered() == []
    assert not server.raised(first)
    server.turn()
    assert server.answered() == [(1, "boom"), 2, 3]


def test_ordered_responses_do_not_wait_for_a_cancelled_request(server: Recorder) -> None:
    serve_in_order(server)
    cancelled = server.submit(ALONE, "cancelled")
    server.turn()
    start(server, (2,), (3,))
    stuck, second, third = server.running
    server.done(third)
    server.done(second)
    server.turn()
    assert server.answered() == []
    server.scheduler.cancel(cancelled)
    server.turn()
    assert server.answered() == [2, 3]
    server.done(stuck)
    server.turn()
    assert server.answered() == [2, 3]


def test_a_held_response_of_a_cancelled_request_is_dropped(server: Recorder) -> None:
    serve_in_order(server)
    start(server, (1,))
    cancelled = server.submit(ALONE, "cancelled")
    server.turn()
    start(server, (3,))
    slow, held, third = server.running
    server.done(held)
    server.turn()
    server.scheduler.cancel(cancelled)
    server.done(third)
    server.done(slow)
    server.turn()
    assert server.answered() == [1, 3]


def test_a_refused_request_is_answered_immediately_and_delays_no_ordered_response(server: Recorder) -> None:
    batcher = Queue(BatchPolicy.simple(1), Levels(policy=LevelPolicy(max_size=1, timeout_ns=50)))
    server.serve(A, batcher, instances=2, keeps_order=True)
    start(server, (1,), (2,))
    server.submit(ALONE, "expires")
    server.submit(ALONE, "refused")
    server.turn()
    assert failed(server) == ["refused"]
    server.turn(at=50)
    assert failed(server) == ["refused", "expires"]
    server.done(server.running[1], at=60)
    server.submit(ALONE, 3)
    server.turn(at=60)
    server.done(server.running[1], at=70)
    server.done(server.running[0], at=80)
    server.turn(at=80)
    assert server.answered()[2:] == [1, 2, 3]


def test_an_ordered_model_in_the_middle_passes_its_batch_on_in_order(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy.single()), instances=2, keeps_order=True)
    server.serve(B)
    for request in (1, 2):
        server.submit(CHAIN, request)
    assert server.turn() == [("a", [1]), ("a", [2])]
    first, second = server.running
    server.done(second)
    assert server.turn() == []
    server.done(first)
    assert server.turn() == [("b", [1, 2])]
