"""Readiness of many descriptors in one task.

Decides how the engine learns that a worker process sent something: all their sockets are in one epoll set, and trio
waits for that set. A wait of trio's own for each socket would cost a task switch and two system calls for each message;
here one wait serves all sockets that became ready, in that order, as one batch of events, and a few times over the
sockets that became ready meanwhile. Does not know the messages.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from typing import Final

from trio.lowlevel import wait_readable

from flowserve.runtime.loop import StepLoop

# Taken at once; the rest follows in the next iteration. Without a limit epoll allocates room for a thousand each time.
_EVENTS_MAX: Final = 64
# Descriptors that became ready while others were read are served in the same iteration, so many times; then the rest of
# the server runs.
_ROUNDS_MAX: Final = 4

log = logging.getLogger("flowserve.runtime")


class Readiness:
    """Calls back on the event loop's thread. Linux only."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._ready: dict[int, tuple[Callable[[], None], Callable[[Exception], None]]] = {}
        self._writable: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, ready: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        """From now on `ready()` is called whenever `descriptor` is readable or at its end. Raises OSError where no more
        can be watched. `broke` is called with an exception of `ready`, or of a callback of `when_writable`; after that
        nothing is called for this descriptor any more.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._ready[descriptor] = ready, broke

    def when_writable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call this once, as soon as a watched descriptor is writable."""
        self._writable[descriptor] = call
        self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def forget(self, descriptor: int) -> None:
        """Before the descriptor is closed. Harmless where it is not watched, and when `run` has ended."""
        self._writable.pop(descriptor, None)
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
                    self._serve(events)
        finally:
            self._epoll.close()

    def _serve(self, events: list[tuple[int, int]]) -> None:
        self._loop.begin_events()
        for descriptor, event in events:
            watched = self._ready.get(descriptor)  # one before it may have had it forgotten
            if watched is None:
                continue
            ready, broke = watched
            try:
                if event & select.EPOLLOUT:
                    self._epoll.modify(descriptor, select.EPOLLIN)
                    self._writable.pop(descriptor)()
                if event & ~select.EPOLLOUT:
                    ready()
            except Exception as error:  # a fault about one descriptor must not stop the others
                log.exception("reading from a worker process failed")
                self.forget(descriptor)
                broke(error)
        self._loop.end_events()
