"""The sockets of worker processes, and which shared memory each side knows.

Decides how the engine is notified of messages of worker processes (`Readiness`): all sockets are in one epoll set, and
trio waits for that set. A wait of trio's own for each socket would cost a task switch and two system calls for each
message; here one wait serves all sockets that became ready, in that order, as one batch of events, and then a few more
batches of sockets that became ready meanwhile.

Decides that messages leave in their order: at once, or as soon as the process reads again (`Outbox`).

Decides how messages are sent and read, when memory is announced to the process, and when a block is free again: a block
of the process's own memory when its last reader is gone (the process is notified with its next batch, without an extra
message), a block that the process reads when its batch has returned or, if its model keeps an input, when the model has
released it. A `Channel` exists as long as its process; a restarted instance gets a new one.

Does not know batches, nor the consequences of a process's end. Used by workers/, and `Readiness` and `Outbox` by
model_calls/. A `Channel` is used on the loader's thread while the instance is opened, then on the event loop; `end` is
called on any thread, and leases end on any thread. Everything else is used on the event loop only.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from trio.lowlevel import wait_readable

from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    ANCILLARY_BYTES,
    CLOSE_ON_EXEC,
    MESSAGE_BYTES_MAX,
    Garbled,
    descriptors,
    encode_release,
    pack,
    unpack,
)
from flowserve.memory.arena import BlockAddress
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.runtime.ipc.tensors import NO_DESCRIPTOR, InputPacker, Packed
from flowserve.runtime.loop import StepLoop

log = logging.getLogger("flowserve.runtime")
# Events that are taken at once; the rest follow in the next round. Without a limit epoll allocates room for a thousand
# each time.
_EVENTS_MAX: Final = 64
# Descriptors that became ready while others were read are served in the same loop iteration, in this many rounds; then
# the rest of the server runs.
_ROUNDS_MAX: Final = 4
_EARLY_MAX: Final = 1000
_BLOCKS_MAX: Final = 1000  # of one RELEASE, so that it fits into a message
_MSG_CTRUNC: Final = int(socket.MSG_CTRUNC)  # an operation on the enumeration's member takes microseconds
# A message: its kind, its words (the first is the head), its text.
Message = tuple[int, Sequence[int], bytes]
_NO_UPDATE: Final = (0, 0)


class Readiness:
    """Calls back on the event loop's thread. Linux only."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._ready: dict[int, tuple[Callable[[], None], Callable[[Exception], None]]] = {}
        self._writable: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, ready: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        """Call `ready()` from now on whenever `descriptor` is readable or at its end. Raises OSError if no more can be
        watched. `broke` is called with an exception of `ready`, or of a callback of `when_writable`; after that the
        descriptor is not watched.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._ready[descriptor] = ready, broke

    def when_writable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call this once, as soon as a watched descriptor is writable."""
        self._writable[descriptor] = call
        self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor; called before it is closed. No effect if it is not watched, or after `run` has
        ended.
        """
        self._writable.pop(descriptor, None)
        if self._ready.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Wait for events and call the callbacks. Ends only by cancellation."""
        try:
            while True:
                await wait_readable(self._epoll.fileno())
                for _ in range(_ROUNDS_MAX):
                    events = self._epoll.poll(0, _EVENTS_MAX)
                    if not events:
                        break
                    self._loop.begin_events()
                    for number, event in events:
                        watched = self._ready.get(number)  # an earlier event may have ended the watch
                        if watched is None:
                            continue
                        ready, broke = watched
                        try:
                            if event & select.EPOLLOUT:
                                self._epoll.modify(number, select.EPOLLIN)
                                self._writable.pop(number)()
                            if event & ~select.EPOLLOUT:
                                ready()
                        except Exception as error:  # a fault about one descriptor must not stop the others
                            log.exception("reading from a worker process failed")
                            self.forget(number)
                            broke(error)
                    self._loop.end_events()
        finally:
            self._epoll.close()


