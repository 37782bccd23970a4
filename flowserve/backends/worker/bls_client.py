"""The worker's side of calls to the server (BLS): calls of other models, requests for models, and metrics.

Decides that calls have a socket of their own, created with the first call: a model that makes no calls costs nothing,
and a thread that waits for a response does not read the messages of batches. Any waiting thread reads for all of them;
an asyncio loop reads while it awaits something. The arrays of a call are copied into shared memory of this process,
those of its responses out of the server's: the model owns both from then on. A model's metrics are counted in shared
memory of this process, which the server reads when metrics are requested: counting sends no message.

A process that the model forks, such as one of a `multiprocessing.Pool`, has a socket of its own too, with its own
numbers of calls and its own memory: so a response goes to the process that asked, and a process that ends withdraws its
own calls only. It inherits no call that is in progress.

It does not know the model. The server's side is in runtime/.

Callers: main.py; the python backend, through the `BlsClient` interface (base.py).
"""

from __future__ import annotations

import asyncio
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
from weakref import ref

import numpy as np

from flowserve.backends.base import (
    IS_WITHDRAWN,
    METRIC,
    NO_FILES,
    OPEN_FAMILY,
    Answer,
    BlsCall,
    Cells,
    ClockNs,
    answer_or_raise,
)
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    MESSAGE_BYTES_MAX,
    decode_error,
    pack,
    request_facts,
)
from flowserve.errors import Unavailable, Unsupported
from flowserve.memory import raw
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.pool import HOST
from flowserve.memory.segment import Segment
from flowserve.values import BY_NUMBER, BY_NUMPY, Array, DType, Request, Response

_GONE = "the server is gone, or going"
_CELL_BYTES = 8


