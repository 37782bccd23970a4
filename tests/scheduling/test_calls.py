"""Models that call models: which calls wait, which are refused as deadlocks, and resources that must not cause one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.types import Graph
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, filler_frame, request_frame
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.rate_limit.limiter import Available, Limiter, Needs
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.sequence.sequence import SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, Oldest
from tests.support.recorder import Recorder, rows_of, simple_model
from tests.support.strategies import chain_graph, plain_graph

MODELS = [simple_model(number, max_batch_size=2) for number in range(4)]
A, B, C, D = MODELS


def call(server: Recorder, batch: Batch | None, graph: Graph, request: object = None) -> Frame:
    """The execution of `batch` calls `graph`. Raises Unavailable if the call is refused."""
    plan = make_plan(graph)
    route = [server.queues[node.model] for node in plan.nodes]
    frame = request_frame(plan, route, [rows_of()], 0, 1 << 40, request)
    server.scheduler.call(batch, frame)
    return frame


def run(server: Recorder, graph: Graph, request: object = "client") -> Batch:
    """Submit a client's request and start its batch."""
    server.submit(graph, request)
    server.turn()
    return server.running[-1]


def called(server: Recorder, batch: Batch, graph: Graph) -> Batch:
    """Make a call and start its batch."""
    call(server, batch, graph)
    server.turn()
    return server.running[-1]


def answer(server: Recorder, batch: Batch, caller: Batch, frame: Frame) -> None:
    server.done(batch)
    server.turn()
    assert frame.record.done
    server.scheduler.calls.over(caller, frame)


# ------------------------------------------------------------------------------------------------- what can be answered


def test_a_call_of_its_own_model_is_refused_with_one_instance(server: Recorder) -> None:
    server.serve(A)
    caller = run(server, plain_graph(A))
    with pytest.raises(Unavailable, match="model 'a' -> 'a': this call can never be answered"):
        call(server, caller, plain_graph(A))
    server.done(caller)
    server.turn()
    assert server.answered() == ["client"]
    assert not server.scheduler.calls


def test_a_refused_call_is_not_referenced_any_more(server: Recorder) -> None:
    server.serve(A)
    caller = run(server, plain_graph(A))

    class Asked:
        """The `request` attribute of a request."""

    asked = Asked()
    gone = weakref.ref(asked)
    gc.disable()
    try:
        with suppress(Unavailable):
            call(server, caller, plain_graph(A), asked)
        del asked
        assert gone() is None, "its model could not be unloaded before the collector comes by"
    finally:
        gc.enable()


def test_a_call_of_its_own_model_is_answered_with_two_instances(server: Recorder) -> None:
    server.serve(A, instances=2)
    caller = run(server, plain_graph(A))
    frame = call(server, caller, plain_graph(A))
    server.turn()
    answer(server, server.running[-1], caller, frame)
    assert not server.scheduler.calls


def test_a_busy_instance_that_will_be_free_is_waited_for(server: Recorder) -> None:
    server.serve(A)
    server.serve(B)
    other = run(server, plain_graph(B), "other")
    caller = run(server, plain_graph(A))
    frame = call(server, caller, plain_graph(B))
    server.turn()
    server.done(other)
    server.turn()
    answer(server, server.running[-1], caller, frame)


def test_a_cycle_is_named_in_the_order_of_its_calls(server: Recorder) -> None:
    for model in (A, B, C):
        server.serve(model)
    first = run(server, plain_graph(A))
    second = called(server, first, plain_graph(B))
    third = called(server, second, plain_graph(C))
    with pytest.raises(Unavailable, match="model 'a' -> 'b' -> 'c' -> 'a':"):
        call(server, third, plain_graph(A))
    with pytest.raises(Unavailable, match="model 'b' -> 'c' -> 'b':"):
        call(server, third, plain_graph(B))


def test_a_call_is_refused_when_the_last_instance_waits_too(server: Recorder) -> None:
    server.serve(A, instances=2)
    server.serve(B)
    other = run(server, plain_graph(A), "other")
    first = run(server, plain_graph(A))
    second = called(server, first, plain_graph(B))
    frame = call(server, second, plain_graph(A))  # the other execution can finish
    server.turn()
    with pytest.raises(Unavailable, match="model 'b' -> 'a' -> 'b':"):
        call(server, other, plain_graph(B))  # ... and now it cannot: its call waits for its own waiters
    server.done(other)
    server.turn()
    answer(server, server.running[-1], second, frame)


