"""When the engine's step runs: once per event-loop iteration in which something happened.

Decides when `step` is called: at the end of a batch of events that are processed together (`begin_events` to
`end_events`); in the loop iteration after `wake`, so that all events of one iteration are scheduled together, in the
loop's own task or in a task that would otherwise wait for it (`take_part`); and at the time that the last step
returned. Does not know the work of a step. Called by the engine, by its workers and by front ends, on the event loop's
thread.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from flowserve.runtime.clock import ClockNs, trio_deadline


class StepLoop:
    """`step` returns when it must be called again, in nanoseconds of `clock`; None: at the next event."""

    def __init__(self, step: Callable[[], int | None], clock: ClockNs) -> None:
        self._step = step
        self._clock = clock
        self._task: Task | None = None  # the loop's own task, while it is parked and not woken yet
        self._at_ns: int | None = None  # the time until which it is parked
        self._steps = 0  # the number of steps that have begun
        self._depth = 0  # the number of nested batches of events
        self._parked: Task | None = None  # the value of `_task` before the outermost batch

    def wake(self) -> None:
        """Run a step in the next loop iteration, because of an event. May be called repeatedly; cheap if the loop is
        awake.
        """
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def begin_events(self) -> None:
        """Begin a batch of events, which are processed without waiting and do not wake the loop's task."""
        if not self._depth:
            self._parked, self._task = self._task, None
        self._depth += 1

    def end_events(self) -> None:
        """End a batch of events: run a step now."""
        self._depth -= 1
        if self._depth:
            return
        self._steps += 1
        try:
            at_ns = self._step()
        finally:  # an exception propagates to the caller; the task continues with the next event
            self._task, self._parked = self._parked, None
        if at_ns is not None and (self._at_ns is None or at_ns < self._at_ns):
            self.wake()

    def put_off_events(self) -> None:
        """End a batch of events without a step; `take_part` follows."""
        self._depth -= 1
        if not self._depth:
            self._task, self._parked = self._parked, None

    async def take_part(self) -> None:
        """Return after a step in the next loop iteration. Of the tasks that wait here, the first that continues runs
        the step, so that no task has to be woken for it. If this is cancelled, a caller calls `wake`.
        """
        steps = self._steps
        await checkpoint()
        if steps == self._steps:
            self.begin_events()
            self.end_events()

    async def run(self) -> None:
        """Run steps. Ends only by cancellation."""
        while True:
            self._steps += 1
            at_ns = self._at_ns = self._step()
            if at_ns is None:
                await self._park()
                continue
            now_ns = self._clock()
            if at_ns <= now_ns:
                await checkpoint()  # other tasks run first
                continue
            with trio.move_on_at(trio_deadline(at_ns, now_ns)):
                await self._park()

    async def _park(self) -> None:
        self._task = current_task()
        await wait_task_rescheduled(self._abort)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
