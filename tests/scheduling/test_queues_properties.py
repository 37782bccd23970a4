"""Properties of a queue with levels and policies for any order of events, and the queue compared with a model of it."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.errors import Unavailable
from flowserve.graph.plan import make_plan
from flowserve.scheduling.frames.frame import Ticket, request_frame
from flowserve.scheduling.queue import OVERTAKEN_MAX, BatchPolicy, LevelPolicy, Levels, Queue
from tests.support.recorder import simple_model
from tests.support.strategies import draw_levels, plain_graph, policies

PLAN = make_plan(plain_graph(simple_model(0)))
LEVELS = st.randoms(use_true_random=False).map(draw_levels)
FEWER = settings(max_examples=settings().max_examples // 2)


class Waiting:
    """One ticket in the reference model."""

    def __init__(self, ticket: Ticket, level: int, policy: LevelPolicy) -> None:
        self.ticket = ticket
        self.level = level
        self.policy = policy
        self.is_delayed = False
        self.expires: int | None = None
        limits = [policy.timeout_ns, ticket.frame.record.timeout_ns if policy.may_override else 0]
        if policy.timeout_ns:
            self.expires = ticket.queued_ns + min(filter(None, limits))

    @property
    def place(self) -> tuple[int, bool]:
        return self.level, self.is_delayed


class QueueMachine(RuleBasedStateMachine):
    """Compares the queue with a list of tickets and a stable sort. There are too few batches here for the limit of
    overtaking.
    """

    @initialize(policy=policies(), levels=LEVELS)
    def build(self, policy: BatchPolicy, levels: Levels) -> None:
        self.policy = policy
        self.levels = levels
        self.batcher = Queue(policy, levels)
        self.now = 0
        self.waiting: list[Waiting] = []  # in order of arrival
        self.batches = 0

    @rule(rows=st.integers(0, 8), key=st.sampled_from("xxxxy"), priority=st.integers(0, 5), timeout=st.integers(0, 60))
    def a_request_arrives(self, rows: int, key: str, priority: int, timeout: int) -> None:
        frame = request_frame(PLAN, (), [None], self.now, 0, None, None, priority, timeout)
        ticket = Ticket(frame, PLAN.nodes[0], min(rows, self.policy.max_batch_size), key)
        ticket.queued_ns = self.now
        level = priority if 1 <= priority <= self.levels.count else self.levels.default
        policy = self.levels.policies.get(level, self.levels.policy)
        if policy.max_size and sum(one.level == level for one in self.waiting) >= policy.max_size:
            with pytest.raises(Unavailable):
                self.batcher.put(ticket)
            return
        self.batcher.put(ticket)
        self.waiting.append(Waiting(ticket, level, policy))

    @rule(ns=st.integers(0, 40))
    def time_passes(self, ns: int) -> None:
        self.now += ns
        due = [one for one in self.waiting if one.expires is not None and one.expires <= self.now]
        refused = self.batcher.expire(self.now)
        assert {*refused} == {one.ticket for one in due if not one.policy.is_delayed}
        assert len(refused) == len({*refused})
        for one in due:
            one.expires, one.is_delayed = None, True
        self.waiting = [one for one in self.waiting if one.ticket not in refused]

    @precondition(lambda self: self.batches < OVERTAKEN_MAX)
    @rule()
    def an_instance_takes(self) -> None:
        walk = sorted(self.waiting, key=lambda one: one.place)
        expected = self.count_by_a_plain_queue([one.ticket for one in walk])
        batch = self.batcher.take(None, self.now)
        assert (batch or []) == [one.ticket for one in walk[:expected]]
        self.waiting = [one for one in self.waiting if one.ticket not in (batch or ())]
        self.batches += batch is not None

    def count_by_a_plain_queue(self, walk: list[Ticket]) -> int:
        """The number of these tickets that the plain dynamic batcher takes in this order, if its delay passes at the
        same time.
        """
        oldest = min((ticket.queued_ns for ticket in walk), default=self.now)
        plain = Queue(self.policy)
        stand_ins = [Ticket(ticket.frame, ticket.node, ticket.rows, ticket.key) for ticket in walk]
        for ticket in stand_ins:
            ticket.queued_ns = oldest
            plain.put(ticket)
        return len(plain.take(None, self.now) or ())

    @precondition(lambda self: self.waiting)
    @rule(which=st.randoms(use_true_random=False))
    def a_request_is_cancelled(self, which: random.Random) -> None:
        cancelled: Waiting = which.choice(self.waiting)
        assert self.batcher.withdraw(cancelled.ticket.frame) == 1
        assert self.batcher.withdraw(cancelled.ticket.frame) == 0
        self.waiting.remove(cancelled)

    @invariant()
    def promises_hold(self) -> None:
        self.batcher.check()
        assert len(self.batcher) == len(self.waiting)
        assert self.batcher.expiry() == min(
            (one.expires for one in self.waiting if one.expires is not None), default=None
        )
        oldest = min((one.ticket.queued_ns for one in self.waiting), default=None)
        delay = self.policy.max_queue_delay_ns
        assert self.batcher.deadline() == (None if oldest is None or not delay else oldest + delay)


TestPolicyBatcher = QueueMachine.TestCase


@given(policy=policies(), levels=LEVELS, inputs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=40))
def test_property_with_time_and_free_instances_every_request_is_taken_or_refused(
    policy: BatchPolicy, levels: Levels, inputs: list[tuple[int, int]]
) -> None:
    batcher = Queue(policy, levels)
    waiting = set()
    now = 0
    for rows, priority in inputs:
        ticket = Ticket(
            request_frame(PLAN, (), [None], 0, 0, None, None, priority),
            PLAN.nodes[0],
            min(rows, policy.max_batch_size),
            None,
        )
        ticket.queued_ns = now
        try:
            batcher.put(ticket)
        except Unavailable:
            continue
        waiting.add(ticket)
        now += rows
    while waiting:
        gone = [*batcher.expire(now), *(batcher.take(None, now) or ())]
        if not gone:
            soonest = [at for at in (batcher.deadline(), batcher.expiry()) if at is not None]
            assert soonest, "a request waits although nothing is pending"
            assert min(soonest) > now, "a time that is over was let pass"
            now = min(soonest)
        for ticket in gone:
            waiting.remove(ticket)
    assert batcher.deadline() is None
    assert batcher.expiry() is None


@pytest.mark.fault("D8")
@settings(FEWER)  # each is many steps
@given(
    limit=st.integers(1, 4),
    stream=st.lists(st.lists(st.integers(1, 4), min_size=4, max_size=8), min_size=60, max_size=90),
)
def test_property_no_level_is_overtaken_without_bound(limit: int, stream: list[list[int]]) -> None:
    """Under overload, the front request of each level leads or joins a batch after a bounded number of batches."""
    batcher = Queue(BatchPolicy.simple(limit), Levels(4, 4))
    lanes: dict[int, deque[tuple[Ticket, int]]] = {level: deque() for level in range(1, 5)}
    since = dict.fromkeys(lanes, 0)
    for taken, priorities in enumerate(stream):
        for priority in priorities:
            ticket = Ticket(request_frame(PLAN, (), [None], 0, 0, None, None, priority), PLAN.nodes[0], 1, None)
            if not lanes[priority]:
                since[priority] = taken
            lanes[priority].append((ticket, taken))
            batcher.put(ticket)
        for ticket in batcher.take(None, 0) or ():
            level = ticket.frame.record.priority
            assert lanes[level].popleft()[0] is ticket
            since[level] = taken + 1
        for level, lane in lanes.items():
            assert not lane or taken + 1 - since[level] <= OVERTAKEN_MAX + len(lanes)