def test_a_call_does_not_wait_for_the_model_of_a_completed_step(server: Recorder) -> None:
    for model in MODELS:
        server.serve(model)
    caller = run(server, plain_graph(A))
    frame = call(server, caller, chain_graph("chain", [B, C]))
    server.turn()
    server.done(server.running[-1])
    server.turn()
    of_c = server.running[-1]
    of_b = run(server, plain_graph(B), "client of b")
    behind = call(server, of_b, plain_graph(C))  # queued behind the running step
    call(server, of_c, plain_graph(D))  # now all three wait, the first no longer for b
    server.turn()
    for batch in (server.running[-1], of_c):
        server.done(batch)
        server.turn()
    assert frame.record.done
    answer(server, server.running[-1], of_b, behind)


def test_a_running_step_is_waited_for_at_its_instance(server: Recorder) -> None:
    """Other instances of its model do not help."""
    server.serve(A)
    server.serve(B, instances=2)
    first = run(server, plain_graph(A))
    second = called(server, first, plain_graph(B))
    with pytest.raises(Unavailable, match="model 'a' -> 'b' -> 'a':"):
        call(server, second, plain_graph(A))


def test_a_call_counts_the_later_steps_of_an_ensemble_from_its_submission(server: Recorder) -> None:
    server.serve(A)
    server.serve(B)
    caller = run(server, plain_graph(A))
    with pytest.raises(Unavailable, match="model 'a' -> 'a':"):
        call(server, caller, chain_graph("chain", [B, A]))


def test_a_call_outside_an_execution_blocks_no_instance(server: Recorder) -> None:
    server.serve(A)
    caller = run(server, plain_graph(A))
    frame = call(server, None, plain_graph(A))
    server.done(caller)
    server.turn()
    server.done(server.running[-1])
    server.turn()
    assert frame.record.done


def test_an_ended_execution_waits_for_no_call(server: Recorder) -> None:
    server.serve(A)
    server.serve(B)
    caller = run(server, plain_graph(A))
    of_b = called(server, caller, plain_graph(B))
    server.scheduler.calls.batch_over(caller)
    server.done(caller)
    server.turn()
    call(server, of_b, plain_graph(A))


def test_a_call_is_refused_when_its_ordered_response_waits_for_an_earlier_one(server: Recorder) -> None:
    server.serve(A)
    server.serve(B, instances=2, keeps_order=True)
    before = run(server, plain_graph(B), "before")
    caller = run(server, plain_graph(A))
    called(server, caller, plain_graph(B))
    with pytest.raises(Unavailable, match="model 'a' -> 'b' -> 'a':"):
        call(server, before, plain_graph(A))


def test_a_running_call_with_an_ordered_response_waits_for_an_earlier_one(server: Recorder) -> None:
    for model in (C, D):
        server.serve(model)
    server.serve(A, instances=2, keeps_order=True)
    first = run(server, plain_graph(A), "first")
    caller = run(server, plain_graph(C))
    second = called(server, caller, plain_graph(A))
    call(server, second, plain_graph(D))
    with pytest.raises(Unavailable, match="model 'c' -> 'a' -> 'c':"):
        call(server, first, plain_graph(C))


def test_calls_are_refused_after_shutdown(server: Recorder) -> None:
    server.serve(A, instances=2)
    caller = run(server, plain_graph(A))
    server.scheduler.fail_all("the end")
    with pytest.raises(Unavailable, match="the end"):
        call(server, caller, plain_graph(A))
    assert not server.scheduler.calls


# ------------------------------------------------------------------------------------------------------- with sequences


def stateful(kind: str) -> Sequences:
    """The sequence batcher of a model whose requests are sequence ids. The first request of an id begins its
    sequence.
    """
    policy = SequencePolicy("a", 2, 1_000_000)
    queue: Sequences

    def identify(frame: Frame) -> tuple[int, bool, bool]:
        return frame.request, not queue.is_live(frame.request), False

    if kind == "oldest":
        queue = Oldest(policy, identify, BatchPolicy.simple(2))
    else:
        queue = Direct(policy, identify, filler_frame(None))
    return queue


