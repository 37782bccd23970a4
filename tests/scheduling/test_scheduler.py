"""The scheduler: arrivals, batches through graphs, failures and cancellations. Each test is a timeline."""

from __future__ import annotations

import gc
import weakref

import pytest

from flowserve.errors import Internal, ModelFailed, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.simulation.deployment import BatchResults
from flowserve.values import DType, TensorSpec
from tests.support.recorder import PORT, Recorder, rows_of, simple_model
from tests.support.strategies import Handle, chain_graph, plain_graph

A, B, C = simple_model(0), simple_model(1), simple_model(2)
CHAIN = chain_graph("chain", [A, B, C])
ALONE = plain_graph(A)


def serve_chain(server: Recorder) -> None:
    for model in (A, B, C):
        server.serve(model)


# ------------------------------------------------------------------------------------------------------ togetherness


def test_requests_of_one_step_run_in_one_batch_in_the_order_of_their_stamps(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "late", stamp=3)
    server.submit(ALONE, "early", stamp=1)
    server.submit(ALONE, "middle", stamp=2)
    assert server.turn() == [("a", ["early", "middle", "late"])]
    server.done(server.running[0])
    assert server.answered() == ["early", "middle", "late"]


def test_a_batch_of_sixteen_stays_whole_and_in_one_block_to_the_last_node(server: Recorder) -> None:
    serve_chain(server)
    requests: list[object] = list(range(16))
    for request in requests:
        server.submit(CHAIN, request)
    for name in ("a", "b", "c"):
        assert server.turn() == [(name, requests)]
        (batch,) = server.running
        assert batch.rows == 16
        if name != "a":
            inputs: list[Handle] = [ticket.tensors[ticket.node.inputs[0]] for ticket in batch.tickets]
            assert len({id(handle.block) for handle in inputs}) == 1
            assert [handle.start for handle in inputs] == list(range(16))  # neighbours: nothing to copy
        server.done(batch)
    assert server.answered() == requests


def test_a_request_too_large_for_its_next_node_fails_and_others_keep_their_order(
    server: Recorder,
) -> None:
    fixed = (TensorSpec("X", DType.FP32, (2,)),)
    first, narrow = simple_model(0, 16, fixed, fixed), simple_model(1, 2, fixed, fixed)
    server.serve(first)
    server.serve(narrow)
    through = chain_graph("through", [first, narrow])
    for request, rows in enumerate([1, 1, 3, 1]):
        server.submit(through, request, [rows_of(rows)])
    assert server.turn() == [("a", [0, 1, 2, 3])]
    server.done(server.running[0])
    told = (2, "inference request batch-size must be <= 2 for 'b'")
    assert server.answered() == [told]
    assert server.turn() == [("b", [0, 1])]
    server.done(server.running[0])
    assert server.turn() == [("b", [3])]
    server.done(server.running[0])
    assert server.answered() == [told, 0, 1, 3]


def test_a_batch_is_filled_with_requests_queued_behind_it(server: Recorder) -> None:
    serve_chain(server)
    server.submit(plain_graph(B), "busy")
    server.submit(CHAIN, 1)
    server.submit(CHAIN, 2)
    assert server.turn() == [("b", ["busy"]), ("a", [1, 2])]
    busy, together = server.running
    server.done(together)
    server.submit(plain_graph(B), "direct")
    assert server.turn() == []  # b's only instance is busy
    server.done(busy)
    assert server.turn() == [("b", [1, 2, "direct"])]


def test_two_steps_of_one_request_may_run_in_one_batch(server: Recorder) -> None:
    joined = simple_model(1, inputs=(*PORT, TensorSpec("Y", DType.FP32, (-1,))))
    server.serve(A)
    server.serve(joined)
    nodes = (
        Node(0, "a", A.key, A.inputs, A.outputs, 16),
        Node(1, "a#2", A.key, A.inputs, A.outputs, 16),
        Node(2, "b", joined.key, joined.inputs, joined.outputs, 16),
    )
    edges = [(GRAPH, 0, 0, 0), (GRAPH, 0, 1, 0), (0, 0, 2, 0), (1, 0, 2, 1), (2, 0, GRAPH, 0)]
    both = Graph("both", 1, PORT, PORT, 16, nodes, tuple(Edge("t", *ends) for ends in edges), is_ensemble=True)
    server.submit(both, "x")
    server.submit(both, "y")
    assert server.turn() == [("a", ["x", "x", "y", "y"])]
    server.done(server.running[0])
    assert server.turn() == [("b", ["x", "y"])]
    server.done(server.running[0])
    assert server.answered() == ["x", "y"]


