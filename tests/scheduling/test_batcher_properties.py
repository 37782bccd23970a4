"""Properties of every batcher for any order of events, and the dynamic batcher compared with a model of it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.graph.plan import make_plan
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.queue import Batcher, BatchPolicy, Queue
from tests.support.recorder import simple_model
from tests.support.strategies import plain_graph, policies

FOREVER_NS = 1 << 60
PLAN = make_plan(plain_graph(simple_model(0)))
MakeBatcher = Callable[[BatchPolicy], Batcher]
# An input: put a ticket of (request, rows, key), let time pass, take, or withdraw a request.
INPUTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 6), st.integers(0, 8), st.sampled_from("xxxy")),
        st.tuples(st.just("pass"), st.integers(0, 60)),
        st.tuples(st.just("take")),
        st.tuples(st.just("withdraw"), st.integers(0, 6)),
    ),
    max_size=40,
)


class History:
    """Feeds one batcher and records, in plain lists, which tickets went in, out, and away."""

    def __init__(self, batcher: Batcher, limit: int) -> None:
        self.batcher = batcher
        self.limit = limit
        self.now = 0
        self.frames = [request_frame(PLAN, (), [None], 0) for _ in range(7)]
        self.waiting: list[Ticket] = []
        self.gone: set[int] = set()
        self.left: list[list[Ticket]] = []

    def put(self, frame: int, rows: int, key: str) -> None:
        if frame not in self.gone:
            ticket = Ticket(self.frames[frame], PLAN.nodes[0], min(rows, self.limit), key)
            ticket.queued_ns = self.now
            self.waiting.append(ticket)
            self.batcher.put(ticket)

    def take(self) -> list[Ticket] | None:
        batch = self.batcher.take(None, self.now)
        if batch is not None:
            assert batch, "nothing left, and it was called a batch"
            assert batch == self.waiting[: len(batch)], "out of order, lost, doubled, or withdrawn before"
            del self.waiting[: len(batch)]
            self.left.append(batch)
            assert len(batch) == 1 or sum(ticket.rows or 1 for ticket in batch) <= self.limit
            assert len({ticket.key for ticket in batch}) == 1
        return batch

    def withdraw(self, frame: int) -> None:
        self.gone.add(frame)
        kept = [ticket for ticket in self.waiting if ticket.frame is not self.frames[frame]]
        assert self.batcher.withdraw(self.frames[frame]) == len(self.waiting) - len(kept)
        self.waiting = kept

    def feed(self, inputs: list[tuple[Any, ...]]) -> None:
        for what, *arguments in inputs:
            match what:
                case "put":
                    self.put(*arguments)
                case "pass":
                    self.now += int(str(arguments[0]))
                case "take":
                    self.take()
                case "withdraw":
                    self.withdraw(*arguments)
                case _:
                    raise AssertionError(what)
            self.batcher.check()
            assert len(self.batcher) == len(self.waiting)


every_batcher = pytest.mark.parametrize(
    "make", [lambda policy: Queue(BatchPolicy.single()), Queue], ids=["one by one", "dynamic"]
)


@every_batcher
@given(policy=policies(), inputs=INPUTS)
def test_property_no_request_is_lost_doubled_reordered_or_mixed(
    make: MakeBatcher, policy: BatchPolicy, inputs: list[tuple[object, ...]]
) -> None:
    history = History(make(policy), policy.max_batch_size)
    history.feed(inputs)


@every_batcher
@given(policy=policies(), inputs=INPUTS)
def test_property_with_time_and_free_instances_every_request_is_taken(
    make: MakeBatcher, policy: BatchPolicy, inputs: list[tuple[object, ...]]
) -> None:
    history = History(make(policy), policy.max_batch_size)
    history.feed(inputs)
    while history.waiting:
        if history.take() is None:
            deadline = history.batcher.deadline()
            assert deadline is not None
            assert deadline > history.now, "not yet, says take; the deadline is over, says deadline"
            history.now = deadline
    assert history.batcher.take(None, FOREVER_NS) is None
    assert history.batcher.deadline() is None


@every_batcher
@given(policy=policies(), inputs=INPUTS, early=st.floats(0, 0.999))
def test_property_take_before_the_deadline_changes_nothing(
    make: MakeBatcher, policy: BatchPolicy, inputs: list[tuple[object, ...]], early: float
) -> None:
    history = History(make(policy), policy.max_batch_size)
    history.feed(inputs)
    while history.take() is not None:
        pass
    deadline = history.batcher.deadline()
    if deadline is None:
        assert not history.waiting
        return
    history.now += int((deadline - history.now) * early)
    if history.now < deadline:
        assert history.take() is None
        assert history.take() is None
        assert history.batcher.deadline() == deadline
    history.now = deadline
    assert history.take() is not None, "a deadline that changed nothing"


# --------------------------------------------------------------------------------- the dynamic batcher and its model


def batch_by_the_book(waiting: list[Ticket], policy: BatchPolicy, now: int) -> int:
    """Triton's rules as a slow reference: all prefixes that could leave, then which one does. 0: none yet."""
    fitting = 0
    while (
        fitting < len(waiting)
        and waiting[fitting].key == waiting[0].key
        and (not fitting or rows_in(waiting[: fitting + 1]) <= policy.max_batch_size)
    ):
        fitting += 1
    sizes = [rows_in(waiting[:n]) for n in range(1, fitting + 1)]
    overdue = policy.max_queue_delay_ns > 0 and now >= waiting[0].queued_ns + policy.max_queue_delay_ns
    if overdue:
        return fitting
    preferred = [n for n, size in enumerate(sizes, 1) if size in policy.preferred]
    if preferred:
        return preferred[-1]
    largest = max(policy.preferred)
    within = [n for n, size in enumerate(sizes, 1) if size <= largest]
    if len(within) < len(waiting) and sizes[-1] > largest:
        return max(1, len(within))  # the next one would skip the largest preferred size
    if fitting < len(waiting) or policy.max_queue_delay_ns == 0 or sizes[-1] >= largest:
        return fitting
    return 0


