"""One client's connection: requests in, the app called, answers out, in order.

Decided here: the conversation. One task and one cancel scope per connection, none per request; raw non-blocking
sockets, on which sending and receiving are tried before they are waited for. A request reaches the app only when its
body is complete, so that what is cut short or malformed is never executed. Anything that takes time is a *phase*
with a deadline: plain fields that the server's sweeper compares with its own idea of now, which costs a request
nothing. What the figures are is decided in limits.py, how a request is received in intake.py, when to drain in
server.py.

The app is called as any ASGI app; the scope holds the connection itself as `flowserve.exchange`, so that a hot route
can take the body and give its answer in one call each, or promise it (exchange.py).

A task that waits for the client's next request is *parked*: the server's watch says when there is something to read,
and a request all of which is there, to a route that answers or promises without waiting, is begun there and
then. The task sleeps on; waking it would cost as much as everything else such a request needs. What is anything else
wakes it, with the bytes.
"""

from __future__ import annotations

import logging
import math
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    cancel_shielded_checkpoint,
    current_task,
    notify_closing,
    wait_readable,
    wait_task_rescheduled,
)

from flowserve.http.answer import refusal
from flowserve.http.head import HEAD_END, Head, Refused
from flowserve.http.intake import Intake
from flowserve.http.line import RECEIVE_BYTES, ClientLeft, Phase
from flowserve.memory.pool import POOLED_BYTES_MIN

if TYPE_CHECKING:
    from flowserve.http.server import Server

_LINGER_S: Final = 2.0
_DELIVERY_LOOK_S: Final = 0.01

_log = logging.getLogger("flowserve.http")


