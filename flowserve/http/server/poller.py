"""Notifies connections of input: one wait for all of a server's connections, in one task.

Decides which requests are started together (all that one poll of the kernel finds), when a connection with more unread
input continues, and how long after a client hung up its request is withdrawn. Knows no HTTP. Called by the server and
its connections.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

import trio
from trio.lowlevel import wait_readable

from flowserve.http.server.connection import Connection

_HANG_UP_GRACE_S: Final = 0.002  # a client that half-closes after a fast request still gets its response
_EVENTS_MAX: Final = 256
# Edges: input that a connection leaves unread is not reported again.
_EVENTS: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET if hasattr(select, "epoll") else 0


class Poller:
    """Serves `connections` (by file descriptor). `begin_events` and `end_events` are called around reads of one
    poll. Without epoll each connection has a task that waits for its input, and a disconnect is
    detected when its response is written.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        begin_events: Callable[[], None],
        end_events: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._begin_events = begin_events
        self._end_events = end_events
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._nursery: trio.Nursery | None = None  # while it runs
        self._resumable: list[Connection] = []
        self._has_resumable = trio.Event()

    def watch(self, connection: Connection) -> None:
        """From now on `connection` is notified of input. Raises OSError if the kernel cannot watch more sockets."""
        if self._epoll is not None:
            self._epoll.register(connection.sock, _EVENTS)
        else:
            self.arm(connection)

    def arm(self, connection: Connection) -> None:
        """All of the connection's input was read."""
        if self._epoll is None and self._nursery is not None:
            self._nursery.start_soon(self._wait_for_one, connection, name="http input")

    def resume(self, connection: Connection) -> None:
        """Advance the connection in the next loop iteration, after others that are ready now."""
        self._resumable.append(connection)
        self._has_resumable.set()

    def forget(self, connection: Connection) -> None:
        """The connection is about to close its socket. Closing alone is not enough: a process that was forked just now
        may hold the socket too, and the kernel would go on reporting it under a number that another connection gets.
        """
        if self._epoll is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.sock)

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for input and notify connections, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._run_resumed, name="http resumed connections")
            task_status.started()
            if self._epoll is None:
                return
            while True:
                await wait_readable(self._epoll)
                hung_up: list[Connection] = []
                self._begin_events()
                try:
                    for descriptor, event in self._epoll.poll(0, _EVENTS_MAX):
                        connection = self._connections.get(descriptor)
                        if connection is None:
                            continue
                        is_end = bool(event & ~select.EPOLLIN)
                        if is_end:
                            hung_up.append(connection)
                        connection.on_readable(is_end=is_end)
                finally:
                    self._end_events()
                if hung_up:
                    self._nursery.start_soon(self._let_hang_up, hung_up)

    async def _let_hang_up(self, hung_up: Iterable[Connection]) -> None:
        await trio.sleep(_HANG_UP_GRACE_S)
        for connection in hung_up:
            connection.on_hang_up()

    async def _run_resumed(self) -> None:
        while True:
            await self._has_resumable.wait()
            self._has_resumable = trio.Event()
            resumable, self._resumable = self._resumable, []
            self._begin_events()
            try:
                for connection in resumable:
                    connection.advance()
            finally:
                self._end_events()

    async def _wait_for_one(self, connection: Connection) -> None:
        with suppress(OSError, trio.ClosedResourceError):
            await wait_readable(connection.sock)
            self._begin_events()
            try:
                connection.on_readable()
            finally:
                self._end_events()
