"""What the end of an instance's process means: for its requests, for its model, and when there is another.

Decided here: the instance takes no work until a new process has loaded the model and run its warm-up; after each end
that comes soon the next start comes later. A model none of whose instances lives is not ready, nor are the ensembles
that need it. What waits for it goes on waiting while a start is near; where it is not, requests are refused and told
why.

That a process has ended is noticed in children.py; what ran there is its host's matter (process_host.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import trio

from flowserve.errors import FlowserveError
from flowserve.runtime.children import Child
from flowserve.runtime.clock import SECOND_NS, ClockNs
from flowserve.runtime.instance import Completions
from flowserve.scheduling.backoff import BackOff, Delays
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher

log = logging.getLogger("flowserve.runtime")

# Requests wait for a start that is so near, and are refused where it is not.
NEAR_NS: Final = SECOND_NS


class Mortal(Protocol):
    """An instance in a process of its own, as the supervisor sees it. `child` is that process, once it is open there.

    `ended` says how it ended, "" while it lives; `on_end` is told of that on the loop, after the batch that ran there
    has failed.
    """

    name: str
    child: Child | None
    running: Batch | None
    ended: str
    on_end: Callable[[], None] | None

    def open(self, completions: Completions) -> None:
        """Start another process and open the instance there. Blocks. Raises FlowserveError, and may be called again."""


WarmUp = Callable[[Any], Awaitable[None]]


class Supervisor:
    """Watches over the instances of a server. Touched on the loop only."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        completions: Completions,
        poke: Callable[[], None],
        clock: ClockNs,
        delays: Delays,
    ) -> None:
        """`poke`: look at the queues again."""
        self._dispatcher = dispatcher
        self._completions = completions
        self._poke = poke
        self._clock = clock
        self._delays = delays
        self._nursery: trio.Nursery | None = None
        self._watched: dict[ModelQueue, list[_Charge]] = {}
        self._down: dict[ModelQueue, str] = {}  # those of which no instance lives, and why

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Restart what ends, for ever. Ends only by cancellation."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def watch(
        self,
        queue: ModelQueue,
        hosts: Sequence[Mortal],
        execution_timeout_ns: int = 0,
        warm_up: WarmUp | None = None,
    ) -> None:
        """From now on their ends are noticed. `execution_timeout_ns`: a batch that runs longer ends its process.
        `warm_up`: what one runs that was started again; raises FlowserveError where that fails.
        """
        charges = self._watched[queue] = [_Charge(queue, host, self._delays, warm_up) for host in hosts]
        for charge in charges:
            charge.since_ns = self._clock()
            charge.host.on_end = partial(self._ended, charge)
            if charge.host.ended:
                self._ended(charge)
            if execution_timeout_ns:
                self._start(charge, partial(end_overdue, charge.host, execution_timeout_ns, self._clock))

    def release(self, queue: ModelQueue) -> None:
        """Its instances are about to be closed; their ends are nothing to notice any more. Harmless if unknown."""
        self._down.pop(queue, None)
        for charge in self._watched.pop(queue, ()):
            charge.release()

    def stop(self) -> None:
        """The server ends: everything is released."""
        for queue in [*self._watched]:
            self.release(queue)

    def outage(self, route: Iterable[ModelQueue]) -> str:
        """Why what runs over these queues is not ready, or ""."""
        return next((self._down[queue] for queue in route if queue in self._down), "")

    # ------------------------------------------------------------------ ends and beginnings

    def _ended(self, charge: _Charge) -> None:
        if charge.is_released or charge.is_away:
            return
        charge.is_away = True
        self._dispatcher.take_away(charge.queue, charge.host)
        self._poke()  # sequences that were its own are told
        delay_ns = self._wait_for_next(charge, charge.host.ended, self._clock() - charge.since_ns)
        self._start(charge, partial(self._restart, charge, delay_ns))

    async def _restart(self, charge: _Charge, delay_ns: int) -> None:
        host = charge.host
        while True:
            await trio.sleep(delay_ns / SECOND_NS)
            why = await self._open(host) or await self._warm_up(charge)
            if not why:
                break
            delay_ns = self._wait_for_next(charge, why, 0)
        log.info("instance %s runs again", host.name)
        charge.is_away = False
        charge.since_ns = self._clock()
        self._down.pop(charge.queue, None)
        self._dispatcher.give_back(charge.queue, host)
        self._poke()

    async def _open(self, host: Mortal) -> str:
        """Returns why it is not open, or ""."""
        # A thread of its own: one that hangs in its initialize keeps no other from starting.
        limiter = trio.CapacityLimiter(1)
        try:
            await trio.to_thread.run_sync(host.open, self._completions, abandon_on_cancel=True, limiter=limiter)
        except FlowserveError as error:
            return str(error)
        except Exception as error:  # a mistake of ours about one instance ends nobody else's supervision
            log.exception("starting instance %s failed", host.name)
            return f"instance '{host.name}': {type(error).__name__}: {error}"
        return host.ended

    async def _warm_up(self, charge: _Charge) -> str:
        """Returns why it cannot serve, or ""."""
        if charge.warm_up is None:
            return ""
        try:
            await charge.warm_up(charge.host)
        except Exception as error:
            if not isinstance(error, FlowserveError):  # a mistake of ours, as in `_open`
                log.exception("warming up instance %s failed", charge.host.name)
            if charge.host.child is not None:
                charge.host.child.kill(why=f"its process was killed: {error}")
            while not charge.host.ended:  # noqa: ASYNC110 - it is about to, and its host is told
                await trio.sleep(0.01)
            return f"instance '{charge.host.name}': {error}"
        return charge.host.ended

    def _wait_for_next(self, charge: _Charge, why: str, lived_ns: int) -> int:
        """Tell everybody that it is not there. Returns after how long it is started again."""
        delay_ns = charge.back_off.ended(lived_ns)
        ends = charge.back_off.ends
        often = f", {ends} times in a row" if ends > 1 else ""
        reason = f"{why}{often}; it is started again after {delay_ns / SECOND_NS:g} s"
        log.error("%s", reason)
        queue = charge.queue
        if not queue.is_served:
            self._down[queue] = reason
            if delay_ns > NEAR_NS:
                model = f"'{queue.key.name}' version {queue.key.version}"
                self._dispatcher.close(queue, f"Request for unknown model: {model} is not at ready state: {reason}")
        return delay_ns

    def _start(self, charge: _Charge, task: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._until_released, charge, task, name=f"supervise {charge.host.name}")

    @staticmethod
    async def _until_released(charge: _Charge, task: Callable[[], Awaitable[None]]) -> None:
        if charge.is_released:
            return
        with trio.CancelScope() as scope:
            charge.scopes.add(scope)
            await task()
        charge.scopes.discard(scope)