class Connection(Intake):
    """One accepted socket. `run` owns it and closes it."""

    __slots__ = ("_is_late", "client", "local")

    def __init__(self, server: Server, sock: socket.socket, client: tuple[str, int] | None) -> None:
        super().__init__(server, sock)
        self.client = client
        self.local = _endpoint(sock)
        self._is_late = False  # its request is large, and begun after the small ones that came with it

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
            if self._promise is not None:
                promise, self._promise = self._promise, None
                promise.withdraw()
            self._stop_running()
            self.server.forget(self)
            notify_closing(self.sock)
            self.sock.close()

    async def _converse(self) -> None:
        try:
            while True:
                head = await self._next_head()
                if head is not None:
                    self._body = await self._read_body(head)
                    await self._answer(head)
                    if self._keeps_alive:
                        continue
                await self.settle()
                if super().has_input() or self.has_undelivered():
                    await self._linger()
                return
        except Refused as refused:
            await self._refuse(refused)
        except ClientLeft:
            await self.settle()  # it left in the middle of one request, and may still read the answer to the one before
            raise

    # -------------------------------------------------------------------------------------------- the next request

    async def _next_head(self) -> Head | None:
        """The next request's head, or None when there is none to come."""
        data = self._buffer.lstrip(b"\r\n") if self._buffer else b""
        server = self.server
        if self._rest is not None:
            await self.settle()  # a client that asks and asks and never reads waits here
        if data:
            await self._let_others()
        while not data:
            self.phase = Phase.IDLE
            data = await self._first_bytes()
            if not data:
                return None
            data = data.lstrip(b"\r\n")  # some clients send an empty line after a body
        end = data.find(HEAD_END) + 4
        if end < 4:
            return await self._rest_of_head(data)
        self._buffer = data[end:]
        return server.heads.parse(data[:end])

    async def _first_bytes(self) -> bytes:
        """The first bytes of a request; none where none will come, or may come any more."""
        while True:
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                if self.server.is_draining:
                    return b""
            else:
                if data:
                    await self._let_others()
                return data
            await self._park()
            if self._status and not self._keeps_alive:
                return b""  # that was said in the last answer
            if self._buffer:
                data, self._buffer = self._buffer, b""
                return data

    async def _let_others(self) -> None:
        """One turn for everybody else: a client that always has its next request there already, and is answered without
        waiting, would be the only one that is ever served.
        """
        self.enter(Phase.HEAD, self.server.limits.header_timeout_s)  # no longer one that draining closes
        await cancel_shielded_checkpoint()

    def has_input(self) -> bool:
        """Whether there is something of the client's that was not looked at yet."""
        return bool(self._buffer) or super().has_input()

    async def _park(self) -> None:
        """Wait until this task has something to do: bytes in `_buffer`, or in the kernel, or the end of the line. Only
        where nothing was left unread.
        """
        if not self.server.arrivals.are_watched:
            await wait_readable(self.sock)
        else:
            self._parked = current_task()
            await wait_task_rescheduled(self._stop_parking)
        if self._promise is not None:
            await self._kept()

    def _stop_parking(self, _: RaiseCancelT) -> Abort:
        self._parked = None
        return Abort.SUCCEEDED

    def readable(self) -> None:
        """Bytes came, or the end. Called by the server's watch, and harmless at any time."""
        if self._parked is None or self._is_late:
            return  # it is awake, and reads before it parks; or what it sends is read when its turn comes
        if self.phase is Phase.IDLE and self._rest is None:
            try:
                data = self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""  # the task meets it too
            if data and self._begin(data):
                return
            if self._received is None:
                self._buffer = data
        self._unpark()

    def _begin(self, data: bytes) -> bool:
        """Begin the request that `data` is, or that begins so and is there; a large one after all that came with it.
        False where that is the task's to do: with `data`, or, where there is something in `_received`, with that and
        the head in `_buffer`.
        """
        server = self.server
        end = data.find(HEAD_END) + 4
        if end < 4 or server.begin is None:
            return False
        try:
            head = server.heads.parse(data[:end])
        except Refused:
            return False
        size = head.content_length
        if head.is_chunked or not head.keep_alive or size > server.limits.max_body_bytes:
            return False
        if len(data) < RECEIVE_BYTES:
            if size != len(data) - end:
                return False
            self._body = data[end:]
            return self._begin_app(head)
        # What fills the buffer may go on, and nothing would tell of the rest.
        if len(data) >= size or size < POOLED_BYTES_MIN or head.expects_continue:
            return False
        if server.arrivals.late is None:
            return self._begin_large(head, data, end)
        self._is_late = True
        server.arrivals.late.append(partial(self._begin_late, head, data, end))
        return True

    def _begin_late(self, head: Head, data: bytes, end: int) -> None:
        """As `_begin_large`, and what is the task's to do is handed to it."""
        self._is_late = False
        if self._parked is not None and self._begin_large(head, data, end):
            return
        if self._received is None:
            self._buffer = data
        self._unpark()

    def _begin_large(self, head: Head, data: bytes, end: int) -> bool:
        """As `_begin`, where the body, from `end` on, is more than `data`."""
        size, got = head.content_length, len(data) - end
        try:
            target = self._make_room(size, head)
        except Exception:  # here it would end the server
            return False  # the task meets it too, and its connection alone is given up
        target[:got] = data[end:]
        with suppress(OSError):  # there is no more just now, or it is broken, which the task meets too
            got += self.sock.recv_into(target[got:])
        if got == size:
            self.server.arrivals.watch_input(self, is_wanted=True)  # what comes behind it may be there already
            self._body = target
            if self._begin_app(head):
                return True
        self._buffer, self._received = data[:end], (target, got)
        return False

    def _begin_app(self, head: Head) -> bool:
        """Begin with a request whose body is there. False where the app waits for something; then nothing has
        happened.
        """
        server = self.server
        assert server.begin is not None, "or it would not have come so far"
        self._enter_running(head)
        try:
            if server.begin(head.scope, self):
                return True
        except Exception:
            self._log_failure(head)
            if self._head is not None:  # not answered yet
                self.post([refusal(500, "internal server error")])
            server.outbox.flush()
            self.scope.cancel()
            return True
        self._stop_running()
        self.phase = Phase.IDLE
        self._body = None
        self._keeps_alive = True  # as it was: else nobody would be parked
        return False

    # ---------------------------------------------------------------------------------------------------- the app

    async def _answer(self, head: Head) -> None:
        self._enter_running(head)
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
            self._log_failure(head)
            await self._fail()
        finally:
            self._body = None
            self._stop_running()
        if self._keeps_alive and self.phase is Phase.RUNNING:
            self.enter(Phase.IDLE, self.server.limits.idle_timeout_s)

    @staticmethod
    def _log_failure(head: Head) -> None:
        # The path is the client's text: repr, so that it cannot forge a log line.
        _log.exception("%s %r failed", head.scope["method"], head.scope["path"])

    async def _promised(self, head: Head) -> None:
        """Wait until the answer that was promised has been given, and most often until there is something else to do
        too: that is one wait for many requests instead of two for each.
        """
        is_watched = self.server.arrivals.are_watched and head.keep_alive
        if is_watched and not self._buffer and not self._receive_ahead():
            await self._park()
        if self._promise is not None:
            await self._kept()

    def _receive_ahead(self) -> bool:
        """Whether the client has sent something, its end perhaps, before it was answered. Raises `ClientLeft`."""
        try:
            self._buffer = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ClientLeft(*error.args) from None
        return True

    async def _kept(self) -> None:
        """Wait until the answer that was promised has been given. The next request came before, or the client hung up,
        which the server's watch looks into.
        """
        self._task = current_task()
        await wait_task_rescheduled(self._stop_waiting)

    def _stop_waiting(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED

    async def _fail(self) -> None:
        if not self._is_started:
            await self.write([refusal(500, "internal server error")])
        self._keeps_alive = False

    # ---------------------------------------------------------------------------------------------------- ending

    async def _refuse(self, refused: Refused) -> None:
        """Answer and close, in a way that lets a client who is still sending read why."""
        await self.write([refusal(refused.status, str(refused))])
        await self._linger(is_sending=True)

    def end(self) -> None:
        """No request is under way on it, and none may come any more. The task lingers where that is of any use."""
        if self._parked is not None and self.has_undelivered():
            self._unpark()
        else:
            self.scope.cancel()

    async def _linger(self, *, is_sending: bool = False) -> None:
        """Say that no more answers come, and read on for a while: closing with input unread, or input that comes to a
        closed socket, makes the kernel reset the connection, and what it had not delivered yet would be lost. A client
        who is not sending has heard all when that is delivered.
        """
        self.enter(Phase.CLOSING, _LINGER_S)
        self.sock.shutdown(socket.SHUT_WR)
        scratch = bytearray(RECEIVE_BYTES)
        is_sending = is_sending or super().has_input()
        while is_sending or self.has_undelivered():
            with trio.move_on_after(math.inf if is_sending else _DELIVERY_LOOK_S) as look:
                await wait_readable(self.sock)
            if look.cancelled_caught:
                continue
            is_sending = True
            if not self.sock.recv_into(scratch):
                return

    def _part(self) -> None:
        """The scope was cancelled: a deadline, a client who left, or the server's end. Nothing may wait any more."""
        self.server.outbox.flush()
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
