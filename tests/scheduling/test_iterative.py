"""Requests that come back until they are done: batches whose members change from one execution to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import NamedTuple
from weakref import ref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.errors import InstanceDied
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.batcher import BatchPolicy
from flowserve.scheduling.direct import Nobody
from flowserve.scheduling.iterative import Iterative, IterativeDirect, IterativeOldest
from flowserve.scheduling.lines import Line, SequencePolicy
from flowserve.scheduling.router import Flow
from flowserve.testing.recorder import Recorder, simple_model
from flowserve.testing.strategies import plain_graph

MODEL = simple_model(0)
GRAPH = plain_graph(MODEL)


class Ask(NamedTuple):
    """A request that runs `rounds` times; `of` is the sequence it names, if any."""

    name: str
    rounds: int = 1
    of: int | str = 0
    start: bool = True


def identify(flow: Flow) -> tuple[int | str, bool, bool]:
    asked: Ask = flow.request
    return asked.of, asked.start and bool(asked.of), False


def oldest(candidates: int = 4, size: int = 2, **policy: object) -> IterativeOldest:
    policies = SequencePolicy("a", candidates, 1_000, **policy), identify, BatchPolicy.simple(size)  # type: ignore[arg-type]
    return IterativeOldest(*policies)


def direct(slots: int = 2, share: float = 0.0, delay_ns: int = 0) -> IterativeDirect:
    return IterativeDirect(SequencePolicy("a", slots, 1_000), identify, Nobody(None), share, delay_ns)


class Rounds:
    """The model: it gives back whoever has rounds left. `seen`: each request's executions as (instance, is first)."""

    def __init__(self, server: Recorder) -> None:
        self.server = server
        self.left: dict[Flow, int] = {}
        self.seen: dict[Flow, list[tuple[object, bool]]] = {}

    def back(self, batch: Batch, at: int = 0) -> None:
        real = [ticket for ticket in batch.tickets if ticket.line is not None]
        again = []
        for ticket in real:
            flow = ticket.flow
            self.seen.setdefault(flow, []).append((batch.instance, ticket.line.going_on is not ticket))
            self.left[flow] = self.left.get(flow, flow.request.rounds) - 1
            if self.left[flow]:
                again.append(ticket)
        self.server.dispatcher.reschedule(batch, again, at)
        batch.tickets = [ticket for ticket in real if ticket not in again]
        if batch.tickets:
            self.server.done(batch, at=at)
        else:
            self.server.running.remove(batch)
            self.server.dispatcher.execute_returned(batch)

    def turns(self, count: int) -> list[list[str]]:
        """So many executions, one after the other: the names of each batch's requests, "-" for nobody."""
        found = []
        for at in range(count):
            for _, batch in self.server.turn(at):
                found.append(["-" if asked is None else asked.name for asked in batch])  # type: ignore[attr-defined]
            for batch in [*self.server.running]:
                self.back(batch, at)
        self.server.turn(count)
        return found


def serve(batcher: Iterative, instances: int = 1) -> tuple[Recorder, Rounds]:
    server = Recorder()
    server.serve(MODEL, batcher, instances)
    return server, Rounds(server)


def names(flows: Iterable[Flow]) -> list[str]:
    return [flow.request.name for flow in flows]


def test_requests_come_and_go_between_the_executions_of_others() -> None:
    """Two in a batch, three that generate: whoever is done makes room in the very next batch."""
    server, rounds = serve(oldest(candidates=4, size=2))
    for asked in (Ask("a", 3), Ask("b", 1), Ask("c", 2)):
        server.submit(GRAPH, asked)
    assert rounds.turns(3) == [["a", "b"], ["c", "a"], ["c", "a"]]
    assert names(server.answers) == ["b", "c", "a"]


def test_who_waits_for_a_slot_gets_that_of_the_first_that_is_done() -> None:
    batcher = oldest(candidates=1, size=1)
    server, rounds = serve(batcher)
    for name in ("a", "b", "c", "d"):
        server.submit(GRAPH, Ask(name, 2))
    assert rounds.turns(8) == [[name] for name in "aabbccdd"]
    assert (batcher.live, batcher.seated) == (0, 0)


