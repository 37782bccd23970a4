"""Calls between two processes of one server, over a connected socket.

Decides the frames: lengths, the number of the call, JSON for arguments and results, and bytes beside it for files and
texts; that both sides may call, any number at once; that an error of this project arrives as the same class; and that
the end of the connection ends every open call. Handlers that are not coroutines run in the order in which their calls
arrive. Does not know what is called, nor processes. Both ends belong to one operator, and others cannot reach their
socket: lengths are checked against mistakes, not attacks. Callers: `parent`, `replica`.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from itertools import count
from typing import Any, Final

import orjson
import trio

from flowserve import errors
from flowserve.errors import FlowserveError, Internal

_log = logging.getLogger("flowserve.replicas")

# The kind of the frame, the number of the call (0: it has no result), the bytes of JSON, the bytes after it.
_HEAD: Final = struct.Struct("<BQIQ")
_CALL, _RESULT, _ERROR, _CANCEL = range(4)
_RECEIVED_BYTES: Final = 1 << 16
_BYTES_MAX: Final = 1 << 32
_CLASSES: Final = {
    name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, FlowserveError)
}

Result = tuple[Any, bytes]  # a value that JSON can hold, and bytes
Handler = Callable[[Any, bytes], Result | Awaitable[Result]]
NOTHING: Final[Result] = (None, b"")


def error_named(name: str, text: str, version: int = 0) -> FlowserveError:
    """The error of this class, with this text; Internal if there is no such class. `version` as in the error."""
    error = _CLASSES.get(name, Internal)(text)
    error.version = version
    return error


class LinkClosed(Exception):
    """The other process closed the connection, or ended."""


class ProcessLink:
    """One end. `handlers` by the names of calls; each gets the arguments and the bytes. For the event loop's thread."""

    def __init__(self, stream: trio.abc.Stream, handlers: Mapping[str, Handler]) -> None:
        self._stream = stream
        self._handlers = handlers
        self._numbers = count(1)
        self._open: dict[int, _OpenCall] = {}  # that this end made
        self._running: dict[int, trio.CancelScope] = {}  # that the other end made
        self._to_send: deque[bytes] = deque()
        self._has_some = trio.Event()
        self.closed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and make calls until the connection ends. Then open calls raise LinkClosed, and calls of the other end
        are cancelled.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                task_status.started()
                await self._receive(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self.closed.set()
            for one in self._open.values():
                one.end(LinkClosed())
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    async def call(self, name: str, arguments: Any = None, data: bytes = b"") -> Result:
        """The result of a handler of the other end. Raises its FlowserveError; LinkClosed. Cancellation cancels it
        there too.
        """
        if self.closed.is_set():
            raise LinkClosed
        number = next(self._numbers)
        one = self._open[number] = _OpenCall()
        self._put(_CALL, number, [name, arguments], data)
        try:
            await one.ended.wait()
        except trio.Cancelled:
            self._put(_CANCEL, number, None)
            raise
        finally:
            del self._open[number]
        if isinstance(one.outcome, BaseException):
            raise one.outcome
        return one.outcome

    def tell(self, name: str, arguments: Any = None) -> None:
        """As `call`, without its result or errors. Nothing happens once the connection has ended."""
        if not self.closed.is_set():
            self._put(_CALL, 0, [name, arguments])

    # ------------------------------------------------------------------ frames

    def _put(self, kind: int, number: int, value: Any, data: bytes = b"") -> None:
        text = orjson.dumps(value)
        self._to_send.append(_HEAD.pack(kind, number, len(text), len(data)) + text)
        if data:
            self._to_send.append(data)
        self._has_some.set()

    async def _send(self) -> None:
        try:
            while True:
                await self._has_some.wait()
                self._has_some = trio.Event()
                while self._to_send:
                    await self._stream.send_all(self._to_send.popleft())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the receiving task detects it too

    async def _receive(self, nursery: trio.Nursery) -> None:
        received = bytearray()
        while True:
            if len(received) >= _HEAD.size:
                kind, number, text_bytes, data_bytes = _HEAD.unpack_from(received)
                if kind > _CANCEL or text_bytes + data_bytes > _BYTES_MAX:
                    _log.error("a frame between two processes of the server cannot be read; the connection is closed")
                    return
                whole = _HEAD.size + text_bytes + data_bytes
                if len(received) >= whole:
                    text = bytes(received[_HEAD.size : _HEAD.size + text_bytes])
                    data = bytes(received[_HEAD.size + text_bytes : whole])
                    del received[:whole]
                    self._take(nursery, kind, number, orjson.loads(text), data)
                    continue
            try:
                some = await self._stream.receive_some(_RECEIVED_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not some:
                return
            received += some

    def _take(self, nursery: trio.Nursery, kind: int, number: int, value: Any, data: bytes) -> None:
        if kind == _CALL:
            name, arguments = value
            self._begin(nursery, number, name, arguments, data)
        elif kind == _CANCEL:
            if number in self._running:
                self._running[number].cancel()
        elif number in self._open:
            self._open[number].end((value, data) if kind == _RESULT else error_named(*value))

    # ------------------------------------------------------------------ calls of the other end

    def _begin(self, nursery: trio.Nursery, number: int, name: str, arguments: Any, data: bytes) -> None:
        try:
            result = self._handlers[name](arguments, data)
        except Exception as error:
            self._failed(number, name, error)
            return
        if isawaitable(result):
            scope = self._running[number] = trio.CancelScope()
            nursery.start_soon(self._finish, number, name, result, scope)
        else:
            self._put(_RESULT, number, *result)

    async def _finish(self, number: int, name: str, result: Awaitable[Result], scope: trio.CancelScope) -> None:
        try:
            with scope:
                value = await result
                self._put(_RESULT, number, *value)
        except Exception as error:
            self._failed(number, name, error)
        finally:
            if self._running.get(number) is scope:
                del self._running[number]

    def _failed(self, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, FlowserveError):
            _log.error("the call '%s' between two processes of the server failed", name, exc_info=error)
            error = Internal(f"{type(error).__name__}: {error}")
        self._put(_ERROR, number, [type(error).__name__, str(error)])


class _OpenCall:
    def __init__(self) -> None:
        self.ended = trio.Event()
        self.outcome: Result | BaseException = NOTHING

    def end(self, outcome: Result | BaseException) -> None:
        self.outcome = outcome
        self.ended.set()
