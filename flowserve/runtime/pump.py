"""Where the dispatcher meets the loop: one task that wakes when there is something to do, once per turn.

Decided here: when `Dispatcher.pump` is called. A poke makes the task runnable for the next turn of the loop, so that
everything that arrived in this turn is looked at together; only a request that is taken to be alone is looked at
at once. Between pokes it sleeps until the dispatcher's own deadline. It knows nothing about batching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from flowserve.runtime.clock import ClockNs, trio_deadline
from flowserve.scheduling.dispatcher import Dispatcher

# So many requests that came alone, and the next is taken to be alone too ...
LONE_TURNS: Final = 64
# ... but after so many one waits for the end of its turn, where it is seen whether others came in it.
_UNSEEN_MAX: Final = 7


class Pump:
    """Owns the task; `poke` may be called from anywhere on the loop's thread, any number of times."""

    def __init__(self, dispatcher: Dispatcher, clock: ClockNs, pumped: Callable[[], None]) -> None:
        """`pumped` is called after each pump: what could start has started, now others may be told."""
        self._dispatcher = dispatcher
        self._pumped = pumped
        self._clock = clock
        self._arrivals = 0  # requests in this turn that the task will hear of
        self._lone_turns = 0  # turns in a row that brought exactly one request
        self._unseen = 0  # requests that were started at once since one waited for its turn's end
        self._task: Task | None = None  # the task while it is parked and nobody woke it yet

    def poke(self) -> None:
        """There is something to do. Costs one comparison when the task is already awake."""
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def arrived(self) -> None:
        """A request was submitted. Where requests have come one by one for a while, it does not wait for company, and
        where it is answered at once the task sleeps on: a turn of the loop costs as much as a cheap step.
        """
        if self._lone_turns < LONE_TURNS or self._task is None or self._unseen == _UNSEEN_MAX:
            self._unseen = 0
            self._arrivals += 1
            self.poke()
            return
        self._unseen += 1
        self._pump_now()

    def takes_alone(self) -> bool:
        """Whether a request that comes now is taken to be alone, with nothing else under way. Asked once for each."""
        if (
            self._lone_turns < LONE_TURNS
            or self._task is None
            or self._unseen == _UNSEEN_MAX
            or self._dispatcher.in_flight
        ):
            return False
        self._unseen += 1
        return True

    def returned(self) -> None:
        """A batch came back from a thread or a process. Where at most one request is under way nothing can come to be
        batched with what follows, so that starts at once: a turn less for every step.
        """
        if self._dispatcher.in_flight > 1 or self._task is None:
            self.poke()
        else:
            self._pump_now()

    def _pump_now(self) -> None:
        self._dispatcher.pump(self._clock())
        self._pumped()
        if self._dispatcher.next_deadline() is not None:
            self.poke()  # the task knows when it would have to wake

    async def run(self) -> None:
        """Pump for ever. Ends only by cancellation."""
        dispatcher = self._dispatcher
        while True:
            if self._arrivals:
                self._lone_turns = self._lone_turns + 1 if self._arrivals == 1 else 0
                self._arrivals = 0
            dispatcher.pump(self._clock())  # before the first sleep too: a poke that came earlier woke nobody
            self._pumped()
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
