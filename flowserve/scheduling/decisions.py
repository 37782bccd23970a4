"""The decisions that `Scheduler.schedule` returns and the engine executes: records without code.

The engine executes the notices in order, then accounts for the finished flows, then starts the batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowserve.errors import FlowserveError
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.flow import Flow, Ticket


class Refused(NamedTuple):
    """A queue refused this ticket, on arrival or later. Its flow finishes with the same error."""

    queue: ModelQueue
    ticket: Ticket
    error: FlowserveError


class Withdrawn(NamedTuple):
    """A waiting ticket was removed from this queue because its ensemble's flow is over."""

    queue: ModelQueue


class Responses(NamedTuple):
    """A stream has responses for its reader."""

    stream: Any


class Grant(NamedTuple):
    """A decoupled step may send this many more responses."""

    sender: Any
    credits: int


class Stop(NamedTuple):
    """The responses of this decoupled step are no longer needed."""

    sender: Any


class Recall(NamedTuple):
    """A batch must return from its route at the next stage: a ticket waits for an instance that it holds."""

    batch: Batch


Notice = Refused | Withdrawn | Responses | Grant | Stop | Recall


class Decisions:
    """`batches` to start, in order; `finished` flows, in order, each exactly once; `notices`, in order."""

    __slots__ = ("batches", "finished", "notices")

    def __init__(self, batches: list[Batch], finished: list[Flow], notices: list[Notice]) -> None:
        self.batches = batches
        self.finished = finished
        self.notices = notices
