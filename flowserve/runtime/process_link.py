"""The wire to one child process, and whose memory is mapped where.

Decided here: how a batch is sent and its answer read, which shared memory each side was told of, and when a block
goes home: one of the child's when its last reader here is gone (the child hears of it with its next batch, so that
this costs no message), one that the child reads when the run is over or, where the model holds on to an input, when
it has let go. A batch may also come to the child from another one, and its answer go on to a third (relays.py); then it
is expected here, and whoever hears of the answer brings it. A link lives as long as its process; a restarted instance
gets a new one.

This file does not know queues, nor what an ended process means.
"""

from __future__ import annotations

import json
import logging
import marshal
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from flowserve.backends.base import Results, Work
from flowserve.backends.child.protocol import (
    ANCILLARY_BYTES,
    ATTACH,
    BROKEN,
    CALLS,
    DONE,
    DONE_HEAD,
    END,
    FAILED,
    FENCE,
    FENCED,
    GONE,
    MESSAGE_BYTES_MAX,
    PATH,
    PEER,
    READY,
    RECALL,
    RELAYED,
    RUN,
    SEGMENT,
    SHOW,
    SPILLED,
    SPILLED_OUT,
    descriptors,
    heard,
    unpack,
)
from flowserve.backends.child.usual import Usual
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.arena import Place
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.runtime.process_inputs import InputPacker, Packed, run_message
from flowserve.runtime.process_outputs import NO_DESCRIPTOR, Garbled, OutputReader

log = logging.getLogger("flowserve.runtime")

Outcome = Results | FlowserveError
# What a process tells of a relay: what it passed before, in words, and what this one answered, b"" for nothing; or
# whether it had come by when it was fenced off.
Told = tuple[Sequence[int], bytes] | bool
_NO_WORD: Final = bytes(8)
# What most batches say of their members. Nobody writes into results.
_NONE: Final[Mapping[int, Any]] = {}


class Expected:
    """A batch that the child has, or will be given by another: its number, what of it lies where, its members' rows,
    and how it is usually answered.
    """

    __slots__ = ("number", "packed", "rows", "usual")

    def __init__(self, number: int, packed: Packed, rows: list[int], usual: Usual | None) -> None:
        self.number = number
        self.packed = packed
        self.rows = rows
        self.usual = usual


class Unseen(Exception):
    """What a child answered lies in memory that the server could not take a descriptor of when the child showed it."""


