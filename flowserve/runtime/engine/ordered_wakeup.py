"""Tasks that must go on one after the other, in a given order.

Decides that each of them goes on in a loop iteration of its own. Trio runs the tasks that are ready in one iteration in
any order; where responses keep an order (`preserve_ordering`), the tasks that wait for them are woken iteration by
iteration. Does not know the events they wait for. Called by the engine.
"""

from __future__ import annotations

from collections import deque

from trio.lowlevel import Abort, RaiseCancelT, Task, checkpoint, current_task, reschedule, wait_task_rescheduled


class OrderedWakeup:
    """Tasks parked elsewhere, to be rescheduled in order. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: deque[Task] = deque()
        self._task: Task | None = None  # its own, while it is parked and not woken yet

    def wake(self, task: Task) -> None:
        """Reschedule `task` after those before it."""
        self._waiting.append(task)
        own, self._task = self._task, None
        if own is not None:
            reschedule(own)

    async def run(self) -> None:
        """Wake one task after the other, for ever."""
        while True:
            while self._waiting:
                reschedule(self._waiting.popleft())
                await checkpoint()
            self._task = current_task()
            await wait_task_rescheduled(self._abort)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
