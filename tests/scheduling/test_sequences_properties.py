"""Properties of both strategies under any order of events, and simulations with hundreds of clients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.errors import Invalid
from flowserve.graph.plan import make_plan
from flowserve.scheduling.frames.frame import Frame, Ticket, filler_frame, request_frame
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.sequence.sequence import RequestSequence, SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, Oldest
from tests.support.recorder import simple_model
from tests.support.sequences import SequenceSim, slots_taken
from tests.support.strategies import plain_graph

PLAN = make_plan(plain_graph(simple_model(0)))
IDLE_NS = 50
INSTANCES = ("one", "two")
IDS = st.integers(1, 9)
FEWER = settings(max_examples=settings().max_examples // 2)


class Mark:
    """A request: its sequence and its number in it."""

    def __init__(self, of: int, number: int, *, start: bool, end: bool) -> None:
        self.of = of
        self.number = number
        self.start = start
        self.end = end


class SequenceMachine(RuleBasedStateMachine):
    """Compares a batcher with a reference: the waiting requests in order of arrival, and the sequences in the backlog
    in order.
    """

    make: Callable[[], Sequences]

    @initialize()
    def build(self) -> None:
        self.batcher = type(self).make()
        self.free: list[str] = [*INSTANCES]
        self.away: list[str] = []
        self.batcher.serve(INSTANCES, self.free)
        self.now = 0
        self.number = 0
        self.waiting: dict[int, Ticket] = {}
        self.running: dict[str, list[Ticket]] = {}
        self.again: set[int] = set()  # waiting requests of a failed batch
        self.seats: dict[RequestSequence, str] = {}
        self.taken: dict[RequestSequence, int] = {}
        self.queued: list[RequestSequence] = []  # in the backlog, in order of arrival

    @rule(of=IDS, start=st.booleans(), end=st.booleans(), timeout=st.sampled_from((0, 0, 20)))
    def a_request_arrives(self, of: int, start: bool, end: bool, timeout: int) -> None:
        self.number += 1
        mark = Mark(of, self.number, start=start, end=end)
        frame = request_frame(PLAN, (), [None], self.now, 0, mark, None, 0, timeout)
        ticket = Ticket(frame, PLAN.nodes[0], 1, None)
        ticket.queued_ns = self.now
        if not (start or self.batcher.is_live(of)):
            with pytest.raises(Invalid):
                self.batcher.put(ticket)
            return
        self.batcher.put(ticket)
        assert self.batcher.is_live(of) == (not end)
        self.waiting[self.number] = ticket
        self.look()

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def an_instance_takes(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.free))
        batch = self.batcher.take(instance, self.now)
        if batch is None:
            mine = [ticket for ticket in self.waiting.values() if self.seat(ticket) == instance]
            due = self.batcher.deadline()
            assert not mine or (self.batcher.may_wait and due is not None), (
                "a request waits although nothing is pending"
            )
            return
        real = [ticket for ticket in batch if ticket.sequence is not None]
        assert real
        assert len({ticket.sequence for ticket in real}) == len(real), "two of one sequence in a batch"
        for ticket in real:
            assert self.waiting.pop(ticket.frame.request.number) is ticket, "it was given out twice"
            if ticket.frame.request.number in self.again:
                self.again.discard(ticket.frame.request.number)
            else:
                assert self.taken.get(ticket.sequence, 0) < ticket.frame.request.number, "out of order"
            self.taken[ticket.sequence] = ticket.frame.request.number
            assert self.seats.setdefault(ticket.sequence, instance) == instance, "it changed its instance"
        self.free.remove(instance)
        self.running[instance] = real
        self.look()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), raises=st.booleans())
    def an_instance_is_back(self, data: st.DataObject, raises: bool) -> None:
        instance = data.draw(st.sampled_from([*self.running]))
        tickets = self.running.pop(instance)
        self.free.append(instance)
        if raises:
            middle = (len(tickets) + 1) // 2
            self.batcher.again(instance, (tickets[:middle], tickets[middle:]))
            found = {ticket.frame.request.number: ticket for ticket in tickets}
            self.waiting.update(found)
            self.again |= found.keys()

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def an_instance_dies(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(self.free))
        self.free.remove(instance)
        self.away.append(instance)
        self.batcher.lost(instance)
        self.bury()

    @precondition(lambda self: self.away)
    @rule()
    def it_runs_again(self) -> None:
        instance = self.away.pop()
        self.free.append(instance)
        self.batcher.found(instance)
        self.look()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_request_is_cancelled(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([*self.waiting]))
        frame = self.waiting.pop(number).frame
        frame.record.done = True
        assert self.batcher.withdraw(frame) == 1
        assert self.batcher.withdraw(frame) == 0
        self.bury()

    @rule(ns=st.integers(1, 80))
    def time_passes(self, ns: int) -> None:
        self.now += ns
        assert self.batcher.expire(self.now) == ()
        at = self.batcher.expiry()
        assert at is None or at > self.now
        self.bury()

    @rule()
    def every_request_is_refused(self) -> None:
        taken = self.batcher.clear()
        assert sorted(ticket.frame.request.number for ticket in taken) == sorted(self.waiting)
        assert not self.batcher.clear()
        assert (self.batcher.live, slots_taken(self.batcher)) == (0, 0)
        self.waiting.clear()
        self.queued.clear()

    def bury(self) -> None:
        for ticket, error in self.batcher.orphans():
            assert self.waiting.pop(ticket.frame.request.number) is ticket, "it was told twice"
            assert str(error)
        self.look()

    def seat(self, ticket: Ticket) -> str | None:
        return None if ticket.sequence.slot is None else ticket.sequence.slot.instance

    def look(self) -> None:
        """Check that the sequences that got slots were the first live ones of the backlog."""
        self.again &= self.waiting.keys()
        lines = list(dict.fromkeys(ticket.sequence for n, ticket in self.waiting.items() if n not in self.again))
        alive = set(lines)
        self.queued = [line for line in self.queued if line in alive]
        moved = [line for line in self.queued if line.slot is not None]
        assert moved == self.queued[: len(moved)], "the backlog was overtaken"
        del self.queued[: len(moved)]
        self.queued += [line for line in lines if line.slot is None and line not in self.queued]

    @invariant()
    def it_is_right(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.check()
            assert len(self.batcher) == len(self.waiting), "a ticket was lost or doubled"


class DirectMachine(SequenceMachine):
    make = staticmethod(lambda: Direct(SequencePolicy("a", 2, IDLE_NS), _identify, filler_frame(None)))


class PatientDirectMachine(SequenceMachine):
    make = staticmethod(lambda: Direct(SequencePolicy("a", 3, IDLE_NS), _identify, filler_frame(None), 0.7, 30))


class OldestMachine(SequenceMachine):
    make = staticmethod(lambda: Oldest(SequencePolicy("a", 3, IDLE_NS), _identify, BatchPolicy.simple(2)))


class PatientOldestMachine(SequenceMachine):
    make = staticmethod(lambda: Oldest(SequencePolicy("a", 3, IDLE_NS), _identify, BatchPolicy(3, (2,), 30)))


def _identify(frame: Frame) -> tuple[int, bool, bool]:
    mark: Mark = frame.request
    return mark.of, mark.start, mark.end


TestPropertiesOfDirect = DirectMachine.TestCase
TestPropertiesOfDirectThatWaits = PatientDirectMachine.TestCase
TestPropertiesOfOldest = OldestMachine.TestCase
TestPropertiesOfOldestThatWaits = PatientOldestMachine.TestCase
TestPropertiesOfDirect.settings = TestPropertiesOfDirectThatWaits.settings = FEWER  # each is many steps
TestPropertiesOfOldest.settings = TestPropertiesOfOldestThatWaits.settings = FEWER

CLIENTS = 50  # in one simulated server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        sequences = metafunc.config.getoption("--sequences", default=2000)
        worlds = -(-sequences // CLIENTS)
        metafunc.parametrize(
            "seeds", [range(first, min(first + 10, worlds)) for first in range(0, worlds, 10)], ids=str
        )


@pytest.mark.parametrize("deaths", [False, True], ids=["alive", "deaths"])
def test_property_unfinished_restarted_and_cancelled_sequences_get_correct_sums_and_return_every_slot(
    seeds: range, deaths: bool
) -> None:
    for seed in chain(seeds):
        try:
            SequenceSim(seed, CLIENTS, deaths=deaths).run()
        except AssertionError as broken:
            broken.add_note(f"SequenceSim({seed}, {CLIENTS}, deaths={deaths}).run() shows it again")
            raise


def test_one_seed_gives_one_simulation() -> None:
    first, second = SequenceSim(7, CLIENTS, deaths=True).run(), SequenceSim(7, CLIENTS, deaths=True).run()
    assert [client.sums for client in first.clients] == [client.sums for client in second.clients]
    assert first.time == second.time
