"""Replicas are started, restarted and ended: laws that hold in every order of events."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowserve.replicas.supervision import Ask, Check, Decision, EndAll, Kill, Start, State, Supervision
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.workers.supervisor import DELAYS


def test_the_first_replica_loads_alone_and_the_others_follow() -> None:
    replicas = Supervision(3)
    assert replicas.begin(0) == [Start(0)]
    assert replicas.ready(0, 5) == [Start(1), Start(2)]
    assert replicas.ready(1, 6) == ()


def test_a_first_replica_that_cannot_serve_ends_the_server_with_its_status() -> None:
    replicas = Supervision(3)
    replicas.begin(0)
    assert replicas.ended(0, 1, 9) == [EndAll(1)]
    assert replicas.next_ns() is None


def test_a_replica_that_ends_by_itself_is_started_again() -> None:
    replicas = Supervision(2)
    replicas.begin(0)
    replicas.ready(0, 0)
    replicas.ready(1, 0)
    assert replicas.ended(0, -9, 60 * SECOND_NS) == ()
    at_ns = replicas.next_ns()
    assert at_ns == 60 * SECOND_NS + DELAYS.first_ns
    assert replicas.due(at_ns - 1) == []
    assert replicas.due(at_ns) == [Start(0)]


def test_the_delay_grows_while_a_replica_ends_early() -> None:
    replicas = Supervision(2)
    replicas.begin(0)
    replicas.ready(0, 0)
    now_ns, delays = 0, []
    for _ in range(12):
        replicas.ended(1, 1, now_ns)
        at_ns = replicas.next_ns()
        assert at_ns is not None
        delays.append(at_ns - now_ns)
        now_ns = at_ns
        replicas.due(now_ns)
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (DELAYS.first_ns, DELAYS.longest_ns)


def test_a_replica_that_does_not_answer_is_killed_and_started_again() -> None:
    replicas = Supervision(2, silence_ns=60 * SECOND_NS)
    replicas.begin(0)
    replicas.ready(0, 0)
    replicas.ready(1, 0)
    for check in range(1, 5):
        assert replicas.next_ns() == check * 15 * SECOND_NS
        assert replicas.due(check * 15 * SECOND_NS) == [Check(0), Check(1)]
        replicas.answered(0)
    assert replicas.due(75 * SECOND_NS) == [Check(0), Kill(1)]
    assert replicas.state(1) is State.READY  # until its process has ended
    replicas.ended(1, -9, 75 * SECOND_NS)
    assert replicas.due(80 * SECOND_NS) == [Start(1)]


def test_a_machine_that_was_suspended_takes_no_replica_for_silent() -> None:
    replicas = Supervision(1, silence_ns=60 * SECOND_NS)
    replicas.begin(0)
    replicas.ready(0, 0)
    assert replicas.due(15 * SECOND_NS) == [Check(0)]
    assert replicas.due(9_000 * SECOND_NS) == [Check(0)]


@given(st.lists(st.integers(-15, 3), min_size=2, max_size=2))
def test_the_server_ends_with_the_worst_status(statuses: list[int]) -> None:
    replicas = Supervision(2)
    replicas.begin(0)
    replicas.ready(0, 0)
    replicas.ready(1, 0)
    assert replicas.stop(1) == [Ask(0), Ask(1)]
    assert replicas.ended(0, statuses[0], 2) == ()
    assert replicas.ended(1, statuses[1], 3) == [EndAll(max(map(abs, statuses)))]


@pytest.mark.parametrize(("status", "ends_with"), [(-signal.SIGTERM, 0), (-signal.SIGSEGV, 11), (1, 1)])
def test_a_replica_that_was_asked_to_end_before_it_had_started_does_not_fail_the_server(
    status: int, ends_with: int
) -> None:
    replicas = Supervision(2)
    replicas.begin(0)
    replicas.ready(0, 0)
    replicas.stop(1)
    replicas.ended(0, 0, 2)
    assert replicas.ended(1, status, 3) == [EndAll(ends_with)]


class Lives(RuleBasedStateMachine):
    """Processes that live and end in any order, and the decisions about them."""

    @initialize(count=st.integers(1, 4), silence_s=st.sampled_from([0, 8, 60]))
    def begin(self, count: int, silence_s: int) -> None:
        self.replicas = Supervision(count, silence_s * SECOND_NS)
        self.silence_ns = silence_s * SECOND_NS
        self.unanswered: dict[int, int] = {}  # since when, by replica
        self.count = count
        self.now_ns = 0
        self.running: set[int] = set()
        self.loading: set[int] = set()
        self.asked: set[int] = set()
        self.has_served = self.is_ending = False
        self.status: int | None = None
        self.carry_out(self.replicas.begin(0))

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            assert self.status is None, "nothing is decided after the end"
            match decision:
                case Start(replica):
                    assert replica not in self.running
                    assert not self.is_ending
                    assert self.has_served or not self.running
                    self.running.add(replica)
                    self.loading.add(replica)
                case Ask(replica):
                    assert replica in self.running
                    assert replica not in self.asked
                    self.asked.add(replica)
                case Check(replica):
                    assert replica in self.running - self.loading
                    assert not self.is_ending
                    self.unanswered.setdefault(replica, self.now_ns)
                case Kill(replica):
                    assert replica in self.running - self.loading
                    assert self.now_ns - self.unanswered[replica] >= self.silence_ns > 0
                case EndAll(status):
                    assert not self.running
                    self.status = status

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(replica)
        self.has_served = True
        self.carry_out(self.replicas.ready(replica, self.now_ns))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.integers(-15, 2))
    def end(self, data: st.DataObject, status: int) -> None:
        replica = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(replica)
        self.loading.discard(replica)
        self.asked.discard(replica)
        self.unanswered.pop(replica, None)
        self.is_ending |= not self.has_served
        self.carry_out(self.replicas.ended(replica, status, self.now_ns))

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.unanswered)))
        del self.unanswered[replica]
        self.replicas.answered(replica)

    @rule(ns=st.integers(0, 40 * SECOND_NS))
    def wait(self, ns: int) -> None:
        self.now_ns += ns
        self.carry_out(self.replicas.due(self.now_ns))

    @rule()
    def stop(self) -> None:
        before, self.is_ending = self.is_ending, True
        decisions = self.replicas.stop(self.now_ns)
        assert not (before and decisions)
        self.carry_out(decisions)

    @invariant()
    def every_replica_runs_or_will_run_or_the_server_ends(self) -> None:
        if not hasattr(self, "replicas"):
            return
        if self.is_ending:
            assert self.replicas.next_ns() is None
            assert (self.status is not None) == (not self.running)
            assert self.running == self.asked
        elif self.has_served:
            waiting = {n for n in range(self.count) if self.replicas.state(n) is State.WAITING}
            assert waiting == set(range(self.count)) - self.running
            if not self.silence_ns:
                assert bool(waiting) == (self.replicas.next_ns() is not None)
            elif waiting:
                assert self.replicas.next_ns() is not None


TestLives = Lives.TestCase
