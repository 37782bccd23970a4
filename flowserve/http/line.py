"""A socket that is tried before it is waited for, and the deadline of whatever it waits for.

Decided here: the phases of a connection, and how bytes are moved: small answers joined into one `send`, large ones
by `sendmsg` without joining; `wait_readable` and `wait_writable` only when the kernel says so (trio's own streams
cost as much again as a small request). Deadlines are plain fields that the server's sweeper compares with its own
idea of now, so they cost a request nothing. This file knows no HTTP.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import socket
import struct
import termios
from typing import TYPE_CHECKING, Any, Final

import trio
from trio.lowlevel import wait_readable, wait_writable

if TYPE_CHECKING:
    from flowserve.http.server import Server

# A small request comes in one piece, and little of a large one has to be moved into its place.
RECEIVE_BYTES: Final = 16_384
_JOINED_BYTES_MAX: Final = 16_384  # below this one copy is cheaper than a longer list of buffers
_PARTS_MAX: Final = 512  # sendmsg takes 1024


class Phase(enum.Enum):
    """What the connection waits for. Every phase but RUNNING ends at the line's deadline."""

    IDLE = "idle"  # the first byte of a request
    HEAD = "head"  # the rest of a head
    BODY = "body"  # the rest of a body
    RUNNING = "running"  # the app
    WRITING = "writing"  # the client to take more of its answer
    CLOSING = "closing"  # the client to read why it was refused


class ClientLeft(OSError):
    """The other side closed, or the line broke. ASGI wants an OSError out of `send`."""