def test_ensembles_and_direct_requests_of_one_model_share_its_batches(server: Recorder) -> None:
    serve_chain(server)
    server.submit(CHAIN, "ensemble")
    server.submit(ALONE, "direct")
    server.submit(chain_graph("other", [A, C]), "other")
    assert server.turn() == [("a", ["ensemble", "direct", "other"])]
    server.done(server.running[0])
    assert server.answered() == ["direct"]
    assert server.turn() == [("b", ["ensemble"]), ("c", ["other"])]


def test_the_instance_idle_longest_takes_the_next_batch(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy.single()), instances=2)
    for request in range(3):
        server.submit(ALONE, request)
    assert server.turn() == [("a", [0]), ("a", [1])]
    first, second = server.running
    server.done(second)
    server.done(first)
    assert server.turn() == [("a", [2])]
    assert server.running[0].instance == second.instance


# -------------------------------------------------------------------------------------------------------------- time


def test_the_queue_delay_applies_only_while_an_instance_is_free(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy.simple(4, max_queue_delay_ns=100)))
    server.submit(ALONE, 1)
    assert server.turn(at=0) == []
    assert server.scheduler.next_deadline() == 100
    assert server.turn(at=99) == []
    assert server.turn(at=100) == [("a", [1])]
    server.submit(ALONE, 2)
    assert server.turn(at=110) == []
    assert server.scheduler.next_deadline() is None  # no instance: time alone changes nothing
    server.done(server.running[0], at=150)
    assert server.turn(at=150) == []
    assert server.scheduler.next_deadline() == 210
    assert server.turn(at=210) == [("a", [2])]


# ---------------------------------------------------------------------------------------------------------- failures


def test_the_error_of_one_member_fails_no_other(server: Recorder) -> None:
    serve_chain(server)
    for request in "xyz":
        server.submit(CHAIN, request)
    server.turn()
    server.done(server.running[0], errors={1: ModelFailed("bad picture")})
    assert server.answered() == [("y", "bad picture")]
    assert server.turn() == [("b", ["x", "z"])]


def test_a_failed_batch_of_an_impure_model_fails_all_its_requests(server: Recorder) -> None:
    server.serve(A)
    for request in "xy":
        server.submit(ALONE, request)
    server.turn()
    assert not server.raised(server.running[0])
    assert server.answered() == [("x", "boom"), ("y", "boom")]
    server.submit(ALONE, "z")
    assert server.turn() == [("a", ["z"])]


def test_one_failing_request_of_a_pure_batch_fails_and_the_others_succeed(server: Recorder) -> None:
    server.serve(A, is_pure=True)
    for request in range(5):
        server.submit(ALONE, request)
    server.turn()
    while server.running:
        batch = server.running[0]
        if any(ticket.frame.request == 3 for ticket in batch.tickets):
            assert server.raised(batch) == (len(batch.tickets) > 1)
        else:
            server.done(batch)
        server.turn()
    assert server.started == [
        ("a", [0, 1, 2, 3, 4]),
        ("a", [0, 1, 2]),
        ("a", [3, 4]),
        ("a", [3]),
        ("a", [4]),
    ]
    assert server.answered() == [0, 1, 2, (3, "boom"), 4]


def test_halves_of_a_failed_batch_run_in_parallel_and_before_new_requests(server: Recorder) -> None:
    server.serve(A, instances=2, is_pure=True)
    for request in range(4):
        server.submit(ALONE, request)
    server.turn()
    server.raised(server.running[0])
    server.submit(ALONE, "newcomer")
    assert server.turn() == [("a", [0, 1]), ("a", [2, 3])]
    server.done(server.running[0])
    assert server.turn() == [("a", ["newcomer"])]


def test_a_cancelled_request_of_a_failed_batch_is_not_retried(server: Recorder) -> None:
    server.serve(A, is_pure=True)
    frames = [server.submit(ALONE, request) for request in range(4)]
    server.turn()
    server.scheduler.cancel(frames[0])
    assert server.raised(server.running[0])
    server.scheduler.cancel(frames[3])
    assert server.turn() == [("a", [1, 2])]


