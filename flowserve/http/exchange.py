"""One request as an app has it, and its answer on the line: what an app is given besides ASGI.

Decided here: how an answer becomes bytes (its head, its framing, whether the connection is kept), and who may give it
when: said in ASGI's two messages, in one call (`reply`), or promised and given later. The request's body may be a
memoryview into pooled memory instead of bytes; an answer's parts are buffers that are sent without being joined. How
a request is received is decided in intake.py, what comes after what in connection.py.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio
from starlette.types import Message
from trio.lowlevel import Task, reschedule

from flowserve.http.answer import head_bytes
from flowserve.http.head import Head
from flowserve.http.line import Line, Phase

if TYPE_CHECKING:
    from flowserve.http.server import Server

# Heads of whole answers on connections that are kept, by what they say. Bounded, and emptied when full.
_STARTS: Final[dict[tuple[int, tuple[tuple[bytes, bytes], ...], int], bytes]] = {}
_KEPT_STARTS: Final = 256
_BODILESS: Final = frozenset({204, 304})
_CONNECTION_CLOSE: Final = b"connection: close\r\n"
_CONNECTION_KEEP_ALIVE: Final = b"connection: keep-alive\r\n"  # HTTP/1.0 clients want to be told
_log = logging.getLogger("flowserve.http")

Buffer = bytes | bytearray | memoryview
Headers = tuple[tuple[bytes, bytes], ...]


class Promise(Protocol):
    """What stands behind an answer that comes later."""

    def withdraw(self) -> None:
        """Nobody waits for it any more."""


class Exchange(Line):
    """The request that the app has now, one after the other."""

    __slots__ = (
        "_body",
        "_head",
        "_headers",
        "_is_running",
        "_is_started",
        "_keeps_alive",
        "_left",
        "_parked",
        "_promise",
        "_status",
        "_task",
    )

    def __init__(self, server: Server, sock: socket.socket) -> None:
        super().__init__(server, sock)
        self._head: Head | None = None
        self._body: Buffer | None = None  # None once the app took it
        # ... and its answer so far. `_status` 0: not begun. `_left`: announced bytes to come, None if unknown.
        self._status = 0
        self._headers: Headers = ()
        self._is_started = False
        self._left: int | None = 0
        self._keeps_alive = False
        self._is_running = False  # counted in `server.running`
        self._promise: Promise | None = None  # while the answer is to come by itself
        self._task: Task | None = None  # the connection's task while it waits for exactly that
        self._parked: Task | None = None  # ... and while it waits for the client

    def _enter_running(self, head: Head) -> None:
        self.phase = Phase.RUNNING
        self._is_running = True
        self.server.running += 1
        self._head = head
        self._status = 0
        self._is_started = False
        self._keeps_alive = False  # until the answer is complete

    def _stop_running(self) -> None:
        if self._is_running:
            self._is_running = False
            self.server.running -= 1

    def goes_on(self) -> None:
        """The answer goes on for as long as somebody listens: others, which are over soon, are not sent with it."""
        self._stop_running()

    def promise(self, promise: Promise) -> None:
        """The answer comes later, by `keep_promise`; the app may return. `promise.withdraw` is called where the client
        leaves before. The exchange holds the body no longer.
        """
        self._promise = promise
        self._body = None

    def keep_promise(self, status: int, headers: Headers, parts: list[Any]) -> None:
        """The answer that was promised. Never waits: it is called from the middle of the engine's work."""
        if self._promise is None:
            return  # the client left
        self._promise = None
        self.reply(status, headers, parts)
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def reply(self, status: int, headers: Headers, parts: list[Any]) -> None:
        """The whole answer: `parts` are buffers, sent in turn without being joined. Never waits."""
        head = self._head
        if head is None or self._status:
            raise RuntimeError("a request is answered once")
        self._body = None
        self.post(self._whole(head, status, headers, parts))
        self._stop_running()
        self.enter(Phase.IDLE, self.server.limits.idle_timeout_s)
        if not self._keeps_alive:
            self._unpark()  # the server began to end: the request that it waits for must not come any more

    def _unpark(self) -> None:
        """Wake the task where it waits for the client."""
        task = self._parked
        if task is not None:
            self._parked = None
            reschedule(task)

    @property
    def body(self) -> Buffer:
        """The request's whole body, for an app that will not keep it if it goes on to take it."""
        return b"" if self._body is None else self._body

    def take_body(self) -> Buffer:
        """The request's whole body, once; the taker's own memory, writable where it is large."""
        body, self._body = self._body, None
        return b"" if body is None else body

    def _whole(self, head: Head, status: int, headers: Headers, parts: list[Any]) -> list[Any]:
        """The buffers of a whole answer."""
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        self._status = status
        if not head.is_plain or self.server.is_ending:
            return self._whole_by_itself(head, headers, size, parts)
        key = status, headers, size
        start = _STARTS.get(key)
        if start is None:
            (start,) = self._whole_by_itself(head, headers, size, ())
            if len(_STARTS) >= _KEPT_STARTS:
                _STARTS.clear()
            _STARTS[key] = start
        else:
            self._is_started = self._keeps_alive = True
            self._head = None
        return [start, *parts]

    def _whole_by_itself(self, head: Head, headers: Headers, size: int, parts: Sequence[Any]) -> list[Any]:
        self._headers = headers
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
        self._keeps_alive = head.keep_alive and not self.server.is_ending
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