class Line:
    """One accepted socket. Cancelling `scope` ends whatever it waits for."""

    __slots__ = ("_is_in_outbox", "_rest", "_unsent", "deadline", "phase", "scope", "server", "sock")

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server = server
        self.sock = sock
        self.scope = trio.CancelScope()
        self.phase = Phase.IDLE
        self.deadline = server.deadline_in(server.limits.header_timeout_s)
        self._is_in_outbox = False  # an answer waits for this turn's burst
        self._rest: trio.Event | None = None  # set when what the kernel did not take is gone; None: there is nothing
        self._unsent: list[memoryview] = []  # that

    def enter(self, phase: Phase, limit_s: float) -> None:
        """Begin a phase that may last `limit_s` seconds."""
        self.phase = phase
        self.deadline = self.server.deadline_in(limit_s)

    def has_input(self) -> bool:
        """Whether bytes wait in the kernel that were not read yet. End-of-file is none."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def receive_some(self) -> bytes:
        """The next bytes. Raises `ClientLeft` where there are no more to come."""
        while True:
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                await wait_readable(self.sock)
                continue
            if not data:
                raise ClientLeft("the client closed in the middle of a request")
            return data

    async def receive_into(self, target: memoryview, bytes_per_s: int) -> None:
        """Fill `target`. Every `bytes_per_s` that arrive move the deadline by a second."""
        got = 0
        while got < len(target):
            try:
                count = self.sock.recv_into(target[got:])
            except BlockingIOError:
                await wait_readable(self.sock)
                continue
            if count == 0:
                raise ClientLeft("the client closed in the middle of a body")
            got += count
            self.deadline += count / bytes_per_s

    def has_undelivered(self) -> bool:
        """Whether some of what was sent is not confirmed by the other side's kernel. False where ours cannot tell."""
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return False
        return bool(count)

    def end(self) -> None:
        """No request is under way on it, and none may come any more."""
        self.scope.cancel()

    @property
    def is_settled(self) -> bool:
        """Everything that was written is with the kernel."""
        return not self._is_in_outbox and self._rest is None

    async def settle(self) -> None:
        """Wait until everything that was written is with the kernel."""
        if self._is_in_outbox:
            self.server.outbox.flush()
        if self._rest is not None:
            await self._rest.wait()

    async def write(self, parts: list[Any]) -> None:
        """All of `parts`, buffers of bytes. Returns when the kernel has them; raises `ClientLeft` where it cannot."""
        try:
            if self._is_in_outbox or self._rest is not None:
                await self.settle()
            if len(parts) == 1:
                data = parts[0]
            elif sum(map(len, parts)) <= _JOINED_BYTES_MAX:
                data = b"".join(parts)
            else:
                await self._write_parts([memoryview(part).cast("B") for part in parts if len(part)])
                return
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                await self._write_parts([memoryview(data)[sent:]])
        except OSError as error:
            raise ClientLeft(*error.args) from None

    def post(self, parts: list[Any]) -> None:
        """All of `parts`, without waiting: small ones at the end of this turn with those of other lines, unless theirs
        is the only request under way. What was posted first leaves first; whoever closes the line must `settle` first.
        """
        if self._is_in_outbox:
            self.server.outbox.flush()
        if self._rest is not None:
            self._unsent += [memoryview(part).cast("B") for part in parts if len(part)]
            return
        if len(parts) == 1 or sum(map(len, parts)) <= _JOINED_BYTES_MAX:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if self.server.running > 1 or self.server.outbox.waiting:
                self._is_in_outbox = True
                self.server.outbox.put(self, data)
            else:
                self.send_now(data)
            return
        if self.server.outbox.waiting:
            self.server.outbox.flush()
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            _drop(views, self.sock.sendmsg(views[:_PARTS_MAX]))
        except BlockingIOError:
            pass
        except OSError:
            return  # broken: whoever reads from it is told
        if views:
            self._send_rest(views)

    def send_now(self, data: bytes) -> None:
        """One small answer. What the kernel does not take (the client reads late) is sent by a task of its own."""
        self._is_in_outbox = False
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # broken: whoever reads from it is told
        if sent < len(data):
            self._send_rest([memoryview(data)[sent:]])

    def _send_rest(self, views: list[memoryview]) -> None:
        self._rest = trio.Event()
        self._unsent = views
        self.server.start_soon(self._write_rest, views, self._rest)

    async def _write_rest(self, views: list[memoryview], done: trio.Event) -> None:
        try:
            while views and self.sock.fileno() >= 0:  # closed perhaps before this began
                with trio.move_on_after(self.server.limits.write_timeout_s) as patience:
                    await wait_writable(self.sock)
                if patience.cancelled_caught:
                    self.reset_on_close()
                    self.scope.cancel()
                    return
                with contextlib.suppress(BlockingIOError):
                    _drop(views, self.sock.sendmsg(views[:_PARTS_MAX]))
        except (OSError, trio.ClosedResourceError):
            pass  # the line is gone, and its own task knows
        finally:
            self._rest = None
            done.set()
            if self.phase is Phase.IDLE:
                self.enter(Phase.IDLE, self.server.limits.idle_timeout_s)
                # With input unread the task is about to say itself that no more answers come: closing now would make
                # the kernel drop what it has not delivered.
                if self.server.is_draining and not self.has_input():
                    self.end()

    def reset_on_close(self) -> None:
        """Make the kernel drop what nobody reads instead of keeping it for minutes."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _write_parts(self, views: list[memoryview]) -> None:
        before = self.phase
        while views:
            try:
                sent = self.sock.sendmsg(views[:_PARTS_MAX])
            except BlockingIOError:
                # When this wait is cancelled the phase stays, and tells why.
                self.enter(Phase.WRITING, self.server.limits.write_timeout_s)
                await wait_writable(self.sock)
                continue
            _drop(views, sent)
        self.phase = before


def _drop(views: list[memoryview], sent: int) -> None:
    """Take the first `sent` bytes, which the kernel has, out of `views`."""
    done = 0
    while done < len(views) and sent >= len(views[done]):
        sent -= len(views[done])
        done += 1
    del views[:done]
    if sent:
        views[0] = views[0][sent:]
