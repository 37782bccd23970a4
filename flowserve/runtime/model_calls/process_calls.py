"""BLS calls of a model in a worker process, received on the socket that the process created for them.

Decides that everything the process sends is checked before use; that a process which the model has forked is served on
a socket of its own, as the worker process is; where the tensors of both directions are (the called model reads them
where the caller wrote them; responses are copied to memory that only the caller's process reads); and that the calls
and metrics of a process end with it. Its other requests (server_requests.py) use the same socket.
"""

from __future__ import annotations

import json
import operator
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from flowserve.backends.base import IS_WITHDRAWN, METRIC, METRIC_VALUE, OPEN_FAMILY, Answer, BlsCall
from flowserve.backends.worker.protocol import (
    ANCILLARY_BYTES,
    ATTACH,
    CALL,
    CLOSE_ON_EXEC,
    DROP,
    LEAVE,
    MESSAGE_BYTES_MAX,
    NO_PARAMETERS,
    READ,
    SEGMENT,
    SERVER_REQUEST,
    Garbled,
    ResultColumn,
    descriptors,
    encode_error,
    encode_result,
    encode_server_reply,
    pack,
    unpack,
)
from flowserve.errors import FlowserveError, Internal
from flowserve.memory import raw
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.segment import PAGE, Lease, Segment, new_number
from flowserve.runtime.ipc.channel import Outbox, Readiness, descriptor
from flowserve.runtime.ipc.tensors import NO_DESCRIPTOR, OutputReader
from flowserve.runtime.model_calls.calls import Calls, PendingCall, is_withdrawn
from flowserve.scheduling.batch import Batch
from flowserve.values import BY_NUMBER, BY_NUMPY, Array, Request, Response, TensorSpec

# Messages that are read at once; the rest of the server runs before the next.
_PORTION: Final = 32
# Blocks that one message gives back: each call takes one, so that their number does not grow.
_BLOCKS_MAX: Final = 64
# Responses up to this size are sent in the message.
INLINE_BYTES_MAX: Final = 8 * 1024
_FACTS: Final[tuple[Any, ...]] = (str, str, list, (list, type(None)), str, int, int, (int, str), bool, bool, dict)


class CallingWorker(Protocol):
    """The worker whose model makes the calls. `running`: the batch it executes; `loads`: the model's name while it is
    opened, else "".
    """

    @property
    def running(self) -> Batch | None: ...
    @property
    def loads(self) -> str: ...
    def end_route(self, number: int | None) -> None:
        """A call was made during this batch, None: the one that it executes. It therefore leaves its route."""

    def calls_ended(self, calls: ProcessCalls) -> None:
        """These calls are closed."""

    def kill_for(self, what: str) -> None:
        """The process sent an invalid message, and is killed."""


