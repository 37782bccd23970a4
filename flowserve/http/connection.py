"""One client's connection: requests in, the app called, answers out, in order.

Decided here: the conversation. One task and one cancel scope per connection, none per request; raw non-blocking
sockets, on which sending and receiving are tried before they are waited for. A request reaches the app only when its
body is complete, so that what is cut short or malformed is never executed. Anything that takes time is a *phase*
with a deadline: plain fields that the server's sweeper compares with its own idea of now, which costs a request
nothing. What the figures are is decided in limits.py, when to drain in server.py.

The app is called as any ASGI app. Two things are our own: the request's body may be a memoryview into pooled memory
instead of bytes, and the scope holds the connection itself as `flowserve.exchange`, so that a hot route can take the
body and give its answer in one call each, the answer as buffers that are sent without being joined. It may also
promise its answer and return: then nothing waits for that answer but the promise, and the task waits for the client's
next request.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio
from starlette.types import Message
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    current_task,
    notify_closing,
    reschedule,
    wait_readable,
    wait_task_rescheduled,
)

from flowserve.http.answer import CONTINUE, head_bytes, refusal
from flowserve.http.chunks import ChunkedBody
from flowserve.http.head import HEAD_END, Head, HeadParser, Refused, check_body_size
from flowserve.http.line import RECEIVE_BYTES, ClientLeft, Line, Phase
from flowserve.memory.pool import ALIGNMENT, POOLED_BYTES_MIN

if TYPE_CHECKING:
    from flowserve.http.server import Server

_LINGER_S: Final = 2.0
_BODILESS: Final = frozenset({204, 304})
_CONNECTION_CLOSE: Final = b"connection: close\r\n"
_CONNECTION_KEEP_ALIVE: Final = b"connection: keep-alive\r\n"  # HTTP/1.0 clients want to be told

_log = logging.getLogger("flowserve.http")

Buffer = bytes | bytearray | memoryview


class Promise(Protocol):
    """What stands behind an answer that comes later."""

    def withdraw(self) -> None:
        """Nobody waits for it any more."""


class Connection(Line):
    """One accepted socket. `run` owns it and closes it."""

    __slots__ = (
        "_body",
        "_buffer",
        "_head",
        "_headers",
        "_is_readable",
        "_is_running",
        "_is_started",
        "_keeps_alive",
        "_left",
        "_promise",
        "_status",
        "_task",
        "client",
        "local",
    )

    def __init__(self, server: Server, sock: socket.socket, client: tuple[str, int] | None) -> None:
        super().__init__(server, sock)
        self.client = client
        self.local = _endpoint(sock)
        self._buffer = b""  # received, not yet looked at
        self._is_readable = False  # the socket was seen to be, and not read from since
        # The request the app has now ...
        self._head: Head | None = None
        self._body: Buffer | None = None  # None once the app took it
        # ... and its answer so far. `_status` 0: not begun. `_left`: announced bytes to come, None if unknown.
        self._status = 0
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        self._is_started = False
        self._left: int | None = 0
        self._keeps_alive = False
        self._is_running = False  # counted in `server.running`
        self._promise: Promise | None = None  # while the answer is to come by itself
        self._task: Task | None = None  # the connection's task while it waits for exactly that

    async def run(self) -> None:
        """Serve the connection to its end. What happens on it stays on it; only cancelling it from outside gets out."""
        try:
            with self.scope:
                await self._converse()
            if self.scope.cancelled_caught:
                self._part()
        except OSError:
            pass  # reset while we read or wrote: the client has nothing more to hear
        except Exception:
            _log.exception("connection given up")  # a mistake of ours, or no memory for a body; others go on
        finally:
            notify_closing(self.sock)
            self.sock.close()

    async def _converse(self) -> None:
        try:
            while True:
                head = await self._next_head()
                if head is None:
                    await self.settle()
                    return
                self._body = await self._read_body(head)
                await self._answer(head)
                if not self._keeps_alive:
                    await self.settle()
                    if self.has_input():
                        await self._linger()
                    return
        except Refused as refused:
            await self._refuse(refused)
        except ClientLeft:
            await self.settle()  # it left in the middle of one request, and may still read the answer to the one before
            raise

    # ---------------------------------------------------------------------------------------------------- receiving

    async def _next_head(self) -> Head | None:
        """The next request's head, or None when there is none to come."""
        data = self._buffer.lstrip(b"\r\n") if self._buffer else b""
        server = self.server
        if self._rest is not None:
            await self.settle()  # a client that asks and asks and never reads waits here
        while not data:
            if self._is_readable:
                self._is_readable = False
            else:
                if server.is_draining and not self.has_input():
                    return None
                self.phase = Phase.IDLE
                await wait_readable(self.sock)
            data = self.sock.recv(RECEIVE_BYTES)
            if not data:
                return None
            data = data.lstrip(b"\r\n")  # some clients send an empty line after a body
        end = data.find(HEAD_END) + 4
        if end < 4:
            return await self._rest_of_head(data)
        self._buffer = data[end:]
        return server.heads.parse(data[:end])

    async def _rest_of_head(self, data: bytes) -> Head:
        self.enter(Phase.HEAD, self.server.limits.header_timeout_s)
        limits = self.server.limits
        parser = HeadParser(limits)
        size = 0
        tail = b""  # the end of a head may itself come in pieces
        while True:
            end = (tail + data).find(HEAD_END)
            if end >= 0:
                end += 4 - len(tail)
                parser.feed(data[:end])
                self._buffer = data[end:]
                return parser.finish()
            parser.feed(data)
            size += len(data)
            if size > limits.max_head_bytes:
                raise Refused(431, f"the request's head is longer than {limits.max_head_bytes} bytes")
            tail = (tail + data)[-3:]
            data = await self.receive_some()

    async def _read_body(self, head: Head) -> Buffer:
        if head.is_chunked:
            return await self._read_chunks(head)
        size = head.content_length
        buffer = self._buffer
        if size == 0:
            return b""
        check_body_size(head, self.server.limits)
        if size <= len(buffer):
            self._buffer = buffer[size:]
            return buffer[:size]
        await self._enter_body(head)
        return await self._receive_body(size, head.anchor)

    async def _receive_body(self, size: int, anchor: int) -> Buffer:
        """`size` bytes straight into one buffer, placed so that offset `anchor` is aligned in memory.

        The buffer is the request's alone, and writable: a model that is its last reader may work in it.
        """
        if size < POOLED_BYTES_MIN:
            target = memoryview(bytearray(size))
        else:
            pad = -anchor % ALIGNMENT
            target = self.server.pool.take(size + pad).data[pad:]
        got = len(self._buffer)
        target[:got] = self._buffer
        self._buffer = b""
        await self.receive_into(target[got:], self.server.limits.body_bytes_per_s)
        return bytes(target) if size < POOLED_BYTES_MIN else target

    async def _read_chunks(self, head: Head) -> Buffer:
        limits = self.server.limits
        body = ChunkedBody(limits.max_body_bytes)
        data = self._buffer
        await self._enter_body(head)
        while not body.feed(data):
            data = await self.receive_some()
            self.deadline += len(data) / limits.body_bytes_per_s
        self._buffer = body.rest
        return bytes(body.body) if len(body.body) < POOLED_BYTES_MIN else memoryview(body.body)

    async def _enter_body(self, head: Head) -> None:
        self.enter(Phase.BODY, self.server.limits.body_timeout_s)
        if head.expects_continue and not self._buffer:
            await self.write([CONTINUE])
            self.enter(Phase.BODY, self.server.limits.body_timeout_s)

    # ---------------------------------------------------------------------------------------------------- the app

    async def _answer(self, head: Head) -> None:
        self.phase = Phase.RUNNING
        self._is_running = True
        self.server.running += 1
        self._head = head
        self._status = 0
        self._is_started = False
        self._keeps_alive = False  # until the answer is complete
        scope = head.scope.copy()
        scope["client"] = self.client
        scope["server"] = self.local
        scope["flowserve.exchange"] = self
        try:
            await self.server.app(scope, self.receive, self.send)
            if self._promise is not None:
                await self._promised(head)
            elif self._head is not None:
                raise RuntimeError("the app returned without completing its answer")
        except ClientLeft:
            self._keeps_alive = False
        except Exception:
            # The path is the client's text: repr, so that it cannot forge a log line.
            _log.exception("%s %r failed", head.scope["method"], head.scope["path"])
            await self._fail()
        finally:
            self._body = None
            self._stop_running()
        if self._keeps_alive and self.phase is Phase.RUNNING:
            self.enter(Phase.IDLE, self.server.limits.idle_timeout_s)

    def _stop_running(self) -> None:
        if self._is_running:
            self._is_running = False
            self.server.running -= 1

    async def _promised(self, head: Head) -> None:
        """Wait until the answer that was promised has been given, and most often until the next request is there too:
        that is one wait for a request instead of two.
        """
        try:
            if head.keep_alive and not self._buffer:
                await wait_readable(self.sock)
                self._is_readable = True
            if self._promise is not None:
                # The next request came before the answer, or the client hung up, which the server's watch looks into.
                self._task = current_task()
                await wait_task_rescheduled(self._stop_waiting)
        finally:
            if self._promise is not None:
                promise, self._promise = self._promise, None
                promise.withdraw()

    def _stop_waiting(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED

    def promise(self, promise: Promise) -> None:
        """The answer comes later, by `keep_promise`; the app may return. `promise.withdraw` is called where the client
        leaves before.
        """
        self._promise = promise

    def keep_promise(self, status: int, headers: Sequence[tuple[bytes, bytes]], parts: list[Any]) -> None:
        """The answer that was promised. Never waits: it is called from the middle of the engine's work."""
        if self._promise is None:
            return  # the client left
        self._promise = None
        head = self._head
        assert head is not None
        self.post(self._whole(head, status, headers, parts))
        self._stop_running()
        self.enter(Phase.IDLE, self.server.limits.idle_timeout_s)
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)
        elif not self._keeps_alive:
            # The server began to end: the task waits for a request that must not come any more.
            self.server.outbox.flush()
            if self._rest is None:
                self.scope.cancel()

    async def _fail(self) -> None:
        if not self._is_started:
            await self.write([refusal(500, "internal server error")])
        self._keeps_alive = False

    def take_body(self) -> Buffer:
        """The request's whole body, once; the taker's own memory, writable where it is large."""
        body, self._body = self._body, None
        return b"" if body is None else body

    async def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], parts: list[Any]) -> None:
        """The whole answer: `parts` are buffers, sent in turn without being joined. What ASGI says in two messages."""
        head = self._head
        if head is None or self._status:
            raise RuntimeError("a request is answered once")
        await self.write(self._whole(head, status, headers, parts), in_burst=self._keeps_alive)

    def _whole(self, head: Head, status: int, headers: Sequence[tuple[bytes, bytes]], parts: list[Any]) -> list[Any]:
        """The buffers of a whole answer."""
        self._status = status
        self._headers = headers
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        start = self._start(head, size, more=False)
        self._left = 0
        self._finish(head)
        return [start] if head.is_head else [start, *parts]

    async def receive(self) -> Message:
        """ASGI: the whole body once, then the end of the connection."""
        if self._body is not None:
            body = self.take_body()
            return {"type": "http.request", "body": body, "more_body": False}
        if self._head is not None:
            # A client who leaves cancels this task, whether anybody waits here or not.
            await trio.sleep_forever()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI: the answer. Raises an OSError when the client is gone."""
        kind = message["type"]
        head = self._head
        if kind == "http.response.start" and not self._status and head is not None:
            self._status = message["status"]
            self._headers = message.get("headers", ())
            return
        if kind != "http.response.body" or not self._status or head is None:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")
        more = message.get("more_body", False)
        body = message.get("body", b"")
        size = len(body)
        out: list[Any] = [] if self._is_started else [self._start(head, size, more)]
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
            self._finish(head)
        if out:
            await self.write(out)

    def _start(self, head: Head, size: int, more: bool) -> bytes:
        """The answer's head. Sets `_left`."""
        self._is_started = True
        self._keeps_alive = head.keep_alive and not self.server.is_draining
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
                self._keeps_alive = False  # its end is the connection's end
        if not self._keeps_alive:
            framing += _CONNECTION_CLOSE
        elif head.is_http_1_0:
            framing += _CONNECTION_KEEP_ALIVE
        return head_bytes(self._status, self._headers, framing)

    def _finish(self, head: Head) -> None:
        self._head = None
        if self._left:
            # Too short or too long: where the next answer starts would be anybody's guess.
            self._keeps_alive = False
            _log.error("%s %r: the answer differs from its Content-Length", head.scope["method"], head.scope["path"])

    # ---------------------------------------------------------------------------------------------------- ending

    async def _refuse(self, refused: Refused) -> None:
        """Answer and close, in a way that lets a client who is still sending read why."""
        await self.write([refusal(refused.status, str(refused))])
        await self._linger()

    async def _linger(self) -> None:
        """Say that no more answers come, and read on for a while: closing with input unread makes the kernel reset the
        connection, and what it had not delivered yet would be lost.
        """
        self.enter(Phase.CLOSING, _LINGER_S)
        self.sock.shutdown(socket.SHUT_WR)
        scratch = bytearray(RECEIVE_BYTES)
        while True:
            await wait_readable(self.sock)
            if not self.sock.recv_into(scratch):
                return

    def _part(self) -> None:
        """The scope was cancelled: a deadline, a client who left, or the server's end. Nothing may wait any more."""
        if self._rest is not None:
            self.reset_on_close()  # in the middle of an earlier answer nothing else can be said
        elif self.phase in (Phase.HEAD, Phase.BODY):
            what = self.phase.value
            self.sock.send(refusal(408, f"the request's {what} did not arrive in time"))
            self.sock.shutdown(socket.SHUT_WR)
        elif self.phase is Phase.WRITING:
            self.reset_on_close()


def _endpoint(sock: socket.socket) -> Any:
    try:
        name = sock.getsockname()
    except OSError:
        return None
    return name[:2] if isinstance(name, tuple) else (name, None)
