"""Small answers leave together: one burst of sends for all that are told of at once, or per turn of the loop.

Decided here: when an answer that is ready is handed to the kernel. A batch answers many connections in one turn. Sent
one by one, between the work for one answer and the work for the next, each send wakes a client that has just gone to
sleep, again and again, and waking is dear (on virtual machines as dear as all else a small request needs). In one
burst most clients are woken while others already are; measured with 32 clients that is 9 % of everything. Who tells
of all answers of a batch says so, and they leave when that is done: the turn that others wait for costs as much as a
cheap step. An answer that is alone is sent at once. This file knows no HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

if TYPE_CHECKING:
    from flowserve.http.line import Line


class Outbox:
    """Small answers, in the order they were ready. Touched from the loop's thread only."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Line, bytes]] = []
        self._task: Task | None = None  # the flushing task while it is parked and nobody woke it
        self._asleep: Task | None = None  # ... and there is a burst, which needs it not

    def begin_burst(self, most: int) -> None:
        """So many answers at most are put now, without a wait: they leave at its end."""
        if self._task is not None:  # one burst may be within another
            self._asleep, self._task = self._task, None

    def end_burst(self) -> None:
        """All of them are in."""
        if self._asleep is not None:
            self._task, self._asleep = self._asleep, None
        if self.waiting:
            self.flush()

    def put(self, line: Line, data: bytes) -> None:
        """Send `data` at the end of this burst, or else of this turn."""
        self.waiting.append((line, data))
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def flush(self) -> None:
        """Send everything now."""
        waiting, self.waiting = self.waiting, []
        for line, data in waiting:
            line.send_now(data)

    async def run(self) -> None:
        """Flush once per turn in which anything was put, for ever."""
        while True:
            self.flush()
            self._task = current_task()
            await wait_task_rescheduled(self._abort)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
