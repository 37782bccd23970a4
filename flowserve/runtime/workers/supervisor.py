"""Restart of instances that run in worker processes or on other machines, after their end.

Decides that the instance takes no work until a new process has loaded the model and run its warm-up, and that the delay
before the next start grows with each early end, and stays short if the process was healthy before it ended (`BackOff`).
A model without a running instance is not ready, nor are the ensembles that need it. Requests for it wait if the next
start is near; else they are refused with the reason.

The workers of such instances (process.py, cluster.py) detect the end and fail their batches. Used on the event loop, by
the engine and by loading.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from flowserve.errors import FlowserveError
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.workers.base import RunsElsewhere, WorkerContext
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.scheduler import Scheduler

log = logging.getLogger("flowserve.runtime")

# Requests wait for a start within this time, and are refused otherwise.
NEAR_NS: Final = SECOND_NS

WarmUp = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Delays:
    """Exponential back-off, in nanoseconds: the delay before a restart is `first_ns`, and doubles with each end in a
    row up to `longest_ns`.

    Only processes that end immediately reach `longest_ns`: they are started at most once per `longest_ns`, which bounds
    the cost of a model that cannot run. An end after a healthy period (`BackOff.ended`) is followed by at most
    `after_health_ns`, and one after `calm_ns` by `first_ns`.
    """

    first_ns: int = SECOND_NS // 10
    longest_ns: int = 30 * SECOND_NS
    healthy_ns: int = SECOND_NS
    after_health_ns: int = NEAR_NS
    calm_ns: int = 10 * SECOND_NS


DELAYS: Final = Delays()


class BackOff:
    """The restarts of one process. `ends`: the number of consecutive ends after less than `calm_ns`."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._doublings_after_health = (delays.after_health_ns // delays.first_ns).bit_length() - 1
        self._doublings = 0
        self.ends = 0

    def ended(self, lived_ns: int, *, has_answered: bool = False) -> int:
        """The process ended `lived_ns` after it began to serve (0: it did not begin). Returns the delay until its
        restart.

        The process was healthy if it lived for `healthy_ns`, or if it has answered a batch (`has_answered`).
        """
        delays = self._delays
        if lived_ns >= delays.calm_ns:
            self.ends = self._doublings = 0
        elif has_answered or lived_ns >= delays.healthy_ns:
            self._doublings = min(self._doublings, self._doublings_after_health)
        delay_ns = min(delays.first_ns << self._doublings, delays.longest_ns)
        self.ends += 1
        if delay_ns < delays.longest_ns:  # bounds the shift, which would otherwise create very large integers
            self._doublings += 1
        return delay_ns


