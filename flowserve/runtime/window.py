"""A stretch of time in which every request is traced, and what came of it.

Decided here: how many requests a stretch holds at most, and that those which are not over when it ends are waited for,
a while. What is made of them is decided in observe/timeline.py.
"""

from __future__ import annotations

from typing import Final

import trio

from flowserve.observe.trace import Trace
from flowserve.runtime.watch import Watch

TRACES_MAX: Final = 10_000  # of requests; a stretch that is full is over
PATIENCE_S: Final = 5.0


class Window:
    """Requests that began in a stretch of time."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._watches: list[Watch] = []
        self._full = trio.Event()

    @property
    def is_open(self) -> bool:
        return len(self._watches) < TRACES_MAX

    def begun(self, watch: Watch) -> None:
        """A request that it holds began."""
        self._watches.append(watch)
        if not self.is_open:
            self._full.set()

    async def last(self, seconds: float, stopping: trio.Event) -> None:
        """Until so long is over, it is full, or the server is `stopping`."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:

                async def until(event: trio.Event) -> None:
                    await event.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, self._full)
                nursery.start_soon(until, stopping)

    async def settle(self) -> int:
        """Until all that began is over, or patience ends. Returns how many are not over."""
        with trio.move_on_after(PATIENCE_S):
            # Polled: it happens once for a stretch, and a request that is over should not have to tell.
            while not all(watch.is_closed for watch in self._watches):  # noqa: ASYNC110
                await trio.sleep(0.02)
        return sum(not watch.is_closed for watch in self._watches)
