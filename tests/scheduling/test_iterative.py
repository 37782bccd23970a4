"""Iterative requests: batches whose members change from one execution to the next."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.errors import InstanceDied
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, filler_frame
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.sequence.sequence import RequestSequence, SequencePolicy
from flowserve.scheduling.sequence.strategies import Iterative, IterativeDirect, IterativeOldest
from tests.support.recorder import Recorder, simple_model
from tests.support.sequences import slots_taken
from tests.support.strategies import plain_graph

MODEL = simple_model(0)
GRAPH = plain_graph(MODEL)


class Ask(NamedTuple):
    """A request that runs `rounds` times; `of` is the sequence it names, if any."""

    name: str
    rounds: int = 1
    of: int | str = 0
    start: bool = True


def identify(frame: Frame) -> tuple[int | str, bool, bool]:
    asked: Ask = frame.request
    return asked.of, asked.start and bool(asked.of), False


def oldest(candidates: int = 4, size: int = 2, **policy: Any) -> IterativeOldest:
    policies = SequencePolicy("a", candidates, 1_000, **policy), identify, BatchPolicy.simple(size)
    return IterativeOldest(*policies)


def direct(slots: int = 2, share: float = 0.0, delay_ns: int = 0) -> IterativeDirect:
    return IterativeDirect(SequencePolicy("a", slots, 1_000), identify, filler_frame(None), share, delay_ns)


class Rounds:
    """The model: it returns each request that has rounds left. `seen`: its executions as (instance, is first)."""

    def __init__(self, server: Recorder) -> None:
        self.server = server
        self.left: dict[Frame, int] = {}
        self.seen: dict[Frame, list[tuple[object, bool]]] = {}

    def back(self, batch: Batch, at: int = 0) -> None:
        real = [ticket for ticket in batch.tickets if ticket.sequence is not None]
        again = []
        for ticket in real:
            frame = ticket.frame
            self.seen.setdefault(frame, []).append((batch.instance, ticket.sequence.rescheduled is not ticket))
            self.left[frame] = self.left.get(frame, frame.request.rounds) - 1
            if self.left[frame]:
                again.append(ticket)
        self.server.scheduler.reschedule(batch, again, at)
        batch.tickets = [ticket for ticket in real if ticket not in again]
        if batch.tickets:
            self.server.done(batch, at=at)
        else:
            self.server.running.remove(batch)
            self.server.scheduler.execute_returned(batch)

    def turns(self, count: int) -> list[list[str]]:
        """`count` executions in sequence: the names of each batch's requests, "-" for padding."""
        found = []
        for at in range(count):
            for _, requests in self.server.turn(at):
                found.append(["-" if asked is None else asked.name for asked in requests])  # type: ignore[attr-defined]
            for batch in [*self.server.running]:
                self.back(batch, at)
        self.server.turn(count)
        return found


def serve(batcher: Iterative, instances: int = 1) -> tuple[Recorder, Rounds]:
    server = Recorder()
    server.serve(MODEL, batcher, instances)
    return server, Rounds(server)


def names(frames: Iterable[Frame]) -> list[str]:
    return [frame.request.name for frame in frames]


def test_requests_join_and_leave_batches_between_executions() -> None:
    """Batches of two, three requests: a completed request frees its slot for the next batch."""
    server, rounds = serve(oldest(candidates=4, size=2))
    for asked in (Ask("a", 3), Ask("b", 1), Ask("c", 2)):
        server.submit(GRAPH, asked)
    assert rounds.turns(3) == [["a", "b"], ["c", "a"], ["c", "a"]]
    assert names(server.answers) == ["b", "c", "a"]


def test_a_waiting_request_gets_the_first_slot_that_becomes_free() -> None:
    batcher = oldest(candidates=1, size=1)
    server, rounds = serve(batcher)
    for name in ("a", "b", "c", "d"):
        server.submit(GRAPH, Ask(name, 2))
    assert rounds.turns(8) == [[name] for name in "aabbccdd"]
    assert (batcher.live, slots_taken(batcher)) == (0, 0)


def test_direct_keeps_a_generating_request_in_its_row() -> None:
    server, rounds = serve(direct(2))
    server.submit(GRAPH, Ask("a", 1))
    server.submit(GRAPH, Ask("b", 3))
    server.submit(GRAPH, Ask("c", 1))
    assert rounds.turns(3) == [["a", "b"], ["c", "b"], ["-", "b"]]


def test_only_the_first_execution_is_the_start_and_all_are_in_one_instance() -> None:
    server, rounds = serve(oldest(candidates=1, size=1), instances=2)
    frames = [server.submit(GRAPH, Ask(name, 3)) for name in ("a", "b")]
    rounds.turns(3)
    for frame in frames:
        (instance,) = {where for where, _ in rounds.seen[frame]}
        assert rounds.seen[frame] == [(instance, True), (instance, False), (instance, False)]