def test_direct_keeps_a_generating_request_in_its_row() -> None:
    server, rounds = serve(direct(2))
    server.submit(GRAPH, Ask("a", 1))
    server.submit(GRAPH, Ask("b", 3))
    server.submit(GRAPH, Ask("c", 1))
    assert rounds.turns(3) == [["a", "b"], ["c", "b"], ["-", "b"]]


def test_only_the_first_execution_is_the_start_and_all_are_in_one_instance() -> None:
    server, rounds = serve(oldest(candidates=1, size=1), instances=2)
    flows = [server.submit(GRAPH, Ask(name, 3)) for name in ("a", "b")]
    rounds.turns(3)
    for flow in flows:
        (instance,) = {where for where, _ in rounds.seen[flow]}
        assert rounds.seen[flow] == [(instance, True), (instance, False), (instance, False)]


def test_requests_of_one_id_are_done_one_after_the_other_and_each_begins_anew() -> None:
    server, rounds = serve(oldest())
    flows = [server.submit(GRAPH, Ask(name, 2, of=7)) for name in ("first", "second")]
    assert rounds.turns(4) == [["first"], ["first"], ["second"], ["second"]]
    assert [first for flow in flows for _, first in rounds.seen[flow]] == [True, False, True, False]


def test_a_name_that_no_client_gave_is_nobody_elses() -> None:
    server, _ = serve(oldest())
    server.submit(GRAPH, Ask("mine", 3, of=1))
    server.submit(GRAPH, Ask("anon", 3))
    server.turn()
    assert sorted(str(ticket.line.id) for ticket in server.running[0].tickets) == ["1", "2"]
    server, _ = serve(oldest(id_type="BYTES"))
    server.submit(GRAPH, Ask("anon"))
    server.turn()
    assert server.running[0].tickets[0].line.id == "1"


@pytest.mark.parametrize("is_live", [False, True])
def test_a_request_that_names_a_sequence_begins_it(is_live: bool) -> None:
    server, _ = serve(oldest())
    if is_live:
        server.submit(GRAPH, Ask("a", 3, of=9))
        server.turn()
    flow = server.submit(GRAPH, Ask("b", 1, of=9, start=False))
    server.turn()
    assert "inference request for sequence 9 to model 'a' must specify the START flag" in str(flow.error)


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
    assert server.answers[0].error is None


def test_who_leaves_is_run_no_more_and_its_slot_is_free() -> None:
    batcher = oldest(candidates=1, size=1)
    server, rounds = serve(batcher)
    leaver = server.submit(GRAPH, Ask("a", 9))
    server.submit(GRAPH, Ask("b", 1))
    server.turn()
    server.dispatcher.cancel(leaver)
    rounds.back(server.running[0])
    assert rounds.turns(1) == [["b"]]
    assert batcher.seated == 0


def test_who_leaves_behind_another_of_its_id_takes_nobody_along() -> None:
    server, rounds = serve(oldest())
    server.submit(GRAPH, Ask("first", 3, of=7))
    leaver = server.submit(GRAPH, Ask("second", 3, of=7))
    server.turn()
    server.dispatcher.cancel(leaver)
    rounds.back(server.running[0])
    assert rounds.turns(2) == [["first"], ["first"]]
    assert names(server.answers) == ["first"]


def test_when_the_server_ends_nobody_is_run_again() -> None:
    server, rounds = serve(oldest())
    flow = server.submit(GRAPH, Ask("a", 5))
    server.turn()
    server.dispatcher.fail_all("the end")
    rounds.back(server.running[0])
    assert str(flow.error) == "the end"
    assert rounds.turns(1) == []


def test_a_batch_that_raised_is_tried_by_halves_and_whoever_is_in_it_keeps_its_slot_unless_it_leaves() -> None:
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
    flows = [server.submit(GRAPH, Ask(name, 1)) for name in ("c", "d", "e")]
    server.turn()
    server.dispatcher.cancel(flows[0])  # while it runs
    assert server.raised(server.running[0])
    server.dispatcher.cancel(flows[1])  # before it is tried again
    assert rounds.turns(1) == [["e"]]
    assert (batcher.live, batcher.seated) == (0, 0)


def test_company_is_waited_for_before_every_execution() -> None:
    server, rounds = serve(direct(2, share=1.0, delay_ns=100))
    server.submit(GRAPH, Ask("a", 2))
    assert server.turn(0) == server.turn(99) == []
    assert server.turn(100)
    rounds.back(server.running[0], 110)
    assert server.turn(110) == server.turn(209) == []
    assert server.turn(210)


