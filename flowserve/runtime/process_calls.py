"""The calls that a model in a process makes of other models, as they come over the socket that it made for them.

Decided here: nothing that a process says of its calls is believed before it is checked, as with its answers; where the
tensors of both directions lie (what is called reads them where the caller wrote them; answers are copied to where only
the caller's model reads); what becomes of calls whose process has ended. What else it asks for comes the same way
(asks.py); the metrics of its model end with it.
"""

from __future__ import annotations

import json
import marshal
import operator
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import trio

from flowserve.backends.base import IS_WITHDRAWN, METRIC, METRIC_VALUE, OPEN_FAMILY, Answer, Call
from flowserve.backends.child.protocol import (
    ANCILLARY_BYTES,
    ASK,
    ATTACH,
    CALL,
    DROP,
    LEAVE,
    MESSAGE_BYTES_MAX,
    READ,
    RESULT,
    SEGMENT,
    TOLD,
    descriptors,
    said,
    unpack,
)
from flowserve.errors import FlowserveError, Internal
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, Place, aligned
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.runtime.calls import Calls, Pending, is_withdrawn
from flowserve.runtime.process_outputs import NO_DESCRIPTOR, Garbled, OutputReader
from flowserve.runtime.readiness import Readiness
from flowserve.scheduling.batch import Batch
from flowserve.values import BY_NUMBER, BY_NUMPY, Array, Request, TensorSpec

# Answers of so many bytes travel in the message.
INLINE_BYTES_MAX: Final = 8 * 1024
_FACTS: Final[tuple[Any, ...]] = (str, str, list, (list, type(None)), str, int, int, (int, str), bool, bool, dict)


