"""Threads for blocking load work: how many loads run at once, and that a load that hangs does not block the others.

Decides that a few loads run at once, since they share the cores. A load that takes longer than `patience_s` is either
waiting or hanging, and its slot is given to the next one. The total number of threads is bounded too. `loader.py`
decides what runs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

AT_ONCE: Final = 4  # as tritonserver's default
HANG_AFTER_S: Final = 5.0
THREADS_MAX: Final = 64

T = TypeVar("T")


class LoadThreads:
    """At most `at_once` threads that have run for less than `patience_s` seconds; THREADS_MAX in total."""

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = HANG_AFTER_S) -> None:
        self._slots = trio.Semaphore(at_once)
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._patience_s = patience_s

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking `work` on a thread once a slot is free; returns or raises its result. A cancelled caller
        abandons the thread.
        """
        await self._slots.acquire()
        slot = _Slot(self._slots)
        values: list[T] = []
        raised: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slot.end_after, self._patience_s)
            try:
                values.append(await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads))
            except Exception as error:  # raised below: a nursery would wrap it
                raised = error
            finally:
                slot.end()
            nursery.cancel_scope.cancel()
        if raised is not None:
            raise raised
        return values[0]


class _Slot:
    """One of the `at_once` slots; released once."""

    def __init__(self, slots: trio.Semaphore) -> None:
        self._slots: trio.Semaphore | None = slots

    def end(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()

    async def end_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.end()
