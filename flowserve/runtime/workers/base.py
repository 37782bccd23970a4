"""The interface of a worker: one instance of a model in its execution place.

Decides nothing; this is the contract between the engine and the kinds of workers (local.py, gpu.py, and
remote/), the records that they exchange, and the outcomes of batches. A worker runs one batch at a time, unless it
says otherwise (`RunsElsewhere`). It does not know queues, requests' other steps or callers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import trio

from flowserve.backends.base import Results, Work
from flowserve.errors import FlowserveError, Internal, Overloaded, told
from flowserve.memory.arena import Arena
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.observe.log_fields import of_requests
from flowserve.runtime.clock import ClockNs
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Ticket
from flowserve.values import Request, TensorSpec

log = logging.getLogger("flowserve.runtime")


@dataclass(slots=True, eq=False)
class Returned:
    """The outcome of a decoupled model's batch: its instance is free. Its responses, and its `error` if it failed, were
    reported separately. `rescheduled`: as in `Results`.
    """

    gathered_ns: int = 0
    computed_ns: int = 0
    error: FlowserveError | None = None
    rescheduled: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Passed:
    """The outcome of a batch with a route: `made[i]` are the results of stage i, for the completed stages. `error` is
    the error of the stage after those; None if the batch passed all stages or returned early.
    """

    made: list[Results]
    error: FlowserveError | None = None


Outcome = Results | Returned | Passed | FlowserveError


class StateAdapter:
    """For a model without state: nothing is added to a batch, and nothing is kept."""

    def work(self, tickets: Sequence[Ticket], *, may_write: bool = False) -> Work:
        """The inputs of an instance for a batch that is about to start: its members' tensors as columns. `may_write`:
        the tensors that it may write to are marked. No tensor is copied.
        """
        node = tickets[0].node
        is_alike = True  # of one node, as in nearly every batch
        rows: list[int] = []
        slots: list[list[Any]] = []
        requests: list[Request] = []
        wanted: list[tuple[str, ...]] = []
        for ticket in tickets:
            frame = ticket.frame
            rows.append(ticket.rows)
            slots.append(ticket.tensors)
            requests.append(frame.request)
            wanted.append(ticket.node.wanted or frame.wanted)
            is_alike = is_alike and ticket.node is node
        columns = []
        for i, slot in enumerate(node.inputs):
            if not is_alike:
                read = [ticket.node.inputs[i] for ticket in tickets]
                tensors = [held[slot] if slot >= 0 else None for held, slot in zip(slots, read, strict=True)]
            elif slot >= 0:
                tensors = [*map(itemgetter(slot), slots)]
            else:
                tensors = [None] * len(rows)
            columns.append(Column(rows, None, None, tensors))
        writable = None
        if may_write:
            writable = []
            for i, is_sole in enumerate(node.sole):
                may = [True] * len(rows) if is_alike and is_sole else writable_members(tickets, i)
                writable.append(may)
        return Work(columns, rows, requests, wanted, writable)

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """Keep the states of a completed batch. Returns the rest of its outcome, and the tickets that are to run again;
        the batch keeps the others.
        """
        return outcome, ()

    def take(self, ticket: Ticket, outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Keep the states in one response of a decoupled model. Returns the rest of its outputs."""
        return outputs

    def restart(self, tickets: Sequence[Ticket]) -> None:
        """Discard the state of sequences that begin again with these tickets."""


def works() -> str:
    """The outage of a worker that needs nothing outside of the server: none."""
    return ""


def counts_nothing() -> Mapping[str, Any]:
    """The `counted_there` of a worker whose batches are counted here alone."""
    return {}