class WorkerBlsClient:
    """The `BlsClient` of the model of this process, on any of its threads, and of each process that the model forks."""

    def __init__(self, model: str, server: socket.socket, clock: ClockNs, cut: Callable[[], int]) -> None:
        """`cut`: called before each call; the batch that returns to the server because of it, 0 for none."""
        self.clock = clock
        self._model = model
        self._cut = cut
        self._server = server.dup()  # forked processes have no other connection (forkserver.py)
        self._is_fork = False
        self._begin_process()
        this = ref(self)

        def forked() -> None:
            client = this()
            if client is not None:
                client._forked()

        os.register_at_fork(after_in_child=forked)

    def _begin_process(self) -> None:
        """Set what belongs to one process only."""
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()  # also guards the arena
        self._arena = Arena()
        self._announced = 0  # the number of segments that were announced to the server
        self._free: deque[BlockAddress] = deque()
        self._numbers = count(1)
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._dropped: deque[int] = deque()  # metric families whose end is not reported to the server yet
        self._segments: dict[int, int] = {}  # file descriptors of the server's segments, by their numbers
        self._reading = threading.Lock()
        self._arrived = threading.Condition()
        self._awaited: dict[asyncio.AbstractEventLoop, int] = {}
        self._families: set[int] = set()  # the metric families that this process has opened

    def _forked(self) -> None:
        """This process was forked by the model. Locks may be held by threads that do not exist here."""
        for fd in self._segments.values():
            os.close(fd)
        self._is_fork = True
        self._cut = _no_batch  # the server ends the route of the batch that runs
        self._begin_process()

    def begin(self, call: BlsCall, answered: Callable[[Answer], None]) -> Callable[[bool], None]:
        number = next(self._numbers)
        head = (messages.CALL, number, int(call.is_stream), self._cut())
        self._begin(head, [*call.request.inputs.values()], _about(call), f"a call of model '{call.model}'", answered)
        return partial(self._leave, self._pid, number)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """One waiting thread reads the socket; each message wakes the others."""
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
        if sock is None:  # the first call could not be sent, and has its error already
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
        answer = self._ask([what, [*arguments], [*files]], contents)[0]
        if what == OPEN_FAMILY:
            self._families.add(answer)
        return answer

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        about = [METRIC, [family, dict(labels), buckets], ["cells"]]
        segment, start = self._ask(about, [np.zeros(count)])[1]
        return memoryview(segment.map)[start : start + count * _CELL_BYTES].cast("d")

    def drop(self, family: int) -> None:
        if family in self._families:  # else a process forked by the model frees a copy
            self._families.discard(family)
            self._dropped.append(family)
            self._send_dropped()

    def is_withdrawn(self, member: int) -> bool:
        return bool(self.ask(IS_WITHDRAWN, (member,)))

    def close(self) -> None:
        """Forked processes can no longer begin to call; this process ends."""
        self._server.close()

    # ------------------------------------------------------------------ to the server

    def _ask(self, about: list[Any], arrays: Sequence[Array]) -> tuple[Any, tuple[Segment, int]]:
        """The server's answer, and the position of `arrays` in shared memory. Raises if the answer is an error."""
        answers: SimpleQueue[Any] = SimpleQueue()
        where = self._begin(
            (messages.SERVER_REQUEST, next(self._numbers), 0, 0), arrays, about, "what was asked", answers.put
        )
        self.wait(lambda: not answers.empty())
        answer = answer_or_raise(answers.get())
        assert where is not None  # else the answer would have been the error that the server is gone
        return answer, where

    def _begin(
        self,
        head: tuple[int, int, int, int],
        arrays: Sequence[Array],
        about: list[Any],
        what: str,
        answered: Callable[[Any], None],
    ) -> tuple[Segment, int] | None:
        """Send a call. Returns the position of its arrays, or None if the server is gone; then it has its error."""
        kind, number, flag, batch = head
        flats = [raw.flat_bytes(array) for array in arrays]
        try:
            with self._sending:
                if self._socket is None:
                    self._socket = self._connect()
                self._send_dropped()
                while self._free:
                    self._arena.give_back((self._free.popleft(),))
                starts, size = [], 0
                for flat in flats:
                    starts.append(aligned(size))
                    size = starts[-1] + flat.nbytes
                segment, offset = self._arena.take(size)
                words = [number, flag, batch, segment.number, offset, size, len(arrays)]
                for array, flat, start in zip(arrays, flats, starts, strict=True):
                    words += (BY_NUMPY[array.dtype].number, start, flat.nbytes, array.ndim, *array.shape)
                    segment.memory[offset + start : offset + start + flat.nbytes] = flat
                message = pack(kind, words, about)
                if len(message) > MESSAGE_BYTES_MAX:
                    self._arena.give_back(((segment.number, offset),))
                    raise Unsupported(
                        f"{what} is too long: its names, id and parameters have {len(message)} bytes, "
                        f"and {MESSAGE_BYTES_MAX} is the most"
                    )
                self._waiting[number] = answered
                for new in self._arena.segments[self._announced :]:
                    socket.send_fds(self._socket, [pack(messages.SEGMENT, (new.number,))], [new.fd])
                    self._announced += 1
                self._socket.send(message)
                return segment, offset
        except OSError:
            self._waiting.pop(number, None)
            answered(Unavailable(_GONE))
            return None

    def _send_dropped(self) -> None:
        """In order, without waiting and without a lock, since the garbage collector may call this."""
        sock = self._socket
        while sock is not None and self._dropped:
            family = self._dropped.popleft()
            try:
                sock.send(pack(messages.DROP, (family,)), socket.MSG_DONTWAIT)
            except OSError:
                self._dropped.append(family)  # the socket is full, or the server is gone
                return

    def _connect(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            socket.send_fds(self._server, [pack(messages.CALLS, (int(self._is_fork),))], [there.fileno()])
        return here

    def _leave(self, pid: int, number: int, is_answered: bool) -> None:
        """Withdraw a call of process `pid`. `is_answered`: the server sends a last result."""
        if pid != self._pid:  # a process forked by the model has a copy of the iterator
            return
        if (number in self._waiting) if is_answered else (self._waiting.pop(number, None) is not None):
            self._say(pack(messages.LEAVE, (number, int(is_answered))))

    def _say(self, message: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.send(message)
        except OSError:
            return  # reading the socket reports that the server is gone

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
        """Handle one message. False if there is none, or the server is gone."""
        assert self._socket is not None
        try:
            message = messages.receive(self._socket, flags)
        except BlockingIOError:
            return False
        if message is None:
            waiting, self._waiting = self._waiting, {}
            for answered in waiting.values():
                answered(Unavailable(_GONE))
            return False
        kind, words, text, fds = message
        if kind == messages.ATTACH:
            (self._segments[words[1]],) = fds
        elif kind == messages.SERVER_REPLY:
            number, free, error, answer = messages.decode_server_reply(words, text)
            self._free.extend(free)
            self._waiting.pop(number)(answer if error is None else decode_error(error))
        else:
            self._take(*messages.decode_result(words, text))
        return True

    def _take(
        self,
        number: int,
        is_last: bool,
        token: int,
        free: Sequence[BlockAddress],
        error: Any,
        columns: Sequence[messages.ResultColumn],
        parameters: Mapping[str, Any],
    ) -> None:
        self._free.extend(free)
        answered = self._waiting.pop(number, None) if is_last else self._waiting.get(number)
        answer: Answer
        if error is not None:
            answer = decode_error(error)
        else:
            arrays = {column[0]: self._array(*column) for column in columns}
            answer = Response("", 0, arrays, "", parameters, is_last)
        if token:
            self._say(pack(messages.READ, (token,)))
        if answered is not None:  # None: the call was withdrawn
            answered(answer)

    def _array(self, name: str, dtype_number: int, shape: Sequence[int], where: bytes | tuple[int, int, int]) -> Array:
        dtype = BY_NUMBER[dtype_number]
        if isinstance(where, bytes):
            flat = np.frombuffer(bytearray(where), np.uint8)
        else:
            segment, offset, nbytes = where
            flat = HOST.take(nbytes)
            _read(self._segments[segment], flat, offset)
        if dtype is DType.BYTES:
            return raw.decode_bytes(flat.data, int(np.prod(shape)), name=name, model=self._model).reshape(shape)
        return flat.view(dtype.numpy).reshape(shape)


def _no_batch() -> int:
    return 0


def _read(fd: int, target: Array, offset: int) -> None:
    """Fill the array. One read takes at most two gigabytes."""
    done = 0
    while done < len(target):
        done += os.preadv(fd, [target[done:].data], offset + done)


def _about(call: BlsCall) -> list[Any]:
    request: Request = call.request
    *facts, parameters = request_facts(request)
    return [
        call.model,
        call.version,
        [*request.inputs],
        None if request.outputs is None else [*request.outputs],
        *facts,
        dict(parameters),
    ]
