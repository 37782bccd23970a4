"""The queue of a model that nobody serves for now: always empty.

Decided here: that nothing waits where nobody will come soon. Each ticket is refused with the reason that its model is
down for. When a queue is closed and opened is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowserve.errors import Unavailable
from flowserve.scheduling.router import Flow, Ticket


class Closed:
    """Stands in for a model's batcher."""

    __slots__ = ("_reason",)
    may_wait = False
    may_expire = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def put(self, ticket: Ticket) -> None:
        raise Unavailable(self._reason)

    def take(self, now_ns: int) -> list[Ticket] | None:
        return None

    def deadline(self) -> int | None:
        return None

    def expiry(self) -> int | None:
        return None

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        return ()

    def withdraw(self, flow: Flow) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    def check(self) -> None:
        """Nothing is in it."""