class ProcessCalls:
    """The calls of one process. On the loop."""

    def __init__(
        self,
        fd: int,
        model: str,
        arena: Arena,
        calls: Calls,
        readiness: Readiness,
        running: Callable[[], Batch | None],
        loads: Callable[[], str],
        wrong: Callable[[str], None],
    ) -> None:
        """Takes `fd`. `arena`: memory that the model's process may read. `loads` names the model while it is loaded
        there. `wrong` ends a process that says what cannot be. Raises Garbled where `fd` is none of its sockets.
        """
        self._socket = _socket(fd)
        self._arena = arena
        self._calls = calls
        self._readiness = readiness
        self._running = running
        self._loads = loads
        self._wrong = wrong
        self._reader = OutputReader(model, (), batches=False)
        self._segments: dict[int, Segment] = {}
        self._come_home: deque[Place] = deque()
        self._pending: dict[int, Pending] = {}
        self._families: set[int] = set()  # of metrics, those that are its model's
        self.come_in_batches = False  # whether it has called, or asked, in the middle of one
        self._told: set[int] = set()
        self._lent: dict[int, Lease] = {}  # answers that are not read yet, by their token
        self._token = 0
        self._unsent: deque[tuple[bytes, Segment | None]] = deque()
        self._is_closed = False
        readiness.watch(self._socket.fileno(), self._read, self._broke)

    def close(self) -> None:
        """Its process is no more, or no more talked to: nobody waits for its calls."""
        if self._is_closed:
            return
        self._is_closed = True
        self._readiness.forget(self._socket.fileno())
        self._socket.close()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            self._calls.leave(one)
        for family in self._families:
            self._calls.asks.metrics.drop(family)
        self._lent.clear()
        self._segments.clear()
        self._unsent.clear()

    # ------------------------------------------------------------------ from the process

    def _read(self) -> None:
        try:
            while not self._is_closed and self._read_one():
                pass
        except EOFError:
            self.close()
        except Garbled as error:
            self.close()
            self._wrong(str(error))

    def _broke(self, error: Exception) -> None:
        """A mistake of ours: nobody would answer its calls any more."""
        self.close()
        self._wrong(f"{type(error).__name__}: {error}")

    def _read_one(self) -> bool:
        try:
            message, ancillary, flags, _ = self._socket.recvmsg(
                MESSAGE_BYTES_MAX, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionError:
            raise EOFError from None
        if not message:
            raise EOFError
        fds = descriptors(ancillary) if ancillary else []
        try:
            if flags & socket.MSG_CTRUNC and not fds:
                raise Garbled(NO_DESCRIPTOR)
            self._take(message, fds)
        except (struct.error, ValueError, LookupError, TypeError, RecursionError, FlowserveError) as error:
            raise Garbled(f"{type(error).__name__}: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _take(self, message: bytes, fds: list[int]) -> None:
        kind, words, text = unpack(message)
        if kind in (CALL, ASK) and self._running() is not None:
            self.come_in_batches = True
        if kind == CALL:
            self._begin(words, json.loads(text))
        elif kind == ASK:
            self._ask(words, *json.loads(text))
        elif kind == READ:
            del self._lent[words[1]]
        elif kind == DROP:
            self._families.remove(words[1])
            self._calls.asks.metrics.drop(words[1])
        elif kind == LEAVE:
            pending = self._pending.pop(words[1], None)  # its answer may be on the way
            if pending is not None:
                self._calls.leave(pending)
        elif kind == SEGMENT:
            self._segments[words[1]] = Segment.read_shared(fds.pop())
        else:
            raise Garbled(f"a message of kind {kind} about calls")

    def _begin(self, words: Sequence[int], facts: list[Any]) -> None:
        number, is_stream, segment, offset, nbytes, count = words[1:7]
        if number in self._pending:
            raise Garbled(f"two calls with number {number}")
        if len(facts) != len(_FACTS) or not all(isinstance(*pair) for pair in zip(facts, _FACTS, strict=True)):
            raise Garbled("a call whose facts are none")
        model, version, names, outputs, *rest = facts
        if len(names) != count or not all(isinstance(name, str) for name in (*names, *(outputs or ()))):
            raise Garbled("a call whose tensors have no names")
        if not all(isinstance(value, (str, int, float)) for value in facts[-1].values()):
            raise Garbled("a call whose parameters are none")
        inputs = self._inputs(words, names, self._block(segment, offset, nbytes))
        request = Request(inputs, None if outputs is None else tuple(outputs), *rest)
        pending = Pending(
            self._running(), Call(model, version, request, bool(is_stream)), partial(self._answered, number)
        )
        self._pending[number] = pending
        self._calls.begin(pending)

    def _block(self, number: int, offset: int, nbytes: int) -> Array:
        segment = self._segments[number]
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self._come_home.append, (number, offset)).view()

    def _inputs(self, words: Sequence[int], names: Sequence[str], memory: Array) -> dict[str, Array]:
        inputs = {}
        at = 7
        for name in names:
            number, offset, nbytes, dimensions = words[at : at + 4]
            shape = tuple(words[at + 4 : at + 4 + dimensions])
            at += 4 + dimensions
            spec = TensorSpec(name, BY_NUMBER[number], (-1,) * len(shape))
            inputs[name] = self._reader.array(spec, offset, nbytes, shape, memory)
        return inputs

    def _ask(self, words: Sequence[int], what: str, arguments: list[Any], names: list[str]) -> None:
        number, _, segment, offset, nbytes, count = words[1:7]
        if len(names) != count or not all(isinstance(name, str) for name in (what, *names)):
            raise Garbled("what is asked has no name")
        if what in (METRIC, METRIC_VALUE) and arguments[0] not in self._families:
            raise Garbled("a metric of a family that is not its own")
        arrays = self._inputs(words, names, self._block(segment, offset, nbytes))
        if what == IS_WITHDRAWN:
            self._answer(number, what, is_withdrawn(self._running(), operator.index(arguments[0])))
            return
        if what == METRIC:
            (cells,) = arrays.values()
            if cells.ndim != 1 or cells.dtype != np.float64:
                raise Garbled("a metric that is not counted in numbers")
            answer: FlowserveError | None = None
            try:
                self._calls.asks.show(arguments, cells)
            except FlowserveError as error:
                answer = error.with_traceback(None)
            self._answer(number, what, answer)
            return
        files = {name: array.tobytes() for name, array in arrays.items()}
        self._calls.asks.begin(what, arguments, files, self._loads(), partial(self._answer, number, what))

    # ------------------------------------------------------------------ to the process

    def _answer(self, number: int, what: str, answer: Any) -> None:
        if what == OPEN_FAMILY and isinstance(answer, int):
            self._families.add(answer)
        error = said(answer) if isinstance(answer, FlowserveError) else None
        home = [*self._come_home]
        self._come_home.clear()
        self._say(marshal.dumps((TOLD, number, home, error, None if error else answer)))

    def _answered(self, number: int, answer: Answer) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        is_last = answer is None or isinstance(answer, FlowserveError) or not pending.call.is_stream
        home = [*self._come_home]
        self._come_home.clear()
        token, columns, error = 0, None, None
        if isinstance(answer, FlowserveError):
            error = said(answer)
        elif answer is not None:
            try:
                token, columns = self._columns(answer.outputs)
            except MemoryError as none:  # in the middle of the engine's work, which goes on for everybody else
                error = said(Internal(f"the answer of model '{pending.call.model}' cannot be handed on: {none}"))
        message = marshal.dumps((RESULT, number, is_last, home, token, error, columns))
        if len(message) > MESSAGE_BYTES_MAX:
            self._lent.pop(token, None)
            error = said(Internal(f"the answer of model '{pending.call.model}' has too many outputs for a call"))
            message = marshal.dumps((RESULT, number, is_last, home, 0, error, None))
        if is_last:
            del self._pending[number]
        self._say(message)

    def _columns(self, outputs: Mapping[str, Array]) -> tuple[int, list[Any]]:
        """The outputs as a message has them. What is large lies where the process reads it, until it has said so of the
        token that comes with it.
        """
        flat = [_flat(array) for array in outputs.values()]
        starts, size = [], 0
        for one in flat:
            starts.append(aligned(size))
            size = starts[-1] + one.nbytes
        token = 0
        where: list[Any] = [one.tobytes() for one in flat] if size <= INLINE_BYTES_MAX else []
        if not where:
            lease = self._arena.lease(size)
            segment = lease.segment
            if segment.number not in self._told:
                self._say(marshal.dumps((ATTACH, segment.number)), segment)
                self._told.add(segment.number)
            for one, start in zip(flat, starts, strict=True):
                segment.memory[lease.offset + start : lease.offset + start + one.nbytes] = one
                where.append((segment.number, lease.offset + start, one.nbytes))
            self._token = token = self._token + 1
            self._lent[token] = lease
        numbers = [BY_NUMPY[array.dtype].number for array in outputs.values()]
        shapes = [array.shape for array in outputs.values()]
        return token, [*zip(outputs, numbers, shapes, where, strict=True)]

    def _say(self, message: bytes, segment: Segment | None = None) -> None:
        """Send, or have it wait until the process reads: it may be computing, and many answers may come meanwhile.
        Raises MemoryError where there is no descriptor to send.
        """
        if self._is_closed:
            return
        if self._unsent:
            self._unsent.append((message, segment))
            return
        try:
            self._send(message, segment)
        except BlockingIOError:
            self._unsent.append((message, segment))
            trio.lowlevel.spawn_system_task(self._send_unsent, name="answers that wait for a process")
        except OSError:
            self.close()

    def _send(self, message: bytes, segment: Segment | None) -> None:
        if segment is None:
            self._socket.send(message)
            return
        try:
            fd = segment.open_for_reading()
        except OSError as error:  # which is nothing about the socket
            raise MemoryError(f"shared memory cannot be shown: {error.strerror}") from error
        try:
            socket.send_fds(self._socket, [message], [fd])
        finally:
            os.close(fd)

    async def _send_unsent(self) -> None:
        try:
            while self._unsent:
                await trio.lowlevel.wait_writable(self._socket)
                with suppress(BlockingIOError):
                    while self._unsent:
                        self._send(*self._unsent[0])
                        self._unsent.popleft()
        except (OSError, MemoryError, trio.ClosedResourceError):
            self.close()


def _socket(fd: int) -> socket.socket:
    """One end of what the process says it made for its calls."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise Garbled(f"a socket for calls that is none: {error.strerror}") from None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        sock.close()
        raise Garbled("a socket for calls of another kind")
    sock.setblocking(False)
    return sock


def _flat(array: Array) -> Array:
    if array.dtype.hasobject:
        return np.frombuffer(bytes_codec.encode(array), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
