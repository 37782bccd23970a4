"""The ASGI server: listeners, connections, and the few tasks that look after all of them.

Decided here: who is accepted, who is given up on, and how the server ends. Two housekeeping tasks serve every
connection: the *sweeper*, which compares deadlines a few times a second, and the *watch* (arrivals.py), which the
kernel tells when a parked connection has something and when a client hangs up. What is said on a connection is decided
in connection.py.

Ending has three steps. From `part` on answers carry `Connection: close`, while whoever comes is still answered: who
asks for the server's health hears what there is to say. `drain` stops accepting, closes connections that have nothing
to say, and lets requests in flight finish; past its deadline the rest is cancelled. `serve` returns when the last
connection is gone.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio
from starlette.types import ASGIApp, Scope
from trio.lowlevel import wait_readable

from flowserve.http.arrivals import Arrivals
from flowserve.http.connection import Connection
from flowserve.http.head import HeadCache
from flowserve.http.limits import Limits
from flowserve.http.line import Phase
from flowserve.http.outbox import Outbox
from flowserve.http.tls import Terminator
from flowserve.memory.pool import Pool
from flowserve.values import Array

_BACKLOG: Final = 2048
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S: Final = 0.1
_SWEEP_S_MAX: Final = 0.5
_SWEEP_S_MIN: Final = 0.01

_log = logging.getLogger("flowserve.http")


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """A snapshot. `running` are connections whose request the app has."""

    connections: int
    idle: int
    running: int


class Server:
    """Serves `app` on any number of listeners. Large bodies are received into buffers of `pool`. `tls`: what the server
    shows to clients, None for plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits | None = None,
        pool: Pool | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.app = app
        # An app may have these besides, called with a scope (without the connection's own part). `room`: where so many
        # bytes of a body are best received, None for anywhere. `begin`: given the exchange, it answers or promises to
        # without waiting, or returns False. `begin_burst`, `end_burst`: called around all that came at once.
        # `tell_around`: given the outbox, which has the same two, called around all promises that are kept at once.
        self.room: Callable[[Scope, int], Array | None] | None = getattr(app, "room", None)
        self.begin: Callable[[Scope, Connection], bool] | None = getattr(app, "begin", None)
        self.limits = limits or Limits()
        self.pool = pool or Pool()
        self.heads = HeadCache(self.limits)
        self._tls = Terminator(tls, self.limits) if tls is not None else None
        self.is_ending = False  # each answer is its connection's last
        self.is_draining = False
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._accepting = trio.CancelScope()
        self._drain_deadline = math.inf
        self._now = 0.0
        self._sweep_s = _sweep_interval(self.limits)
        self.running = 0  # connections whose request the app has
        self.outbox = Outbox()
        getattr(app, "tell_around", _ignore)(self.outbox)
        self._nursery: trio.Nursery | None = None  # of the connections, while serving
        begin_burst: Callable[[int], None] = getattr(app, "begin_burst", _ignore)
        end_burst: Callable[[], None] = getattr(app, "end_burst", _ignore)
        self.arrivals = Arrivals(self._connections, self.outbox, begin_burst, end_burst)

    async def serve(
        self, listeners: Sequence[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until drained. Owns and closes `listeners` (from `open_listeners`). Cancelling it cuts every
        connection."""
        self._now = trio.current_time()
        try:
            async with trio.open_nursery() as housekeeping:
                housekeeping.start_soon(self._sweep, name="http sweeper")
                housekeeping.start_soon(self.arrivals.run, housekeeping, name="http watch")
                housekeeping.start_soon(self.outbox.run, name="http outbox")
                # Connections live outside the accepting scope: ending that one must not end them.
                async with trio.open_nursery() as connections:
                    self._nursery = connections
                    with self._accepting:
                        async with trio.open_nursery() as accepting:
                            for listener in listeners:
                                accepting.start_soon(self._accept, listener, connections, name="http listener")
                            task_status.started()
                    _close(listeners)
                housekeeping.cancel_scope.cancel()
        finally:
            _close(listeners)
            self.arrivals.close()

    def part(self) -> None:
        """From now on every connection ends with its next answer; new ones are taken until `drain`."""
        self.is_ending = True

    def drain(self, within_s: float = math.inf) -> None:
        """Begin to end. Requests in flight have `within_s` seconds. Calling it again may only shorten that."""
        self._drain_deadline = min(self._drain_deadline, trio.current_time() + within_s)
        self.is_ending = self.is_draining = True
        self._accepting.cancel()
        self.outbox.flush()
        for connection in self._connections.values():
            if connection.phase is Phase.IDLE and connection.is_settled and not connection.has_input():
                connection.end()

    def start_soon(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run a connection's side task; `serve` does not return before it is done."""
        assert self._nursery is not None  # only connections call this, and they live in it
        self._nursery.start_soon(work, *arguments)

    def statistics(self) -> ServerStatistics:
        """What the connections are doing now."""
        phases = [connection.phase for connection in self._connections.values()]
        return ServerStatistics(len(phases), phases.count(Phase.IDLE), phases.count(Phase.RUNNING))

    def deadline_in(self, limit_s: float) -> float:
        """`limit_s` from now, at most two sweeps late and never early. Reads no clock."""
        return self._now + self._sweep_s + limit_s

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        while True:
            try:
                sock, address = listener.accept()
                plain = sock if self._tls is None else self._tls.plain(sock, connections)
            except BlockingIOError:
                await wait_readable(listener)
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    # The listener stays readable: without a pause this would spin until somebody closes something.
                    _log.warning("cannot accept connections for the moment: %s", error.strerror)
                    await trio.sleep(_ACCEPT_PAUSE_S)
                elif error.errno not in (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR):
                    raise
            else:
                sock.setblocking(False)
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = address[:2] if isinstance(address, tuple) else None
                connections.start_soon(self._run, Connection(self, plain, client), name="http connection")

    async def _run(self, connection: Connection) -> None:
        try:
            self.arrivals.watch(connection)
        except OSError as error:
            _log.warning("cannot serve a connection for the moment: %s", error.strerror)
            connection.sock.close()
            return
        self._connections[connection.sock.fileno()] = connection
        await connection.run()

    def forget(self, connection: Connection) -> None:
        """A connection is about to close its socket."""
        del self._connections[connection.sock.fileno()]
        self.arrivals.forget(connection)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(self._sweep_s)
            self._now = now = trio.current_time()
            is_over = now >= self._drain_deadline
            for connection in self._connections.values():
                is_late = now >= connection.deadline and connection.phase is not Phase.RUNNING
                # Who still takes an answer is not idle; that has a deadline of its own (line.py).
                if is_over or (is_late and (connection.phase is not Phase.IDLE or connection.is_settled)):
                    connection.scope.cancel()


def _ignore(*_: object) -> None:
    """An app that does not care what came at once."""


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`; `port` 0 picks one, the same for all. Raises OSError where one
    cannot be had."""
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or listeners[0].getsockname()[1]
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(_BACKLOG)
    except OSError:
        _close(listeners)
        raise
    return listeners


def open_unix_listener(path: str) -> socket.socket:
    """A listening socket at `path`, for this user and group only. What an earlier server left there is taken away; a
    server that still listens there, or a file, is not. Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        _take_away_stale(path)
        before = os.umask(0o117)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _take_away_stale(path: str) -> None:
    """Remove a socket that nobody listens on any more. Anything else stays, and is what binding will complain about."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _sweep_interval(limits: Limits) -> float:
    shortest = min(limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s, limits.idle_timeout_s)
    return min(max(shortest / 4, _SWEEP_S_MIN), _SWEEP_S_MAX)


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
            with suppress(OSError):
                os.unlink(sock.getsockname())
        sock.close()
