"""The responses of a decoupled model that runs in a process.

Decides which step a message is about, that a response costs a credit that was granted, and that a request which runs
again keeps its sender. Nothing in a message is trusted. Models on threads have their counterpart in workers/sink.py.
Made for each process of such a model, called by workers/process.py on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from flowserve.backends.base import Sent
from flowserve.backends.worker.protocol import ANSWER, GOES_ON, GRANT, OVER, WAITS, WITHDRAW, decode_error, pack
from flowserve.errors import FlowserveError, Internal
from flowserve.runtime.ipc.channel import Channel, Unseen
from flowserve.runtime.ipc.decoder import Garbled, OutputReader
from flowserve.runtime.workers.sink import is_wanted
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket
from flowserve.scheduling.streaming.iterations import Source

_GOING_ON_MAX: Final = 1000  # members in one message
_NO_SENDER: Final = (0, 0)  # batches are numbered from 1


class ProcessSink:
    """The responses of one process."""

    def __init__(self, channel: Channel, reader: OutputReader, streams: ResponseStreams) -> None:
        self._channel = channel
        self._reader = reader
        self._streams = streams
        self._sources: dict[tuple[int, int], Source] = {}  # steps that have not ended

    def begin(self, number: int, batch: Batch) -> None:
        """Before a batch is sent: report to the process the credits of each member, and the members that go on."""
        going_on: list[int] = []
        for m, ticket in enumerate(batch.tickets):
            if not is_wanted(ticket):
                going_on += (m, *_NO_SENDER)
                continue
            assert isinstance(ticket, Source)
            sender = ticket.sender
            if isinstance(sender, ProcessSender) and sender.sink is self:
                self._streams.goes_on(ticket)
                going_on += (m, *sender.key)
                continue
            sender = ProcessSender(self, number, m, ticket)
            self._sources[number, m] = ticket
            granted = self._streams.start(ticket, sender, batch.instance)
            if granted:
                sender.grant(granted)
        for first in range(0, len(going_on), 3 * _GOING_ON_MAX):
            self._channel.tell(pack(GOES_ON, [number, *going_on[first : first + 3 * _GOING_ON_MAX]]))

    def take(self, kind: int, words: Sequence[int], text: bytes, batch: Batch | None) -> None:
        """Take a message about responses. `batch`: the one that the process has. Raises Garbled."""
        if kind == ANSWER:
            self._take_response(words, text)
        elif kind == OVER:
            number, member, is_empty = words[1:]
            source = self._sources.pop((number, member), None)
            if source is not None:
                self._streams.over(source, decode_error(json.loads(text)) if text else None, is_empty=bool(is_empty))
        elif kind == WAITS:
            number, member, is_inside = words[1:]
            source = self._sources.get((number, member))
            if source is not None:
                self._streams.waits(source, batch if is_inside else None)
        else:
            raise Garbled(f"a message of kind {kind}")

    def fail(self, error: FlowserveError, tickets: Sequence[Ticket] | None = None) -> None:
        """Steps that may still respond fail: all of them, or those of a batch."""
        for key, source in [*self._sources.items()]:
            if tickets is None or source in tickets:
                del self._sources[key]
                self._streams.over(source, error)

    def _take_response(self, words: Sequence[int], text: bytes) -> None:
        number, member, infer_ns, output_ns, rows, segment, offset, nbytes = words[1:9]
        key = (number, member)
        try:
            block = self._channel.block(segment, offset, nbytes)
        except Unseen as error:
            source = self._sources.pop(key, None)
            if source is not None:
                self._streams.over(source, Internal(str(error)))
            return
        source = self._sources.get(key)
        if source is None:
            return  # it failed meanwhile
        outputs, _ = self._reader.read(words, 9, block, [rows])
        if source.flow.done:
            return
        if not source.credit:
            raise Garbled(f"an answer to member {member} of batch {number}, which may not send one")
        parameters = json.loads(text) if text else {}
        if not isinstance(parameters, dict):
            raise Garbled("parameters of a response that are no object")
        self._streams.answered(source, Sent([column[0] for column in outputs], parameters, infer_ns, output_ns))

    def grant(self, key: tuple[int, int], granted: int) -> None:
        """Let a step send so many more responses."""
        homes = self._channel.homes
        words = [*key, granted]
        while homes:
            words += homes.popleft()
        self._channel.tell(pack(GRANT, words))

    def withdraw(self, key: tuple[int, int], source: Source) -> None:
        """No response of a step is wanted any more."""
        self._streams.cancelled(source)
        self._channel.tell(pack(WITHDRAW, key))


class ProcessSender:
    """Sends the scheduler's credits and cancellations to a step that runs in a process."""

    def __init__(self, sink: ProcessSink, number: int, member: int, source: Source) -> None:
        self.sink = sink
        self.key = (number, member)
        self._source = source

    def grant(self, count: int) -> None:
        self.sink.grant(self.key, count)

    def withdraw(self) -> None:
        self.sink.withdraw(self.key, self._source)
