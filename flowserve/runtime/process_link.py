"""The wire to one child process, and whose memory is mapped where.

Decided here: how a batch is sent and its answer read, which shared memory each side was told of, and when a block
goes home: one of the child's when its last reader here is gone (the child hears of it with its next batch, so that
this costs no message), one that the child reads when the run is over or, where the model holds on to an input, when
it has let go. A link lives as long as its process; a restarted instance gets a new one.

This file does not know queues, nor what an ended process means.
"""

from __future__ import annotations

import json
import marshal
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    GONE,
    MESSAGE_BYTES_MAX,
    READY,
    RUN,
    SEGMENT,
    SPILLED,
    SPILLED_OUT,
    descriptors,
    heard,
    unpack,
)
from flowserve.errors import FlowserveError
from flowserve.memory.arena import Place
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.runtime.process_inputs import InputPacker, Packed, run_message
from flowserve.runtime.process_outputs import Garbled, OutputReader, Usual

Outcome = Results | FlowserveError
# What most batches say of their members. Nobody writes into results.
_NONE: Final[Mapping[int, Any]] = {}


class Link:
    """One child's socket and memory. Touched on the loop, except that leases may end anywhere."""

    def __init__(self, sock: socket.socket, packer: InputPacker, reader: OutputReader) -> None:
        self._socket = sock
        self.on_calls: Callable[[int], None] | None = None  # given the socket on which the model calls others
        self.is_ready = False  # whether the instance is open
        self._packer = packer
        self._reader = reader
        self._number = 0
        self._running: Packed | None = None
        self._rows: list[int] = []
        self._usual: Usual | None = None  # how that batch is usually answered
        self._kept: dict[int, Packed] = {}  # by batch: inputs that the model holds on to
        self._told: set[int] = set()  # segments that the child has mapped
        self._ended: deque[int] = deque()  # of those, the ones that are no more
        self._segments: dict[int, Segment] = {}  # the child's own, by its numbers
        self._come_home: deque[Place] = deque()  # its blocks that nobody reads any more

    def send(self, work: Work) -> None:
        """Start a batch in the child. Raises a FlowserveError where it cannot be sent, and OSError."""
        packed = self._packer.pack(work.inputs)
        number = self._number + 1
        rows = work.rows
        come_home = _drained(self._come_home) if self._come_home else ()
        ended = _drained(self._ended) if self._ended else ()
        head = (RUN, number, come_home, ended, packed.columns, rows)
        message = run_message(head, work)
        if len(message) > MESSAGE_BYTES_MAX:
            message = marshal.dumps((SPILLED, *self._packer.message(message, packed)))
        for segment in packed.segments:
            if segment.number not in self._told:
                self._tell(segment)
        self._socket.send(message)
        self._number = number
        self._rows = rows
        self._usual = self._reader.usual(rows)
        self._running = packed

    def end(self) -> None:
        """Ask the child to finalise its model and leave. On any thread."""
        self._socket.send(marshal.dumps((END,)))

    def read(self) -> Outcome | bool:
        """Read one message: the outcome of the batch that runs; True where there may be more to read, False where not.
        Raises Garbled, and EOFError where the other end is closed.
        """
        try:
            message, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionError:
            raise EOFError from None
        if not message:
            raise EOFError
        fds = descriptors(ancillary) if ancillary else []
        try:
            return self._usual_results(message) or self._take(message, fds)
        except Garbled:
            raise
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

    def _take(self, message: bytes, fds: list[int]) -> Outcome | bool:
        kind, words, text = unpack(message)
        if kind == SPILLED_OUT:
            kind, words, text = unpack(self._spilled(*words[1:]))
        if kind == DONE:
            return self._done(words, text)
        if kind == FAILED:
            self._over(*words[1:])
            return heard(json.loads(text))
        if kind == SEGMENT:
            self._segments[words[1]] = Segment.read_shared(fds.pop())
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

    def _usual_results(self, message: bytes) -> Results | None:
        """Those of a batch, where the message ends as it does for nearly every batch: everything is checked then by one
        comparison with the only bytes that can be right.
        """
        usual = self._usual
        if usual is None or len(message) != usual.length or not message.endswith(usual.tail):
            return None
        first, number, kept, gathered_ns, computed_ns, segment, offset, nbytes = DONE_HEAD.unpack_from(message)
        if first != usual.first or nbytes != usual.nbytes or not nbytes:
            return None  # without a byte there is no block
        packed = self._over(number, kept)
        outputs = self._reader.cut(usual, self._block(segment, offset, nbytes), self._rows)
        return Results(outputs, _NONE, gathered_ns, computed_ns, packed.copied, usual.placed, _NONE)

    def _done(self, words: Sequence[int], text: bytes) -> Results:
        number, kept, gathered_ns, computed_ns, segment, offset, nbytes = words[1:8]
        packed = self._over(number, kept)
        block = self._block(segment, offset, nbytes) if nbytes else None
        outputs, placed = self._reader.read(words, 8, block, self._rows)
        results = Results(outputs, _NONE, gathered_ns, computed_ns, packed.copied, placed, _NONE)
        if text:
            self._tell_of_members(results, {int(m): one for m, one in json.loads(text).items()})
        return results

    def _tell_of_members(self, results: Results, told: Mapping[int, Any]) -> None:
        if not told.keys() <= set(range(len(self._rows))):
            raise Garbled("it tells of a member that is none")
        results.parameters = {m: one for m, one in told.items() if isinstance(one, dict)}
        results.rescheduled = [m for m, one in told.items() if one is None]
        results.errors = {m: heard(one) for m, one in told.items() if not (one is None or isinstance(one, dict))}

    def _over(self, number: int, kept: int) -> Packed:
        """The batch that runs is over. Its inputs go home, unless the model keeps them."""
        packed = self._running
        if packed is None or number != self._number:
            raise Garbled(f"an answer to batch {number}, which does not run")
        self._running = None
        if kept:
            self._kept[number] = packed
        return packed

    def _block(self, number: int, offset: int, nbytes: int) -> Lease:
        segment = self._segments[number]
        if offset % PAGE or offset + nbytes > segment.size:
            raise Garbled(f"a block at {offset} of {nbytes} bytes in a segment of {segment.size}")
        return Lease(segment, offset, nbytes, self._come_home.append, (number, offset))

    def _spilled(self, number: int, offset: int, nbytes: int) -> bytes:
        # A copy first: what lies there may change under whoever reads it.
        return self._block(number, offset, nbytes).view().tobytes()

    def _tell(self, segment: Segment) -> None:
        fd = segment.open_for_reading()
        try:
            socket.send_fds(self._socket, [marshal.dumps((ATTACH, segment.number))], [fd])
        finally:
            os.close(fd)
        self._told.add(segment.number)
        segment.on_end.append(self._ended.append)


def _drained(entries: deque[Any]) -> list[Any]:
    drained = []
    while entries:
        drained.append(entries.popleft())
    return drained
