"""When memory that is not used any more goes back to the operating system.

Decides that idle memory is collected every SWEEP_S while there is activity or warm memory, also in worker processes,
and that an idle server without warm memory is never woken: the engine's step reports the next activity. What is idle
is decided in memory/; it is returned on a thread, because that takes long. Used on the event loop by the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import trio

from flowserve.memory.release import ProcessMemory
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Worker

log = logging.getLogger("flowserve.runtime")

SWEEP_S: Final = 2.5


class MemoryRelease:
    """Releases the idle memory of a server and of the processes of its `workers`. `is_quiet`: no request is running.

    `awaits_activity`: `note_activity` must be called at the next activity. It is false for the rest of a period with
    activity, so that a step only reads one attribute.
    """

    def __init__(self, clock: ClockNs, workers: Callable[[], Iterable[Worker]], is_quiet: Callable[[], bool]) -> None:
        self.awaits_activity = True
        self._clock = clock
        self._workers = workers
        self._is_quiet = is_quiet
        self._memory = ProcessMemory()
        self._activity = trio.Event()
        self._limiter = trio.CapacityLimiter(1)

    def note_activity(self) -> None:
        """Record activity, which may leave idle memory."""
        self.awaits_activity = False
        self._activity.set()

    async def run(self) -> None:
        """Release idle memory. Ends only by cancellation."""
        while True:
            await self._activity.wait()
            is_warm = True
            while is_warm or self._activity.is_set():
                if self._activity.is_set():
                    self._memory.used()
                    self._activity = trio.Event()
                    self.awaits_activity = True
                await trio.sleep(SWEEP_S)
                try:
                    is_warm = await self._sweep()
                except Exception:  # requests can be served without it
                    log.exception("idle memory cannot be released")
                    is_warm = False

    async def _sweep(self) -> bool:
        """Release idle memory. Returns whether more may be idle later without activity in between."""
        processes = [worker for worker in self._workers() if isinstance(worker, RemoteWorker)]
        arenas = dict.fromkeys(worker.arena for worker in processes if worker.arena is not None)
        idle = self._memory.collect(self._clock(), arenas, is_quiet=self._is_quiet())
        are_warm = [worker.release_idle() for worker in processes]
        if idle is not None:
            await trio.to_thread.run_sync(idle.release, abandon_on_cancel=True, limiter=self._limiter)
        return self._memory.is_warm or any(are_warm)
