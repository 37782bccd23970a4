"""Who runs when: arrivals, batches through graphs, failures, leavers. Read each test as a timeline."""

from __future__ import annotations

import gc
import weakref

import pytest

from flowserve.errors import Internal, ModelFailed, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, Node
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.router import Flow
from flowserve.testing.recorder import PORT, Recorder, rows_of, simple_model
from flowserve.testing.sim_world import Handle
from flowserve.testing.strategies import chain_graph, plain_graph
from flowserve.values import DType, TensorSpec

A, B, C = simple_model(0), simple_model(1), simple_model(2)
CHAIN = chain_graph("chain", [A, B, C])
ALONE = plain_graph(A)


def serve_chain(server: Recorder) -> None:
    for model in (A, B, C):
        server.serve(model)


# ------------------------------------------------------------------------------------------------------ togetherness


def test_requests_of_one_turn_run_together_in_the_order_of_their_stamps(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "late", stamp=3)
    server.submit(ALONE, "early", stamp=1)
    server.submit(ALONE, "middle", stamp=2)
    assert server.turn() == [("a", ["early", "middle", "late"])]
    server.done(server.running[0])
    assert server.answered() == ["early", "middle", "late"]


def test_a_batch_of_sixteen_is_a_batch_of_sixteen_at_the_last_node_and_lies_in_one_block(server: Recorder) -> None:
    serve_chain(server)
    everybody: list[object] = list(range(16))
    for request in everybody:
        server.submit(CHAIN, request)
    for name in ("a", "b", "c"):
        assert server.turn() == [(name, everybody)]
        (batch,) = server.running
        assert batch.rows == 16
        if name != "a":
            inputs: list[Handle] = [ticket.flow.tensors[ticket.node.inputs[0]] for ticket in batch.tickets]
            assert len({id(handle.block) for handle in inputs}) == 1
            assert [handle.start for handle in inputs] == list(range(16))  # neighbours: nothing to copy
        server.done(batch)
    assert server.answered() == everybody


def test_one_of_a_batch_that_its_next_step_cannot_take_fails_alone_and_the_others_keep_their_order(
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


def test_a_batch_takes_on_whoever_waits_behind_it(server: Recorder) -> None:
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


def test_ensembles_and_direct_callers_of_one_model_share_its_batches(server: Recorder) -> None:
    serve_chain(server)
    server.submit(CHAIN, "ensemble")
    server.submit(ALONE, "direct")
    server.submit(chain_graph("other", [A, C]), "other")
    assert server.turn() == [("a", ["ensemble", "direct", "other"])]
    server.done(server.running[0])
    assert server.answered() == ["direct"]
    assert server.turn() == [("b", ["ensemble"]), ("c", ["other"])]


def test_work_spreads_over_instances_idle_longest_first(server: Recorder) -> None:
    server.serve(A, OneByOne(), instances=2)
    for request in range(3):
        server.submit(ALONE, request)
    assert server.turn() == [("a", [0]), ("a", [1])]
    first, second = server.running
    server.done(second)
    server.done(first)
    assert server.turn() == [("a", [2])]
    assert server.running[0].instance == second.instance


# -------------------------------------------------------------------------------------------------------------- time


def test_company_is_waited_for_only_until_the_delay_is_over_and_only_beside_a_free_instance(server: Recorder) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy.simple(4, max_queue_delay_ns=100)))
    server.submit(ALONE, 1)
    assert server.turn(at=0) == []
    assert server.dispatcher.next_deadline() == 100
    assert server.turn(at=99) == []
    assert server.turn(at=100) == [("a", [1])]
    server.submit(ALONE, 2)
    assert server.turn(at=110) == []
    assert server.dispatcher.next_deadline() is None  # no instance: time alone changes nothing
    server.done(server.running[0], at=150)
    assert server.turn(at=150) == []
    assert server.dispatcher.next_deadline() == 210
    assert server.turn(at=210) == [("a", [2])]


