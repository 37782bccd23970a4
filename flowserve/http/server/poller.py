"""The poller: one task that waits for input of all connections, and advances those that have some.

Decides which requests are started together (all that one poll of the kernel finds), when a connection with more unread
input continues, how much of large bodies is read before other events, and how long after a client hung up its request
is withdrawn. Does not know HTTP, nor when a connection ends. Called by the server and the connections.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import trio
from trio.lowlevel import wait_readable

_BODIES_AT_ONCE: Final = 16
_HANG_UP_GRACE_S: Final = 0.002  # a client that half-closes after a fast request still gets its response
_EVENTS_MAX: Final = 256
# Edges: input that a connection leaves unread is not reported again.
_EVENTS: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET if hasattr(select, "epoll") else 0


def has_epoll() -> bool:
    """Whether the system has epoll; else the poller waits for each connection by itself, and `arm` asks it to."""
    return hasattr(select, "epoll")


class Polled(Protocol):
    """What the poller uses of a connection. `target` is set while a large body is received."""

    sock: socket.socket
    may_read: bool  # the kernel may have bytes, or the end
    is_hung_up: bool  # the end has come, perhaps behind bytes
    target: Any

    def advance(self) -> None:
        """Read input until a request is complete, and start it. Never waits."""

    def on_hang_up(self) -> None:
        """The client closed its sending side a moment ago."""


class Poller:
    """Notifies `connections` (by file descriptor) of input: one wait for all of them, in one task.

    `begin_events` and `end_events` are called around the reads of one poll. `end_events` runs a step of the engine: the
    requests that were read are scheduled there, models that run inline compute, and responses are written. Without
    epoll each connection has a task that waits for its input, and a disconnect is detected when its response is
    written.
    """

    def __init__(
        self,
        connections: Mapping[int, Polled],
        begin_events: Callable[[], None],
        end_events: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._begin_events = begin_events
        self._end_events = end_events
        self._epoll = select.epoll() if has_epoll() else None
        self._nursery: trio.Nursery | None = None  # while it runs
        self._resumable: dict[Polled, None] = {}  # each once, however many events it had
        self._has_resumable = trio.Event()

    def watch(self, connection: Polled) -> None:
        """From now on `connection` advances on input. Raises OSError if the kernel cannot watch more sockets."""
        if self._epoll is not None:
            self._epoll.register(connection.sock, _EVENTS)
        else:
            self.arm(connection)

    def arm(self, connection: Polled) -> None:
        """All of the connection's input was read."""
        if self._epoll is None and self._nursery is not None:
            self._nursery.start_soon(self._wait_for_one, connection, name="http input")

    def resume(self, connection: Polled) -> None:
        """Advance the connection in the next loop iteration, after others that are ready now."""
        self._resumable[connection] = None
        self._has_resumable.set()

    def forget(self, connection: Polled) -> None:
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
                hung_up: list[Polled] = []
                found: list[Polled] = []
                self._begin_events()
                try:
                    for descriptor, event in self._epoll.poll(0, _EVENTS_MAX):
                        connection = self._connections.get(descriptor)
                        if connection is None:
                            continue
                        connection.may_read = True
                        if event & ~select.EPOLLIN:
                            connection.is_hung_up = True
                            hung_up.append(connection)
                        found.append(connection)
                    self._advance(found)
                finally:
                    self._end_events()
                if hung_up:
                    self._nursery.start_soon(self._let_hang_up, hung_up)

    async def _let_hang_up(self, hung_up: Iterable[Polled]) -> None:
        await trio.sleep(_HANG_UP_GRACE_S)
        for connection in hung_up:
            connection.on_hang_up()

    async def _run_resumed(self) -> None:
        while True:
            await self._has_resumable.wait()
            self._has_resumable = trio.Event()
            resumable, self._resumable = self._resumable, {}
            self._begin_events()
            try:
                self._advance(resumable)
            finally:
                self._end_events()

    def _advance(self, connections: Iterable[Polled]) -> None:
        """Advance connections that may have input. Of those that read bodies, the rest follows in the next loop
        iteration.
        """
        bodies = 0
        for connection in connections:
            if connection.target is not None:
                bodies += 1
                if bodies > _BODIES_AT_ONCE:
                    self.resume(connection)
                    continue
            connection.advance()

    async def _wait_for_one(self, connection: Polled) -> None:
        with suppress(OSError, trio.ClosedResourceError):
            await wait_readable(connection.sock)
            connection.may_read = True
            self.resume(connection)