class Supervisor:
    """Supervises the worker processes of a server."""

    def __init__(self, scheduler: Scheduler, context: WorkerContext, delays: Delays) -> None:
        self._scheduler = scheduler
        self._context = context
        self._clock = context.clock
        self._delays = delays
        self._nursery: trio.Nursery | None = None
        self._watched: dict[ModelQueue, list[_Charge]] = {}
        self._down: dict[ModelQueue, str] = {}  # queues without a running instance, and why

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Restart processes that have ended, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def watch(
        self,
        queue: ModelQueue,
        workers: Sequence[RunsElsewhere],
        execution_timeout_ns: int = 0,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Watch these workers from now on. `execution_timeout_ns`: a batch that runs longer ends its process.
        `warm_up`: runs on a restarted instance; raises FlowserveError if it fails.
        """
        now_ns = self._clock()
        self._watched[queue] = [_Charge(queue, worker, BackOff(self._delays), warm_up, now_ns) for worker in workers]
        for charge in self._watched[queue]:
            charge.worker.on_end = partial(self._ended, charge)
            charge.worker.has_answered = False  # batches of the warm-up do not count
            if charge.worker.ended:
                self._ended(charge)
            if execution_timeout_ns:
                self._start(charge, partial(end_overdue, charge.worker, execution_timeout_ns, self._clock))

    def release(self, queue: ModelQueue) -> None:
        """Stop supervising these workers, whose instances are about to be closed. No effect if unknown."""
        self._down.pop(queue, None)
        for charge in self._watched.pop(queue, ()):
            charge.release()

    def stop(self) -> None:
        """The server ends: stop supervising all workers."""
        for queue in [*self._watched]:
            self.release(queue)

    def outage(self, queues: Iterable[ModelQueue]) -> str:
        """Why deployments that use these queues are not ready, or ""."""
        return next((self._down[queue] for queue in queues if queue in self._down), "")

    # ------------------------------------------------------------------ ends and starts

    def _ended(self, charge: _Charge) -> None:
        if charge.is_released or charge.is_away:
            return
        charge.is_away = True
        worker = charge.worker
        for _ in range(worker.depth):
            charge.queue.take_away(worker)
        lived_ns = self._clock() - charge.since_ns
        delay_ns = self._wait_for_next(charge, worker.ended, lived_ns, has_answered=worker.has_answered)
        self._start(charge, partial(self._restart, charge, delay_ns))

    async def _restart(self, charge: _Charge, delay_ns: int) -> None:
        worker = charge.worker
        while True:
            await trio.sleep(delay_ns / SECOND_NS)
            why = await self._open(worker) or await self._warm_up(charge)
            if not why:
                break
            delay_ns = self._wait_for_next(charge, why, 0, has_answered=False)
        log.info("instance %s runs again", worker.name)
        charge.is_away = False
        charge.since_ns = self._clock()
        worker.has_answered = False  # batches of the warm-up do not count
        self._down.pop(charge.queue, None)
        for _ in range(worker.depth):
            charge.queue.give_back(worker)
        self._context.wake()

    async def _open(self, worker: RunsElsewhere) -> str:
        """Open the instance. Returns the reason if that fails, else ""."""
        # On its own thread, so that a model that hangs in `initialize` does not prevent others from starting.
        limiter = trio.CapacityLimiter(1)
        try:
            await trio.to_thread.run_sync(worker.open, self._context, abandon_on_cancel=True, limiter=limiter)
        except FlowserveError as error:
            return str(error)
        except Exception as error:  # an error about one instance must not end the supervision of the others
            log.exception("starting instance %s failed", worker.name)
            return f"instance '{worker.name}': {type(error).__name__}: {error}"
        return worker.ended

    async def _warm_up(self, charge: _Charge) -> str:
        """Warm the instance up. Returns the reason if it cannot serve, else ""."""
        if charge.warm_up is None:
            return ""
        try:
            await charge.warm_up(charge.worker)
        except Exception as error:
            if not isinstance(error, FlowserveError):  # an internal error, as in `_open`
                log.exception("warming up instance %s failed", charge.worker.name)
            charge.worker.kill(f"its process was killed: {error}")
            while not charge.worker.ended:  # noqa: ASYNC110 - it is about to end, and its worker is notified
                await trio.sleep(0.01)
            return f"instance '{charge.worker.name}': {error}"
        return charge.worker.ended

    def _wait_for_next(self, charge: _Charge, why: str, lived_ns: int, *, has_answered: bool) -> int:
        """Make the instance unavailable. Returns the delay until its restart."""
        delay_ns = charge.back_off.ended(lived_ns, has_answered=has_answered)
        ends = charge.back_off.ends
        often = f", {ends} times in a row" if ends > 1 else ""
        reason = f"{why}{often}; it is started again after {delay_ns / SECOND_NS:g} s"
        log.error("%s", reason)
        queue = charge.queue
        if not queue.is_served:
            self._down[queue] = reason
            if delay_ns > NEAR_NS:
                model = f"'{queue.key.name}' version {queue.key.version}"
                self._scheduler.close(queue, f"Request for unknown model: {model} is not at ready state: {reason}")
        self._context.wake()  # answer the requests that were refused, and those of its sequences, now
        return delay_ns

    def _start(self, charge: _Charge, task: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._until_released, charge, task, name=f"supervise {charge.worker.name}")

    @staticmethod
    async def _until_released(charge: _Charge, task: Callable[[], Awaitable[None]]) -> None:
        if charge.is_released:
            return
        with trio.CancelScope() as scope:
            charge.scopes.add(scope)
            await task()
        charge.scopes.discard(scope)


async def end_overdue(worker: RunsElsewhere, timeout_ns: int, clock: ClockNs) -> None:
    """End the instance whenever a batch runs longer than `timeout_ns`. Ends only by cancellation.

    It checks the running batches when the earliest of them could be overdue, and does nothing per batch.
    """
    while True:
        batch = worker.running
        left_ns = timeout_ns if batch is None else batch.started_ns + timeout_ns - clock()
        if left_ns <= 0:
            limit = f"{timeout_ns / SECOND_NS:g} s (parameter execution_timeout)"
            worker.kill(f"its process was killed, because an execution took longer than {limit}")
            left_ns = timeout_ns
        await trio.sleep(left_ns / SECOND_NS)


@dataclass(slots=True, eq=False)
class _Charge:
    """One supervised instance. `since_ns`: when its process began to serve."""

    queue: ModelQueue
    worker: RunsElsewhere
    back_off: BackOff
    warm_up: WarmUp | None
    since_ns: int
    is_away: bool = False
    is_released: bool = False
    scopes: set[trio.CancelScope] = field(default_factory=set)

    def release(self) -> None:
        self.is_released = True
        # Breaks the reference cycle of worker and charge, so that the worker is freed as soon as it is closed.
        self.worker.on_end = None
        for scope in self.scopes:
            scope.cancel()
