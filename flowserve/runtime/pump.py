"""Where the dispatcher meets the loop: one task that wakes when there is something to do, once per turn.

Decided here: when `Dispatcher.pump` is called. A poke makes the task runnable for the next turn of the loop, so that
everything that arrived in this turn is looked at together; only a request that is taken to be alone is looked at
at once. Between pokes it sleeps until the dispatcher's own deadline. It knows nothing about batching.
"""

from __future__ import annotations

from typing import Final

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from flowserve.runtime.clock import ClockNs, trio_deadline
from flowserve.scheduling.dispatcher import Dispatcher

# So many requests that came alone, and the next is taken to be alone too.
LONE_TURNS: Final = 64


class Pump:
    """Owns the task; `poke` may be called from anywhere on the loop's thread, any number of times."""

    def __init__(self, dispatcher: Dispatcher, clock: ClockNs) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._arrivals = 0  # requests submitted in this turn
        self._lone_turns = 0  # turns in a row that brought exactly one request
        self._task: Task | None = None  # the task while it is parked and nobody woke it yet

    def poke(self) -> None:
        """There is something to do. Costs one comparison when the task is already awake."""
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def arrived(self) -> None:
        """A request was submitted. Where requests have come one by one for a while, it does not wait for company.

        The task is woken all the same: that is how a second request in the same turn is noticed, and company waited
        for again.
        """
        self._arrivals += 1
        self.poke()
        if self._arrivals == 1 and self._lone_turns >= LONE_TURNS:
            self._dispatcher.pump(self._clock())

    async def run(self) -> None:
        """Pump for ever. Ends only by cancellation."""
        dispatcher = self._dispatcher
        while True:
            if self._arrivals:
                self._lone_turns = self._lone_turns + 1 if self._arrivals == 1 else 0
                self._arrivals = 0
            dispatcher.pump(self._clock())  # before the first sleep too: a poke that came earlier woke nobody
            deadline_ns = dispatcher.next_deadline()
            if deadline_ns is None:
                await self._park()
                continue
            with trio.move_on_at(trio_deadline(deadline_ns, self._clock())):
                await self._park()
            dispatcher.wake(self._clock())

    async def _park(self) -> None:
        self._task = current_task()
        await wait_task_rescheduled(self._abort)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
