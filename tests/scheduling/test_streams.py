"""Properties of streams: random graphs with decoupled steps against plain nested loops."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowserve.errors import Invalid
from flowserve.graph.plan import make_plan
from flowserve.graph.types import GRAPH, Conversion, ModelKey
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import RegionFrame, Source, region_frame
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.scheduling.frames.stream import UNREAD_MAX
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.simulation.deployment import BatchResults
from flowserve.values import DType, TensorSpec
from tests.support.recorder import Recorder, rows_of, simple_model
from tests.support.strategies import chain_graph
from tests.support.streams import StreamSim
from tests.support.streams_world import Content, Model, StreamRequest, draw_wires, make_graph, right_answers


def count_of(seed: int, most: int) -> Callable[[Content], int]:
    """The number of responses of a step: any up to `most`, always the same for the same input."""

    def answers(made: Content) -> int:
        return Random(f"{seed} {made.made_of}").randint(0, most)

    return answers


def draw_world(seed: int, waiting_max: int = 0) -> StreamSim:
    random = Random(seed)
    models = []
    for n in range(6):
        slow = random.choice([(1, 1), (1, 9), (5, 20)])
        answers = count_of(seed, random.choice([1, 3, 7])) if n >= 4 else None
        models.append(
            Model(
                ModelKey("abcdef"[n], 1),
                random.randint(1, 3),
                slow,
                answers,
                # A decoupled model that keeps its instance may be in a deadlock, which other tests cover.
                keeps_instance=False,
                max_batch_size=random.choice([1, 8]),
                waiting_max=waiting_max,
            )
        )
    while True:
        wires, outputs = draw_wires(random, models)
        if any(models[m].answers is not None for m, _ in wires):
            break
    limit = random.choice([0, 1, 2, 4])
    graph = make_graph(models, wires, outputs, limit, is_shared=random.random() < 0.25)
    requests = []
    for number in range(random.randint(1, 4)):
        request = StreamRequest(number, random.randint(0, 10), reads_every_ns=random.choice([0, 0, 3, 30]))
        if random.random() < 0.2:
            request.leaves_after_ns = random.randint(0, 60)
        right = right_answers(graph, {model.key: model for model in models}, request)
        if random.random() < 0.2 and right:
            request.fails_at = random.choice(random.choice(right))
        requests.append(request)
    return StreamSim(graph, models, requests, seed)


@given(st.integers(0, 2**32))
def test_property_every_response_is_correct_and_in_order(seed: int) -> None:
    draw_world(seed).run()


@given(st.integers(0, 2**32))
@example(16)  # another step of the refused request also waits
@example(2383)  # the refused step and the step that freed the place belong to different requests
def test_a_request_refused_by_a_full_queue_fails_alone_and_leaves_no_state(seed: int) -> None:
    sim = draw_world(seed, waiting_max=Random(seed).randint(1, 3)).run()
    for request in sim.requests:
        ended = sim.ended[request.number]
        assert ended in ("", "left") or "as it was told" in ended or "Exceeds maximum queue size" in ended


def chain(
    limit: int,
    *ns: int,
    answers: int = 1000,
    instances: int = 1,
    reads_every_ns: int = 0,
    requests: int = 1,
    keeps_instance: bool = True,
) -> StreamSim:
    models = [Model(ModelKey("p", 1), 1, (1, 1), lambda _: answers, keeps_instance)]
    models += [Model(ModelKey(f"m{i}", 1), instances, (each, each), max_batch_size=1) for i, each in enumerate(ns)]
    wires = [(0, [GRAPH])] + [(i + 1, [i]) for i in range(len(ns))]
    graph = make_graph(models, wires, [len(ns)], limit)
    given = [StreamRequest(number, reads_every_ns=reads_every_ns) for number in range(requests)]
    return StreamSim(graph, models, given)


@pytest.mark.parametrize("limit", [1, 4, 16])
@pytest.mark.parametrize("ns", [(10,), (1, 1, 10), (10, 1, 1), (3, 10, 2)])
@pytest.mark.fault("P7")
def test_the_queue_behind_a_faster_producer_is_limited(limit: int, ns: tuple[int, ...]) -> None:
    sim = chain(limit, *ns, answers=300).run()
    assert len(sim.answers[0]) == 300
    assert sim.most_live <= limit * len(ns) + limit


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.fault("P10")
def test_sixteen_streams_of_eight_responses_complete(limit: int) -> None:
    sim = chain(limit, 10, answers=8, requests=16).run()
    assert [len(answers) for answers in sim.answers.values()] == [8] * 16


def loop_of(limit: int, instances: int, requests: int = 1, answers: int = 9) -> StreamSim:
    """A decoupled model that keeps its instance, and is also a later step of its own graph."""
    counts: dict[object, int] = {0: answers, 1: 1}  # of the first step and of the second
    model = Model(ModelKey("p", 1), instances, (1, 1), lambda made: counts[made.made_of[0]], max_batch_size=1)
    graph = make_graph([model], [(0, [GRAPH]), (0, [0])], [1], limit)
    return StreamSim(graph, [model], [StreamRequest(number) for number in range(requests)])


def test_an_endless_backpressure_wait_fails_and_names_the_cycle() -> None:
    sim = loop_of(2, instances=1)
    sim.run()
    assert sim.ended[0].startswith("max_inflight_requests 2 can never be kept: step 'n0' waits in its send until")
    assert "a step 'n1' is over, which needs an instance of model 'p'" in sim.ended[0]


def test_of_two_requests_that_hold_both_instances_only_one_fails() -> None:
    sim = loop_of(2, instances=2, requests=2).run()
    assert sorted(bool(text) for text in sim.ended.values()) == [False, True]


@pytest.mark.parametrize(("limit", "instances"), [(0, 1), (9, 1), (1, 2)])
def test_a_backpressure_wait_that_can_end_is_not_failed(limit: int, instances: int) -> None:
    sim = loop_of(limit, instances).run()
    assert sim.ended == {0: ""}


def test_a_later_step_that_needs_resources_of_a_model_blocked_in_send_is_a_deadlock() -> None:
    """Both have free instances; the resource closes the cycle."""
    needs = Needs({("R", 0): 1})
    models = [Model(ModelKey("p", 1), 2, answers=lambda _: 9, needs=needs), Model(ModelKey("m", 1), 2, needs=needs)]
    graph = make_graph(models, [(0, [GRAPH]), (1, [0])], [1], 2)
    sim = StreamSim(graph, models, [StreamRequest(0)], overtaken_max=16).run()
    assert sim.ended[0].startswith("max_inflight_requests 2 can never be kept: step 'n0' waits in its send until")
    assert "a step 'n1' is over, for which model 'm' needs resources that 'p' holds until then" in sim.ended[0]
    models[0].needs = Needs({("R", 0): 1})
    models[1].needs = Needs({("S", 0): 1})
    assert StreamSim(graph, models, [StreamRequest(0)], overtaken_max=16).run().ended == {0: ""}


def test_reserved_resources_are_available_to_steps_the_reserving_one_waits_for() -> None:
    """A model in send() holds one copy, and the other is reserved for a step that needs both: a later step takes it."""
    one, both = Needs({("R", 0): 1}), Needs({("R", 0): 2})
    p = Model(ModelKey("p", 1), answers=lambda _: 10, needs=one)
    models = [p, Model(ModelKey("m", 1), needs=one), Model(ModelKey("x", 1), needs=both)]
    graph = make_graph(models, [(0, [GRAPH]), (1, [0]), (2, [GRAPH])], [1, 2], 2)
    assert StreamSim(graph, models, [StreamRequest(0)], overtaken_max=1).run().ended == {0: ""}


def test_responses_blocked_by_resources_of_their_own_model_are_an_unexpected_deadlock() -> None:
    """No response is complete before x, and x needs the resource that p holds until its responses are taken."""
    p = Model(ModelKey("p", 1), answers=lambda _: UNREAD_MAX + 1, needs=Needs({("R", 0): 1}))
    models = [p, Model(ModelKey("x", 1), needs=Needs({("R", 0): 2}))]
    graph = make_graph(models, [(0, [GRAPH]), (1, [GRAPH])], [0, 1], 0)
    ended = StreamSim(graph, models, [StreamRequest(0)], overtaken_max=16).run().ended[0]
    assert ended.startswith(
        "unexpected deadlock: step 'n0' waits in its send until its answers can be taken, that reads"
    )
    assert "what step 'n1' writes, for which model 'x' needs resources that 'p' holds until then" in ended


def caller_and_sender(instances: int) -> StreamSim:
    """p sends to m, whose model calls p."""
    p = Model(ModelKey("p", 1), instances, answers=lambda _: 9, max_batch_size=1)
    called = make_graph([p], [(0, [GRAPH])], [0], 0)
    models = [p, Model(ModelKey("m", 1), ns=(1, 1), max_batch_size=1, calls=called)]
    graph = make_graph(models, [(0, [GRAPH]), (1, [0])], [1], 1)
    return StreamSim(graph, models, [StreamRequest(0)])


def test_a_model_called_by_the_step_it_sends_to_does_not_deadlock() -> None:
    sim = caller_and_sender(instances=1).run()
    assert sim.refused or sim.ended[0]
    assert "'m' -> 'p': this call can never be answered" in " ".join(sim.refused) or "waits in its send" in sim.ended[0]
    assert caller_and_sender(instances=2).run().ended == {0: ""}


def draw_circles(seed: int) -> StreamSim | None:
    """Models that respond before `execute` returns, in loops of any kind, with resources that they hold meanwhile; some
    of them call others.
    """
    random = Random(seed)
    models = [
        Model(ModelKey("abcd"[n], 1), random.randint(1, 2), (1, 5), answers, max_batch_size=1)
        for n, answers in enumerate([None, None, count_of(seed, 6), count_of(seed + 1, 6)])
    ]
    is_limited = random.random() < 0.5
    for model in models:
        if is_limited:
            model.needs = Needs({(name, 0): random.randint(1, 2) for name in "RS" if random.random() < 0.4})
        if model.answers is None and random.random() < 0.4:
            called = random.choice(models)
            model.calls = make_graph([called], [(0, [GRAPH])], [0], 0)
    wires, outputs = draw_wires(random, models)
    graph = make_graph(models, wires, outputs, random.choice([0, 1, 2]), is_shared=random.random() < 0.2)
    if not graph.is_decoupled:
        return None
    requests = [StreamRequest(number) for number in range(3)]
    return StreamSim(graph, models, requests, seed, overtaken_max=random.choice([1, 16]) if is_limited else None)


@example(101914)  # the deadlock exists only after the last runnable step ends
@given(st.integers(0, 2**32))
def test_property_every_cycle_of_held_instances_ends(seed: int) -> None:
    """Every request ends, and the responses are correct."""
    sim = draw_circles(seed)
    if sim is not None:
        sim.run()


@given(st.integers(0, 2**32))
def test_property_a_wait_reported_as_endless_would_never_have_ended(seed: int) -> None:
    """No false alarm: without intervention the step is still blocked in send() when no event is left."""
    sim = draw_circles(seed)
    if sim is None:
        return
    doomed: list[Source] = []
    streams, pauses = sim.scheduler.streams, sim.scheduler.backpressure

    def remember() -> None:
        stuck = sim.scheduler.calls.stuck()
        doomed.extend(source for holder, source in pauses.holders().items() if holder in stuck)

    streams._fail_deadlocked = remember  # type: ignore[method-assign]
    sim.check_end = lambda: None  # type: ignore[method-assign]
    sim.run()
    assert all(source in pauses.waiting for source in doomed)


def test_a_completed_stream_is_in_no_reference_cycle() -> None:
    sim = chain(2, 3, answers=20)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        sim.run()
        sim.frames.clear()
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, Frame | Ticket)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_tensor_shared_by_iterations_has_no_last_reader() -> None:
    models = [Model(ModelKey("p", 1), answers=lambda _: 2), Model(ModelKey("m", 1))]
    graph = make_graph(models, [(0, [GRAPH]), (1, [GRAPH, 0]), (1, [1])], [2], 0)
    seen: dict[str, list[bool]] = {}

    class Sim(StreamSim):
        def _run(self, batch: Batch, finished: Sequence[Frame]) -> None:
            for ticket in batch.tickets:
                seen[ticket.node.name] = [ticket.frame.is_last_reader(slot) for slot in ticket.node.inputs]
            super()._run(batch, finished)

    Sim(graph, models, [StreamRequest(0)]).run()
    assert seen == {"n0": [False], "n1": [False, True], "n2": [True]}


def test_a_converted_tensor_has_no_last_reader() -> None:
    models = [Model(ModelKey("p", 1), answers=lambda _: 2), Model(ModelKey("m", 1))]
    drawn = make_graph(models, [(0, [GRAPH]), (1, [0]), (1, [GRAPH])], [1, 2], 0)
    edges = [replace(edge, conversion=Conversion(batch=1)) for edge in drawn.edges]
    nodes = [replace(node, max_batch_size=8) for node in drawn.nodes]
    plan = make_plan(replace(drawn, nodes=tuple(nodes), edges=tuple(edges)))
    stream = region_frame(plan, [], [Content((0,))], 0)
    converted = [slot for node in plan.nodes for _, slot, _ in node.converts]
    assert converted
    assert not any(stream.is_last_reader(slot) for slot in converted)


@pytest.mark.parametrize("leaves", [False, True], ids=["answered", "leaves"])
def test_a_response_that_does_not_fit_its_step_fails_its_own_request(server: Recorder, leaves: bool) -> None:
    first, second = simple_model(0), simple_model(1, inputs=(TensorSpec("X", DType.FP32, (2,)),))
    drawn = chain_graph("g", [first, second])
    nodes = tuple(replace(node, max_inflight=node.index) for node in drawn.nodes)  # one step of the second
    plan = make_plan(replace(drawn, shares_limits=True, nodes=nodes))
    assert plan.regions is not None
    shared = InflightSlots(plan.regions.limits)
    route = [server.serve(first, instances=2), server.serve(second)]

    def submit(name: str, width: int) -> RegionFrame:
        frame = region_frame(plan, route, [rows_of()], 0, width, name, shared=shared)
        server.scheduler.submit(frame)
        server.turn()
        batch = server.running.pop()
        server.scheduler.complete(batch, [BatchResults([[rows_of(1, width)]])], None, 0)
        server.turn()
        return frame

    fits, wide = submit("fits", 2), submit("wide", 3)
    assert len(shared.parked[1]) == 1
    if leaves:
        server.scheduler.cancel(fits)
        server.turn()
    server.done(server.running[0])
    server.turn()
    assert (fits.record.done, fits.record.error) == (True, None)
    assert isinstance(wide.record.error, Invalid)
    assert str(wide.record.error).startswith("unexpected shape for input 'X' for model 'b'")
    assert server.scheduler.in_flight == 0
    assert not any(shared.taken)


def test_a_stream_that_completes_at_its_deadline_is_not_late() -> None:
    models = [Model(ModelKey("p", 1), answers=lambda _: 2)]
    graph = make_graph(models, [(0, [GRAPH])], [0], 0)
    last_ns = StreamSim(graph, models, [StreamRequest(0)]).run().time

    class Sim(StreamSim):
        due_ns = 0

        def _arrive(self, request: StreamRequest) -> None:
            super()._arrive(request)
            self.scheduler.due.add(self.frames[request.number], self.due_ns)

    for due_ns, text in ((last_ns - 1, "Request timeout expired"), (last_ns, "")):
        sim = Sim(graph, models, [StreamRequest(0)])
        sim.due_ns = due_ns
        sim._at(due_ns, lambda: None)
        sim.run()
        assert sim.ended[0].partition(":")[0] == text
    assert len(sim.answers[0]) == 2