async def end_overdue(host: Mortal, timeout_ns: int, clock: ClockNs) -> None:
    """Kill the instance's process when a batch runs longer than `timeout_ns`, for ever; ends only by cancellation.

    It looks at what runs when the earliest of its batches could be overdue: nothing is done per batch.
    """
    while True:
        batch = host.running
        left_ns = timeout_ns if batch is None else batch.started_ns + timeout_ns - clock()
        child = host.child
        if left_ns <= 0 and child is not None:
            limit = f"{timeout_ns / SECOND_NS:g} s (parameter execution_timeout)"
            child.kill(why=f"its process was killed, because an execution took longer than {limit}")
            left_ns = timeout_ns
        await trio.sleep(left_ns / SECOND_NS)


class _Charge:
    """One instance that is watched over."""

    def __init__(self, queue: ModelQueue, host: Mortal, delays: Delays, warm_up: WarmUp | None) -> None:
        self.queue = queue
        self.host = host
        self.warm_up = warm_up
        self.back_off = BackOff(delays)
        self.since_ns = 0  # when its process began to serve
        self.is_away = False
        self.is_released = False
        self.scopes: set[trio.CancelScope] = set()

    def release(self) -> None:
        self.is_released = True
        self.host.on_end = None  # opens the circle of host and charge: the host's memory goes as soon as it is closed
        for scope in self.scopes:
            scope.cancel()