def test_requests_of_one_id_run_one_at_a_time_and_each_starts_a_sequence() -> None:
    server, rounds = serve(oldest())
    frames = [server.submit(GRAPH, Ask(name, 2, of=7)) for name in ("first", "second")]
    assert rounds.turns(4) == [["first"], ["first"], ["second"], ["second"]]
    assert [first for frame in frames for _, first in rounds.seen[frame]] == [True, False, True, False]


def test_a_generated_sequence_id_differs_from_every_id_of_a_client() -> None:
    server, _ = serve(oldest())
    server.submit(GRAPH, Ask("mine", 3, of=1))
    server.submit(GRAPH, Ask("anon", 3))
    server.turn()
    assert sorted(str(ticket.sequence.id) for ticket in server.running[0].tickets) == ["1", "2"]
    server, _ = serve(oldest(id_type="BYTES"))
    server.submit(GRAPH, Ask("anon"))
    server.turn()
    assert server.running[0].tickets[0].sequence.id == "1"


@pytest.mark.parametrize("is_live", [False, True])
def test_a_request_that_names_a_sequence_begins_it(is_live: bool) -> None:
    server, _ = serve(oldest())
    if is_live:
        server.submit(GRAPH, Ask("a", 3, of=9))
        server.turn()
    frame = server.submit(GRAPH, Ask("b", 1, of=9, start=False))
    server.turn()
    assert "inference request for sequence 9 to model 'a' must specify the START flag" in str(frame.record.error)


def test_a_long_generation_is_not_idle() -> None:
    batcher = oldest(candidates=1, size=1)
    server, rounds = serve(batcher)
    server.submit(GRAPH, Ask("a", 2))
    server.turn(0)
    server.turn(5_000)  # past the idle time of 1000: it runs
    rounds.back(server.running[0], 5_000)
    server.turn(10_000)
    rounds.back(server.running[0], 10_000)
    assert names(server.answers) == ["a"]
    assert server.answers[0].record.error is None


def test_a_cancelled_request_is_not_run_again_and_its_slot_is_free() -> None:
    batcher = oldest(candidates=1, size=1)
    server, rounds = serve(batcher)
    cancelled = server.submit(GRAPH, Ask("a", 9))
    server.submit(GRAPH, Ask("b", 1))
    server.turn()
    server.scheduler.cancel(cancelled)
    rounds.back(server.running[0])
    assert rounds.turns(1) == [["b"]]
    assert slots_taken(batcher) == 0


def test_a_cancelled_request_does_not_affect_an_earlier_one_of_its_id() -> None:
    server, rounds = serve(oldest())
    server.submit(GRAPH, Ask("first", 3, of=7))
    cancelled = server.submit(GRAPH, Ask("second", 3, of=7))
    server.turn()
    server.scheduler.cancel(cancelled)
    rounds.back(server.running[0])
    assert rounds.turns(2) == [["first"], ["first"]]
    assert names(server.answers) == ["first"]


def test_no_request_is_run_again_after_shutdown() -> None:
    server, rounds = serve(oldest())
    frame = server.submit(GRAPH, Ask("a", 5))
    server.turn()
    server.scheduler.fail_all("the end")
    rounds.back(server.running[0])
    assert str(frame.record.error) == "the end"
    assert rounds.turns(1) == []


def test_a_failed_batch_is_retried_in_halves_and_its_requests_keep_their_slots_unless_cancelled() -> None:
    batcher = oldest()
    server = Recorder()
    server.serve(MODEL, batcher, is_pure=True)
    rounds = Rounds(server)
    for name in ("a", "b"):
        server.submit(GRAPH, Ask(name, 2))
    server.turn()
    assert server.raised(server.running[0])
    assert rounds.turns(3) == [["a"], ["b"], ["a", "b"]]
    assert names(server.answers) == ["a", "b"]
    frames = [server.submit(GRAPH, Ask(name, 1)) for name in ("c", "d", "e")]
    server.turn()
    server.scheduler.cancel(frames[0])  # while it runs
    assert server.raised(server.running[0])
    server.scheduler.cancel(frames[1])  # before its retry
    assert rounds.turns(1) == [["e"]]
    assert (batcher.live, slots_taken(batcher)) == (0, 0)


def test_the_queue_delay_applies_before_every_execution() -> None:
    server, rounds = serve(direct(2, share=1.0, delay_ns=100))
    server.submit(GRAPH, Ask("a", 2))
    assert server.turn(0) == server.turn(99) == []
    assert server.turn(100)
    rounds.back(server.running[0], 110)
    assert server.turn(110) == server.turn(209) == []
    assert server.turn(210)