# ---------------------------------------------------------------------------------------------------------- failures


def test_the_error_of_one_member_touches_no_neighbour(server: Recorder) -> None:
    serve_chain(server)
    for request in "xyz":
        server.submit(CHAIN, request)
    server.turn()
    server.done(server.running[0], errors={1: ModelFailed("bad picture")})
    assert server.answered() == [("y", "bad picture")]
    assert server.turn() == [("b", ["x", "z"])]


def test_a_batch_that_raises_fails_whole_where_the_model_is_not_pure(server: Recorder) -> None:
    server.serve(A)
    for request in "xy":
        server.submit(ALONE, request)
    server.turn()
    assert not server.raised(server.running[0])
    assert server.answered() == [("x", "boom"), ("y", "boom")]
    server.submit(ALONE, "z")
    assert server.turn() == [("a", ["z"])]  # the instance is home


def test_one_poisonous_request_of_a_pure_batch_fails_alone(server: Recorder) -> None:
    server.serve(A, is_pure=True)
    for request in range(5):
        server.submit(ALONE, request)
    server.turn()
    while server.running:
        batch = server.running[0]
        if any(ticket.flow.request == 3 for ticket in batch.tickets):
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


def test_halves_run_side_by_side_where_instances_are_free_and_before_newcomers(server: Recorder) -> None:
    server.serve(A, instances=2, is_pure=True)
    for request in range(4):
        server.submit(ALONE, request)
    server.turn()
    server.raised(server.running[0])
    server.submit(ALONE, "newcomer")
    assert server.turn() == [("a", [0, 1]), ("a", [2, 3])]
    server.done(server.running[0])
    assert server.turn() == [("a", ["newcomer"])]


def test_who_left_meanwhile_is_not_tried_again(server: Recorder) -> None:
    server.serve(A, is_pure=True)
    flows = [server.submit(ALONE, request) for request in range(4)]
    server.turn()
    server.dispatcher.cancel(flows[0])
    assert server.raised(server.running[0])
    server.dispatcher.cancel(flows[3])
    assert server.turn() == [("a", [1, 2])]


def test_two_steps_of_one_request_in_a_batch_that_raises_are_one_failure(server: Recorder) -> None:
    server.serve(A)
    nodes = tuple(Node(i, f"a#{i}", A.key, A.inputs, A.outputs, 16) for i in range(2))
    edges = tuple(Edge("t", GRAPH, 0, i, 0) for i in range(2)) + tuple(Edge("t", i, 0, GRAPH, i) for i in range(2))
    server.submit(Graph("twice", 1, PORT, PORT * 2, 16, nodes, edges, is_ensemble=True), "x")
    assert server.turn() == [("a", ["x", "x"])]
    assert not server.raised(server.running[0])
    assert server.answered() == [("x", "boom")]
    assert server.dispatcher.in_flight == 0


def test_a_request_that_fails_in_one_branch_leaves_the_queues_of_the_others(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, DynamicBatcher(BatchPolicy.simple(8, max_queue_delay_ns=1000)))
    nodes = (Node(0, "a", A.key, A.inputs, A.outputs, 16), Node(1, "b", B.key, B.inputs, B.outputs, 16))
    edges = (
        Edge("t", GRAPH, 0, 0, 0),
        Edge("t", GRAPH, 0, 1, 0),
        Edge("t", 0, 0, GRAPH, 0),
        Edge("t", 1, 0, GRAPH, 1),
    )
    server.submit(Graph("fork", 1, PORT, PORT * 2, 16, nodes, edges, is_ensemble=True), "x")
    assert server.turn() == [("a", ["x"])]
    assert server.dispatcher.waiting()[B.key] == 1
    server.raised(server.running[0])
    assert server.answered() == [("x", "boom")]
    assert server.dispatcher.waiting()[B.key] == 0
    assert server.turn(at=5000) == []


