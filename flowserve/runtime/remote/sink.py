"""The responses of a decoupled model that runs in another process.

Decides which step a message about responses concerns, and that each response uses one granted credit; nothing in a
message is trusted. What follows from a response is decided in workers/streaming.py. Does not know how messages travel.
Called by worker.py, on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from flowserve.backends.base import Sent
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    ANSWER_OUTPUTS_AT,
    FROM_INSTANCE,
    Garbled,
    decode_error,
    decode_notes,
    pack,
    read_fields,
)
from flowserve.errors import FlowserveError, Internal
from flowserve.runtime.ipc.channel import Unseen
from flowserve.runtime.ipc.tensors import ANY_ROWS, OutputReader
from flowserve.runtime.remote.port import RemotePort
from flowserve.runtime.workers.streaming import ResponseStreams, is_wanted
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import Source
from flowserve.scheduling.frames.frame import Ticket

_GOING_ON_MAX: Final = 1000  # members in one GOES_ON message
_NO_SENDER: Final = (0, 0)  # batches are numbered from 1

# The memory of a message's tensors, by its segment, its offset and its bytes. Raises Unseen, Garbled, or LookupError.
MemoryOf = Callable[[int, int, int], Any]


class RemoteSink:
    """Reads the messages of one process about responses."""

    def __init__(self, port: RemotePort, reader: OutputReader, streams: ResponseStreams) -> None:
        self.port = port
        self._reader = reader
        self.streams = streams
        self._sources: dict[tuple[int, int], Source] = {}  # steps that have not ended

    def begin(self, number: int, batch: Batch) -> None:
        """Called before a batch is sent: report to the process the credits of each member, and the members that run
        again.
        """
        going_on: list[int] = []
        for m, ticket in enumerate(batch.tickets):
            if not is_wanted(ticket):
                going_on += (m, *_NO_SENDER)
                continue
            sender = ticket.sender
            if isinstance(sender, RemoteSender) and sender.sink is self:
                self.streams.goes_on(ticket)
                going_on += (m, *sender.key)
                continue
            sender = RemoteSender(self, number, m, ticket)
            self._sources[number, m] = ticket
            granted = self.streams.start(ticket, sender, batch.instance)
            if granted:
                sender.grant(granted)
        for first in range(0, len(going_on), 3 * _GOING_ON_MAX):
            self.port.tell(pack(messages.GOES_ON, [number, *going_on[first : first + 3 * _GOING_ON_MAX]]))

    def take(self, kind: int, words: Sequence[int], text: bytes, memory_of: MemoryOf, batch: Batch | None) -> None:
        """Process a message about responses. `batch`: the batch in the process. Raises Garbled."""
        if kind == messages.ANSWER:
            self._take_response(words, text, memory_of)
        elif kind == messages.OVER:
            number, member = read_fields(FROM_INSTANCE, kind, words)
            source = self._sources.pop((number, member), None)
            if source is not None:
                self.streams.over(source, decode_error(json.loads(text)) if text else None)
        elif kind == messages.WAITS:
            number, member, is_inside = read_fields(FROM_INSTANCE, kind, words)
            source = self._sources.get((number, member))
            if source is not None:
                self.streams.waits(source, batch if is_inside else None)
        else:
            raise Garbled(f"a message of kind {kind}")

    def fail(self, error: FlowserveError, tickets: Sequence[Ticket] | None = None) -> None:
        """Fail the steps that may still respond: all of them, or those of a batch."""
        for key, source in [*self._sources.items()]:
            if tickets is None or source in tickets:
                del self._sources[key]
                self.streams.over(source, error)

    def _take_response(self, words: Sequence[int], text: bytes, memory_of: MemoryOf) -> None:
        number, member, is_last, infer_ns, output_ns, segment, offset, nbytes = words[1:ANSWER_OUTPUTS_AT]
        key = (number, member)
        try:
            block = memory_of(segment, offset, nbytes)
        except Unseen as error:
            source = self._sources.pop(key, None)
            if source is not None:
                self.streams.over(source, Internal(str(error)))
            return
        source = self._sources.get(key)
        if source is None:
            return  # the step failed meanwhile
        told = json.loads(text) if text else {}
        parameters, noted = told if isinstance(told, list) and len(told) == 2 else (told, None)
        notes = decode_notes(noted, self._reader.names, 1)
        outputs, _ = self._reader.read(
            words, ANSWER_OUTPUTS_AT, block, [ANY_ROWS], () if notes is None else notes.unlike
        )
        if source.frame.record.done:
            return
        if not source.credit:
            raise Garbled(f"an answer to member {member} of batch {number}, which may not send one")
        if not isinstance(parameters, dict):
            raise Garbled("parameters of a response that are no object")
        if is_last:
            del self._sources[key]
        row = [column[0] for column in outputs]
        self.streams.answered(source, Sent(row, parameters, infer_ns, output_ns, notes, bool(is_last)))


class RemoteSender:
    """Sends the scheduler's credits and cancellations to a step that runs in another process."""

    def __init__(self, sink: RemoteSink, number: int, member: int, source: Source) -> None:
        self.sink = sink
        self.key = (number, member)
        self._source = source

    def grant(self, count: int) -> None:
        port = self.sink.port
        port.tell(pack(messages.GRANT, [*self.key, count, *port.free_words()]))

    def withdraw(self) -> None:
        self.sink.streams.cancelled(self._source)
        self.sink.port.tell(pack(messages.WITHDRAW, self.key))
