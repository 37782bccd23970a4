"""The responses of one request, and what its frames share.

Decides in which order the responses of a request leave: in the order in which their frames began. Called by borders.py
and streaming/.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.frames.operations import RowOperations
from flowserve.scheduling.frames.slots import InflightSlots

# The largest number of unread responses below one decoupled step; then it may not respond.
UNREAD_MAX: Final = 16


class StreamSender(Protocol):
    """The runtime's side of a decoupled step, which passes the model's responses to `Streams`."""

    def grant(self, count: int) -> None:
        """The step may send `count` more responses."""

    def withdraw(self) -> None:
        """No further response is needed."""


class Stream:
    """`answers`: the frames that are complete responses, in order, to be read; if `is_read_whole`, there is one, which
    is read from the frame of the request when that is over, and `answers` stays empty: an entry would be a reference
    cycle. `live`: the frames below that of the request that are not complete. `late`: steps and operations that wait
    for a tensor from above. `held`: the number of slots that the request holds, by node. `refusal`: an error that
    occurred when a step got a slot. `is_over`: no further response follows. `ends_empty`: when it was over, nothing was
    left that the last response could have waited for, so that its end needs a message of its own. `is_answered` is the
    runtime's: whether its first response was counted. `changed` is called with the frame of the request whenever
    `Streams.settle` has something to do for it.
    """

    __slots__ = (
        "answers",
        "changed",
        "ends_empty",
        "held",
        "is_answered",
        "is_over",
        "is_read_whole",
        "late",
        "live",
        "refusal",
        "rows",
        "slots",
    )

    def __init__(self, slots: InflightSlots, rows: RowOperations | None, *, is_read_whole: bool) -> None:
        self.slots = slots
        self.rows: Any = rows
        self.is_read_whole = is_read_whole
        self.answers: deque[Any] = deque()
        self.live: dict[Any, None] = {}
        self.late: list[tuple[Any, int]] = []
        self.held = [0] * len(slots.limits)
        self.is_over = self.is_answered = self.ends_empty = False
        self.refusal: Any = None
        self.changed: Callable[[Any], None] = ignore

    @property
    def has_answers(self) -> bool:
        """Whether a response waits to be read."""
        return self.is_over if self.is_read_whole else bool(self.answers)

    @property
    def has_ended(self) -> bool:
        """Whether the last response was read and carries the final flag."""
        return self.is_over and not self.ends_empty and not self.answers


def ignore(whole: Frame) -> None:
    """The callback of a request that was not submitted."""