def test_what_became_of_a_request_is_of_no_interest_to_the_next_of_its_id() -> None:
    server, _ = serve(oldest(candidates=1, size=1))
    server.submit(GRAPH, Ask("runs", 2))
    leaver = server.submit(GRAPH, Ask("waits", 1, of=9))
    server.turn()
    server.dispatcher.cancel(leaver)
    late = server.submit(GRAPH, Ask("late", 1, of=9, start=False))
    server.turn()
    assert str(late.error).endswith("on the first request of the sequence")


def test_what_is_done_is_let_go_of_at_once() -> None:
    """Not when the collector comes: a model is unloaded when nothing holds a request to it any more."""
    server, rounds = serve(oldest())
    server.submit(GRAPH, Ask("a", 3))
    server.turn()
    line = ref(server.running[0].tickets[0].line)
    gc.disable()
    try:
        rounds.turns(3)
        server.answers.clear()
        rounds.seen.clear()
        rounds.left.clear()
        assert line() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------- laws


class IterativeMachine(RuleBasedStateMachine):
    """Whatever comes, leaves and dies: every request runs its rounds in order, in one instance, or is told why not."""

    make = staticmethod(lambda: oldest(candidates=2))

    @initialize()
    def build(self) -> None:
        self.batcher: Iterative = type(self).make()
        self.server, self.rounds = serve(self.batcher, instances=2)
        self.queue = self.server.queues[MODEL.key]
        self.time = 0
        self.flows: list[Flow] = []
        self.left: set[Flow] = set()
        self.lines: dict[Flow, Line] = {}

    @rule(rounds=st.integers(1, 4), of=st.integers(0, 3))
    def somebody_asks(self, rounds: int, of: int) -> None:
        self.flows.append(self.server.submit(GRAPH, Ask(str(len(self.flows)), rounds, of)))
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
        self.server.dispatcher.batch_failed(batch, InstanceDied("it died"))
        self.server.dispatcher.take_away(self.queue, batch.instance)
        self.look()

    @precondition(lambda self: self.queue.away)
    @rule()
    def it_runs_again(self) -> None:
        self.server.dispatcher.give_back(self.queue, self.queue.away[0])
        self.look()

    @precondition(lambda self: self.flows)
    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from(self.flows))
        if not flow.done:
            self.left.add(flow)
            self.server.dispatcher.cancel(flow)
        self.look()

    @rule(ns=st.integers(1, 2_000))
    def time_passes(self, ns: int) -> None:
        self.time += ns
        self.look()

    def look(self) -> None:
        self.server.turn(self.time)
        for batch in self.server.running:
            lines = [ticket.line for ticket in batch.tickets if ticket.line is not None]
            assert len(set(lines)) == len(lines), "a batch holds two of one sequence"

    @invariant()
    def it_is_right(self) -> None:
        if not hasattr(self, "flows"):
            return
        for flow in self.flows:
            seen = self.rounds.seen.get(flow, [])
            assert len({instance for instance, _ in seen}) <= 1, "it changed its instance"
            assert [first for _, first in seen] == [n == 0 for n in range(len(seen))], "it began twice, or never"
            if flow.done and flow.error is None and flow not in self.left:
                assert len(seen) == flow.request.rounds, "it was answered before it was done"

    def teardown(self) -> None:
        if not hasattr(self, "flows"):
            return
        while self.queue.away:
            self.it_runs_again()
        while self.server.running:
            self.rounds.back(self.server.running[0], self.time)
            self.look()
        answered = self.server.answers
        assert len(set(answered)) == len(answered), "somebody was answered twice"
        assert set(answered) | self.left == set(self.flows), "somebody was never answered"
        assert (len(self.batcher), self.batcher.live, self.batcher.seated) == (0, 0, 0)


class IterativeDirectMachine(IterativeMachine):
    make = staticmethod(direct)


TestLawsOfIterativeOldest = IterativeMachine.TestCase
TestLawsOfIterativeDirect = IterativeDirectMachine.TestCase
# What is true of all sequences is searched for in test_sequences_laws.py.
HALF = settings(max_examples=settings.default.max_examples // 2)
TestLawsOfIterativeOldest.settings = TestLawsOfIterativeDirect.settings = HALF
