"""The dispatcher over queues that refuse, and models that keep order. Read each test as a timeline."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from flowserve.errors import FlowserveError, ModelFailed, Unavailable
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import Batcher, BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limiter import Limiter
from flowserve.scheduling.queues import LevelPolicy, Levels, PolicyBatcher
from flowserve.scheduling.router import Flow, Ticket
from flowserve.testing.recorder import PORT, Recorder, rows_of, simple_model
from flowserve.testing.strategies import chain_graph, plain_graph
from flowserve.values import DType, TensorSpec

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


def policed(limit: int = 16, delay: int = 0, **policy: int) -> PolicyBatcher:
    return PolicyBatcher(BatchPolicy.simple(limit, delay), Levels(policy=LevelPolicy(**policy)))  # type: ignore[arg-type]


@pytest.fixture(params=["without", "with"])
def server(request: pytest.FixtureRequest) -> Recorder:
    """Without and with a rate limiter: it changes who goes first where something is short, and nothing else."""
    return Recorder(limiter=Limiter() if request.param == "with" else None)


# ------------------------------------------------------------------------------------------------------------- refusal


@pytest.mark.fault("D1")
def test_who_finds_a_full_queue_is_answered_in_the_same_turn(server: Recorder) -> None:
    server.serve(A, policed(max_size=2))
    server.submit(ALONE, "runs")
    server.turn()
    for request in "xyz":
        server.submit(ALONE, request)
    assert server.turn() == []
    (told,) = server.answered()
    assert told == ("z", "Exceeds maximum queue size: the queue of model 'a' has room for 2; try again later")
    assert server.dispatcher.waiting() == {A.key: 2}
    server.done(server.running[0])
    assert server.turn() == [("a", ["x", "y"])]


def test_nobody_is_refused_while_an_instance_can_take_those_who_fill_the_queue(server: Recorder) -> None:
    server.serve(A, policed(limit=2, max_size=1), instances=2)
    for request in "wxyz":
        server.submit(ALONE, request)
    assert server.turn() == [("a", ["w"]), ("a", ["x"])]
    assert [told[0] for told in server.answered()] == ["z"]
    assert server.dispatcher.waiting() == {A.key: 1}


def test_who_waits_for_company_fills_the_queue_all_the_same(server: Recorder) -> None:
    server.serve(A, policed(delay=100, max_size=1))
    server.submit(ALONE, "waits")
    server.submit(ALONE, "refused")
    assert server.turn() == []
    assert [told[0] for told in server.answered()] == ["refused"]
    assert server.turn(at=100) == [("a", ["waits"])]


def test_a_step_in_the_middle_that_finds_no_room_fails_its_request_and_no_neighbour(server: Recorder) -> None:
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


def test_a_branch_that_finds_no_room_takes_the_other_out_of_its_queue(server: Recorder) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy.simple(16, 1000)))
    server.serve(B, policed(delay=1000, max_size=1))
    withdrawn: list[ModelQueue] = []
    server.dispatcher._withdrawn = withdrawn.append
    server.submit(plain_graph(B), "there")
    server.submit(FORK, "refused")
    server.turn()
    assert [told[0] for told in server.answered()] == ["refused"]
    assert withdrawn == [server.queues[A.key]]
    assert server.dispatcher.waiting() == {A.key: 0, B.key: 1}
    assert server.dispatcher.in_flight == 1


@pytest.mark.parametrize("depth", [0, 1], ids=["its first steps", "later steps"])
def test_a_request_that_fails_while_room_is_made_for_its_other_branch_is_answered_once(depth: int) -> None:
    runs: list[str] = []
    answers: list[object] = []

    def run(batch: Batch) -> None:
        """Inline, inside the call."""
        runs.append(batch.queue.key.name)
        if batch.queue.key == A.key:
            dispatcher.batch_failed(batch, ModelFailed("boom"))
        else:
            dispatcher.batch_done(batch, [[rows_of()]], {}, 0)

    dispatcher = Dispatcher(run, lambda flow: answers.append(str(flow.error)))
    server = Recorder()
    server.dispatcher = dispatcher
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
    dispatcher.pump(0)
    dispatcher.check()
    assert answers == ["boom"]
    assert runs == ["b"] * depth + ["a"]
    assert dispatcher.in_flight == 0
    assert dispatcher.waiting() == {A.key: 0, B.key: 0}


def test_refusing_costs_no_look_through_the_queue(server: Recorder) -> None:
    class Unsearched(PolicyBatcher):
        def withdraw(self, flow: Flow) -> int:
            raise AssertionError("the queue was searched")

    policy = LevelPolicy(max_size=1, timeout_ns=50)
    server.serve(A, Unsearched(BatchPolicy.simple(1), Levels(policy=policy)))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.submit(ALONE, "refused")
    server.turn()
    server.turn(at=50)
    assert [told[0] for told in server.answered()] == ["refused", "expires"]


def test_who_is_refused_lets_go_of_its_tensors_without_the_collector(server: Recorder) -> None:
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
        assert [told[0] for told in server.answered()] == ["refused", "expires"]
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.fault("D2")
def test_who_waits_too_long_is_answered_at_the_deadline_whatever_the_instance_does(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50_000_000))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.turn(at=10_000_000)
    assert server.dispatcher.next_deadline() == 60_000_000  # although no instance is free
    server.turn(at=59_999_999)
    assert server.answered() == []
    server.turn(at=60_000_000)
    assert server.answered() == [("expires", "Request timeout expired: it waited 50 ms in the queue of model 'a'")]
    assert isinstance(server.answers[0].error, Unavailable)
    assert server.dispatcher.next_deadline() is None
    server.done(server.running[0])
    assert server.turn(at=70_000_000) == []


def test_a_batch_that_was_taken_is_not_timed_out(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50), is_pure=True)
    server.submit(ALONE, "x")
    server.submit(ALONE, "y")
    server.turn()
    assert server.turn(at=1000) == []
    assert server.raised(server.running[0])
    assert server.turn(at=2000) == [("a", ["x"])]  # tried again, one by one
    server.done(server.running[0])
    assert server.turn(at=3000) == [("a", ["y"])]


def test_at_its_deadline_an_instance_comes_too_late(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.turn()
    server.done(server.running[0], at=50)
    server.dispatcher.pump(50)  # nobody has called `wake`
    assert [flow.request for flow in server.answers] == ["runs", "expires"]
    assert server.running == []


def test_whose_time_is_over_leaves_the_room_to_who_comes_at_that_moment(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, policed(limit=1, max_size=1, timeout_ns=50))
    server.submit(plain_graph(B), "runs")
    server.submit(CHAIN, "comes")
    server.turn()
    server.submit(plain_graph(B), "expires")
    server.turn()
    runs, comes = server.running
    server.done(runs, at=50)
    server.done(comes, at=50)  # before anything has looked at the deadlines
    assert server.turn(at=50) == [("b", ["comes"])]
    assert [told if isinstance(told, str) else told[0] for told in server.answered()] == ["runs", "expires"]


def test_who_is_gone_at_the_deadline_is_not_answered(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50, delay=1000))
    server.dispatcher.cancel(server.submit(ALONE, "early"))
    leaver = server.submit(ALONE, "late")
    server.turn()
    assert server.dispatcher.cancel(leaver) == [server.queues[A.key]]
    assert server.dispatcher.cancel(leaver) == ()
    server.turn(at=50)
    assert server.answered() == []


def test_two_branches_that_expire_together_are_one_failure(server: Recorder) -> None:
    server.serve(A, policed(timeout_ns=50, delay=1000))
    server.serve(B, policed(timeout_ns=50, delay=1000))
    server.submit(FORK, "x")
    server.turn()
    server.turn(at=50)
    assert [told[0] for told in server.answered()] == ["x"]
    assert server.dispatcher.in_flight == 0
    assert server.dispatcher.next_deadline() is None


def test_refusals_are_told_with_their_queue(server: Recorder) -> None:
    told: list[tuple[ModelQueue, object, str]] = []

    def refused(queue: ModelQueue, ticket: Ticket, error: FlowserveError) -> None:
        assert not ticket.flow.done
        told.append((queue, ticket.flow.request, str(error).partition(":")[0]))

    server.dispatcher._refused = refused
    queue = server.serve(A, policed(max_size=1, timeout_ns=50))
    server.submit(ALONE, "runs")
    server.turn()
    server.submit(ALONE, "expires")
    server.submit(ALONE, "full")
    server.turn(at=10)
    server.turn(at=60)
    assert told == [(queue, "full", "Exceeds maximum queue size"), (queue, "expires", "Request timeout expired")]


def test_the_end_of_the_server_reaches_every_level(server: Recorder) -> None:
    levels = Levels(2, 2, LevelPolicy(timeout_ns=10, is_delayed=True))
    server.serve(A, PolicyBatcher(BatchPolicy.simple(1, 1000), levels))
    server.submit(ALONE, "runs")
    server.turn()
    for priority in (1, 2):
        server.submit(ALONE, priority, priority=priority)
    server.turn(at=0)
    server.turn(at=10)
    server.dispatcher.fail_all("closing")
    assert server.answered() == [(1, "closing"), (2, "closing")]
    assert server.dispatcher.next_deadline() is None


# ---------------------------------------------------------------------------------------------------------- withdrawal


@pytest.mark.fault("D12")
def test_whoever_stays_behind_a_leaver_makes_a_batch_at_once(server: Recorder) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy(16, (2, 6), 1000)))
    leaver = server.submit(ALONE, "leaver")
    server.submit(ALONE, "stayer", [rows_of(2)])
    assert server.turn() == []
    server.dispatcher.cancel(leaver)
    assert server.turn() == [("a", ["stayer"])]  # two rows are a preferred size


@pytest.mark.fault("D12")
def test_a_leaver_frees_a_place_in_a_full_queue(server: Recorder) -> None:
    server.serve(A, policed(max_size=1))
    server.submit(ALONE, "runs")
    server.turn()
    leaver = server.submit(ALONE, "leaver")
    server.turn()
    server.dispatcher.cancel(leaver)
    server.submit(ALONE, "comes")
    server.turn()
    assert server.answered() == []
    server.done(server.running[0])
    assert server.turn() == [("a", ["comes"])]


# ----------------------------------------------------------------------------------------------------- optional inputs


@pytest.mark.parametrize(
    "make", [lambda: DynamicBatcher(BatchPolicy.simple(8, 1000)), lambda: policed(8, 1000, max_size=9)]
)
def test_another_set_of_optional_inputs_closes_a_batch(server: Recorder, make: Callable[[], Batcher]) -> None:
    model = simple_model(0, inputs=(*PORT, TensorSpec("Y", DType.FP32, (4,), optional=True)))
    server.serve(model, make())
    graph = plain_graph(model)
    for request in ("both", "both too"):
        server.submit(graph, request, [rows_of(), rows_of(width=4)])
    assert server.turn() == []  # alike: they wait for company
    server.submit(graph, "one", [rows_of(), None])
    assert server.turn() == [("a", ["both", "both too"])]
    server.done(server.running[0])
    assert server.turn(at=999) == []  # only the last waits
    assert server.turn(at=1000) == [("a", ["one"])]


# --------------------------------------------------------------------------------------------------------------- order


def serve_in_order(server: Recorder, instances: int = 3, *, is_pure: bool = False) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy.simple(2)), instances, is_pure=is_pure, keeps_order=True)


def start(server: Recorder, *batches: tuple[object, ...]) -> None:
    """Each on an instance of its own."""
    for batch in batches:
        for request in batch:
            server.submit(ALONE, request)
        assert server.turn() == [("a", [*batch])]


@pytest.mark.fault("D11")
def test_answers_leave_in_the_order_of_arrival_however_fast_each_instance_is(server: Recorder) -> None:
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


def test_the_instance_of_an_answer_that_is_held_is_free(server: Recorder) -> None:
    serve_in_order(server, instances=2)
    start(server, (1,), (2,))
    server.done(server.running[1])
    server.submit(ALONE, 3)
    assert server.turn() == [("a", [3])]


@pytest.mark.fault("D11")
def test_a_failure_waits_for_its_turn_like_any_answer(server: Recorder) -> None:
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
def test_halves_of_a_batch_keep_its_place(server: Recorder) -> None:
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


def test_nobody_waits_for_the_answer_of_somebody_who_left(server: Recorder) -> None:
    serve_in_order(server)
    leaver = server.submit(ALONE, "leaver")
    server.turn()
    start(server, (2,), (3,))
    stuck, second, third = server.running
    server.done(third)
    server.done(second)
    server.turn()
    assert server.answered() == []
    server.dispatcher.cancel(leaver)
    server.turn()
    assert server.answered() == [2, 3]
    server.done(stuck)
    server.turn()
    assert server.answered() == [2, 3]


def test_an_answer_that_is_held_for_somebody_who_left_is_dropped(server: Recorder) -> None:
    serve_in_order(server)
    start(server, (1,))
    leaver = server.submit(ALONE, "leaver")
    server.turn()
    start(server, (3,))
    slow, held, third = server.running
    server.done(held)
    server.turn()
    server.dispatcher.cancel(leaver)
    server.done(third)
    server.done(slow)
    server.turn()
    assert server.answered() == [1, 3]


def test_who_never_ran_is_answered_at_once_and_holds_nobody_back(server: Recorder) -> None:
    batcher = PolicyBatcher(BatchPolicy.simple(1), Levels(policy=LevelPolicy(max_size=1, timeout_ns=50)))
    server.serve(A, batcher, instances=2, keeps_order=True)
    start(server, (1,), (2,))
    server.submit(ALONE, "expires")
    server.submit(ALONE, "refused")
    server.turn()
    assert [told[0] for told in server.answered()] == ["refused"]
    server.turn(at=50)
    assert [told[0] for told in server.answered()] == ["refused", "expires"]
    server.done(server.running[1], at=60)
    server.submit(ALONE, 3)
    server.turn(at=60)
    server.done(server.running[1], at=70)
    server.done(server.running[0], at=80)
    server.turn(at=80)
    assert server.answered()[2:] == [1, 2, 3]


def test_an_ordered_model_in_the_middle_hands_on_in_order_and_together(server: Recorder) -> None:
    server.serve(A, OneByOne(), instances=2, keeps_order=True)
    server.serve(B)
    for request in (1, 2):
        server.submit(CHAIN, request)
    assert server.turn() == [("a", [1]), ("a", [2])]
    first, second = server.running
    server.done(second)
    assert server.turn() == []
    server.done(first)
    assert server.turn() == [("b", [1, 2])]
