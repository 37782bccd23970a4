"""One client's connection: requests are read, started, and responded to in order.

Decides the request/response cycle of HTTP/1.1: when a request is complete, whether the app or the inference handler
responds, how the response is framed, whether the connection is kept, the effect of deadlines, and how a connection
ends. A request is started only when its body is complete, so that one that is cut short or malformed is never executed.
The class reads top to bottom in the order of a request's life.

A connection has no task of its own. The poller (poller.py) calls `advance` when bytes arrive; they are read and parsed
without waiting. A request for the inference handler (all inference) is started immediately, and its response arrives by
callback. Any other request is one call of the ASGI app in a task. Blocking work runs in a task too: the rest of a
response that the kernel did not accept, and lingering. At most one task works for a connection at a time; one that has
responded may still be ending. Each wait is a phase with a deadline: two plain fields that the server's sweeper compares
with its clock.

Does not know Starlette or models, nor how sockets are accepted (server.py). Called by the server.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import trio
from starlette.types import ASGIApp, Message, Scope
from trio.lowlevel import notify_closing, wait_writable

from flowserve.errors import Overloaded
from flowserve.http.server.poller import Poller, has_epoll
from flowserve.http.server.request_parser import (
    HEAD_END,
    ChunkedBody,
    Head,
    HeadCache,
    HeadParser,
    Limits,
    Refused,
    body_too_large,
    trace_context,
)
from flowserve.http.server.response import HeaderTuple, head_bytes, no_memory, refusal
from flowserve.memory.pool import ALIGNMENT, POOLED_BYTES_MIN, Pool
from flowserve.observe.log_fields import of_context
from flowserve.runtime.budget import Budget, Reservation
from flowserve.values import Array, BytesLike

RECEIVE_BYTES: Final = 16_384  # a small request comes in one piece, and little of a large body has to be moved
_READS_MAX: Final = 16  # in a row, before other connections are read
# The same for large bodies. New memory is mapped while it is filled, at 1 to 3 ms per MiB, so many of them would keep
# the event loop: it reads 16 MiB before it goes on.
_BODY_RECEIVE_BYTES: Final = 1 << 18
_BODY_READS_MAX: Final = 4
_BODILESS: Final = frozenset({204, 304})
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CONNECTION_CLOSE: Final = b"connection: close\r\n"
_CONNECTION_KEEP_ALIVE: Final = b"connection: keep-alive\r\n"  # HTTP/1.0 clients expect it
_JOINED_BYTES_MAX: Final = 16_384  # below this one copy is cheaper than a longer list of buffers
_PARTS_MAX: Final = 512  # sendmsg takes 1024
_LINGER_S: Final = 2.0
_CHECK_S: Final = 0.01
RESERVATION: Final = "flowserve.reservation"  # in the ASGI scope: returns the request's part of the budget
STOPPED: Final = "the server is stopping, and its time for requests is over"

_log = logging.getLogger("flowserve.http")

# Status, headers and the body's buffers. Called once, on the event loop's thread, at any time.
Respond = Callable[[int, HeaderTuple, Sequence[Any]], None]
# Runs blocking work in a task. The work gets the request's part of the budget, for more bytes of its body.
Spawn = Callable[[Callable[[Reservation], Awaitable[None]]], None]


class InferenceHandler(Protocol):
    """Responds to some requests without the ASGI app."""

    def body_memory(self, scope: Scope, nbytes: int) -> Array | None:
        """The best buffer for a large body of a request, as bytes; None: any."""

    def start(self, scope: Scope, body: BytesLike, respond: Respond, spawn: Spawn) -> Callable[[], None] | None:
        """Start a request without waiting. Returns a callable that withdraws it when its client disconnects before
        `respond` was called; None if the request is for the app and was not started. `spawn` runs blocking work in a
        task, which is cancelled when the client disconnects, and passes it the request's part of the budget.
        """

    def begin_events(self) -> None:
        """Several requests may be started now, without a wait in between."""

    def end_events(self) -> None:
        """All of them are started."""


class ClientLeft(OSError):
    """The client closed or reset the connection. ASGI requires an OSError from `send`."""


class Phase(enum.Enum):
    """The event that a connection waits for. Every phase but RUNNING ends at the connection's deadline."""

    IDLE = "idle"  # the first byte of a request
    HEAD = "head"  # the rest of a head
    BODY = "body"  # the rest of a body
    RUNNING = "running"  # the response
    WRITING = "writing"  # the client, which has to read more of its response
    CLOSING = "closing"  # the client, which may still read the last response
    CLOSED = "closed"

    def __init__(self, text: str) -> None:
        self.is_reading = text in ("idle", "head", "body")