def test_a_request_that_its_first_step_cannot_take_is_answered_in_its_turn(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "too many", inputs=[rows_of(17)])
    server.submit(ALONE, "fine")
    assert server.turn() == [("a", ["fine"])]
    assert server.answered() == [("too many", "inference request batch-size must be <= 16 for 'a'")]


def test_a_request_that_wants_only_what_it_brought_is_answered_in_its_turn(server: Recorder) -> None:
    server.serve(A)
    edges = (Edge("x", GRAPH, 0, 0, 0), Edge("x", GRAPH, 0, GRAPH, 0), Edge("y", 0, 0, GRAPH, 1))
    nodes = (Node(0, "a", A.key, A.inputs, A.outputs, 16),)
    through = Graph("through", 1, PORT, (*PORT, TensorSpec("Y", DType.FP32, (-1,))), 16, nodes, edges, is_ensemble=True)
    given = rows_of()
    flow = Flow(make_plan(through, ["X"]), [server.queues[A.key]], [given], 0, 1, "x")
    server.dispatcher.submit(flow)
    assert server.turn() == []
    assert server.answered() == ["x"]
    assert flow.tensors[flow.plan.output_slots[0]] is given


def test_a_failed_request_lets_go_of_its_tensors_without_the_collector(server: Recorder) -> None:
    serve_chain(server)
    gc.disable()
    try:
        server.submit(CHAIN, "x")
        server.turn()
        made = [[Handle(0, 2, 0, 17)]]  # more rows than b takes
        held = weakref.ref(made[0][0])
        server.dispatcher.batch_done(server.running.pop(), made, {}, 0)
        del made
        assert server.answered() == [("x", "inference request batch-size must be <= 16 for 'b'")]
        assert held() is None
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------- leaving


def test_who_leaves_before_the_turn_is_never_queued(server: Recorder) -> None:
    server.serve(A)
    server.dispatcher.cancel(server.submit(ALONE, "x"))
    assert server.turn() == []
    assert server.dispatcher.in_flight == 0
    assert server.answered() == []


def test_who_leaves_while_running_runs_out_and_goes_no_further(server: Recorder) -> None:
    serve_chain(server)
    leaver, _ = server.submit(CHAIN, "leaver"), server.submit(CHAIN, "stayer")
    server.turn()
    server.dispatcher.cancel(leaver)
    server.dispatcher.cancel(leaver)
    assert server.dispatcher.in_flight == 1
    server.done(server.running[0])
    assert server.turn() == [("b", ["stayer"])]


def test_who_leaves_lets_go_of_its_tensors_at_once(server: Recorder) -> None:
    server.serve(A)
    given = rows_of()
    held = weakref.ref(given)
    leaver = server.submit(ALONE, "leaver", inputs=[given])
    del given
    server.turn()
    server.dispatcher.cancel(leaver)
    assert held() is None  # what runs has its own hold on what it reads


def test_who_leaves_out_of_a_queue_makes_room(server: Recorder) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy.simple(2)))
    server.submit(ALONE, 1)
    server.turn()
    flows = [server.submit(ALONE, request) for request in (2, 3, 4)]
    server.turn()
    server.dispatcher.cancel(flows[1])
    server.done(server.running[0])
    assert server.turn() == [("a", [2, 4])]


# ------------------------------------------------------------------------------------------- calls from inside a call


def test_an_instance_may_answer_inside_run_and_a_whole_chain_runs_in_one_turn() -> None:
    order: list[tuple[str, int]] = []
    answers: list[object] = []

    def run(batch: Batch) -> None:
        order.append((batch.queue.key.name, len(batch.tickets)))
        dispatcher.batch_done(batch, [[rows_of() for _ in batch.tickets]], {}, 0)

    dispatcher = Dispatcher(run, lambda flow: answers.append(flow.request))
    server = Recorder()
    server.dispatcher = dispatcher
    serve_chain(server)
    for request in range(20):
        server.submit(CHAIN, request)
    dispatcher.pump(0)
    dispatcher.check()
    assert order == [("a", 16), ("a", 4), ("b", 16), ("b", 4), ("c", 16), ("c", 4)]
    assert answers == list(range(20))