class ProcessCalls:
    """The calls of one process: a worker process, or (`is_fork`) one that its model has forked. On the event loop."""

    def __init__(
        self,
        fd: int,
        model: str,
        arena: Arena,
        calls: Calls,
        readiness: Readiness,
        worker: CallingWorker,
        *,
        families: set[int],
        is_fork: bool,
    ) -> None:
        """Owns `fd`. `arena`: memory that the model's process may read. `families`: the metric families of the worker's
        model, including those of its other processes. Raises Garbled if `fd` is no socket of the expected type.
        """
        self._socket = _socket(fd)
        self._outbox = Outbox(self._socket, readiness)
        self._arena = arena
        self._calls = calls
        self._readiness = readiness
        self._worker = worker
        self._reader = OutputReader(model, (), batches=False)
        self._segments: dict[int, Segment] = {}
        self._come_home: deque[BlockAddress] = deque()
        self._pending: dict[int, PendingCall] = {}
        self.is_fork = is_fork
        self._families = families
        self._opened: set[int] = set()  # the families that end with this process
        self._shown: set[int] = set()  # segments that the process has attached
        self._lent: dict[int, Lease] = {}  # responses that are not read yet, by token
        self._token = 0
        self._is_closed = False
        readiness.watch(self._socket.fileno(), self._read, self._broke)

    def close(self) -> None:
        """Withdraw its calls: the process has ended or its socket is closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._readiness.forget(self._socket.fileno())
        self._outbox.clear()
        self._socket.close()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            self._calls.leave(one)
        for family in [*self._opened]:
            self._drop(family)
        self._lent.clear()
        self._segments.clear()
        self._worker.calls_ended(self)

    # ------------------------------------------------------------------ from the process

    def _read(self) -> None:
        try:
            for _ in range(_PORTION):
                if self._is_closed:
                    return
                try:
                    message, ancillary, flags, _ = self._socket.recvmsg(
                        MESSAGE_BYTES_MAX, ANCILLARY_BYTES, CLOSE_ON_EXEC
                    )
                except BlockingIOError:
                    return
                except ConnectionError:
                    message = b""
                if not message:
                    self.close()
                    return
                fds = descriptors(ancillary) if ancillary else []
                try:
                    if flags & socket.MSG_CTRUNC and not fds:
                        raise Garbled(NO_DESCRIPTOR)
                    self._take(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except Garbled as error:
            self.close()
            self._worker.kill_for(str(error))
        except (struct.error, ValueError, LookupError, TypeError, RecursionError, FlowserveError) as error:
            self._broke(error)

    def _broke(self, error: Exception) -> None:
        """An invalid message, or a fault of the server while reading: its calls would never be answered, so the process
        is killed.
        """
        self.close()
        self._worker.kill_for(f"{type(error).__name__}: {error}")

    def _take(self, message: bytes, fds: list[int]) -> None:
        kind, words, text = unpack(message)
        if kind == CALL:
            self._begin_call(words, json.loads(text))
        elif kind == SERVER_REQUEST:
            self._begin_server_request(words, *json.loads(text))
        elif kind == READ:
            del self._lent[words[1]]
        elif kind == DROP:
            self._drop(words[1])
        elif kind == LEAVE:
            pending = self._pending.get(words[1])
            if pending is None:
                return  # its last response was sent already
            if words[2]:
                self._calls.cancel(pending)
            else:
                del self._pending[words[1]]
                self._calls.leave(pending)
        elif kind == SEGMENT:
            # Processes that a model has forked use the same numbers.
            self._segments[words[1]] = Segment.read_shared(fds.pop(), new_number())
        else:
            raise Garbled(f"a message of kind {kind} about calls")

    def _drop(self, family: int) -> None:
        self._opened.remove(family)
        self._families.remove(family)
        self._calls.server_requests.metrics.drop(family)

    def _begin_call(self, words: Sequence[int], facts: list[Any]) -> None:
        number, is_stream, batch, segment, offset, nbytes, count = words[1:8]
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
        pending = PendingCall(
            self._worker.running, BlsCall(model, version, request, bool(is_stream)), partial(self._respond, number)
        )
        if batch or self.is_fork:  # a forked process does not know which batch is executed
            self._worker.end_route(None if self.is_fork else batch)
        self._pending[number] = pending
        self._calls.begin(pending)

    def _block(self, number: int, offset: int, nbytes: int) -> Array:
        segment = self._segments[number]
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self._come_home.append, (number, offset)).view()

    def _inputs(self, words: Sequence[int], names: Sequence[str], memory: Array) -> dict[str, Array]:
        inputs = {}
        at = 8
        for name in names:
            number, offset, nbytes, dimensions = words[at : at + 4]
            shape = tuple(words[at + 4 : at + 4 + dimensions])
            at += 4 + dimensions
            spec = TensorSpec(name, BY_NUMBER[number], (-1,) * len(shape))
            inputs[name] = self._reader.array(spec, offset, nbytes, shape, memory)
        return inputs

    def _begin_server_request(self, words: Sequence[int], what: str, arguments: list[Any], names: list[str]) -> None:
        number, _, _, segment, offset, nbytes, count = words[1:8]
        if len(names) != count or not all(isinstance(name, str) for name in (what, *names)):
            raise Garbled("what is asked has no name")
        if what in (METRIC, METRIC_VALUE) and arguments[0] not in self._families:
            raise Garbled("a metric of a family that is not its own")
        arrays = self._inputs(words, names, self._block(segment, offset, nbytes))
        if what == IS_WITHDRAWN:
            self._reply(number, what, is_withdrawn(self._worker.running, operator.index(arguments[0])))
            return
        if what == METRIC:
            (cells,) = arrays.values()
            if cells.ndim != 1 or cells.dtype != np.float64:
                raise Garbled("a metric that is not counted in numbers")
            answer: FlowserveError | None = None
            try:
                self._calls.server_requests.show(arguments, cells)
            except FlowserveError as error:
                answer = error.with_traceback(None)
            self._reply(number, what, answer)
            return
        files = {name: array.tobytes() for name, array in arrays.items()}
        self._calls.server_requests.begin(
            what, arguments, files, self._worker.loads, partial(self._reply, number, what)
        )

    # ------------------------------------------------------------------ to the process

    def _reply(self, number: int, what: str, answer: Any) -> None:
        if what == OPEN_FAMILY and isinstance(answer, int):
            self._opened.add(answer)
            self._families.add(answer)
        error = encode_error(answer) if isinstance(answer, FlowserveError) else None
        self._send(encode_server_reply(number, self._free_blocks(), error, None if error else answer))

    def _respond(self, number: int, answer: Answer) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        is_last = isinstance(answer, FlowserveError) or answer.is_final
        home = self._free_blocks()
        token, error = 0, None
        columns: list[ResultColumn] = []
        if isinstance(answer, FlowserveError):
            error = encode_error(answer)
        else:
            try:
                token, columns = self._columns(answer.outputs)
            except MemoryError as none:  # within the engine's step, which must continue for other requests
                error = encode_error(
                    Internal(f"the answer of model '{pending.call.model}' cannot be handed on: {none}")
                )
        parameters = answer.parameters if isinstance(answer, Response) else NO_PARAMETERS
        message = encode_result(number, is_last, token, home, error, columns, parameters)
        if len(message) > MESSAGE_BYTES_MAX:
            self._lent.pop(token, None)
            error = encode_error(
                Internal(f"the response of model '{pending.call.model}' has too many outputs or parameters for a call")
            )
            message = encode_result(number, is_last, 0, home, error, ())
        if is_last:
            del self._pending[number]
        self._send(message)

    def _free_blocks(self) -> list[BlockAddress]:
        """Blocks of the process without a reader, at most as many as fit into a message with its other contents; other
        threads may add more meanwhile.
        """
        return [self._come_home.popleft() for _ in range(min(len(self._come_home), _BLOCKS_MAX))]

    def _columns(self, outputs: Mapping[str, Array]) -> tuple[int, list[ResultColumn]]:
        """The outputs in the form of a message, and its token. Large outputs are in shared memory until the process
        acknowledges the token; 0: none are.
        """
        flat = [raw.flat_bytes(array) for array in outputs.values()]
        starts, size = [], 0
        for one in flat:
            starts.append(aligned(size))
            size = starts[-1] + one.nbytes
        token = 0
        where: list[Any] = []
        if size <= INLINE_BYTES_MAX:
            where += [one.tobytes() for one in flat]
        else:
            lease = self._arena.lease(size)
            segment = lease.segment
            if segment.number not in self._shown:
                self._send(pack(ATTACH, (segment.number,)), segment)
                self._shown.add(segment.number)
            for one, start in zip(flat, starts, strict=True):
                segment.memory[lease.offset + start : lease.offset + start + one.nbytes] = one
                where.append((segment.number, lease.offset + start, one.nbytes))
            self._token = token = self._token + 1
            self._lent[token] = lease
        numbers = [BY_NUMPY[array.dtype].number for array in outputs.values()]
        shapes = [array.shape for array in outputs.values()]
        return token, [*zip(outputs, numbers, shapes, where, strict=True)]

    def _send(self, message: bytes, segment: Segment | None = None) -> None:
        """Send a message, or queue it until the process reads its socket. Raises MemoryError if no descriptor is free
        for `segment`.
        """
        if self._is_closed:
            return
        fd = -1 if segment is None else descriptor(segment.open_for_reading, "shared memory")
        try:
            self._outbox.send(message, fd)
        except OSError:
            self.close()


def _socket(fd: int) -> socket.socket:
    """The socket that the process sent for its calls. Raises Garbled."""
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
