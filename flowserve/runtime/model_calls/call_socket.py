"""The socket of one process for its calls: the port of its `RemoteCalls` on this machine.

Decides where the tensors of both directions are: the called model reads them where the caller wrote them; responses are
copied to memory that only the caller's process reads. Does not know what is called. On the event loop.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flowserve.backends.worker.messages import (
    ATTACH,
    FROM_CALLER,
    HOME_BLOCKS_MAX,
    INLINE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    READ,
    SEGMENT,
    Garbled,
    ResultColumn,
    encode_result,
    encode_server_reply,
    pack,
    read_fields,
    receive,
)
from flowserve.errors import Internal
from flowserve.memory import raw
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.segment import PAGE, Lease, Segment, new_number
from flowserve.runtime.ipc.channel import Outbox, Readiness, descriptor
from flowserve.runtime.ipc.tensors import NO_DESCRIPTOR
from flowserve.runtime.model_calls.remote_calls import RemoteCalls
from flowserve.values import BY_NUMPY, Array

# Messages that are read at once; the rest of the server runs before the next.
_PORTION: Final = 32
TOO_LONG: Final = "has too many outputs or parameters for a call"


class CallSocket:
    """The socket of one process, and the memory that each side reads."""

    def __init__(self, fd: int, arena: Arena, readiness: Readiness, make: Callable[[CallSocket], RemoteCalls]) -> None:
        """Owns `fd`. `arena`: memory that the model's process may read. `make`: makes the calls that come from this
        socket. Raises Garbled if `fd` is no socket of the expected type.
        """
        self._socket = _socket(fd)
        self._outbox = Outbox(self._socket, readiness)
        self._arena = arena
        self._readiness = readiness
        self._segments: dict[int, Segment] = {}
        self._come_home: deque[BlockAddress] = deque()
        self._shown: set[int] = set()  # segments that the process has attached
        self._lent: dict[int, Lease] = {}  # responses that are not read yet, by token
        self._token = 0
        self._is_closed = False
        self.calls = make(self)
        readiness.watch(self._socket.fileno(), self._read, self.calls.broke)

    def close(self) -> None:
        self._is_closed = True
        self._readiness.forget(self._socket.fileno())
        self._outbox.clear()
        self._socket.close()
        self._lent.clear()
        self._segments.clear()

    # ------------------------------------------------------------------ from the process

    def _read(self) -> None:
        for _ in range(_PORTION):
            if self._is_closed:
                return
            try:
                message = receive(self._socket)
                if message is None:
                    self.calls.close()
                else:
                    self._take(*message)
            except BlockingIOError:
                return
            except (ValueError, LookupError, Internal) as error:
                self.calls.broke(error)

    def _take(self, kind: int, words: Sequence[int], text: bytes, fds: list[int]) -> None:
        try:
            if kind == SEGMENT:
                (number,) = read_fields(FROM_CALLER, kind, words)
                if not fds:
                    raise Garbled(NO_DESCRIPTOR)
                # Processes that a model has forked use the same numbers.
                self._segments[number] = Segment.read_shared(fds.pop(), new_number())
            elif kind == READ:
                (token,) = read_fields(FROM_CALLER, kind, words)
                del self._lent[token]
            else:
                self.calls.take(kind, words, text, self._block)
        finally:
            for fd in fds:
                os.close(fd)

    def _block(self, number: int, offset: int, nbytes: int) -> Array:
        segment = self._segments[number]
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self._come_home.append, (number, offset)).view()

    # ------------------------------------------------------------------ to the process

    def reply(self, number: int, error: Sequence[str] | None, answer: Any) -> None:
        self._send(encode_server_reply(number, self._free_blocks(), error, answer))

    def result(
        self, number: int, is_last: bool, error: Sequence[str] | None, outputs: Mapping[str, Array], parameters: Any
    ) -> None:
        token, columns = self._columns(outputs)
        home = self._free_blocks()
        message = encode_result(number, is_last, token, home, error, columns, parameters)
        if len(message) > MESSAGE_BYTES_MAX:
            self._lent.pop(token, None)
            self._come_home.extend(home)
            raise Internal(TOO_LONG)
        self._send(message)

    def cells(self, number: int, family: int, cells: Array, *, is_gauge: bool) -> Array:
        return cells  # in shared memory, in which the process counts

    def drop(self, family: int) -> None:
        """No effect: the block is free when the server forgets the metric."""

    def _free_blocks(self) -> list[BlockAddress]:
        """Blocks of the process without a reader, at most as many as fit into a message with its other contents; other
        threads may add more meanwhile.
        """
        return [self._come_home.popleft() for _ in range(min(len(self._come_home), HOME_BLOCKS_MAX))]

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
            self.calls.close()


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
