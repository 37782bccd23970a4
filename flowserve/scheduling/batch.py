"""Records of the scheduler's decisions: a batch, the notices, and all decisions of one call of `schedule`.

The scheduler creates them, the runtime executes them. The engine executes the notices of `Decisions` in order, then
accounts for the finished requests, then starts the batches, then executes the lookups. The runtime writes a few
attributes of a batch (see `Batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flowserve.errors import FlowserveError
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.route import Route


class Batch:
    """Tickets that run together on one instance. `rows` is their sum; `is_back` is set when it is complete.

    A batch may have a `route`: then it holds an instance of every stage, `instances`, and `stage(i)` is the batch of
    stage i. `released` are the stages whose instance it has freed.

    The runtime writes some attributes:
      * `started_ns`, when a worker in which the batch waited begins to run it. A recall counts from there. `begin_at`
        sets that of a stage.
      * `tickets` and `rows` of a batch of sequences that has run, to leave out fillers and steps that run again
        (runtime/workers/state.py).
      * `contexts`, the trace contexts of its members at each stage, empty if none is traced, and `wants_outputs`,
        whether an observer reads the outputs of every stage.
    """

    __slots__ = (
        "_stages",
        "contexts",
        "instance",
        "instances",
        "is_back",
        "is_recalled",
        "queue",
        "released",
        "route",
        "rows",
        "started_ns",
        "tickets",
        "wants_outputs",
    )

    def __init__(self, queue: ModelQueue, instance: Any, tickets: list[Ticket], started_ns: int) -> None:
        self.queue = queue
        self.instance = instance
        self.tickets = tickets
        self.started_ns = started_ns
        self.is_back = False
        self.route: Route | None = None
        self.contexts: Sequence[Sequence[str]] = ()
        self.wants_outputs = False
        rows = 0
        for ticket in tickets:
            rows += ticket.rows
        self.rows = rows

    def take(self, route: Route, instances: Sequence[Any]) -> None:
        """Set its route, and an instance for each stage, its own first."""
        self.route = route
        self.instances = tuple(instances)
        self.released: set[int] = set()
        self.is_recalled = False
        self._stages: dict[int, Batch] = {}

    def stage(self, i: int) -> Batch:
        """The batch of stage i, always the same object."""
        if self.route is None or not i:
            return self
        batch = self._stages.get(i)
        if batch is None:
            node, since_ns = self.route.nodes[i], self.started_ns
            tickets = [Ticket(ticket.frame, node, ticket.rows, None, since_ns) for ticket in self.tickets]
            batch = self._stages[i] = Batch(self.route.queues[i], self.instances[i], tickets, since_ns)
        return batch

    def begin_at(self, since_ns: int) -> None:
        """Set the time at which a stage of a route was queued and started, as its worker reported it."""
        self.started_ns = since_ns
        for ticket in self.tickets:
            ticket.queued_ns = since_ns

    def __repr__(self) -> str:
        return f"Batch({self.queue.key}, {len(self.tickets)} tickets, rows={self.rows})"


class TicketRefused(NamedTuple):
    """A queue refused this ticket, on arrival or later. Its request finishes with the same error."""

    queue: ModelQueue
    ticket: Ticket
    error: FlowserveError


class Lookup(NamedTuple):
    """A step of an ensemble is ready, and its model has a response cache: the runtime looks it up, then calls
    `Scheduler.answer_step` or `run_step`.
    """

    queue: ModelQueue
    ticket: Ticket


class Withdrawn(NamedTuple):
    """A waiting ticket was removed from this queue because its ensemble's request is over."""

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


Notice = TicketRefused | Withdrawn | Responses | Grant | Stop | Recall


class Decisions(NamedTuple):
    """`batches` to start, in order; `finished` requests, in order, each exactly once; `notices`, in order; `lookups`,
    in order, after the batches have started, since a lookup may end a request that has a step in one of them.
    """

    batches: list[Batch]
    finished: list[Frame]
    notices: list[Notice]
    lookups: list[Lookup]


# Faster than the constructor, which is a Python function.
make_decisions: Callable[[tuple[list[Batch], list[Frame], list[Notice], list[Lookup]]], Decisions] = partial(
    tuple.__new__, Decisions
)
