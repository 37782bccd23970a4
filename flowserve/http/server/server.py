"""The HTTP server: listening sockets are opened, connections are accepted, swept for deadlines, and drained.

Decides the options of listening sockets, that a socket which an earlier server left in the file system is replaced,
which connections are accepted, which are refused (beyond the budget of connections, or without a file descriptor) or
closed, and how the server ends. Two tasks serve every connection: the sweeper, which compares deadlines a few times a
second, and the poller. The request/response cycle is in connection.py, the poller in poller.py.

Ending has three steps. From `part` on responses carry `Connection: close`, while new connections are still served:
health probes detect that the server stops. `drain` stops accepting, closes connections without a request, and lets
requests in flight finish; past its deadline the rest is cut. `serve` returns when the last connection is gone.

Does not know Starlette or models. Called by the command line, which opens the listening sockets before models are
loaded, so that a port in use is reported at once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio
from starlette.types import ASGIApp
from trio.lowlevel import notify_closing, wait_readable

from flowserve.http.server.connection import Connection, InferenceHandler, Phase, ServerContext
from flowserve.http.server.poller import Poller
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.response import refusal
from flowserve.http.server.tls import Terminator
from flowserve.memory.pool import Pool
from flowserve.runtime.budget import Budget

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_OUT_OF_RESOURCES: Final = frozenset({*_OUT_OF_DESCRIPTORS, errno.ENOBUFS, errno.ENOMEM})
_BACKLOG: Final = 2048
_ACCEPTS_MAX: Final = 64  # in a row, before the event loop continues
_ACCEPT_PAUSE_S: Final = 0.1
NO_DESCRIPTORS: Final = "no file descriptors left: the server cannot take more connections at the moment"
# A refused client gets so much time to read the response before its connection is closed; a refused client beyond so
# many gets none, so that its connection costs two system calls.
_REFUSED_S: Final = 1.0
_REFUSED_WITHOUT_DESCRIPTORS_S: Final = 0.1  # one after the other, with the only descriptor
_REFUSED_AT_ONCE: Final = 32
_DISCARDED_BYTES: Final = 65536
_EPISODE_S: Final = 10.0  # without the event, before it is logged again
_SWEEP_S_MAX: Final = 0.5
_SWEEP_S_MIN: Final = 0.01

_log = logging.getLogger("flowserve.http")


class Server:
    """Serves `app`, and in front of it the requests of the route `direct`, on any number of listeners. Large bodies are
    received into buffers of `pool`. `tls`: the certificate shown to clients, None for plain HTTP. `budget` bounds
    bodies and connections; without one they are not bounded. `connections`: those that are open, by file descriptor.
    `changed` is called when one was opened or closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits | None = None,
        pool: Pool | None = None,
        tls: ssl.SSLContext | None = None,
        direct: InferenceHandler | None = None,
        budget: Budget | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        limits = limits or Limits()
        self.pool = pool or Pool()
        self.budget = budget or Budget()
        self._context = ServerContext(app, direct, limits, self.budget, self.pool, _sweep_interval(limits))
        self._tls = Terminator(tls, limits) if tls is not None else None
        self.connections: dict[int, Connection] = {}
        self._accepting = trio.CancelScope()
        self._refused = 0  # connections that are being refused
        self._reserve = -1  # a descriptor that is closed to accept a connection when no other is left; -1: none
        self._over_limit, self._out_of_resources = _Episode(), _Episode()
        self._drain_deadline = math.inf
        self._is_empty = trio.Event()  # set when the last connection goes, once none is accepted any more
        self._changed = changed or _ignore
        self._begin_events = direct.begin_events if direct is not None else _ignore
        self._end_events = direct.end_events if direct is not None else _ignore
        self._poller = Poller(self.connections, self._begin_events, self._end_events)
        self._context.poller = self._poller

    async def serve(
        self, listeners: Sequence[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until drained. Owns and closes `listeners` (from `open_listeners`), which may be none. Cancelling it
        cuts every connection."""
        self._context.now = trio.current_time()
        self._open_reserve()
        try:
            async with trio.open_nursery() as housekeeping:
                housekeeping.start_soon(self._sweep, name="http sweeper")
                await housekeeping.start(self._poller.run, name="http poller")
                # Connections' tasks live outside the accepting scope: ending that one must not end them.
                async with trio.open_nursery() as tasks:
                    self._context.nursery = tasks
                    with self._accepting:
                        async with trio.open_nursery() as accepting:
                            for listener in listeners:
                                accepting.start_soon(self._accept, listener, tasks, name="http listener")
                            task_status.started()
                            if not listeners:  # another process accepts
                                await trio.sleep_forever()
                    close_listeners(listeners)
                    if self.connections:
                        await self._is_empty.wait()
                housekeeping.cancel_scope.cancel()
        finally:
            for connection in list(self.connections.values()):
                connection.close()
            close_listeners(listeners)
            self._close_reserve()
            self._poller.close()

    def part(self) -> None:
        """From now on every connection ends with its next response; new ones are accepted until `drain`."""
        self._context.is_ending = True

    def drain(self, within_s: float = math.inf) -> None:
        """Begin to end. Requests in flight have `within_s` seconds. Calling it again may only shorten that."""
        self._drain_deadline = min(self._drain_deadline, trio.current_time() + within_s)
        self._context.is_ending = self._context.is_draining = True
        self._accepting.cancel()
        for connection in list(self.connections.values()):
            connection.close_if_idle()

    def cut(self) -> None:
        """End every connection at once. Requests without a response get 503."""
        for connection in list(self.connections.values()):
            connection.expire()

    async def _accept(self, listener: socket.socket, tasks: trio.Nursery) -> None:
        while True:
            await wait_readable(listener)
            try:
                for _ in range(_ACCEPTS_MAX):
                    sock, address = listener.accept()
                    sock.setblocking(False)
                    self._take(sock, address, tasks)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    await self._refuse_one(listener, error)
                elif error.errno not in (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR):
                    raise

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that another process has accepted. It does not block. While this serves."""
        try:
            address = sock.getpeername()
        except OSError:  # its client has left already
            sock.close()
            return
        self._take(sock, address, self._context.nursery)

    def _take(self, sock: socket.socket, address: object, tasks: trio.Nursery) -> None:
        if self._context.is_draining:
            sock.close()
        elif self.budget.connections < self.budget.max_connections:
            try:
                self._open(sock, address, tasks)
            except OSError:
                sock.close()
                raise
        else:
            self._refuse(sock, tasks)

    def _refuse(self, sock: socket.socket, tasks: trio.Nursery) -> None:
        """The server has as many connections as it may have. A client that speaks TLS gets no text."""
        self.budget.refused_connections += 1
        self._over_limit.note(self._context.now, self._too_many())
        if self._tls is not None:
            sock.close()
        elif self._refused < _REFUSED_AT_ONCE:
            tasks.start_soon(self._answer_and_close, sock, self._too_many(), _REFUSED_S, name="http refusal")
        else:
            with sock, suppress(OSError):
                sock.send(refusal(503, self._too_many()))

    def _too_many(self) -> str:
        most = self.budget.max_connections
        return f"the server has {most} connections, and no more are accepted; --http-max-connections sets the limit"

    async def _refuse_one(self, listener: socket.socket, error: OSError) -> None:
        """There is no descriptor, or no memory, for a waiting connection: refuse it, with the reserved descriptor. The
        listener stays readable, so this waits a moment if it cannot.
        """
        is_short = error.errno in _OUT_OF_DESCRIPTORS
        self._out_of_resources.note(self._context.now, NO_DESCRIPTORS if is_short else str(error.strerror))
        if not is_short or self._reserve < 0:
            await trio.sleep(_ACCEPT_PAUSE_S)
            if self._reserve < 0:
                self._open_reserve()
            return
        self._close_reserve()
        try:
            sock, _ = listener.accept()
        except OSError:
            await trio.sleep(_ACCEPT_PAUSE_S)
        else:
            self.budget.refused_connections += 1
            if self._tls is None:
                await self._answer_and_close(sock, NO_DESCRIPTORS, _REFUSED_WITHOUT_DESCRIPTORS_S)
            else:
                sock.close()
        finally:
            self._open_reserve()

    async def _answer_and_close(self, sock: socket.socket, text: str, within_s: float) -> None:
        """Refuse a connection with 503. What its client sends is read for a while: unread input would reset the
        connection, and the client might not read the response.
        """
        self._refused += 1
        try:
            with trio.move_on_after(within_s), suppress(OSError):
                sock.setblocking(False)
                sock.send(refusal(503, text))
                sock.shutdown(socket.SHUT_WR)
                is_open = True
                while is_open:
                    await wait_readable(sock)
                    is_open = bool(sock.recv(_DISCARDED_BYTES))
        finally:
            self._refused -= 1
            notify_closing(sock)
            sock.close()

    def _open_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _close_reserve(self) -> None:
        reserve, self._reserve = self._reserve, -1
        if reserve >= 0:
            os.close(reserve)

    def _open(self, sock: socket.socket, address: object, tasks: trio.Nursery) -> None:
        """Serve a connection that was accepted. Raises OSError without a descriptor for TLS, and then it is closed."""
        plain = sock if self._tls is None else self._tls.plain(sock, tasks)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = address[:2] if isinstance(address, tuple) else None
        connection = Connection(self._context, plain, client, self._forget)
        self.connections[plain.fileno()] = connection
        self.budget.connections = len(self.connections)
        self._changed()
        try:
            self._poller.watch(connection)
        except OSError as error:
            _log.warning("cannot serve a connection for the moment: %s", error.strerror)
            connection.close()

    def _forget(self, connection: Connection) -> None:
        """A connection is about to close its socket."""
        del self.connections[connection.sock.fileno()]
        self.budget.connections = len(self.connections)
        self._changed()
        self._poller.forget(connection)
        if not self.connections and self._context.is_draining:
            self._is_empty.set()

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(self._context.sweep_s)
            self._context.now = now = trio.current_time()
            is_over = now >= self._drain_deadline
            expired = [
                connection
                for connection in self.connections.values()
                if is_over or (now >= connection.deadline and connection.phase is not Phase.RUNNING)
            ]
            if expired:
                self._begin_events()
                try:
                    for connection in expired:
                        connection.expire()
                finally:
                    self._end_events()


class _Episode:
    """Refused connections, which may be thousands a second: the first one after a while without any is logged."""

    def __init__(self) -> None:
        self._last = -math.inf

    def note(self, now: float, reason: str) -> None:
        """A connection is refused at `now`, in seconds of the server's clock."""
        if now - self._last > _EPISODE_S:
            _log.warning("connections are refused: %s", reason)
        self._last = now


def _ignore() -> None:
    """Where no request is started directly, or connections are not counted."""


def _sweep_interval(limits: Limits) -> float:
    shortest = min(limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s, limits.idle_timeout_s)
    return min(max(shortest / 4, _SWEEP_S_MIN), _SWEEP_S_MAX)


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`; `port` 0 picks one, the same for all. Raises OSError if one
    cannot be opened."""
    return _bound_sockets(host, port, socket.SO_REUSEADDR, listens=True)


def shared_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that do not listen and keep the port for those of other processes that share it; `port` as for
    `open_listeners`. Raises OSError.
    """
    return _bound_sockets(host, port, socket.SO_REUSEPORT, listens=False)


def _bound_sockets(host: str, port: int, option: int, *, listens: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = port or sockets[0].getsockname()[1]
            sock.bind((address[0], chosen, *address[2:]))
            if listens:
                sock.listen(_BACKLOG)
    except OSError:
        close_listeners(sockets)
        raise
    return sockets


def open_unix_listener(path: str) -> socket.socket:
    """A listening socket at `path`, for this user and group only. A socket that an earlier server left there is
    removed; one with a server behind it, or a file, is not. Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        _remove_stale(path)
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


def _remove_stale(path: str) -> None:
    """Remove a socket without a server behind it. Anything else stays, and binding reports it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def close_listeners(sockets: Sequence[socket.socket]) -> None:
    """Close listening sockets, and remove those of the file system. Harmless when they are closed."""
    for sock in sockets:
        if sock.family == socket.AF_UNIX and sock.fileno() >= 0:
            with suppress(OSError):
                os.unlink(sock.getsockname())
        sock.close()
