"""The channel to one worker process: its socket, and which shared memory each side knows.

Decides how messages are sent and read, when memory is announced to the process, and when a block is free again: one of
the process's own when its last reader is gone (the process learns that with its next batch, without an extra message),
one that the process reads when its batch is back or, where its model holds an input, when the model has let go of it. A
channel lives as long as its process; an instance that is started again gets a new one.

Does not know what a batch is, nor what the end of a process means. Used by workers/ on the
event loop, except that leases may end on any thread.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from flowserve.backends.worker.protocol import (
    ANCILLARY_BYTES,
    ATTACH,
    CALLS,
    END,
    GONE,
    MESSAGE_BYTES_MAX,
    PEER,
    SEGMENT,
    SHOW,
    SPILLED,
    SPILLED_OUT,
    descriptors,
    pack,
    unpack,
)
from flowserve.backends.worker.run_message import News, RunMessage
from flowserve.errors import Internal
from flowserve.memory.arena import BlockAddress
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.runtime.ipc.decoder import NO_DESCRIPTOR, Garbled
from flowserve.runtime.ipc.encoder import InputPacker, Packed
from flowserve.runtime.ipc.outbox import Outbox
from flowserve.runtime.ipc.poller import Readiness

log = logging.getLogger("flowserve.runtime")

# A message: its kind, its words (the first of which is not for the reader), its text.
Message = tuple[int, Sequence[int], bytes]


_EARLY_MAX: Final = 1000
_MSG_CTRUNC: Final = int(socket.MSG_CTRUNC)  # an operation on the enumeration's member takes microseconds
_MSG_CMSG_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)


class Unseen(Exception):
    """Outputs are in memory whose descriptor the server could not take when the process sent it."""


class Channel:
    """One worker process's socket and memory.

    `number`: the process's own, which also numbers its memory (`Job.number`). `homes`: its blocks that have no reader
    any more. `attached`: the numbers of the segments that it has mapped.
    """

    def __init__(self, sock: socket.socket, number: int, model: str, readiness: Readiness) -> None:
        self.number = number
        self.homes: deque[BlockAddress] = deque()
        self.is_closed = False
        self.on_calls: Callable[[int], None] | None = None  # takes the socket on which the model calls others
        self._socket = sock
        self._model = model
        self._outbox = Outbox(sock, readiness)
        self.attached: set[int] = set()
        self._ended: deque[int] = deque()  # of those, the ones that are no more
        self._segments: dict[int, Segment] = {}  # the process's own
        self._unseen: set[int] = set()  # ... and those whose descriptor is missing
        self._held: dict[int, Sequence[Any]] = {}  # by batch: memory that the model goes on reading
        self._let_go: set[int] = set()  # batches whose memory it read no more before they were back
        self._peers: dict[int, Channel] = {}  # the processes whose sockets it has, by number

    # ------------------------------------------------------------------ to the process

    def run(self, message: RunMessage, packed: Packed, packer: InputPacker) -> None:
        """Start a batch in the process. Raises Internal if a fact about its requests cannot be encoded, and MemoryError
        for lack of memory or descriptors.
        """
        try:
            written = message.encode()
        except ValueError:
            written = b""  # raised in here, the error would hold these frames, and the batch, by its context
        if not written:
            raise Internal("a request holds a parameter that is no text, number or boolean")
        if len(written) > MESSAGE_BYTES_MAX:
            written = pack(SPILLED, packer.spill(written, packed))
        for segment in packed.segments:
            if segment.number not in self.attached:
                self.tell(pack(ATTACH, (segment.number,)), _for_reading(segment))
                self.has_attached(segment)
        self._outbox.send(written)

    def tell(self, message: bytes, fd: int = -1) -> None:
        """Send a message, with a descriptor where one is given, which is closed then. Dropped where the process has
        ended.
        """
        if not self.is_closed:
            self._outbox.send(message, fd)
        elif fd >= 0:
            os.close(fd)

    def end(self) -> None:
        """Ask the process to finalise its model and leave. On any thread, when nothing else is sent any more."""
        self._socket.send(pack(END, ()))

    def news(self) -> News:
        """The notices for the process with its next batch. Requests missing descriptors again."""
        for number in self._unseen:
            self.tell(pack(SHOW, (number,)))
        if not self.homes and not self._ended:
            return _NO_NEWS
        homes, ended = [], []  # on other threads more may be added meanwhile
        while self.homes:
            homes.append(self.homes.popleft())
        while self._ended:
            ended.append(self._ended.popleft())
        return News(homes, ended)

    def put_back(self, news: News) -> None:
        """Restore notices that were not sent to the process."""
        self.homes.extend(news.homes)
        self._ended.extend(news.ended)

    def introduce(self, peer: Channel) -> None:
        """Give the process the server's end of another process's socket, once. It closes those of processes that have
        ended.
        """
        if peer.number not in self._peers:
            fd = _duplicate(peer._socket)
            gone = [number for number, one in self._peers.items() if one.is_closed]
            for number in gone:
                del self._peers[number]
            self.tell(pack(PEER, (peer.number, *gone)), fd)
            self._peers[peer.number] = peer

    def has_attached(self, segment: Segment) -> None:
        """The process has mapped this segment, or will before it reads anything else."""
        if segment.number not in self.attached:
            self.attached.add(segment.number)
            segment.on_end.append(self._ended.append)

    # ------------------------------------------------------------------ from the process

    def read(self) -> Message | None:
        """The next message that is not about memory. None: there is none now. Raises Garbled, and EOFError where the
        other end is closed.
        """
        while True:
            try:
                received, ancillary, flags, _ = self._socket.recvmsg(
                    MESSAGE_BYTES_MAX, ANCILLARY_BYTES, _MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionError:
                raise EOFError from None
            if not received:
                raise EOFError
            try:
                message = unpack(received)
                if ancillary or flags & _MSG_CTRUNC:
                    self._take_descriptor(message, descriptors(ancillary))
                    continue
                kind, words, _ = message
                if kind == SPILLED_OUT:
                    return unpack(self._spilled(*words[1:]))
                if kind == GONE:
                    self._take_gone(words[1:])
                else:
                    return message
            except Garbled:
                raise
            except Exception as error:  # whatever comes of a message, it concerns this process only
                raise Garbled(f"{type(error).__name__}: {error}") from None

    def block(self, number: int, offset: int, nbytes: int) -> Lease | None:
        """A block of the process's own memory; None where it has no bytes. It is free again with its last view. Raises
        Unseen, Garbled, and KeyError for memory that the process did not announce.
        """
        if not nbytes:
            return None
        try:
            segment = self._segments[number]
        except KeyError:
            if number not in self._unseen:
                raise
            self.homes.append((number, offset))
            raise Unseen(f"what model '{self._model}' answered cannot be read: {NO_DESCRIPTOR}") from None
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self.homes.append, (number, offset))

    def knows(self, number: int) -> bool:
        """Whether the process announced this segment."""
        return number in self._segments or number in self._unseen

    def segment(self, number: int) -> Segment | None:
        """The process's own segment with that number, where the server has it."""
        return self._segments.get(number)

    def hold(self, batch: int, memory: Sequence[Any]) -> None:
        """The model goes on reading this memory until the process sends GONE for that batch."""
        if batch in self._let_go:
            self._let_go.discard(batch)
        else:
            self._held[batch] = memory

    def close(self) -> None:
        """Nothing is sent or read any more. The process's outputs can still be read: a batch that it has handed on may
        return early.
        """
        self.is_closed = True
        self._outbox.clear()
        self._socket.close()
        self._held.clear()
        self._peers.clear()

    def _take_descriptor(self, message: Message, fds: Sequence[int]) -> None:
        """A message with a descriptor, or one whose descriptor is lost: the server has as many open as it may."""
        kind, words, _ = message
        taken = [*fds]
        try:
            if kind == SEGMENT:
                self._show(words[1], taken)
            elif kind == CALLS and taken and self.on_calls is not None:
                self.on_calls(taken.pop())
            elif not taken:
                raise Garbled(NO_DESCRIPTOR)
            else:
                raise Garbled(f"a descriptor with a message of kind {kind}")
        finally:
            for fd in taken:
                os.close(fd)

    def _take_gone(self, batches: Sequence[int]) -> None:
        for batch in batches:
            if self._held.pop(batch, None) is None:
                self._let_go.add(batch)  # it was handed on to another process, and is not back yet
        if len(self._let_go) > _EARLY_MAX:
            raise Garbled("it lets go of batches that it does not have")

    def _show(self, number: int, fds: list[int]) -> None:
        if number >> 32 != self.number:
            raise Garbled(f"segment {number}, which is not its own")
        if number in self._segments:
            return  # it was requested twice
        if not fds:
            if number not in self._unseen:
                log.error("memory that model '%s' answers in cannot be seen: %s", self._model, NO_DESCRIPTOR)
            self._unseen.add(number)
            return
        self._segments[number] = Segment.read_shared(fds.pop(), number)
        self._unseen.discard(number)

    def _spilled(self, number: int, offset: int, nbytes: int) -> bytes:
        try:
            block = self.block(number, offset, nbytes)
        except Unseen as error:  # the subject of the message is unknown
            raise Garbled(str(error)) from None
        # A copy first: the process may change this memory while it is read.
        return b"" if block is None else block.view().tobytes()


_NO_NEWS = News()


def _for_reading(segment: Segment) -> int:
    try:
        return segment.open_for_reading()
    except OSError as error:  # the error does not concern the process
        raise MemoryError(f"shared memory cannot be shown: {error.strerror}") from error


def _duplicate(sock: socket.socket) -> int:
    try:
        return os.dup(sock.fileno())
    except OSError as error:
        raise MemoryError(f"a socket cannot be shown: {error.strerror}") from error
