"""When replicas are started, watched, restarted and ended, and with which status the whole server ends.

Decides that the first replica loads the models alone, so that a repository that cannot be served is reported once and
ends the server; that the others start when the first is ready; that a replica that ends by itself is started again
after a delay, which grows while it ends early; that one whose event loop does not answer for a given time is killed;
and that after a stop signal nothing is started any more. Pure: it knows
neither processes nor clocks, gets the time in nanoseconds with each event, and returns what is to be done. Caller:
`parent`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from flowserve.runtime.workers.supervisor import DELAYS, BackOff, Delays

FIRST: Final = 0  # the replica that is started before the others
# Checks in a row that a replica may leave unanswered. They are counted, and not the time, because a machine that is
# suspended also stops the time between a question and its answer.
_UNANSWERED_MAX: Final = 4


class State(Enum):
    """WAITING: not started, or to be started again; STARTING: it loads its models; READY: it serves them; GONE: it
    ended, and is not started again.
    """

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Start:
    """Start the process of this replica."""

    replica: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this replica to end: it finishes its requests first."""

    replica: int


@dataclass(frozen=True, slots=True)
class Check:
    """Ask this replica for a sign of life, and report it by `answered`."""

    replica: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process of this replica, which does not answer."""

    replica: int


@dataclass(frozen=True, slots=True)
class EndAll:
    """Every replica has ended: the parent ends with this exit status."""

    status: int


Decision = Start | Ask | Check | Kill | EndAll


class _Replica:
    def __init__(self, delays: Delays) -> None:
        self.state = State.WAITING
        self.due_ns: int | None = None  # when it is to be started or checked; None: not by time
        self.unanswered = 0  # checks in a row
        self.ready_ns = 0
        self.back_off = BackOff(delays)


class Supervision:
    """`count` replicas, at least one. One that is ready and does not answer for `silence_ns` is killed; 0: none is.
    Every method takes the time of its event in nanoseconds, which never decreases, and returns decisions, to be carried
    out in order.
    """

    def __init__(self, count: int, silence_ns: int = 0, delays: Delays = DELAYS) -> None:
        self._replicas = [_Replica(delays) for _ in range(count)]
        self._check_every_ns = silence_ns // _UNANSWERED_MAX
        self._has_served = False  # one replica was ready once
        self._is_ending = False
        self._status = 0

    def state(self, replica: int) -> State:
        return self._replicas[replica].state

    def begin(self, now_ns: int) -> Sequence[Decision]:
        """The server starts."""
        return self._start(FIRST)

    def ready(self, replica: int, now_ns: int) -> Sequence[Decision]:
        """A replica has loaded its models."""
        one = self._replicas[replica]
        if one.state is not State.STARTING:
            return ()
        one.state, one.ready_ns, one.unanswered = State.READY, now_ns, 0
        if self._check_every_ns and not self._is_ending:
            one.due_ns = now_ns + self._check_every_ns
        if self._has_served or self._is_ending:
            return ()
        self._has_served = True
        return [
            decision
            for number, other in enumerate(self._replicas)
            if other.state is State.WAITING
            for decision in self._start(number)
        ]

    def ended(self, replica: int, status: int, now_ns: int) -> Sequence[Decision]:
        """The process of a replica ended with an exit status; negative: by a signal of this number."""
        one = self._replicas[replica]
        if self._is_ending or not self._has_served:
            was_asked_early = self._is_ending and one.state is State.STARTING and status == -signal.SIGTERM
            one.state = State.GONE
            if not was_asked_early:  # before it could receive the signal
                self._status = max(self._status, abs(status))
            if not self._is_ending:  # the first replica could not serve
                return self.stop(now_ns)
            return self._end_if_over()
        lived_ns = now_ns - one.ready_ns if one.state is State.READY else 0
        one.state = State.WAITING
        one.due_ns = now_ns + one.back_off.ended(lived_ns)
        return ()

    def due(self, now_ns: int) -> Sequence[Decision]:
        """The time of `next_ns` has come."""
        decisions: list[Decision] = []
        for number, one in enumerate(self._replicas):
            if one.due_ns is None or one.due_ns > now_ns:
                continue
            if one.state is State.WAITING:
                decisions += self._start(number)
            elif one.unanswered < _UNANSWERED_MAX:
                one.unanswered += 1
                one.due_ns = now_ns + self._check_every_ns
                decisions.append(Check(number))
            else:
                one.due_ns = None
                decisions.append(Kill(number))
        return decisions

    def answered(self, replica: int) -> None:
        """A replica has answered a check."""
        self._replicas[replica].unanswered = 0

    def next_ns(self) -> int | None:
        """When `due` is to be called; None: not by time."""
        return min((one.due_ns for one in self._replicas if one.due_ns is not None), default=None)

    def stop(self, now_ns: int) -> Sequence[Decision]:
        """The server was asked to stop."""
        if self._is_ending:
            return ()
        self._is_ending = True
        asked: list[Decision] = []
        for number, one in enumerate(self._replicas):
            one.due_ns = None
            if one.state is State.WAITING:
                one.state = State.GONE
            elif one.state is not State.GONE:
                asked.append(Ask(number))
        return asked or self._end_if_over()

    def _start(self, replica: int) -> Sequence[Decision]:
        one = self._replicas[replica]
        one.state, one.due_ns = State.STARTING, None
        return [Start(replica)]

    def _end_if_over(self) -> Sequence[Decision]:
        return [EndAll(self._status)] if all(one.state is State.GONE for one in self._replicas) else ()