def test_the_end_of_a_request_is_not_reported_to_the_next_one_of_its_id() -> None:
    server, _ = serve(oldest(candidates=1, size=1))
    server.submit(GRAPH, Ask("runs", 2))
    cancelled = server.submit(GRAPH, Ask("waits", 1, of=9))
    server.turn()
    server.scheduler.cancel(cancelled)
    late = server.submit(GRAPH, Ask("late", 1, of=9, start=False))
    server.turn()
    assert str(late.record.error).endswith("on the first request of the sequence")


def test_a_completed_request_is_released_immediately() -> None:
    """Without the garbage collector: a model is unloaded as soon as no request to it is referenced."""
    server, rounds = serve(oldest())
    server.submit(GRAPH, Ask("a", 3))
    server.turn()
    line = ref(server.running[0].tickets[0].sequence)
    gc.disable()
    try:
        rounds.turns(3)
        server.answers.clear()
        rounds.seen.clear()
        rounds.left.clear()
        assert line() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------- properties


class IterativeMachine(RuleBasedStateMachine):
    """Under any order of events, every request runs its rounds in order in one instance, or fails with a reason."""

    make: Callable[[], Any] = staticmethod(lambda: oldest(candidates=2))

    @initialize()
    def build(self) -> None:
        self.batcher: Iterative = type(self).make()
        self.server, self.rounds = serve(self.batcher, instances=2)
        self.queue = self.server.queues[MODEL.key]
        self.time = 0
        self.frames: list[Frame] = []
        self.left: set[Frame] = set()
        self.lines: dict[Frame, RequestSequence] = {}

    @rule(rounds=st.integers(1, 4), of=st.integers(0, 3))
    def a_request_arrives(self, rounds: int, of: int) -> None:
        self.frames.append(self.server.submit(GRAPH, Ask(str(len(self.frames)), rounds, of)))
        self.look()

    @precondition(lambda self: self.server.running)
    @rule(data=st.data())
    def a_batch_is_back(self, data: st.DataObject) -> None:
        self.rounds.back(data.draw(st.sampled_from(self.server.running)), self.time)
        self.look()

    @precondition(lambda self: self.server.running)
    @rule(data=st.data())
    def an_instance_dies(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.server.running))
        self.server.running.remove(batch)
        self.server.scheduler.complete(batch, [], InstanceDied("it died"), 0)
        self.queue.take_away(batch.instance)
        self.look()

    @precondition(lambda self: self.queue.away)
    @rule()
    def it_runs_again(self) -> None:
        self.queue.give_back(self.queue.away[0])
        self.look()

    @precondition(lambda self: self.frames)
    @rule(data=st.data())
    def a_request_is_cancelled(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(self.frames))
        if not frame.record.done:
            self.left.add(frame)
            self.server.scheduler.cancel(frame)
        self.look()

    @rule(ns=st.integers(1, 2_000))
    def time_passes(self, ns: int) -> None:
        self.time += ns
        self.look()

    def look(self) -> None:
        self.server.turn(self.time)
        for batch in self.server.running:
            lines = [ticket.sequence for ticket in batch.tickets if ticket.sequence is not None]
            assert len(set(lines)) == len(lines), "a batch holds two of one sequence"

    @invariant()
    def it_is_right(self) -> None:
        if not hasattr(self, "requests"):
            return
        for frame in self.frames:
            seen = self.rounds.seen.get(frame, [])
            assert len({instance for instance, _ in seen}) <= 1, "it changed its instance"
            assert [first for _, first in seen] == [n == 0 for n in range(len(seen))], "it began twice, or never"
            if frame.record.done and frame.record.error is None and frame not in self.left:
                assert len(seen) == frame.request.rounds, "it was answered before it was done"

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        while self.queue.away:
            self.it_runs_again()
        while self.server.running:
            self.rounds.back(self.server.running[0], self.time)
            self.look()
        answered = self.server.answers
        assert len(set(answered)) == len(answered), "a request was answered twice"
        assert set(answered) | self.left == set(self.frames), "a request was never answered"
        assert (len(self.batcher), self.batcher.live, slots_taken(self.batcher)) == (0, 0, 0)


class IterativeDirectMachine(IterativeMachine):
    make = staticmethod(direct)


TestPropertiesOfIterativeOldest = IterativeMachine.TestCase
TestPropertiesOfIterativeDirect = IterativeDirectMachine.TestCase
# The properties of all sequences are in test_sequences_properties.py.
HALF = settings(max_examples=settings().max_examples // 2)
TestPropertiesOfIterativeOldest.settings = TestPropertiesOfIterativeDirect.settings = HALF
