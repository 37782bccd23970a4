"""Many descriptors, one task: who is told that there is something to read.

Decided here: the sockets of all child processes (and whatever else of theirs can become readable) stand in one epoll
set, and trio waits for that set. A wait of trio's own for each of them would cost a task switch and two system calls
per message; so one wait serves everything that became ready, in the order in which it did, as one burst, and what
became ready meanwhile, a few times over. This file does not know what is read.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from typing import Final

from trio.lowlevel import wait_readable

from flowserve.runtime.pump import Bursts

# At once; what is beyond comes with the next turn. Without a limit room for a thousand is made each time.
_EVENTS_MAX: Final = 64
# What became ready while others were called is called in the same turn, so many times; then it is the turn of the rest
# of the server.
_ROUNDS_MAX: Final = 4

log = logging.getLogger("flowserve.runtime")


class Readiness:
    """Calls back on the loop's thread. Linux only."""

    def __init__(self, pump: Bursts) -> None:
        self._pump = pump
        self._epoll = select.epoll()
        self._ready: dict[int, tuple[Callable[[], None], Callable[[Exception], None]]] = {}

    def watch(self, descriptor: int, ready: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        """From now on `ready()` is called whenever `descriptor` is readable or at its end. It reads all there is.
        Raises OSError where no more can be watched. `broke` hears of a mistake of ours in `ready`, after which it is
        not called any more.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._ready[descriptor] = ready, broke

    def forget(self, descriptor: int) -> None:
        """Before the descriptor is closed. Harmless where it is not watched, and when `run` has ended."""
        if self._ready.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Wait and call, for ever. Ends only by cancellation."""
        try:
            while True:
                await wait_readable(self._epoll.fileno())
                for _ in range(_ROUNDS_MAX):
                    events = self._epoll.poll(0, _EVENTS_MAX)
                    if not events:
                        break
                    self._tell(events)
        finally:
            self._epoll.close()

    def _tell(self, events: list[tuple[int, int]]) -> None:
        self._pump.begin_burst(0)
        for descriptor, _ in events:
            watched = self._ready.get(descriptor)  # one may have made us forget the next
            if watched is None:
                continue
            ready, broke = watched
            try:
                ready()
            except Exception as error:  # a mistake of ours about one child is no reason to go deaf for the others
                log.exception("reading from a child process failed")
                self.forget(descriptor)
                broke(error)
        self._pump.end_burst()