def rows_in(tickets: list[Ticket]) -> int:
    return sum(ticket.rows or 1 for ticket in tickets)


class DynamicBatcherMachine(RuleBasedStateMachine):
    """Compares the batcher with a list of tickets and `batch_by_the_book`."""

    @initialize(policy=policies(), instances=st.integers(1, 3))
    def build(self, policy: BatchPolicy, instances: int) -> None:
        self.policy = policy
        self.batcher = Queue(policy)
        self.free = self.instances = instances
        self.now = 0
        self.numbers = count()
        self.waiting: deque[Ticket] = deque()

    @rule(rows=st.integers(0, 8), key=st.sampled_from("xxxxy"))
    def a_request_arrives(self, rows: int, key: str) -> None:
        frame = request_frame(PLAN, (), [None], self.now, next(self.numbers))
        ticket = Ticket(frame, PLAN.nodes[0], min(rows, self.policy.max_batch_size), key)
        ticket.queued_ns = self.now
        self.waiting.append(ticket)
        self.batcher.put(ticket)
        self.instances_take()

    @rule(ns=st.integers(0, 120))
    def time_passes(self, ns: int) -> None:
        self.now += ns
        self.instances_take()

    @precondition(lambda self: self.free < self.instances)
    @rule()
    def an_instance_becomes_free(self) -> None:
        self.free += 1
        self.instances_take()

    @precondition(lambda self: self.waiting)
    @rule(which=st.randoms(use_true_random=False))
    def a_request_is_cancelled(self, which: random.Random) -> None:
        cancelled = which.choice(list(self.waiting))
        self.waiting.remove(cancelled)
        assert self.batcher.withdraw(cancelled.frame) == 1
        self.instances_take()

    def instances_take(self) -> None:
        while self.free:
            expected = batch_by_the_book([*self.waiting], self.policy, self.now) if self.waiting else 0
            batch = self.batcher.take(None, self.now)
            assert len(batch or ()) == expected
            if batch is None:
                return
            assert batch == [self.waiting.popleft() for _ in batch]
            self.free -= 1

    @invariant()
    def no_request_overstays_beside_a_free_instance(self) -> None:
        if self.waiting and self.free:
            deadline = self.batcher.deadline()
            assert deadline is not None
            assert deadline > self.now

    @invariant()
    def promises_hold(self) -> None:
        self.batcher.check()
        assert len(self.batcher) == len(self.waiting)


TestDynamicBatcher = DynamicBatcherMachine.TestCase