class Outbox:
    """The unsent messages of one non-blocking socket that `readiness` watches."""

    def __init__(self, sock: socket.socket, readiness: Readiness) -> None:
        self._socket = sock
        self._readiness = readiness
        self._unsent: deque[tuple[bytes, int]] = deque()

    def send(self, message: bytes, fd: int = -1) -> None:
        """Send a message, with a descriptor if one is given, which is closed afterwards. Dropped if the process has
        closed its end, which the reader of the socket detects.
        """
        if self._unsent:
            self._unsent.append((message, fd))
            return
        try:
            if fd < 0:
                self._socket.send(message)
            else:
                self._send(message, fd)
        except BlockingIOError:
            self._unsent.append((message, fd))
            self._readiness.when_writable(self._socket.fileno(), self._send_unsent)
        except ConnectionError:
            pass

    def clear(self) -> None:
        """Drop the unsent messages."""
        for _, fd in self._unsent:
            if fd >= 0:
                os.close(fd)
        self._unsent.clear()

    def _send_unsent(self) -> None:
        while self._unsent:
            message, fd = self._unsent.popleft()
            try:
                self._send(message, fd)
            except BlockingIOError:
                self._unsent.appendleft((message, fd))
                self._readiness.when_writable(self._socket.fileno(), self._send_unsent)
                return
            except ConnectionError:
                self.clear()

    def _send(self, message: bytes, fd: int) -> None:
        if fd < 0:
            self._socket.send(message)
            return
        try:
            socket.send_fds(self._socket, [message], [fd])
        except BlockingIOError:
            raise
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


class Unseen(Exception):
    """Outputs are in memory whose descriptor the server could not receive when the process sent it."""