class Link:
    """One child's socket and memory. Touched on the loop, except that leases may end anywhere.

    `homes`: the child's blocks that nobody reads any more. `learned` counts the memory of all children that was ever
    heard of.
    """

    learned = 0

    def __init__(self, sock: socket.socket, packer: InputPacker, reader: OutputReader) -> None:
        self._socket = sock
        self.on_calls: Callable[[int], None] | None = None  # given the socket on which the model calls others
        self.is_ready = False  # whether the instance is open
        self._packer = packer
        self._reader = reader
        self.on_relay: Callable[[int, Told], None] | None = None  # given a relay's number
        self._number = 0
        self._nothing = Packed()  # of a batch whose inputs need not be held here
        self._nothing.copied = packer.nothing
        self._running: Expected | None = None  # by itself, in no relay
        self._kept: dict[int, Packed] = {}  # by batch: inputs that the model holds on to
        self._told: set[int] = set()  # segments that the child has mapped
        self._ended: deque[int] = deque()  # of those, the ones that are no more
        self._peer_numbers = count(1)
        self._ended_paths: deque[int] = deque()  # of those that the child was told of
        self._peers: dict[socket.socket, int] = {}  # those to which the child may hand batches on, by its numbers
        self._segments: dict[int, Segment] = {}  # the child's own, by its numbers
        self._unseen: set[int] = set()  # ... and those that there was no descriptor for
        self.homes: deque[Place] = deque()

    def send(self, work: Work) -> None:
        """Start a batch in the child. Raises a FlowserveError where it cannot be sent, and OSError."""
        number = self._number + 1
        self._running = self._send_run(work, number)
        self._number = number

    def send_relay(self, work: Work, number: int, relay: tuple[Any, ...]) -> Expected:
        """Start a batch that the child is to hand on (protocol.py). As `send`."""
        return self._send_run(work, number, relay)

    def _send_run(self, work: Work, number: int, relay: tuple[Any, ...] | None = None) -> Expected:
        if self._unseen:
            self.look_again()
        packed = self._packer.pack(work.inputs)
        rows = work.rows
        come_home, ended = self.news()
        head = (RUN, number, come_home, ended, packed.columns, rows)
        try:
            message = run_message(head, work, relay)
            if len(message) > MESSAGE_BYTES_MAX:
                message = marshal.dumps((SPILLED, *self._packer.message(message, packed)))
            for segment in packed.segments:
                if segment.number not in self._told:
                    self._tell(segment)
            self._socket.send(message)
        except Exception:
            self.untold(come_home, ended)
            raise
        return Expected(number, packed, rows, self._reader.usual(rows))

    def expected(self, number: int, rows: list[int], held: Any) -> Expected:
        """A batch that another process has handed to the child. `held`: where its inputs lie, for a model that keeps
        them; nothing of them was copied.
        """
        packed = self._nothing
        if held is not None:
            packed = Packed()
            packed.copied = self._nothing.copied
            packed.held.append(held)
        return Expected(number, packed, rows, self._reader.usual(rows))

    def news(self) -> tuple[Sequence[Place], Sequence[int]]:
        """What the child is told with its next batch: blocks that came home, memory that is no more."""
        come_home = _drained(self.homes) if self.homes else ()
        return come_home, _drained(self._ended) if self._ended else ()

    def untold(self, come_home: Sequence[Place], ended: Sequence[int]) -> None:
        """It was not told of these after all."""
        self.homes.extend(come_home)
        self._ended.extend(ended)

    def fence_off(self, number: int) -> None:
        """Ask whether that batch of a relay has come by; if not, it no longer may. Raises OSError."""
        self._socket.send(marshal.dumps((FENCE, number)))

    def recall(self, number: int) -> None:
        """Nobody will read what the child made of it. Raises OSError."""
        self._socket.send(marshal.dumps((RECALL, number)))

    def look_again(self) -> None:
        """Ask for the memory that could not be seen, before the next batch. Raises OSError."""
        for number in self._unseen:
            self._socket.send(marshal.dumps((SHOW, number)))

    def fileno(self) -> int:
        """Of its socket; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def segment_count(self) -> int:
        """How much memory of the child's own is known; it only ever grows."""
        return len(self._segments)

    def sees(self, other: Link) -> None:
        """The child may read all that the other's has answered. Raises OSError."""
        for segment in other._segments.values():
            if segment.number not in self._told:
                self._tell(segment)

    def peer_of(self, other: Link) -> int:
        """By which number the other's child knows this one, to hand batches on to it. Raises OSError."""
        number = other._peers.get(self._socket)
        if number is None:
            number = next(other._peer_numbers)
            gone = [(end, known) for end, known in other._peers.items() if end.fileno() < 0]
            told = (PEER, number, [known for _, known in gone])
            socket.send_fds(other._socket, [marshal.dumps(told)], [self._socket.fileno()])
            for end, _ in gone:
                del other._peers[end]
            other._peers[self._socket] = number
        return number

    def tell_path(self, number: int, peer: int, inputs: list[tuple[int, int]], wanted: tuple[str, ...]) -> None:
        """Where relays of that path go on from the child: to which peer, which reads and is asked for that
        (protocol.py). Raises OSError.
        """
        names = {own: segment.number for own, segment in self._segments.items()}
        gone = _drained(self._ended_paths) if self._ended_paths else ()
        self._socket.send(marshal.dumps((PATH, number, names, peer, inputs, wanted, gone)))

    def end_path(self, number: int) -> None:
        """None goes there any more. On any thread."""
        self._ended_paths.append(number)

    def end(self) -> None:
        """Ask the child to finalise its model and leave. On any thread."""
        self._socket.send(marshal.dumps((END,)))

    def read(self) -> Outcome | bool:
        """Read one message: the outcome of the batch that runs; True where there may be more to read, False where not.
        Raises Garbled, and EOFError where the other end is closed.
        """
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
            running = self._running
            results = None if running is None else self._usual_results(running, message)
            if results is not None:
                self._running = None
                return results
            if flags & socket.MSG_CTRUNC and not fds:
                self._has_no_descriptor(message)
                return True
            return self._take(message, fds)
        except Garbled:
            raise
        except Unseen as error:  # it has answered, and nobody can read what
            self._running = None
            return Internal(str(error))
        except Exception as error:  # whatever comes of what it said, nobody else suffers from it
            raise Garbled(f"{type(error).__name__}: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Nothing is sent or read any more. Views of the child's outputs stay good as long as somebody has them."""
        self._socket.close()
        self._running = None
        self._kept.clear()
        self._segments.clear()
        self._peers.clear()

    def _take(self, message: bytes, fds: list[int]) -> Outcome | bool:
        kind, words, text = unpack(message)
        if kind == SPILLED_OUT:
            kind, words, text = unpack(self._spilled(*words[1:]))
        if kind == RELAYED and self.on_relay is not None:
            self.on_relay(words[1], (words[2:], text))
            return False
        if kind in (DONE, FAILED):
            running, self._running = self._running, None
            if running is None:
                raise Garbled(f"an answer to batch {words[1]}, which does not run")
            return self._outcome(running, kind, words, text)
        if kind == SEGMENT:
            if words[1] in self._segments:
                return True  # it was asked for twice
            self._segments[words[1]] = Segment.read_shared(fds.pop())
            self._unseen.discard(words[1])
            Link.learned += 1
        elif kind == FENCED and self.on_relay is not None:
            self.on_relay(words[1], bool(words[2]))
        elif kind == CALLS and self.on_calls is not None:
            self.on_calls(fds.pop())
        elif kind == GONE:
            for number in words[1:]:
                del self._kept[number]
        elif kind == BROKEN:
            return heard(json.loads(text))
        elif kind == READY:
            self.is_ready = True
        else:
            raise Garbled(f"a message of kind {kind}")
        return True

    def _has_no_descriptor(self, message: bytes) -> None:
        """The one that came with a message was lost: the server has as many open as it may."""
        kind, words, _ = unpack(message)
        if kind != SEGMENT:
            raise Garbled(NO_DESCRIPTOR)
        if words[1] not in self._unseen:
            log.error("memory that model '%s' answers in cannot be seen: %s", self._reader.model, NO_DESCRIPTOR)
        self._unseen.add(words[1])
        Link.learned += 1  # relays look for what they have to tell

    def outcome(self, expected: Expected, message: bytes) -> Outcome:
        """What the child said of a batch of a relay, whoever brings it. Raises Garbled."""
        try:
            results = self._usual_results(expected, message)
            return results or self._outcome(expected, *unpack(message))
        except Garbled:
            raise
        except Unseen as error:
            return Internal(str(error))
        except Exception as error:
            raise Garbled(f"{type(error).__name__}: {error}") from None

    def passed(self, expected: Expected, passed: Sequence[int]) -> Results:
        """As `outcome`, where another process says of it (`PASSED_WORDS`) that it was the usual one."""
        kept, gathered_ns, computed_ns, segment, offset = passed
        usual = expected.usual
        if usual is None or segment not in self._segments:
            raise Garbled("an answer that was passed on, and could not be")
        packed = self._over(expected, expected.number, kept)
        outputs = self._reader.cut(usual, self._block(segment, offset, usual.nbytes), expected.rows)
        return Results(outputs, _NONE, gathered_ns, computed_ns, packed.copied, usual.placed, _NONE)

    def placed_at(self, segment: int, offset: int, rows: list[int]) -> Sequence[int]:
        """The bytes of each output of a batch that the child is said to have answered, as usual, in that block. Raises
        Garbled where there is no such block.
        """
        usual = self._reader.usual(rows)
        memory = self._segments.get(segment)
        if usual is None or (memory is None and self.is_open):
            raise Garbled("an answer that was passed on, and could not be")
        if memory is not None and (offset % PAGE or offset + usual.nbytes > memory.size):
            raise Garbled(f"a block at {offset} of {usual.nbytes} bytes in a segment of {memory.size}")
        return usual.placed

    def _outcome(self, expected: Expected, kind: int, words: Sequence[int], text: bytes) -> Outcome:
        if kind == DONE:
            return self._done(expected, words, text)
        if kind != FAILED:
            raise Garbled(f"a message of kind {kind} for an answer")
        self._over(expected, *words[1:])
        return heard(json.loads(text))

    def _usual_results(self, expected: Expected, message: bytes) -> Results | None:
        """Those of a batch, where the message ends as it does for nearly every batch: everything is checked then by one
        comparison with the only bytes that can be right.
        """
        usual = expected.usual
        if usual is None or len(message) != usual.length or not message.endswith(usual.tail):
            return None
        first, number, kept, gathered_ns, computed_ns, segment, offset, nbytes = DONE_HEAD.unpack_from(message)
        if first != usual.first or nbytes != usual.nbytes or not nbytes:
            return None  # without a byte there is no block
        if kept or number != expected.number:
            self._over(expected, number, kept)
        outputs = self._reader.cut(usual, self._block(segment, offset, nbytes), expected.rows)
        return Results(outputs, _NONE, gathered_ns, computed_ns, expected.packed.copied, usual.placed, _NONE)

    def _done(self, expected: Expected, words: Sequence[int], text: bytes) -> Results:
        number, kept, gathered_ns, computed_ns, segment, offset, nbytes = words[1:8]
        packed = self._over(expected, number, kept)
        block = self._block(segment, offset, nbytes) if nbytes else None
        outputs, placed = self._reader.read(words, 8, block, expected.rows)
        results = Results(outputs, _NONE, gathered_ns, computed_ns, packed.copied, placed, _NONE)
        if text:
            members = {int(m): one for m, one in json.loads(text).items()}
            self._tell_of_members(results, members, len(expected.rows))
        return results

    def _tell_of_members(self, results: Results, told: Mapping[int, Any], count: int) -> None:
        if not told.keys() <= set(range(count)):
            raise Garbled("it tells of a member that is none")
        results.parameters = {m: one for m, one in told.items() if isinstance(one, dict)}
        results.rescheduled = [m for m, one in told.items() if one is None]
        results.errors = {m: heard(one) for m, one in told.items() if not (one is None or isinstance(one, dict))}

    def _over(self, expected: Expected, number: int, kept: int) -> Packed:
        """The batch is over. Its inputs go home, unless the model keeps them."""
        if number != expected.number:
            raise Garbled(f"an answer to batch {number}, which does not run")
        if kept:
            self._kept[number] = expected.packed
        return expected.packed

    def _block(self, number: int, offset: int, nbytes: int) -> Lease:
        try:
            segment = self._segments[number]
        except KeyError:
            if number not in self._unseen:
                raise
            self.homes.append((number, offset))
            raise Unseen(f"what model '{self._reader.model}' answered cannot be read: {NO_DESCRIPTOR}") from None
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self.homes.append, (number, offset))

    def _spilled(self, number: int, offset: int, nbytes: int) -> bytes:
        # A copy first: what lies there may change under whoever reads it.
        try:
            return self._block(number, offset, nbytes).view().tobytes()
        except Unseen as error:  # what the message is about nobody knows
            raise Garbled(str(error)) from None

    def _tell(self, segment: Segment) -> None:
        fd = segment.open_for_reading()
        try:
            socket.send_fds(self._socket, [marshal.dumps((ATTACH, segment.number))], [fd])
        finally:
            os.close(fd)
        self._told.add(segment.number)
        segment.on_end.append(self._ended.append)


def keeps_inputs(answer: bytes) -> bool:
    """Whether a DONE or FAILED says that the model holds on to inputs of its batch."""
    return answer[16:24] != _NO_WORD


def _drained(entries: deque[Any]) -> list[Any]:
    drained = []
    while entries:
        drained.append(entries.popleft())
    return drained