class Worker(Protocol):
    """One instance in its place. The scheduler holds it as an opaque handle."""

    name: str

    @property
    def running(self) -> Batch | None:
        """The batch that it runs outside the event loop, as known there; the oldest if it has several, or None."""

    @property
    def arena(self) -> Arena | None:
        """Shared memory from which its process reads inputs without a copy; None: it reads any memory."""

    is_on_gpu: bool  # whether it computes on a GPU in the server's own process
    route_group: object  # workers of one group hand batches to each other; None: this one does not
    computes_apart: bool  # whether it computes at the same time as other workers of its group
    outage: Callable[[], str]  # why it cannot work at present, or ""; the supervisor handles the end of a process
    counted_there: Callable[[], Mapping[str, Any]]  # the counters of another server, if the model runs there
    state: StateAdapter
    has_state: bool  # whether `finish` has something to do

    def open(self, context: WorkerContext) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises the model's exception."""

    def run(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or None if that arrives later through `Completions`."""

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """Remove states of sequences and padding rows from an outcome; the scheduler does not use them. Returns the
        rest and the tickets that are to run again. Called on the event loop, once for each batch of a worker that
        `has_state`, before any other use of the outcome.
        """

    def recall(self, batch: Batch) -> None:
        """Return a batch from its route as early as possible."""

    def share(self, output: int, spec: TensorSpec) -> None:
        """Place this output, with this declaration, in shared memory from now on: a process reads it."""

    def close(self) -> None:
        """Close the instance after its running batch. Blocks; called on a thread."""


@runtime_checkable
class AsksModel(Protocol):
    """A worker that can ask the code of its model whether it is ready."""

    def readiness(self) -> Callable[[], str] | None:
        """As `KnowsReadiness.readiness`. On the event loop; never blocks."""


@runtime_checkable
class RunsElsewhere(Worker, Protocol):
    """A worker whose instance is in another process, here or on another machine, and may end. While it has none,
    `ended` is how the last one ended. `has_answered`: a batch came back from it; the supervisor resets this when an
    instance begins to serve. `on_end` is called on the event loop when an instance has ended, after its batches failed;
    then `open` may be called again.
    """

    ended: str
    has_answered: bool
    on_end: Callable[[], None] | None
    depth: int  # the batches that it takes at once; its queue has an entry for each

    @property
    def batches(self) -> Sequence[Batch]:
        """All batches that it runs, as `running`."""

    def kill(self, why: str) -> None:
        """End its instance immediately, for this reason. No effect if there is none."""

    def give_up(self, why: str) -> None:
        """Abort a pending `open`. On any thread; no effect once it is open."""


def slots_of(workers: Sequence[Worker]) -> list[Worker]:
    """The workers of a model, each once for every batch that it takes at a time."""
    return [one for one in workers for _ in range(one.depth if isinstance(one, RunsElsewhere) else 1)]


def batches_of(worker: Worker) -> Sequence[Batch]:
    """The batches that it runs outside the event loop."""
    if isinstance(worker, RunsElsewhere):
        return worker.batches
    return [] if worker.running is None else [worker.running]


class Completions:
    """Completed batches, `waiting` until the engine's step takes them. Code on the event loop appends to that list
    directly, and runs a step (`step_now`) or wakes the loop.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, step_now: Callable[[], None]) -> None:
        self._token = token
        self.step_now = step_now
        self.waiting: deque[tuple[Batch, Outcome]] = deque()

    def add(self, batch: Batch, outcome: Outcome) -> None:
        """Add a completed batch. On any thread; a step follows."""
        self.waiting.append((batch, outcome))
        try:
            self._token.run_sync_soon(self.step_now, idempotent=True)
        except trio.RunFinishedError:
            log.debug("a batch came back after the server was gone")


@dataclass(slots=True, eq=False)
class WorkerContext:
    """The engine's interface for a worker. `calls` receives calls of other models, `wake` has the engine run a step,
    `release` frees the instances of stages of a batch that it has passed or will not reach.
    """

    token: trio.lowlevel.TrioToken
    clock: ClockNs
    completions: Completions
    wake: Callable[[], None]
    release: Callable[[Batch, Sequence[int]], None]
    calls: Any = None


def fields_of(batch: Batch) -> Mapping[str, Any]:
    """`extra` of a log record about a batch."""
    members = (ticket.frame.whole.request for ticket in batch.tickets)
    return of_requests(members, model=batch.queue.key.name, instance=batch.instance.name)


def log_failure(text: str, *arguments: object, error: FlowserveError, extra: Mapping[str, Any]) -> None:
    """One line about a failure, with the traceback of the model's exception unless an earlier line has it."""
    if log.isEnabledFor(logging.ERROR):
        record = log.makeRecord(log.name, logging.ERROR, "", 0, text, arguments, None, extra=extra)
        record.exc_text = (error.raised.take() if error.raised is not None else None) or None
        log.handle(record)


def log_unnoticed(error: FlowserveError, batch: Batch) -> None:
    """Log a model's exception if no request of its batch fails because of it: the callers have left, or have received
    their last responses. Otherwise the log line about the first failed request has the traceback.
    """
    raised = error.raised
    failed = (ticket.frame.record.error for ticket in batch.tickets)
    if raised is not None and not any(one is not None and one.raised is raised for one in failed):
        log_failure("%s", error, error=error, extra=fields_of(batch))


def cannot_start(worker: Worker, batch: Batch, error: Exception) -> FlowserveError:
    """The outcome of a batch that could not be started, for lack of memory or descriptors, or by an internal error; if
    the exception propagated, it would stop the server. Called in the handler of the exception.
    """
    where = f"model '{batch.queue.key.name}', instance '{worker.name}': a batch cannot be started"
    if isinstance(error, MemoryError):
        log.error("%s: MemoryError: %s", where, error, extra=fields_of(batch))
        return Overloaded(f"{where}: MemoryError: {error}")
    log.exception("instance %s: a batch cannot be started", worker.name, extra=fields_of(batch))
    what = told(error, f"{type(error).__name__}: {error}", len(batch.tickets))
    return Internal(f"{where}: {what}")


def writable_members(tickets: Sequence[Ticket], i: int) -> list[bool]:
    """Whether a model may write into input i of each member: no other step reads it, and it feeds no other input."""
    return [ticket.node.sole[i] or _is_last_reader(ticket, i) for ticket in tickets]


def _is_last_reader(ticket: Ticket, i: int) -> bool:
    slot = ticket.node.inputs[i]
    return slot >= 0 and ticket.frame.is_last_reader(slot) and ticket.node.inputs.count(slot) == 1