@pytest.mark.parametrize("kind", ["oldest", "direct"])
def test_a_sequence_model_cannot_call_itself_within_its_instance(server: Recorder, kind: str) -> None:
    """For any number of instances. A new sequence might also get the same instance."""
    server.serve(A, stateful(kind), instances=2)
    server.serve(B)
    for sequence in (1, 2, 3, 4):
        server.done(run(server, plain_graph(A), sequence))
        server.turn()
    caller = run(server, plain_graph(A), 1)
    here, elsewhere = (3, 2) if caller.instance == 0 else (4, 1)
    for sequence in (1, here, 99):
        with pytest.raises(Unavailable, match=rf"^model 'a' -> 'a': .* because sequence {sequence} goes on in an"):
            call(server, caller, plain_graph(A), sequence)
    frame = call(server, caller, plain_graph(A), elsewhere)
    server.turn()
    answer(server, server.running[-1], caller, frame)
    between = called(server, caller, plain_graph(B))
    with pytest.raises(Unavailable, match=r"model 'b' -> 'a': .* sequence 1 goes on in an instance that waits for it"):
        call(server, between, plain_graph(A), 1)


# ------------------------------------------------------------------------------------------------------- with resources


def needs(**amounts: int) -> Needs:
    return Needs({(name, 0): count for name, count in amounts.items()})


def test_a_call_that_needs_resources_of_its_caller_is_refused() -> None:
    server = Recorder(limiter=Limiter())
    server.serve(A, needs=[needs(R=1)])
    server.serve(B, needs=[needs(R=1)])
    caller = run(server, plain_graph(A))
    with pytest.raises(Unavailable, match=r"'a' -> 'b': this call .* 'b' needs resources that 'a' holds"):
        call(server, caller, plain_graph(B))


def test_the_refusal_of_a_call_to_itself_names_the_missing_resource() -> None:
    for amount, why in (
        (1, "'a' needs resources that 'a' holds"),
        (2, "each instance that could answer it waits for it"),
    ):
        server = Recorder(limiter=Limiter([Available("R", amount)]))
        server.serve(A, instances=2, needs=[needs(R=1)] * 2)
        caller = run(server, plain_graph(A))
        if amount > 1:
            caller = called(server, caller, plain_graph(A))
        with pytest.raises(Unavailable, match=rf"'a' -> 'a': this call can never be answered, because {why}"):
            call(server, caller, plain_graph(A))


@pytest.mark.fault("R10")
def test_reserved_resources_are_available_to_requests_the_reserving_one_waits_for() -> None:
    """The caller holds one copy and calls a model that needs the other, which is reserved for a waiting batch."""
    server = Recorder(limiter=Limiter([Available("R", 2)]))
    server.serve(A, instances=2, needs=[needs(R=1)] * 2)
    server.serve(B, needs=[needs(R=2)])
    server.serve(C, needs=[needs(R=1)])
    caller = run(server, plain_graph(A))
    server.submit(plain_graph(B), "needs both")
    for number in range(OVERTAKEN_MAX):
        server.submit(plain_graph(A), number)
        server.turn()
        server.done(server.running[-1])
        server.turn()
    assert server.scheduler.rate_limit is not None
    while not server.scheduler.rate_limit.waited_for():
        server.submit(plain_graph(A), "another")
        server.turn()
        server.done(server.running[-1])
    server.submit(plain_graph(C), "another")
    assert server.turn() == [], "the free copy is kept"
    frame = call(server, caller, plain_graph(C), "called")
    server.turn()
    assert server.started[-1] == ("c", ["another", "called"])
    answer(server, server.running[-1], caller, frame)
    server.done(caller)
    assert server.turn()[0] == ("b", ["needs both"])


# ---------------------------------------------------------------------------------------- properties


@dataclass
class Script:
    """The calls of a request's model: groups of calls that are made together, each group when the previous one is
    answered.
    """

    targets: tuple[int, ...]  # one model, or a chain of them
    groups: list[list[Script]] = field(default_factory=list)

    def graph(self) -> Graph:
        models = [MODELS[target] for target in self.targets]
        return plain_graph(models[0]) if len(models) == 1 else chain_graph("chain", models)


