"""What comes on all parked connections: one wait for all of them, taken in as one burst.

Decided here: what belongs together, and what is begun first. A request that is there wakes no task of its own. While
the requests of a crowd are taken in others of it come, since each of them takes longer to read than to send; they
belong to the same burst, so that all become one batch instead of two that follow each other for ever. Small requests
go before large ones. What is said on a connection is decided in connection.py.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio
from trio.lowlevel import wait_readable

from flowserve.http.line import Line, Phase
from flowserve.http.outbox import Outbox

if TYPE_CHECKING:
    from flowserve.http.connection import Connection

_LEAVING_GRACE_S: Final = 0.002  # a client that half-closes after a fast request still gets its answer
# Edges only: what is left unread is not told of again.
_LEAVING: Final = select.EPOLLRDHUP | select.EPOLLET if hasattr(select, "epoll") else 0
_INPUT: Final = _LEAVING | select.EPOLLIN if hasattr(select, "epoll") else 0

# So many are taken in at most before what they ask for is begun ...
_BURST_MAX: Final = 256
# ... and so often the kernel is asked for more of them. Whoever came first waits meanwhile.
_ROUNDS_MAX: Final = 3

BeginBurst = Callable[[int], None]
EndBurst = Callable[[], None]


class Arrivals:
    """Tells `connections` (by file descriptor) of what came. `begin_burst` and `end_burst` are called around all that
    came at once, the first with how much that is at most. Where there is no epoll each connection waits for itself,
    and who left is noticed when the answer is sent.
    """

    def __init__(
        self, connections: Mapping[int, Connection], outbox: Outbox, begin_burst: BeginBurst, end_burst: EndBurst
    ) -> None:
        self._connections = connections
        self._outbox = outbox
        self._begin_burst = begin_burst
        self._end_burst = end_burst
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        # The large requests of a burst; None where nothing came with them that should go first.
        self.late: list[Callable[[], None]] | None = None

    @property
    def are_watched(self) -> bool:
        """Whether connections are told of what comes (`Connection.readable`), or must wait for it themselves."""
        return self._epoll is not None

    def watch(self, connection: Connection) -> None:
        """From now on it is told. Raises OSError where the kernel watches no more."""
        if self._epoll is not None:
            self._epoll.register(connection.sock, _INPUT)

    def watch_input(self, line: Line, *, is_wanted: bool) -> None:
        """Whether a connection is told of bytes that come. Told again, it hears of those that are there already."""
        if self._epoll is not None:
            self._epoll.modify(line.sock, _INPUT if is_wanted else _LEAVING)

    def forget(self, connection: Connection) -> None:
        """A connection is about to close its socket. Closing alone is not enough: a process that was forked just now
        may hold the socket too, and the kernel would go on telling of it under a number that is another connection's.
        """
        if self._epoll is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.sock)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()

    async def run(self, housekeeping: trio.Nursery) -> None:
        """Wait and tell, for ever."""
        if self._epoll is None:
            return
        have_company = False
        leaving: list[Connection] = []
        while True:
            await wait_readable(self._epoll)
            told = self._epoll.poll(0, _BURST_MAX)
            if have_company or len(told) > 1:
                have_company = self._take_in(self._epoll, told, leaving)
                # Those who were answered meanwhile may have asked again: once they need not wait for the next turn.
                if told := self._epoll.poll(0, _BURST_MAX):
                    self._take_in(self._epoll, told, leaving)
                    have_company = True
            else:
                self._begin_burst(1)
                try:
                    self._tell(told, leaving)
                finally:
                    self._end_burst()
            if leaving:
                housekeeping.start_soon(self._let_leave, leaving)
                leaving = []

    def _take_in(self, epoll: select.epoll, told: Sequence[tuple[int, int]], leaving: list[Connection]) -> bool:
        """Take in what came, and what comes meanwhile. Returns whether it was more than one."""
        self.late = []
        count = len(told)
        self._begin_burst(_BURST_MAX)
        try:
            self._tell(told, leaving)
            for _ in range(_ROUNDS_MAX):
                told = epoll.poll(0, _BURST_MAX - count) if count < _BURST_MAX else ()
                if not told:
                    break
                count += len(told)
                self._tell(told, leaving)
        finally:
            self._end_burst()
            late, self.late = self.late, None
        if late:
            self._begin_late(late)
        return count > 1

    def _begin_late(self, late: Sequence[Callable[[], None]]) -> None:
        """Begin what let the small requests go first, as a burst of its own: receiving it takes as long as many of
        those.
        """
        self._outbox.flush()
        self._begin_burst(len(late))
        try:
            for begin in late:
                begin()
        finally:
            self._end_burst()

    def _tell(self, told: Sequence[tuple[int, int]], leaving: list[Connection]) -> None:
        """Tell connections what came, and add those that hung up to `leaving`."""
        for descriptor, events in told:
            connection = self._connections.get(descriptor)
            if connection is None:
                continue
            if events & select.EPOLLIN:
                connection.readable()
            if events & ~select.EPOLLIN:
                leaving.append(connection)

    async def _let_leave(self, leaving: Sequence[Connection]) -> None:
        """Cancel the requests of clients that hung up."""
        await trio.sleep(_LEAVING_GRACE_S)
        for connection in leaving:
            if connection.phase is Phase.RUNNING:
                connection.scope.cancel()
            else:
                connection.readable()  # the end, which nothing else will tell of again