def test_two_steps_of_one_request_in_a_batch_that_raises_are_one_failure(server: Recorder) -> None:
    server.serve(A)
    nodes = tuple(Node(i, f"a#{i}", A.key, A.inputs, A.outputs, 16) for i in range(2))
    edges = tuple(Edge("t", GRAPH, 0, i, 0) for i in range(2)) + tuple(Edge("t", i, 0, GRAPH, i) for i in range(2))
    server.submit(Graph("twice", 1, PORT, PORT * 2, 16, nodes, edges, is_ensemble=True), "x")
    assert server.turn() == [("a", ["x", "x"])]
    assert not server.raised(server.running[0])
    assert server.answered() == [("x", "boom")]
    assert server.scheduler.in_flight == 0


def test_a_request_that_fails_in_one_branch_leaves_the_queues_of_the_others(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, Queue(BatchPolicy.simple(8, max_queue_delay_ns=1000)))
    nodes = (Node(0, "a", A.key, A.inputs, A.outputs, 16), Node(1, "b", B.key, B.inputs, B.outputs, 16))
    edges = (
        Edge("t", GRAPH, 0, 0, 0),
        Edge("t", GRAPH, 0, 1, 0),
        Edge("t", 0, 0, GRAPH, 0),
        Edge("t", 1, 0, GRAPH, 1),
    )
    server.submit(Graph("fork", 1, PORT, PORT * 2, 16, nodes, edges, is_ensemble=True), "x")
    assert server.turn() == [("a", ["x"])]
    assert server.waiting()[B.key] == 1
    server.raised(server.running[0])
    assert server.answered() == [("x", "boom")]
    assert server.waiting()[B.key] == 0
    assert server.turn(at=5000) == []


def test_a_request_too_large_for_its_first_node_fails_in_the_same_step(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "too many", inputs=[rows_of(17)])
    server.submit(ALONE, "fine")
    assert server.turn() == [("a", ["fine"])]
    assert server.answered() == [("too many", "inference request batch-size must be <= 16 for 'a'")]


def test_a_request_that_selects_only_its_own_inputs_completes_in_the_same_step(server: Recorder) -> None:
    server.serve(A)
    edges = (Edge("x", GRAPH, 0, 0, 0), Edge("x", GRAPH, 0, GRAPH, 0), Edge("y", 0, 0, GRAPH, 1))
    nodes = (Node(0, "a", A.key, A.inputs, A.outputs, 16),)
    through = Graph("through", 1, PORT, (*PORT, TensorSpec("Y", DType.FP32, (-1,))), 16, nodes, edges, is_ensemble=True)
    given = rows_of()
    frame = request_frame(make_plan(through, ["X"]), [server.queues[A.key]], [given], 0, 1, "x")
    server.scheduler.submit(frame)
    assert server.turn() == []
    assert server.answered() == ["x"]
    assert frame.tensors[frame.plan.output_slots[0]] is given


def test_a_failed_request_releases_its_tensors_without_the_collector(server: Recorder) -> None:
    serve_chain(server)
    gc.disable()
    try:
        server.submit(CHAIN, "x")
        server.turn()
        made = [[Handle(0, 2, 0, 17)]]  # more rows than b takes
        held = weakref.ref(made[0][0])
        server.scheduler.complete(server.running.pop(), [BatchResults(made)], None, 0)
        del made
        assert server.answered() == [("x", "inference request batch-size must be <= 16 for 'b'")]
        assert held() is None
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------- leaving


def test_a_request_cancelled_before_the_step_is_never_queued(server: Recorder) -> None:
    server.serve(A)
    server.scheduler.cancel(server.submit(ALONE, "x"))
    assert server.turn() == []
    assert server.scheduler.in_flight == 0
    assert server.answered() == []


def test_a_request_cancelled_while_it_runs_does_not_reach_the_next_node(server: Recorder) -> None:
    serve_chain(server)
    cancelled, _ = server.submit(CHAIN, "cancelled"), server.submit(CHAIN, "stayer")
    server.turn()
    server.scheduler.cancel(cancelled)
    server.scheduler.cancel(cancelled)
    assert server.scheduler.in_flight == 1
    server.done(server.running[0])
    assert server.turn() == [("b", ["stayer"])]


def test_a_cancelled_request_releases_its_tensors_immediately(server: Recorder) -> None:
    server.serve(A)
    given = rows_of()
    held = weakref.ref(given)
    cancelled = server.submit(ALONE, "cancelled", inputs=[given])
    del given
    server.turn()
    server.scheduler.cancel(cancelled)
    assert held() is None  # a running batch holds its own references