def test_an_answered_caller_may_cancel_a_neighbour_of_its_batch_and_ask_again(server: Recorder) -> None:
    answers: list[object] = []
    flows: list[Flow] = []

    def answered(flow: Flow) -> None:
        answers.append(flow.request)
        if flow.request == 0:
            server.dispatcher.cancel(flows[1])
            server.submit(ALONE, "again")

    server.dispatcher = Dispatcher(server._run, answered)
    server.serve(A)
    flows += [server.submit(ALONE, request) for request in range(3)]
    server.turn()
    server.done(server.running[0])
    assert answers == [0, 2]
    assert server.turn() == [("a", ["again"])]


# --------------------------------------------------------------------------------------------------------------- end


def test_at_the_end_everybody_who_waits_is_told_and_what_runs_runs_out(server: Recorder) -> None:
    queue: ModelQueue = server.serve(A, DynamicBatcher(BatchPolicy.simple(4)), is_pure=True)
    for request in range(4):
        server.submit(ALONE, request)
    server.turn()
    server.raised(server.running[0])
    assert server.turn() == [("a", [0, 1])]  # the other half waits for the instance
    server.submit(ALONE, "queued")
    server.turn()
    server.submit(ALONE, "arriving")
    server.dispatcher.fail_all("closing")
    assert sorted(map(str, server.answered())) == [
        "('arriving', 'closing')",
        "('queued', 'closing')",
        "(2, 'closing')",
        "(3, 'closing')",
    ]
    assert all(isinstance(flow.error, Unavailable) for flow in server.answers)
    server.done(server.running[0])
    assert server.turn() == []
    assert server.answered()[-2:] == [0, 1]
    assert server.dispatcher.in_flight == 0
    assert list(queue.free) == [0]


@pytest.mark.parametrize("waiting", [0, 3])
def test_pumping_again_at_the_same_time_changes_nothing(server: Recorder, waiting: int) -> None:
    server.serve(A, DynamicBatcher(BatchPolicy.simple(4, max_queue_delay_ns=100)))
    for request in range(waiting):
        server.submit(ALONE, request)
    server.turn(at=1)
    assert server.turn(at=1) == []
    assert server.dispatcher.waiting() == {A.key: waiting}


# --------------------------------------------------------------------------------------------------------- broken off


def test_a_batch_that_is_broken_off_when_it_is_back_does_not_free_its_instance_again(server: Recorder) -> None:
    server.serve(A)
    server.submit(ALONE, "first")
    server.turn()
    (first,) = server.running
    server.done(first)
    server.submit(ALONE, "second")
    server.turn()
    server.dispatcher.break_off(first, Internal("a slip"))
    server.submit(ALONE, "third")
    assert server.turn() == [], "the second has the instance"
    server.done(server.running[0])
    assert server.turn() == [("a", ["third"])]
    assert server.answered() == ["first", "second"]


def test_of_a_batch_that_is_broken_off_all_are_told_though_telling_one_fails(server: Recorder) -> None:
    server.serve(A)
    told: list[tuple[object, str]] = []

    def answered(flow: Flow) -> None:
        told.append((flow.request, str(flow.error)))
        if flow.request == "slips":
            raise RuntimeError("a slip")

    server.dispatcher.tell(server._run, answered)
    for request in ("slips", "other"):
        server.submit(ALONE, request)
    server.turn()
    (batch,) = server.running
    with pytest.raises(RuntimeError, match="a slip"):
        server.dispatcher.break_off(batch, Internal("not taken in"))
    assert [request for request, _ in told] == ["slips", "other"]
    assert all("not taken in" in text for _, text in told)
    server.submit(ALONE, "next")
    assert server.turn() == [("a", ["next"])]
