"""The wire to the process of a decoupled model.

Decided here: what of it concerns answers: which step a message is about, that an answer costs a credit that was
granted, and that what must not be lost (a credit, that nobody wants any more) is sent again where the child does not
read just now. Batches and memory are process_link.py's. Nothing that a child says is believed.
"""

from __future__ import annotations

import json
import marshal
import socket
from collections import deque
from collections.abc import Sequence

import trio

from flowserve.backends.base import Sent, Work
from flowserve.backends.child.protocol import ANSWER, GRANT, OVER, SPILLED_OUT, WAITS, WITHDRAW, heard, unpack
from flowserve.errors import FlowserveError, Internal
from flowserve.runtime.process_inputs import InputPacker, Packed
from flowserve.runtime.process_link import Expected, Link, Outcome, Unseen
from flowserve.runtime.process_outputs import Garbled, OutputReader
from flowserve.runtime.streaming import Streaming
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.iterations import Source
from flowserve.scheduling.router import Ticket


class StreamLink(Link):
    """One child's socket and memory."""

    def __init__(self, sock: socket.socket, packer: InputPacker, reader: OutputReader, streaming: Streaming) -> None:
        super().__init__(sock, packer, reader)
        self._streaming = streaming
        self._sources: dict[tuple[int, int], Source] = {}  # steps whose end was not heard of yet
        self._batch: Batch | None = None
        self._unsent: deque[bytes] = deque()

    def start(self, batch: Batch, work: Work) -> None:
        """As `send`; credits go before the batch."""
        self._batch = batch
        for m, ticket in enumerate(batch.tickets):
            self._begin(self._number + 1, m, ticket, batch)
        self._flush()
        self.send(work)

    def _begin(self, number: int, m: int, ticket: Ticket, batch: Batch) -> None:
        """Before the batch itself: what its process hears of one of its members."""
        assert isinstance(ticket, Source)
        sender = LinkSender(self, number, m, ticket)
        self._sources[number, m] = ticket
        count = self._streaming.start(ticket, sender, batch.instance)
        if count:
            sender.grant(count)

    def over(self, why: FlowserveError, batch: Sequence[Ticket] | None = None) -> None:
        """Those steps that may still answer fail: all of them, or those of a batch."""
        for key, source in [*self._sources.items()]:
            if batch is None or source in batch:
                del self._sources[key]
                self._streaming.over(source, why)

    def cancelled(self, source: Source) -> None:
        self._streaming.cancelled(source)

    def tell(self, message: bytes) -> None:
        """Send this, now or when the child reads again, in order."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()
            if self._unsent:
                trio.lowlevel.spawn_system_task(self._flush_later, name="unsent credits")

    def come_home(self) -> list[tuple[int, int]]:
        places = []
        while self.homes:
            places.append(self.homes.popleft())
        return places

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # its process has ended, and in a moment we are told how
                self._unsent.clear()
                return
            self._unsent.popleft()

    async def _flush_later(self) -> None:
        try:
            while self._unsent:
                await trio.lowlevel.wait_writable(self._socket)
                self._flush()
        except (OSError, trio.ClosedResourceError):
            self._unsent.clear()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
        super().close()

    def _over(self, expected: Expected, number: int, kept: int) -> Packed:
        self._batch = None  # it holds its requests, and with them what they run on
        return super()._over(expected, number, kept)

    def _take(self, message: bytes, fds: list[int]) -> Outcome | bool:
        kind, words, text = unpack(message)
        if kind == SPILLED_OUT:
            return self._take(self._spilled(*words[1:]), fds)
        if kind == ANSWER:
            self._answered(words, text)
        elif kind == OVER:
            self._finished(*words[1:], text=text)
        elif kind == WAITS:
            number, member, is_inside = words[1:]
            source = self._sources.get((number, member))
            if source is not None:
                self._streaming.waits(source, self._batch if is_inside else None)
        else:
            return super()._take(message, fds)
        return True

    def _answered(self, words: Sequence[int], text: bytes) -> None:
        number, member, infer_ns, output_ns, rows, segment, offset, nbytes = words[1:9]
        try:
            block = self._block(segment, offset, nbytes) if nbytes else None
        except Unseen as error:
            self._fail((number, member), Internal(str(error)))
            return
        source = self._sources.get((number, member))
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
        row = [column[0] for column in outputs]
        self._streaming.answered(source, Sent(row, parameters, infer_ns, output_ns))

    def _finished(self, number: int, member: int, is_empty: int, *, text: bytes) -> None:
        source = self._sources.pop((number, member), None)
        if source is not None:
            self._streaming.over(source, heard(json.loads(text)) if text else None, is_empty=bool(is_empty))

    def _fail(self, key: tuple[int, int], error: FlowserveError) -> None:
        source = self._sources.pop(key, None)
        if source is not None:
            self._streaming.over(source, error)


class LinkSender:
    """What the machines tell a step that runs in a process."""

    def __init__(self, link: StreamLink, number: int, member: int, source: Source) -> None:
        self.link = link
        self.key = (number, member)
        self._source = source

    def grant(self, count: int) -> None:
        self.link.tell(marshal.dumps((GRANT, *self.key, count, self.link.come_home())))

    def withdraw(self) -> None:
        self.link.cancelled(self._source)
        self.link.tell(marshal.dumps((WITHDRAW, *self.key)))
