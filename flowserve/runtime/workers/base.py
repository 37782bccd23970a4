"""The interface of a worker: one instance of a model in its execution place.

Decides nothing; this is the contract between the engine and the kinds of workers (local.py, gpu.py, process.py), and
the records that travel between them. A worker runs one batch at a time. It does not know queues, flows' other steps or
callers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from flowserve.errors import FlowserveError, Internal, ModelRaised
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.workers.outcome import Outcome
from flowserve.runtime.workers.state import StateAdapter
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket

log = logging.getLogger("flowserve.runtime")


class Worker(Protocol):
    """One instance in its place. The scheduler holds it as an opaque handle."""

    name: str

    @property
    def running(self) -> Batch | None:
        """The batches that it runs outside the event loop, as known on the event loop."""

    is_on_gpu: bool  # whether it computes on a GPU in the server's own process
    route_group: object  # workers of one group hand batches to each other; None: this one does not
    state: StateAdapter
    has_state: bool  # whether `finish` has something to do

    def open(self, context: WorkerContext) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises the model's exception."""

    def run(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or None where that comes later through `Completions`."""

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """Remove states of sequences and padding rows from an outcome; the scheduler does not use them. Returns the
        rest and the tickets that are to run again. Called on the event loop, once for each batch of a worker that
        `has_state`, before any other use of the outcome.
        """

    def recall(self, batch: Batch) -> None:
        """A batch that is on its route is to return as early as it can."""

    def close(self) -> None:
        """Close the instance after its running batch. Blocks; called on a thread."""


class Completions:
    """Completed batches, `waiting` until the engine's step takes them. Code on the event loop appends to that list
    directly, and runs a step or wakes the loop.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, step_now: Callable[[], None]) -> None:
        self._token = token
        self._step_now = step_now
        self.waiting: deque[tuple[Batch, Outcome]] = deque()

    def add(self, batch: Batch, outcome: Outcome) -> None:
        """A batch is back. On any thread; a step follows."""
        self.waiting.append((batch, outcome))
        try:
            self._token.run_sync_soon(self._step_now, idempotent=True)
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


def reported(error: FlowserveError) -> FlowserveError:
    """The error of a batch for its callers: without the cause, whose frames hold references to the batch."""
    return error.as_told() if isinstance(error, ModelRaised) else error


def log_raised(error: ModelRaised, model: str, instance: str) -> None:
    """Write the traceback of a model's exception; nothing of its batch is run again."""
    log.error("model '%s', instance '%s' failed", model, instance, exc_info=error.__cause__)
    error.__cause__ = error.__context__ = None  # its frames hold the batch


def cannot_start(worker: Worker, batch: Batch, error: Exception) -> Internal:
    """The outcome of a batch that could not be started, for lack of memory or by an internal error; if the exception
    propagated, it would stop the server. Called in the exception's handler.
    """
    log.exception("instance %s: a batch cannot be started", worker.name)
    what = f"{type(error).__name__}: {error}"
    return Internal(f"model '{batch.queue.key.name}', instance '{worker.name}': a batch cannot be started: {what}")
