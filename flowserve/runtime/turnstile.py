"""Tasks that must go on one after the other, in the order in which they were let in.

Decided here: each goes on in a turn of the loop of its own. Trio runs the tasks that are ready in one turn in any
order; where answers keep an order (`preserve_ordering`), the tasks that wait for them are woken turn by turn instead.
"""

from __future__ import annotations

from collections import deque

from trio.lowlevel import Abort, RaiseCancelT, Task, checkpoint, current_task, reschedule, wait_task_rescheduled


class Turnstile:
    """Tasks parked elsewhere, to be rescheduled in order. Touched from the loop's thread only."""

    def __init__(self) -> None:
        self._waiting: deque[Task] = deque()
        self._task: Task | None = None  # its own task while it is parked and nobody woke it

    def let_in(self, task: Task) -> None:
        """Reschedule `task` when those before it have gone."""
        self._waiting.append(task)
        own, self._task = self._task, None
        if own is not None:
            reschedule(own)

    async def run(self) -> None:
        """Let one task after the other go, for ever."""
        while True:
            while self._waiting:
                reschedule(self._waiting.popleft())
                await checkpoint()
            self._task = current_task()
            await wait_task_rescheduled(self._abort)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