def test_a_request_cancelled_in_a_queue_frees_its_place(server: Recorder) -> None:
    server.serve(A, Queue(BatchPolicy.simple(2)))
    server.submit(ALONE, 1)
    server.turn()
    frames = [server.submit(ALONE, request) for request in (2, 3, 4)]
    server.turn()
    server.scheduler.cancel(frames[1])
    server.done(server.running[0])
    assert server.turn() == [("a", [2, 4])]


# ------------------------------------------------------------------------------------------- calls from inside a call


def test_an_inline_instance_runs_a_whole_chain_in_one_step() -> None:
    order: list[tuple[str, int]] = []

    class Inline(Recorder):
        def run(self, batch: Batch) -> None:
            order.append((batch.queue.key.name, len(batch.tickets)))
            self.scheduler.complete(batch, [BatchResults([[rows_of() for _ in batch.tickets]])], None, 0)

    server = Inline()
    serve_chain(server)
    for request in range(20):
        server.submit(CHAIN, request)
    server.turn()
    assert sorted(order) == [("a", 4), ("a", 16), ("b", 4), ("b", 16), ("c", 4), ("c", 16)]
    assert server.answered() == [*range(20)]


def test_a_caller_may_send_its_next_request_when_it_has_its_response() -> None:
    class Asking(Recorder):
        def finished(self, frame: Frame) -> None:
            super().finished(frame)
            if frame.request == 0:
                self.submit(ALONE, "again")

    server = Asking()
    server.serve(A)
    for request in range(3):
        server.submit(ALONE, request)
    server.turn()
    server.done(server.running[0])
    assert server.turn() == [("a", ["again"])]
    assert server.answered() == [0, 1, 2]


# --------------------------------------------------------------------------------------------------------------- end


def test_shutdown_fails_waiting_requests_and_running_batches_complete(server: Recorder) -> None:
    queue: ModelQueue = server.serve(A, Queue(BatchPolicy.simple(4)), is_pure=True)
    for request in range(4):
        server.submit(ALONE, request)
    server.turn()
    server.raised(server.running[0])
    assert server.turn() == [("a", [0, 1])]  # the other half waits for the instance
    server.submit(ALONE, "queued")
    server.turn()
    server.submit(ALONE, "arriving")
    server.scheduler.fail_all("closing")
    assert sorted(map(str, server.answered())) == [
        "('arriving', 'closing')",
        "('queued', 'closing')",
        "(2, 'closing')",
        "(3, 'closing')",
    ]
    assert all(isinstance(frame.record.error, Unavailable) for frame in server.answers)
    server.done(server.running[0])
    assert server.turn() == []
    assert server.answered()[-2:] == [0, 1]
    assert server.scheduler.in_flight == 0
    assert list(queue.free) == [0]


@pytest.mark.parametrize("waiting", [0, 3])
def test_scheduling_again_at_the_same_time_changes_nothing(server: Recorder, waiting: int) -> None:
    server.serve(A, Queue(BatchPolicy.simple(4, max_queue_delay_ns=100)))
    for request in range(waiting):
        server.submit(ALONE, request)
    server.turn(at=1)
    assert server.turn(at=1) == []
    assert server.waiting() == {A.key: waiting}


# --------------------------------------------------------------------------------------------------------- broken off


def test_aborting_a_completed_batch_does_not_free_its_instance_again(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "first")
    server.turn()
    (first,) = server.running
    server.done(first)
    server.submit(ALONE, "second")
    server.turn()
    server.scheduler.break_off(first, Internal("a slip"))
    server.submit(ALONE, "third")
    assert server.turn() == [], "the second has the instance"
    server.done(server.running[0])
    assert server.turn() == [("a", ["third"])]
    assert server.answered() == ["first", "second"]


def test_all_members_of_an_aborted_batch_fail(server: Recorder) -> None:
    server.serve(A)
    for request in ("first", "other"):
        server.submit(ALONE, request)
    server.turn()
    (batch,) = server.running
    server.scheduler.break_off(batch, Internal("not taken in"))
    assert server.answered() == [("first", "not taken in"), ("other", "not taken in")]
    server.submit(ALONE, "next")
    assert server.turn() == [("a", ["next"])]
