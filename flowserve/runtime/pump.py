"""Where the dispatcher meets the loop: at the end of what came at once, and in one task that wakes once per turn.

Decided here: when `Dispatcher.pump` is called. Whoever is told of many things at once takes them in as one *burst*, and
the dispatcher is pumped at its end. What comes otherwise pokes the task, which runs in the next turn of the loop, so
that everything that arrived in this turn is looked at together; only a request that is taken to be alone is looked at
at once. Between pokes the task sleeps until the dispatcher's own deadline. It knows nothing about batching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from flowserve.runtime.clock import ClockNs, trio_deadline
from flowserve.scheduling.dispatcher import Dispatcher

# So many requests that came alone, and the next is taken to be alone too ...
LONE_TURNS: Final = 64
# ... but after so many one waits for the end of its turn, where it is seen whether others came in it.
_UNSEEN_MAX: Final = 7
# The same for those that are answered on the spot: what each of a crowd would cost alone is little.
_ON_THE_SPOT_MAX: Final = 15

_SEEN: Final = -1  # the size of a burst of one request that was looked at


class Bursts(Protocol):
    """Who wants to know what came together."""

    def begin_burst(self, most: int) -> None:
        """At most so many things came at once and are taken in now, without a wait."""

    def end_burst(self) -> None:
        """All of it is in."""


class NoBursts:
    """Nobody does."""

    def begin_burst(self, most: int) -> None: ...

    def end_burst(self) -> None: ...


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
        self._task: Task | None = None  # the task while it is parked, nobody woke it yet, and waking it is of any use
        self._asleep: Task | None = None  # the task while it is parked and there is a burst
        self._burst = 0  # how much came together at most in the burst that there is

    def poke(self) -> None:
        """There is something to do. Costs one comparison when the task is already awake."""
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def begin_burst(self, most: int) -> None:
        """At most so many things came at once and are taken in now, without a wait. None of it pokes."""
        self._burst = most
        self._asleep, self._task = self._task, None

    def end_burst(self) -> None:
        """All of it is in: what it brought is started."""
        is_seen, self._burst = self._burst == _SEEN, 0
        self._task = self._asleep
        if not is_seen:
            self._count_arrivals()
            self._pump_now()
        self._look_later()

    def arrived(self) -> None:
        """A request was submitted. Where requests have come one by one for a while, it does not wait for company, and
        where it is answered at once the task sleeps on: a turn of the loop costs as much as a cheap step.
        """
        if self._is_alone(_UNSEEN_MAX):
            self.went_alone()
            self._pump_now()
            if not self._burst:
                self._look_later()
            return
        self._unseen = 0
        self._arrivals += 1
        self.poke()

    def takes_alone(self) -> bool:
        """Whether a request that comes now is taken to be alone, with nothing else under way. Then either `went_alone`
        or `arrived` hears of it.
        """
        return not self._dispatcher.in_flight and self._is_alone(_ON_THE_SPOT_MAX)

    def went_alone(self) -> None:
        """A request that was taken to be alone has been looked at."""
        if self._burst:
            self._burst = _SEEN
        else:
            self._unseen += 1

    def _is_alone(self, unseen_max: int) -> bool:
        if self._burst:
            return self._burst == 1
        return self._lone_turns >= LONE_TURNS and self._task is not None and self._unseen < unseen_max

    def _count_arrivals(self) -> None:
        if self._arrivals:
            self._lone_turns = self._lone_turns + 1 if self._arrivals == 1 else 0
            self._arrivals = 0

    def _pump_now(self) -> None:
        task, self._task = self._task, None  # whoever pokes meanwhile finds it awake, and is not forgotten
        try:
            self._dispatcher.pump(self._clock())
            self._pumped()
        finally:  # of a mistake of ours hears who called, and everybody else is served on
            self._task = task

    def _look_later(self) -> None:
        if self._dispatcher.is_due or self._dispatcher.next_deadline() is not None:
            self.poke()  # the task knows when it would have to wake

    async def run(self) -> None:
        """Pump for ever. Ends only by cancellation."""
        dispatcher = self._dispatcher
        while True:
            self._count_arrivals()
            dispatcher.pump(self._clock())  # before the first sleep too: a poke that came earlier woke nobody
            self._pumped()
            if dispatcher.is_due:  # what ran in there let others in; everybody else has a turn first
                await checkpoint()
                continue
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
