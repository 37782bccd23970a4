"""What a worker is: one instance of a model in its place, as the engine sees it.

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
        """What it runs elsewhere than on the event loop, as far as it is known there."""

    is_on_gpu: bool  # whether it computes on a GPU in the server's own process
    route_group: object  # workers of one group hand batches to each other; None: this one does not
    state: StateAdapter
    has_state: bool  # whether `finish` has something to do

    def open(self, context: WorkerContext) -> None:
        """Open the instance where it will run. Blocks; called on a loader's thread. Raises what the model raised."""

    def run(self, batch: Batch) -> Outcome | None:
        """Run a batch now and return its outcome, or None where that comes later through `Completions`."""

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """Take out of an outcome what is not the scheduler's: states of sequences, padding rows. Returns what is left,
        and the tickets that are to run again. Called on the event loop, once for each batch, before anything else looks
        at the outcome, where the worker `has_state`.
        """

    def recall(self, batch: Batch) -> None:
        """A batch that is on its route is to return as early as it can."""

    def close(self) -> None:
        """End the instance after what it runs now. Blocks; called on a thread."""


class Completions:
    """Batches that came back, `waiting` until the engine's step takes them. What runs on the event loop appends to
    that itself, and runs a step or wakes the loop.
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
    """What a worker knows of its engine. `calls` is where calls of other models go, `wake` has the engine run a step,
    `release` frees the instances of stages of a batch that it has passed or will not reach.
    """

    token: trio.lowlevel.TrioToken
    clock: ClockNs
    completions: Completions
    wake: Callable[[], None]
    release: Callable[[Batch, Sequence[int]], None]
    calls: Any = None


def reported(error: FlowserveError) -> FlowserveError:
    """What the callers of a batch are told of its failure: without the cause, whose frames hold what ran."""
    return error.as_told() if isinstance(error, ModelRaised) else error


def log_raised(error: ModelRaised, model: str, instance: str) -> None:
    """Write the traceback of a model's exception; nothing of its batch is run again."""
    log.error("model '%s', instance '%s' failed", model, instance, exc_info=error.__cause__)
    error.__cause__ = error.__context__ = None  # its frames hold the batch


def cannot_start(worker: Worker, batch: Batch, error: Exception) -> Internal:
    """What becomes of a batch that could not be started, for lack of memory or by a fault of the server: raised further
    it would end the server. Called in the exception's handler.
    """
    log.exception("instance %s: a batch cannot be started", worker.name)
    what = f"{type(error).__name__}: {error}"
    return Internal(f"model '{batch.queue.key.name}', instance '{worker.name}': a batch cannot be started: {what}")
