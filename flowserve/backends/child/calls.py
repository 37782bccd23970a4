"""A model in a process of its own that calls other models.

Decided here: calls have a socket of their own, made when the first is made; so models that call nobody pay nothing, and
who waits for an answer does not read what is meant for others. Whichever thread waits reads, for all of them; an
asyncio loop reads while it has something to await. What a call sends is copied into memory of this process's own, what
comes back is copied out of the server's: both are the model's from then on, whatever it does with them. What else a
model asks of the server goes the same way. Its metrics are counted in memory of this process, where the server looks
when somebody wants to know: counting sends nothing.

This file does not know what a model looks like.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np

from flowserve.backends.base import IS_WITHDRAWN, METRIC, NO_FILES, Answer, Call, Cells, ClockNs, answer_or_raise
from flowserve.backends.child.protocol import (
    ANCILLARY_BYTES,
    ASK,
    ATTACH,
    CALL,
    CALLS,
    DROP,
    LEAVE,
    MESSAGE_BYTES_MAX,
    READ,
    SEGMENT,
    TOLD,
    descriptors,
    heard,
    pack,
)
from flowserve.errors import Unavailable, Unsupported
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, Place, aligned
from flowserve.memory.pool import HOST
from flowserve.memory.segment import Segment
from flowserve.values import BY_NUMBER, BY_NUMPY, Array, DType, Request, Response

_GONE = "the server is gone, or going"
_CELL_BYTES = 8


class ChildCaller:
    """What the model of this process calls through, on any of its threads."""

    def __init__(self, model: str, server: socket.socket, clock: ClockNs) -> None:
        self.clock = clock
        self._pid = os.getpid()
        self._model = model
        self._server = server
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()  # around the arena, too
        self._arena = Arena()
        self._told = 0  # how many of its segments the server knows
        self._come_home: deque[Place] = deque()
        self._numbers = count(1)
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._dropped: deque[int] = deque()  # families that the server is not told of yet
        self._segments: dict[int, int] = {}  # descriptors of the server's memory, by its numbers
        self._reading = threading.Lock()
        self._arrived = threading.Condition()
        self._awaited: dict[asyncio.AbstractEventLoop, int] = {}

    def begin(self, call: Call, answered: Callable[[Answer], None]) -> Callable[[], None]:
        number = next(self._numbers)
        head = (CALL, number, int(call.is_stream))
        self._begin(head, [*call.request.inputs.values()], _about(call), f"a call of model '{call.model}'", answered)
        return partial(self._leave, number)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Until it is, whichever thread waits reads; the others are woken by each message."""
        while not is_there():
            if self._reading.acquire(blocking=False):
                try:
                    if not is_there():
                        self._receive()
                finally:
                    self._stop_reading()
            else:
                with self._arrived:
                    if self._reading.locked() and not is_there():
                        self._arrived.wait()

    @contextmanager
    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        sock = self._socket
        if sock is None:  # the first call could not be sent, and has its answer
            yield
            return
        if not self._awaited.get(loop):
            loop.add_reader(sock.fileno(), self._receive_what_is_there)
        self._awaited[loop] = self._awaited.get(loop, 0) + 1
        try:
            yield
        finally:
            self._awaited[loop] -= 1
            if not self._awaited[loop]:
                del self._awaited[loop]
                loop.remove_reader(sock.fileno())

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        contents = [np.frombuffer(content, np.uint8) for content in files.values()]
        return self._ask([what, [*arguments], [*files]], contents)[0]

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        about = [METRIC, [family, dict(labels), buckets], ["cells"]]
        segment, start = self._ask(about, [np.zeros(count)])[1]
        return memoryview(segment.map)[start : start + count * _CELL_BYTES].cast("d")

    def drop(self, family: int) -> None:
        if os.getpid() == self._pid:  # a process that the model has forked lets go of copies only
            self._dropped.append(family)
            self._tell_dropped()

    def is_withdrawn(self, member: int) -> bool:
        return bool(self.ask(IS_WITHDRAWN, (member,)))

    def close(self) -> None:
        """Nothing to do: what the process has ends with it."""

    # ------------------------------------------------------------------ to the server

    def _ask(self, about: list[Any], arrays: Sequence[Array]) -> tuple[Any, tuple[Segment, int]]:
        """What is answered, and where `arrays` lie. Raises what is answered."""
        answers: SimpleQueue[Any] = SimpleQueue()
        where = self._begin((ASK, next(self._numbers), 0), arrays, about, "what was asked", answers.put)
        self.wait(lambda: not answers.empty())
        answer = answer_or_raise(answers.get())
        assert where is not None  # or the server were gone
        return answer, where

    def _begin(
        self,
        head: tuple[int, int, int],
        arrays: Sequence[Array],
        about: list[Any],
        what: str,
        answered: Callable[[Any], None],
    ) -> tuple[Segment, int] | None:
        """Send it; returns where the arrays lie. None: the server is gone, and that was answered."""
        try:
            with self._sending:
                return self._send(head, [_flat(array) for array in arrays], about, what, answered)
        except OSError:
            self._waiting.pop(head[1], None)
            answered(Unavailable(_GONE))
            return None

    def _send(
        self,
        head: tuple[int, int, int],
        arrays: Sequence[tuple[Array, Array]],
        about: list[Any],
        what: str,
        answered: Callable[[Any], None],
    ) -> tuple[Segment, int]:
        kind, number, flag = head
        sock = self._socket
        if sock is None:
            sock = self._socket = self._connect()
        self._tell_dropped()
        while self._come_home:
            self._arena.give_back(self._come_home.popleft())
        starts, size = [], 0
        for _, flat in arrays:
            starts.append(aligned(size))
            size = starts[-1] + flat.nbytes
        segment, offset = self._arena.take(size)
        words = [number, flag, segment.number, offset, size, len(arrays)]
        for (array, flat), start in zip(arrays, starts, strict=True):
            words += (BY_NUMPY[array.dtype].number, start, flat.nbytes, array.ndim, *array.shape)
            segment.memory[offset + start : offset + start + flat.nbytes] = flat
        message = pack(kind, words, about)
        if len(message) > MESSAGE_BYTES_MAX:
            self._arena.give_back((segment.number, offset))
            raise Unsupported(
                f"{what} is too long: its names, id and parameters have {len(message)} bytes, "
                f"and {MESSAGE_BYTES_MAX} is the most"
            )
        self._waiting[number] = answered
        for new in self._arena.segments[self._told :]:
            socket.send_fds(sock, [pack(SEGMENT, (new.number,))], [new.fd])
            self._told += 1
        sock.send(message)
        return segment, offset

    def _tell_dropped(self) -> None:
        """In order, without waiting and without a lock: this may be within the garbage collector."""
        sock = self._socket
        while sock is not None and self._dropped:
            family = self._dropped.popleft()
            try:
                sock.send(pack(DROP, (family,)), socket.MSG_DONTWAIT)
            except OSError:
                self._dropped.append(family)  # the server does not read just now, or never again
                return

    def _connect(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            socket.send_fds(self._server, [pack(CALLS, ())], [there.fileno()])
        return here

    def _leave(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._say(pack(LEAVE, (number,)))

    def _say(self, message: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.send(message)
        except OSError:
            return  # whoever reads finds out

    # ------------------------------------------------------------------ from the server

    def _receive_what_is_there(self) -> None:
        while self._reading.acquire(blocking=False):
            try:
                if not self._receive(socket.MSG_DONTWAIT):
                    return
            finally:
                self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading.release()
        with self._arrived:
            self._arrived.notify_all()

    def _receive(self, flags: int = 0) -> bool:
        """Take one message. False: there is none, or never again."""
        assert self._socket is not None
        try:
            packed, ancillary, _, _ = self._socket.recvmsg(
                MESSAGE_BYTES_MAX, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC | flags
            )
        except BlockingIOError:
            return False
        except OSError:
            packed = b""
        if not packed:
            waiting, self._waiting = self._waiting, {}
            for answered in waiting.values():
                answered(Unavailable(_GONE))
            return False
        message: tuple[Any, ...] = marshal.loads(packed)
        if message[0] == ATTACH:
            (self._segments[message[1]],) = descriptors(ancillary)
        elif message[0] == TOLD:
            self._take_told(*message[1:])
        else:
            self._take(*message[1:])
        return True

    def _take(
        self, number: int, is_last: bool, come_home: list[Place], token: int, error: Any, columns: list[Any] | None
    ) -> None:
        self._come_home.extend(come_home)
        answered = self._waiting.pop(number, None) if is_last else self._waiting.get(number)
        answer: Answer = None
        if error is not None:
            answer = heard(error)
        elif columns is not None:
            answer = Response("", 0, {name: self._array(name, *rest) for name, *rest in columns})
        if token:
            self._say(pack(READ, (token,)))
        if answered is not None:  # it may have lost interest
            answered(answer)

    def _take_told(self, number: int, come_home: list[Place], error: Any, answer: Any) -> None:
        self._come_home.extend(come_home)
        self._waiting.pop(number)(answer if error is None else heard(error))

    def _array(self, name: str, dtype_number: int, shape: tuple[int, ...], where: Any) -> Array:
        dtype = BY_NUMBER[dtype_number]
        if isinstance(where, bytes):
            flat = np.frombuffer(bytearray(where), np.uint8)
        else:
            segment, offset, nbytes = where
            flat = HOST.take(nbytes)
            _read(self._segments[segment], flat, offset)
        if dtype is DType.BYTES:
            return bytes_codec.decode(flat.data, int(np.prod(shape)), name=name, model=self._model).reshape(shape)
        return flat.view(dtype.numpy).reshape(shape)


def _flat(array: Array) -> tuple[Array, Array]:
    """An array and its bytes."""
    if array.dtype.hasobject:
        return array, np.frombuffer(bytes_codec.encode(array), np.uint8)
    return array, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read(fd: int, target: Array, offset: int) -> None:
    """Fill it. One read takes at most two gigabytes."""
    done = 0
    while done < len(target):
        done += os.preadv(fd, [target[done:].data], offset + done)


def _about(call: Call) -> list[Any]:
    request: Request = call.request
    return [
        call.model,
        call.version,
        [*request.inputs],
        None if request.outputs is None else [*request.outputs],
        request.id,
        request.priority,
        request.timeout_us,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        dict(request.parameters),
    ]