class ServerContext:
    """State shared by all connections of a server. `nursery` runs their tasks; `now`: the sweeper's clock, in s."""

    nursery: trio.Nursery
    poller: Poller

    def __init__(
        self, app: ASGIApp, direct: InferenceHandler | None, limits: Limits, budget: Budget, pool: Pool, sweep_s: float
    ) -> None:
        self.app = app
        self.direct = direct
        self.limits = limits
        self.budget = budget
        self.pool = pool
        self.heads = HeadCache(limits)
        self.is_ending = False  # each response is its connection's last
        self.is_draining = False  # and connections that wait for a request are closed
        self.sweep_s = sweep_s
        self.now = 0.0
        self.idle_limit_s = sweep_s + limits.idle_timeout_s
        self.must_arm = not has_epoll()

    def deadline_in(self, limit_s: float) -> float:
        """`limit_s` from now, at most two sweeps late and never early. Reads no clock."""
        return self.now + self.sweep_s + limit_s


class Connection:
    """One accepted socket, non-blocking. `on_close` is called when it is about to be closed."""

    __slots__ = (
        *("_body", "_chunked", "_client", "_context", "_got", "_has_started", "_head", "_headers", "_keeps_alive"),
        *("_left", "_local", "_on_close", "_parser", "_reservation", "_status", "_task", "_unread"),
        *("_unsent", "_withdraw", "deadline", "is_hung_up", "may_read", "phase", "sock", "target"),
    )

    def __init__(
        self,
        context: ServerContext,
        sock: socket.socket,
        client: tuple[str, int] | None,
        on_close: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self.sock = sock
        self.phase = Phase.IDLE
        self.deadline = context.deadline_in(context.limits.header_timeout_s)
        self._client = client
        self._local = _endpoint(sock)
        self._on_close = on_close
        self._task: trio.CancelScope | None = None  # of the task that works for this connection
        # Input.
        self.may_read = False  # the kernel may have bytes, or the end; set by the poller
        self.is_hung_up = False  # the end has come, perhaps behind bytes; set by the poller
        self._unread = b""  # received, and belongs to the request after this one
        self._parser: HeadParser | None = None  # of a head that comes in pieces
        self._chunked: ChunkedBody | None = None
        self.target: memoryview | None = None  # memory of a body of known size, `_got` bytes of which have come
        self._got = 0
        self._reservation: Reservation | None = None  # of the request's body, if it needs a buffer of its own
        # The request that is read or responded to, and its response so far.
        self._head: Head | None = None  # None: no response is due
        self._body: BytesLike | None = None  # until the app takes it
        self._withdraw: Callable[[], None] | None = None  # of the inference handler
        self._status = 0  # 0: the app has not begun
        self._headers: HeaderTuple = ()
        self._has_started = False  # the head is written
        self._left: int | None = 0  # announced bytes to come; None: unknown
        self._keeps_alive = False
        self._unsent: list[memoryview] = []  # written, and not accepted by the kernel yet

    def _enter(self, phase: Phase, limit_s: float) -> None:
        """Begin a phase that may last `limit_s` seconds."""
        self.phase = phase
        self.deadline = self._context.deadline_in(limit_s)

    # ---------------------------------------------------------------------------------------------- reading

    def on_hang_up(self) -> None:
        """The client closed its sending side a moment ago: withdraw a request that still runs, because its response
        would most likely not be read.
        """
        if self.phase is Phase.RUNNING:
            self.close()

    def advance(self) -> None:
        """Read input until a request is complete, and start it. Never waits. Called by the poller, when
        input arrives and when the connection is resumed.
        """
        try:
            if self._unread and self.phase.is_reading:
                unread, self._unread = self._unread, b""
                self._take(unread)
            for _ in range(_READS_MAX if self.target is None else _BODY_READS_MAX):
                if not self.may_read or not self.phase.is_reading or self._unread:
                    break
                self._receive()
            else:
                self._context.poller.resume(self)
            if self._context.is_draining:
                self.close_if_idle()
        except Refused as refused:
            self._drop_body()
            self._enter(Phase.CLOSING, _LINGER_S)
            self._spawn(self._refuse, refused)
        except OSError:
            self.close()  # the client reset the connection, and reads nothing more
        except Exception:
            _log.exception("connection given up")  # an internal error
            self.close()

    def _receive(self) -> None:
        """Receive once, and process the bytes."""
        target = self.target
        try:
            if target is None:
                data = self.sock.recv(RECEIVE_BYTES)
                is_all = len(data) < RECEIVE_BYTES
            else:
                room = target[self._got : self._got + _BODY_RECEIVE_BYTES]
                count = self.sock.recv_into(room)
                is_all = count < len(room)
        except BlockingIOError:
            self.may_read = False
            self._context.poller.arm(self)
            return
        if not (data if target is None else count):
            self.may_read = False
            if self.phase is Phase.IDLE:
                self._finish_connection()
            else:  # in the middle of a request, which is dropped
                self.close()
            return
        if is_all and not self.is_hung_up:
            self.may_read = False
            if self._context.must_arm:
                self._context.poller.arm(self)
        if target is None:
            self._take(data)
        else:
            self._take_body(count)

    def _take(self, data: bytes) -> None:
        """The next bytes of a head, or of a chunked body; or the first of a request."""
        if self._chunked is not None:
            self._take_chunks(data)
            return
        if self._parser is None:
            data = data.lstrip(b"\r\n")  # some clients send an empty line after a body
            if not data:
                return
            end = data.find(HEAD_END) + 4
            if end >= 4:
                text = data[:end]
                heads = self._context.heads
                head = heads.by_text.get(text) or heads.parse(text)
                rest = data[end:]
            else:
                self._parser = HeadParser(self._context.limits)
                self._enter(Phase.HEAD, self._context.limits.header_timeout_s)
        if self._parser is not None:
            found = self._parser.take(data)
            if found is None:
                return
            head, rest, self._parser = found, self._parser.rest, None
        # A head is complete, and `rest` was received behind it.
        self._head = head
        limits = self._context.limits
        size = head.content_length
        if not head.is_chunked:
            if size > limits.max_body_bytes:
                raise Refused(413, body_too_large(size, limits.max_body_bytes))
            if size <= len(rest):
                self._unread = rest[size:]
                self._start(rest[:size])
                return
        if not head.is_chunked:
            self._reserve(size)
            try:
                self.target = self._memory_for(size, head)
            except MemoryError as error:
                raise _without_memory(head, error) from None
        self._enter(Phase.BODY, limits.body_timeout_s)
        if head.expects_continue and not rest and not self._send((CONTINUE,)):
            self._enter(Phase.WRITING, limits.write_timeout_s)
            self._spawn(self._finish_continue)
        if self.target is None:
            self._chunked = ChunkedBody(limits.max_body_bytes)
            self._take_chunks(rest)
        else:
            self._got = 0
            self.target[: len(rest)] = rest
            self._take_body(len(rest))

    async def _finish_continue(self) -> None:
        """The client waits for an interim response: send 100 Continue, then read the body."""
        await self._flush()
        self._enter(Phase.BODY, self._context.limits.body_timeout_s)
        self._context.poller.resume(self)

    def _request_reservation(self) -> Reservation:
        """The part of the budget that the current request has."""
        if self._reservation is None:
            self._reservation = Reservation(self._context.budget)
        return self._reservation

    def _reserve(self, nbytes: int) -> None:
        """Reserve so many more bytes for the body. Raises Refused if the budget is used up."""
        try:
            self._request_reservation().grow(nbytes)
        except Overloaded as error:
            raise Refused(503, str(error)) from None

    def _drop_body(self) -> None:
        """The request's body is not needed any more."""
        self._body = self.target = self._chunked = None
        if self._reservation is not None:
            self._reservation.end()
            self._reservation = None

    def _memory_for(self, size: int, head: Head) -> memoryview:
        """Room for a body, placed so that its first tensor is aligned in memory. It belongs to the request alone and is
        writable: a model that is its last reader may modify it.
        """
        if size < POOLED_BYTES_MIN:
            return memoryview(bytearray(size))
        context = self._context
        pad = -head.anchor % ALIGNMENT
        block = None if context.direct is None else context.direct.body_memory(head.scope, size + pad)
        if block is None:
            block = context.pool.take(size + pad)
        return block.data[pad:]

    def _take_body(self, count: int) -> None:
        target = self.target
        assert target is not None
        self._got += count
        self.deadline += count / self._context.limits.body_bytes_per_s
        if self._got == len(target):
            self.target = None
            self._start(target if self._got >= POOLED_BYTES_MIN else bytes(target))

    def _take_chunks(self, data: bytes) -> None:
        chunked = self._chunked
        assert chunked is not None
        self.deadline += len(data) / self._context.limits.body_bytes_per_s
        before = len(chunked.body)
        try:
            is_complete = chunked.feed(data)
        except MemoryError as error:
            assert self._head is not None
            raise _without_memory(self._head, error) from None
        if is_complete:
            self._chunked = None
            self._unread = chunked.rest
            body = chunked.body
            self._start(bytes(body) if len(body) < POOLED_BYTES_MIN else memoryview(body))
        else:
            self._reserve(len(chunked.body) - before)

    # ---------------------------------------------------------------------------------------------- responding

    def _start(self, body: BytesLike) -> None:
        """The request is complete: have the inference handler or the app respond."""
        head = self._head
        assert head is not None
        self.phase = Phase.RUNNING
        self._status = 0
        self._has_started = False
        self._keeps_alive = False  # until the response is complete
        if self._context.direct is not None:
            try:
                withdraw = self._context.direct.start(head.scope, body, self._respond, self._spawn_work)
            except Exception as error:
                refused = self._failure(head, error)
                if self._head is not None:
                    self._spawn(self._fail, refused)
                else:
                    self.close()
                return
            if withdraw is not None:
                if self._head is not None:
                    self._withdraw = withdraw
                return
        self._body = body
        self._spawn(self._run_app, head)

    @staticmethod
    def _failure(head: Head, error: Exception) -> Refused:
        """The response to a request that failed by an internal error or for lack of memory, which is logged. Called in
        the exception's handler.
        """
        if isinstance(error, MemoryError):
            return _without_memory(head, error)
        # The path is the client's text: repr, so that it cannot forge a log line.
        _log.exception("%s %r failed", head.scope["method"], head.scope["path"], extra=_fields(head))
        return Refused(500, "internal server error")

    def _respond(self, status: int, headers: HeaderTuple, parts: Sequence[Any]) -> None:
        """The inference handler's response. Never waits."""
        self._withdraw = None
        head = self._head
        if head is None or self.phase is Phase.CLOSED:
            return  # the client left
        self._status, self._headers = status, headers
        start = self._start_response(head, sum(map(len, parts)), more=False)
        self._left = 0
        self._head = None
        try:
            is_written = self._send((start,) if head.is_head else (start, *parts))
        except OSError:
            self.close()
            return
        if is_written:
            self._finish_response()
        else:
            self._spawn(self._finish_writing)

    async def _finish_writing(self) -> None:
        await self._flush()
        self._finish_response()

    async def _run_app(self, head: Head) -> None:
        scope = head.scope.copy()
        scope["client"] = self._client
        scope["server"] = self._local
        scope[RESERVATION] = self._request_reservation
        try:
            await self._context.app(scope, self._asgi_receive, self._asgi_send)
            if self._head is not None:
                raise RuntimeError("the app returned without completing its response")
        except Exception as error:
            if _is_client_left(error):
                self.close()
                return
            refused = self._failure(head, error)
        else:
            self._finish_response()
            return
        await self._fail(refused)  # not in the handler: the exception's frames may hold the body

    async def _fail(self, refused: Refused) -> None:
        """The request failed, which is logged."""
        if not self._has_started:
            await self._write((refusal(refused.status, str(refused)),))
        self._keeps_alive = False
        self._head = None
        self._finish_response()

    async def _asgi_receive(self) -> Message:
        """The whole body once, then the end of the connection. A large body is a memoryview."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._head is not None:
            await trio.sleep_forever()  # a disconnect cancels this task at any wait
        return {"type": "http.disconnect"}

    async def _asgi_send(self, message: Message) -> None:
        """The response. Raises an OSError if the client has disconnected."""
        if self.phase is Phase.CLOSED:
            raise ClientLeft
        kind = message["type"]
        head = self._head
        if kind == "http.response.start" and not self._status and head is not None:
            self._status = message["status"]
            self._headers = tuple(map(tuple, message.get("headers", ())))
            return
        if kind != "http.response.body" or not self._status or head is None:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")
        more = message.get("more_body", False)
        body = message.get("body", b"")
        size = len(body)
        out: list[Any] = [] if self._has_started else [self._start_response(head, size, more=more)]
        if head.is_head or self._status in _BODILESS:
            self._left = 0
        elif self._left is not None:
            self._left -= size
            out.append(body)
        elif head.is_http_1_0:
            out.append(body)
        else:
            if size:
                out += (b"%x\r\n" % size, body, b"\r\n")
            if not more:
                out.append(b"0\r\n\r\n")
        if not more:
            self._head = None
            if self._left:
                # Too short or too long: the client cannot find the beginning of the next response.
                self._keeps_alive = False
                method, path = head.scope["method"], head.scope["path"]
                text = "%s %r: the response differs from its Content-Length"
                _log.error(text, method, path, extra=_fields(head))
        if out:
            await self._write(out)

    def _start_response(self, head: Head, size: int, *, more: bool) -> bytes:
        """The response's head, with the framing that fits it. `size` is the body's, so far if there is `more`."""
        self._keeps_alive = head.keep_alive and not self._context.is_ending
        self._left = None if more else size
        has_length = False
        for name, value in self._headers:
            if name == b"content-length":
                has_length = True
                self._left = int(value)
        framing = b""
        if not has_length and self._status not in _BODILESS:
            if not more:
                framing = b"content-length: %d\r\n" % size
            elif not head.is_http_1_0:
                framing = b"transfer-encoding: chunked\r\n"
            else:
                self._keeps_alive = False  # the body ends where the connection does
        if not self._keeps_alive:
            framing += _CONNECTION_CLOSE
        elif head.is_http_1_0:
            framing += _CONNECTION_KEEP_ALIVE
        start = head_bytes(self._status, self._headers, framing)
        self._has_started = True
        return start

    async def _write(self, parts: Sequence[Any]) -> None:
        """Write buffers of bytes. Returns when the kernel has them; raises `ClientLeft` if it cannot."""
        try:
            if not self._send(parts):
                before = self.phase
                await self._flush()
                self.phase = before
        except OSError as error:
            raise ClientLeft(*error.args) from None

    async def _flush(self) -> None:
        """Wait until the kernel has everything that was written. The client must read some of it in time."""
        while not self._send_rest():
            self._enter(Phase.WRITING, self._context.limits.write_timeout_s)
            await wait_writable(self.sock)

    def _send(self, parts: Sequence[Any]) -> bool:
        """Write buffers of bytes, in order: small ones are joined into one `send`, large ones are sent by `sendmsg`,
        not joined. Never waits. Returns whether the kernel has everything. Raises OSError if the kernel refuses.
        """
        if not self._unsent and sum(map(len, parts)) <= _JOINED_BYTES_MAX:
            data = b"".join(parts)
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._unsent.append(memoryview(data)[sent:])
            return not self._unsent
        self._unsent += [memoryview(part).cast("B") for part in parts if len(part)]
        return self._send_rest()

    def _send_rest(self) -> bool:
        """Write the bytes that the kernel has not accepted yet. Returns and raises as `_send` does."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self.sock.sendmsg(unsent[:_PARTS_MAX])
            except BlockingIOError:
                return False
            done = 0
            while done < len(unsent) and sent >= len(unsent[done]):
                sent -= len(unsent[done])
                done += 1
            del unsent[:done]
            if sent:
                unsent[0] = unsent[0][sent:]
        return True

    def _finish_response(self) -> None:
        """The response is with the kernel."""
        if self._reservation is not None or self._body is not None:
            self._drop_body()
        if self.phase is Phase.CLOSED:
            return
        if not self._keeps_alive:
            self._finish_connection()
            return
        context = self._context
        self.phase = Phase.IDLE
        self.deadline = context.now + context.idle_limit_s
        if self._unread or self.may_read:
            context.poller.resume(self)
        elif context.is_draining:
            self.close_if_idle()

    # ---------------------------------------------------------------------------------------------- the end

    def close_if_idle(self) -> None:
        """The server drains: end the connection if no request is in progress."""
        if self.phase is Phase.IDLE and not self._unread and not self._has_input():
            self._finish_connection()

    def _finish_connection(self) -> None:
        """No response follows: close, after lingering if that is useful."""
        if self._has_input() or self._has_undelivered():
            self._enter(Phase.CLOSING, _LINGER_S)
            self._spawn(self._linger)
        else:
            self.close()

    async def _refuse(self, refused: Refused) -> None:
        """Respond to an invalid request, and close so that a client that still sends can read the error."""
        await self._write((refusal(refused.status, str(refused)),))
        await self._linger(is_sending=True)

    async def _linger(self, *, is_sending: bool = False) -> None:
        """Close the sending side and read on for a while. Closing with unread input, or input for a closed socket,
        makes the kernel reset the connection and drop undelivered output. A client that does not send has read
        everything once that is delivered.
        """
        self._enter(Phase.CLOSING, _LINGER_S)
        self.sock.shutdown(socket.SHUT_WR)
        scratch = bytearray(RECEIVE_BYTES)
        is_sending = is_sending or self._has_input()
        while is_sending or self._has_undelivered():
            try:
                if not self.sock.recv_into(scratch):
                    break
                is_sending = True
            except BlockingIOError:
                await trio.sleep(_CHECK_S)
            else:
                await trio.lowlevel.checkpoint()
        self.close()

    def _has_input(self) -> bool:
        """Whether bytes wait in the kernel that were not read yet. End-of-file is none."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _has_undelivered(self) -> bool:
        """Whether some sent bytes are not confirmed by the client's kernel. False if this kernel does not report it."""
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return False
        return bool(count)

    def expire(self) -> None:
        """The deadline has passed, or the server's: end the connection without waiting."""
        try:
            if self.phase is Phase.RUNNING and not self._has_started:
                self.sock.send(refusal(503, STOPPED))
                self.sock.shutdown(socket.SHUT_WR)
            elif self.phase in (Phase.HEAD, Phase.BODY):
                self.sock.send(refusal(408, f"the request's {self.phase.value} did not arrive in time"))
                self.sock.shutdown(socket.SHUT_WR)
            elif self.phase is Phase.WRITING:  # the kernel drops output that the client does not read
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # the client is gone
        self.close()

    def close(self) -> None:
        """End the connection at once; a request that runs is withdrawn. Harmless when it is closed."""
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()
        if self._task is not None:
            self._task.cancel()
        # The poller's last events refer to closed connections until the next ones come: they hold no memory then.
        self._head = self._parser = None
        self._unread, self._unsent = b"", []
        self._drop_body()
        self._on_close(self)
        notify_closing(self.sock)
        self.sock.close()

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Run `work` in a task, which closing the connection cancels."""
        self._task = trio.CancelScope()
        self._context.nursery.start_soon(self._run_task, self._task, work, *arguments, name="http connection")

    def _spawn_work(self, work: Callable[[Reservation], Awaitable[None]]) -> None:
        self._spawn(work, self._request_reservation())

    async def _run_task(self, scope: trio.CancelScope, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        # The cancel scope is inside: it removes cancellations from exception groups, which are no `Exception` before.
        if self.phase is Phase.CLOSED:
            return  # before the task began
        try:
            with scope:
                await work(*arguments)
        except (OSError, trio.ClosedResourceError):
            self.close()  # the client is gone
        except Exception as error:
            if not _is_client_left(error):
                _log.exception("connection given up")
            self.close()
        if self._task is scope:
            self._task = None


def _fields(head: Head) -> Mapping[str, Any]:
    return of_context(trace_context(head.scope["headers"]))


def _without_memory(head: Head, error: MemoryError) -> Refused:
    """The refusal of a request for which there is no memory, which is logged."""
    _log.error("%s %r: %s", head.scope["method"], head.scope["path"], no_memory(error), extra=_fields(head))
    return Refused(503, no_memory(error))


def _is_client_left(error: Exception) -> bool:
    """Whether the error is `ClientLeft`, or a nursery's group of nothing else."""
    if isinstance(error, ExceptionGroup):
        return error.split(ClientLeft)[1] is None
    return isinstance(error, ClientLeft)


def _endpoint(sock: socket.socket) -> Any:
    try:
        name = sock.getsockname()
    except OSError:
        return None
    return name[:2] if isinstance(name, tuple) else (name, None)