class Channel:
    """One worker process's socket and memory.

    `number`: the process's own, which also numbers its memory (`Job.number`). `free_blocks`: its blocks without a
    reader. `attached`: the numbers of the segments that it has mapped.
    """

    def __init__(self, sock: socket.socket, number: int, model: str, readiness: Readiness) -> None:
        self.number = number
        self.free_blocks: deque[BlockAddress] = deque()
        self.is_closed = False
        # Receives a socket for the model's calls of other models, and whether a fork of the process made it.
        self.on_calls: Callable[[int, bool], None] | None = None
        self.questions: socket.socket | None = None  # about the readiness of its model, if that has code for it
        self._socket = sock
        self._model = model
        self._outbox = Outbox(sock, readiness)
        self.attached: set[int] = set()
        self._ended: deque[int] = deque()  # attached segments that were closed since the last update
        self._segments: dict[int, Segment] = {}  # the process's own
        self._unseen: set[int] = set()  # ... and those with a missing descriptor
        self._held: dict[int, Sequence[Any]] = {}  # by batch: memory that the model keeps reading
        self._let_go: set[int] = set()  # batches whose memory it released before they returned
        self._peers: dict[int, Channel] = {}  # the processes whose sockets it has, by number

    # ------------------------------------------------------------------ to the process

    def send_batch(self, message: bytes, packed: Packed, packer: InputPacker) -> None:
        """Send a batch, whose RUN message this is, and before it the memory that the process has not attached. Raises
        MemoryError for lack of memory or descriptors.
        """
        if len(message) > MESSAGE_BYTES_MAX:
            message = pack(messages.SPILLED, packer.spill(message, packed))
        for segment in packed.segments:
            if segment.number not in self.attached:
                self.tell(
                    pack(messages.ATTACH, (segment.number,)), descriptor(segment.open_for_reading, "shared memory")
                )
                self.has_attached(segment)
        self._outbox.send(message)

    def tell(self, message: bytes, fd: int = -1) -> None:
        """Send a message, with a descriptor if one is given, which is closed afterwards. Dropped if the process has
        ended.
        """
        if not self.is_closed:
            self._outbox.send(message, fd)
        elif fd >= 0:
            os.close(fd)

    def end(self) -> None:
        """Ask the process to finalise its model and exit. On any thread, after all other messages."""
        self._socket.send(pack(messages.END, ()))

    def take_update(self) -> Sequence[int]:
        """The updates about memory for the process, as words of its next RUN message. Requests missing descriptors
        again.
        """
        for number in self._unseen:
            self.tell(pack(messages.SHOW, (number,)))
        if not self.free_blocks and not self._ended:
            return _NO_UPDATE
        words = [0, 0]
        while self.free_blocks:  # other threads may add more meanwhile
            words += self.free_blocks.popleft()
            words[0] += 1
        while self._ended:
            words.append(self._ended.popleft())
            words[1] += 1
        return words

    def release_idle(self, *, is_quiet: bool) -> None:
        """Have the process release memory that it has not used for a while. `is_quiet`: it had no batch since the last
        call.
        """
        blocks = [self.free_blocks.popleft() for _ in range(min(len(self.free_blocks), _BLOCKS_MAX))]
        ended = [self._ended.popleft() for _ in range(min(len(self._ended), _BLOCKS_MAX))]
        self.tell(encode_release(is_quiet=is_quiet, blocks=blocks, ended=ended))

    def restore_update(self, update: Sequence[int]) -> None:
        """Undo `take_update`: the update was not sent, and is sent with the next batch."""
        ended_at = 2 + 2 * update[0]
        self.free_blocks.extend(zip(update[2:ended_at:2], update[3:ended_at:2], strict=True))
        self._ended.extend(update[ended_at:])

    def introduce(self, peer: Channel) -> None:
        """Send the process the server's end of another process's socket, once. It closes those of processes that have
        ended.
        """
        if peer.number not in self._peers:
            fd = descriptor(partial(os.dup, peer._socket.fileno()), "a socket")
            gone = [number for number, one in self._peers.items() if one.is_closed]
            for number in gone:
                del self._peers[number]
            self.tell(pack(messages.PEER, (peer.number, *gone)), fd)
            self._peers[peer.number] = peer

    def has_attached(self, segment: Segment) -> None:
        """Record that the process has mapped this segment, or will before it reads another message."""
        if segment.number not in self.attached:
            self.attached.add(segment.number)
            segment.on_end.append(self._ended.append)

    # ------------------------------------------------------------------ from the process

    def read(self) -> Message | None:
        """The next message that is not about memory; None if there is none now. Raises Garbled, and EOFError if the
        other end is closed.
        """
        while True:
            try:
                received, ancillary, flags, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, ANCILLARY_BYTES, CLOSE_ON_EXEC)
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
                if kind == messages.SPILLED_OUT:
                    return unpack(self._spilled(*words[1:]))
                if kind == messages.GONE:
                    self._take_gone(words[1:])
                else:
                    return message
            except Garbled:
                raise
            except Exception as error:  # an error about a message concerns this process only
                raise Garbled(f"{type(error).__name__}: {error}") from None

    def block(self, number: int, offset: int, nbytes: int) -> Lease | None:
        """A block of the process's own memory; None if it has no bytes. It is free again after its last view. Raises
        Unseen, Garbled, and KeyError for memory that the process did not announce.
        """
        if not nbytes:
            return None
        try:
            segment = self._segments[number]
        except KeyError:
            if number not in self._unseen:
                raise
            self.free_blocks.append((number, offset))
            raise Unseen(f"what model '{self._model}' answered cannot be read: {NO_DESCRIPTOR}") from None
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self.free_blocks.append, (number, offset))

    def knows(self, number: int) -> bool:
        """Whether the process announced this segment."""
        return number in self._segments or number in self._unseen

    def hold(self, batch: int, memory: Sequence[Any]) -> None:
        """Keep this memory, which the model still reads, until the process sends GONE for that batch."""
        if batch in self._let_go:
            self._let_go.discard(batch)
        else:
            self._held[batch] = memory

    def close(self) -> None:
        """Close the socket. The process's outputs can still be read: a batch that it has handed on may return early."""
        self.is_closed = True
        self._outbox.clear()
        self._socket.close()
        if self.questions is not None:
            with suppress(OSError):
                self.questions.shutdown(socket.SHUT_RDWR)  # a thread may wait for its answer
        self._held.clear()
        self._peers.clear()

    def _take_descriptor(self, message: Message, fds: Sequence[int]) -> None:
        """Process a message with a descriptor, or one whose descriptor is lost because the server has too many open."""
        kind, words, _ = message
        taken = [*fds]
        try:
            if kind == messages.SEGMENT:
                self._take_segment(words[1], taken)
            elif kind == messages.CALLS and taken and self.on_calls is not None:
                self.on_calls(taken.pop(), bool(words[1]))
            elif kind == messages.READINESS and taken and self.questions is None:
                self.questions = socket.socket(fileno=taken.pop())
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

    def _take_segment(self, number: int, fds: list[int]) -> None:
        """Record a segment of the process, and take its descriptor out of `fds`. Raises Garbled."""
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


def descriptor(make: Callable[[], int], what: str) -> int:
    """A new descriptor for a process. Raises MemoryError if there is none, because an OSError would mean the process's
    socket.
    """
    try:
        return make()
    except OSError as error:
        raise MemoryError(f"{what} cannot be shown: {error.strerror}") from error
