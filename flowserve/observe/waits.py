"""Why a step waited, in reasons that follow each other without a gap.

Decided here: the words for the reasons, and how the time in a queue is divided among them: while no instance was free
that was the reason, and otherwise whatever the queue was waiting for. Pure: moments are nanoseconds that callers bring.
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
GATE: Final = "the deployment was full"
SAME_ANSWER: Final = "the same request was being answered"
AGAIN: Final = "its batch had failed and it was tried again in a smaller one"
TURN: Final = "its turn of the event loop had not come"
ORDER: Final = "the answers before it were not there"
SEND: Final = "there was no room for another answer"
HANDOVER: Final = "its batch was on the way to the instance"

_SPELLS_MAX: Final = 4096  # who waited through more than these has waited for an instance


@dataclass(frozen=True, slots=True)
class Wait:
    """One reason, and from when until when it held."""

    reason: str
    from_ns: int
    to_ns: int

    @property
    def ns(self) -> int:
        return self.to_ns - self.from_ns


class Spells:
    """When no instance of a queue was free, each spell from its beginning to its end."""

    __slots__ = ("_since_ns", "_spells")

    def __init__(self) -> None:
        self._spells: deque[tuple[int, int]] = deque(maxlen=_SPELLS_MAX)
        self._since_ns: int | None = None

    def begin(self, now_ns: int) -> None:
        """The last free instance is free no more. Harmless where none was."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def end(self, now_ns: int) -> None:
        """An instance is free. Harmless where one was."""
        if self._since_ns is not None:
            self._spells.append((self._since_ns, now_ns))
            self._since_ns = None

    def after(self, moment_ns: int) -> list[tuple[int, int]]:
        """The spells that are over and were not at that moment."""
        if len(self._spells) == _SPELLS_MAX and self._spells[0][0] > moment_ns:
            return [(moment_ns, self._spells[0][1]), *self._spells]
        found: list[tuple[int, int]] = []
        for spell in reversed(self._spells):
            if spell[1] <= moment_ns:
                break
            found.append(spell)
        return found[::-1]


def divided(from_ns: int, to_ns: int, busy: Sequence[tuple[int, int]], otherwise: str) -> list[Wait]:
    """The time between two moments: `busy` in these spells, in order, and `otherwise` between them."""
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
    """One more, where it is any time at all."""
    if to_ns > from_ns:
        waits.append(Wait(reason, from_ns, to_ns))


def by_reason(waits: Sequence[Wait]) -> dict[str, int]:
    """Nanoseconds by reason, the longest first."""
    sums: dict[str, int] = {}
    for wait in waits:
        sums[wait.reason] = sums.get(wait.reason, 0) + wait.ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
