"""A time window in which every request is traced, for timelines.

Decides how many requests a window holds, and how long its unfinished requests are waited for after its end.
observe/timeline.py renders it.
"""

from __future__ import annotations

from typing import Final

import trio

from flowserve.observe.trace import Trace
from flowserve.runtime.tracing.watch import Watch

TRACES_MAX: Final = 10_000  # requests; a full window ends
SETTLE_TIMEOUT_S: Final = 5.0


class Window:
    """The traced requests that began in one window."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._watches: list[Watch] = []
        self._full = trio.Event()

    @property
    def is_open(self) -> bool:
        return len(self._watches) < TRACES_MAX

    def begun(self, watch: Watch) -> None:
        """Add a request."""
        self._watches.append(watch)
        if not self.is_open:
            self._full.set()

    async def wait(self, seconds: float, stopping: trio.Event) -> None:
        """Wait until `seconds` have passed, the window is full, or the server is `stopping`."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:

                async def until(event: trio.Event) -> None:
                    await event.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, self._full)
                nursery.start_soon(until, stopping)

    async def settle(self) -> int:
        """Wait until all requests have finished, at most SETTLE_TIMEOUT_S. Returns the number of unfinished ones."""
        with trio.move_on_after(SETTLE_TIMEOUT_S):
            # Polled: this runs once per window, and requests need not notify it.
            while not all(watch.is_closed for watch in self._watches):  # noqa: ASYNC110
                await trio.sleep(0.02)
        return sum(not watch.is_closed for watch in self._watches)