@st.composite
def scripts(draw: st.DrawFn, depth: int = 3) -> Script:
    """Few models, so that nested calls reach the same ones; some calls are made several times at once."""
    targets = draw(st.sampled_from([(0,), (0,), (1,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 0)]))
    calls = st.lists(scripts(depth - 1), min_size=1, max_size=2)
    groups = draw(st.lists(calls, max_size=2)) if depth else []
    return Script(targets, [group * draw(st.sampled_from((1, 1, 4))) for group in groups])


some_needs = st.dictionaries(st.sampled_from([("R", 0), ("S", 0)]), st.integers(1, 2), max_size=2).map(Needs)
places = st.lists(st.tuples(st.integers(1, 3), some_needs, st.booleans()), min_size=4, max_size=4)


class World:
    """A server whose models execute scripts. With `believes`, the first refusal is not carried out."""

    def __init__(self, places: Sequence[tuple[int, Needs, bool]], *, is_limited: bool, believes: bool) -> None:
        self.server = Recorder(limiter=Limiter() if is_limited else None, overtaken_max=2)
        for model, (instances, one, keeps_order) in zip(MODELS, places, strict=True):
            self.server.serve(model, instances=instances, needs=[one] * instances, keeps_order=keeps_order)
        self.believes = believes
        self.refused: list[Frame] = []
        self.open: dict[Batch, list[Frame]] = {}
        self.todo: dict[Batch, list[list[Script]]] = {}

    def step(self, random: Random) -> bool:
        """Advance one execution that can continue. False: none can."""
        self.server.turn()
        for batch in self.server.running:
            if batch not in self.todo:
                first = [t for t in batch.tickets if t.node.index == 0]
                self.todo[batch] = [group for ticket in first for group in ticket.frame.request.groups]
            for frame in [frame for frame in self.open.get(batch, []) if frame.record.done]:
                self.open[batch].remove(frame)
                self.server.scheduler.calls.over(batch, frame)
        able = [batch for batch in self.server.running if not self.open.get(batch)]
        if not able:
            return False
        batch = random.choice(able)
        if self.todo[batch]:
            self._call(batch, self.todo[batch].pop(0))
        else:
            self.server.done(batch)
        return True

    def _call(self, batch: Batch, group: list[Script]) -> None:
        for script in group:
            plan = make_plan(script.graph())
            route = [self.server.queues[node.model] for node in plan.nodes]
            frame = request_frame(plan, route, [rows_of()], 0, 1 << 40, script)
            if self.believes and self.refused:
                self.server.scheduler.call(None, frame)
            else:
                try:
                    self.server.scheduler.call(batch, frame)
                except Unavailable:
                    self.refused.append(frame)
                    if not self.believes:
                        continue
                    self.server.scheduler.call(None, frame)
            self.open.setdefault(batch, []).append(frame)


@given(
    places=places,
    requests=st.lists(scripts(), min_size=1, max_size=6),
    is_limited=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_property_every_request_of_models_that_call_each_other_is_answered(
    places: Sequence[tuple[int, Needs, bool]], requests: Sequence[Script], is_limited: bool, random: Random
) -> None:
    """No deadlock is missed: with deadlocking calls refused, all requests complete."""
    world = World(places, is_limited=is_limited, believes=False)
    for script in requests:
        world.server.submit(script.graph(), script)
    while world.step(random):
        pass
    assert not world.server.running, f"{world.server.running} wait for each other"
    assert not world.server.scheduler.in_flight
    assert not world.server.scheduler.calls


@given(
    places=places,
    requests=st.lists(scripts(), min_size=1, max_size=6),
    is_limited=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_property_a_refused_call_would_never_have_been_answered(
    places: Sequence[tuple[int, Needs, bool]], requests: Sequence[Script], is_limited: bool, random: Random
) -> None:
    """No false alarm: a refused call that is made anyway has no response when no event is left."""
    world = World(places, is_limited=is_limited, believes=True)
    for script in requests:
        world.server.submit(script.graph(), script)
    while world.step(random):
        pass
    assert not any(frame.record.done for frame in world.refused)
