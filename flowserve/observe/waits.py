"""Wait reasons of steps, as adjacent intervals without gaps.

Decides the texts of the reasons, and how the time in a queue is divided among them: periods without a free instance
have that reason, the rest has the queue's own reason. Pure: times are nanoseconds from the caller. Callers:
`runtime/tracing`, trace formats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUSY: Final = "no instance was free"
FULL: Final = "its batch was forming until it was full"
SIZED: Final = "its batch was forming until it had a preferred size"
CLOSED: Final = "its batch was forming until the next request did not fit"
DELAYED: Final = "its batch was forming until max_queue_delay_microseconds was over"
LIMITER: Final = "the rate limiter kept its resources for others"
SEQUENCE: Final = "its sequence's turn had not come"
INFLIGHT: Final = "max_inflight_requests was reached"
ADMISSION: Final = "the deployment was full"
SAME_REQUEST: Final = "the same request was being answered"
AGAIN: Final = "its batch had failed and it was tried again in a smaller one"
TURN: Final = "its turn of the event loop had not come"
ORDER: Final = "the answers before it were not there"
SEND: Final = "there was no room for another answer"
HANDOVER: Final = "its batch was on the way to the instance"

_PERIODS_MAX: Final = 4096  # a wait that is longer than the kept periods counts as waiting for an instance


@dataclass(frozen=True, slots=True)
class Wait:
    """One reason, and the interval in which it held."""

    reason: str
    from_ns: int
    to_ns: int

    @property
    def ns(self) -> int:
        return self.to_ns - self.from_ns


class BusyPeriods:
    """The periods in which no instance of a queue was free."""

    __slots__ = ("_periods", "_since_ns")

    def __init__(self) -> None:
        self._periods: deque[tuple[int, int]] = deque(maxlen=_PERIODS_MAX)
        self._since_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """The last free instance became busy. No effect if none was free."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def end(self, now_ns: int) -> None:
        """An instance became free. No effect if one was free."""
        if self._since_ns is not None:
            self._periods.append((self._since_ns, now_ns))
            self._since_ns = None

    def after(self, moment_ns: int) -> list[tuple[int, int]]:
        """The periods that ended after that time."""
        if len(self._periods) == _PERIODS_MAX and self._periods[0][0] > moment_ns:
            return [(moment_ns, self._periods[0][1]), *self._periods]
        found: list[tuple[int, int]] = []
        for spell in reversed(self._periods):
            if spell[1] <= moment_ns:
                break
            found.append(spell)
        return found[::-1]


def divided(from_ns: int, to_ns: int, busy: Sequence[tuple[int, int]], otherwise: str) -> list[Wait]:
    """The interval divided into BUSY, in these periods in order, and `otherwise` between them."""
    waits: list[Wait] = []
    at = from_ns
    for begun, ended in busy:
        begun, ended = max(begun, at), min(ended, to_ns)
        if ended > begun:
            add(waits, otherwise, at, begun)
            add(waits, BUSY, begun, ended)
            at = ended
    add(waits, otherwise, at, to_ns)
    return waits


def add(waits: list[Wait], reason: str, from_ns: int, to_ns: int) -> None:
    """Append a wait unless it is empty."""
    if to_ns > from_ns:
        waits.append(Wait(reason, from_ns, to_ns))


def by_reason(waits: Sequence[Wait]) -> dict[str, int]:
    """Nanoseconds by reason, longest first."""
    sums: dict[str, int] = {}
    for wait in waits:
        sums[wait.reason] = sums.get(wait.reason, 0) + wait.ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
