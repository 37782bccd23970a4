"""Hosts of decoupled models of sequences: controls and state as in sequence_hosts.py, answers as in stream_host.py.

Decided here: that a step which runs again has the sender that it had, on the side of the model too; that whoever sends
to a place that nobody has is heard by nobody; and that the state in an answer is kept before the batch that brought it
is back.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any, Final

from flowserve.backends.base import Instance, Work
from flowserve.backends.child.protocol import GOES_ON
from flowserve.runtime.children import Child
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import Completions, Outcome
from flowserve.runtime.sequence_hosts import finishing
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.runtime.stream_host import StreamHost, StreamProcessHost
from flowserve.runtime.stream_link import LinkSender, StreamLink
from flowserve.runtime.streaming import Returned, Streaming, ThreadSender
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.iterations import Source
from flowserve.scheduling.router import Ticket

GOING_ON_MAX: Final = 1000  # in one message
NOBODY: Final = (0, 0)  # batches are counted from 1


class SequenceStreamHost(StreamHost):
    """On a thread."""

    def __init__(
        self,
        ports: SequencePorts,
        name: str,
        model: str,
        instance: Instance,
        input_count: int,
        streaming: Streaming,
        clock: ClockNs,
    ) -> None:
        super().__init__(name, model, instance, input_count, streaming.keeping(ports.take), clock)
        self._ports = ports

    def open(self, completions: Completions) -> None:
        super().open(finishing(completions, self._apart))

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        self._ports.restart(tickets)
        return self._ports.gather(tickets, may_write=True)

    def _sender(self, ticket: Ticket) -> ThreadSender:
        if not _is_wanted(ticket):
            sender = ThreadSender(None, self._streaming, self._execution)
            sender.withdraw()
            return sender
        assert isinstance(ticket, Source)
        if isinstance(ticket.sender, ThreadSender):
            self._streaming.goes_on(ticket)
            return ticket.sender
        return super()._sender(ticket)

    def _apart(self, batch: Batch, outcome: Outcome) -> Outcome:
        return _finish(self._ports, self._streaming, batch, outcome)


class SequenceStreamProcessHost(StreamProcessHost):
    """In a process of its own."""

    def __init__(self, ports: SequencePorts, *arguments: Any, streaming: Streaming) -> None:
        super().__init__(*arguments, streaming=streaming.keeping(ports.take))
        self._ports = ports

    def open(self, completions: Completions) -> None:
        super().open(finishing(completions, self._apart))

    def start(self, batch: Batch) -> Outcome | None:
        outcome = super().start(batch)
        return None if outcome is None else self._apart(batch, outcome)

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        self._ports.restart(tickets)
        return self._ports.gather(tickets)

    def _new_link(self, child: Child) -> StreamLink:
        return _SequenceStreamLink(child.socket, self._packer, self._reader, self._streaming)

    def _apart(self, batch: Batch, outcome: Outcome) -> Outcome:
        return _finish(self._ports, self._streaming, batch, outcome)


class _SequenceStreamLink(StreamLink):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._going_on: list[tuple[int, int, int]] = []  # members of the batch that is about to be sent

    def send(self, work: Work) -> None:
        going_on, self._going_on = self._going_on, []
        for first in range(0, len(going_on), GOING_ON_MAX):
            self.tell(marshal.dumps((GOES_ON, self._number + 1, going_on[first : first + GOING_ON_MAX])))
        super().send(work)

    def _begin(self, number: int, m: int, ticket: Ticket, batch: Batch) -> None:
        if not _is_wanted(ticket):
            self._going_on.append((m, *NOBODY))
            return
        assert isinstance(ticket, Source)
        sender = ticket.sender
        if isinstance(sender, LinkSender) and sender.link is self:
            self._streaming.goes_on(ticket)
            self._going_on.append((m, *sender.key))
            return
        super()._begin(number, m, ticket, batch)


def _is_wanted(ticket: Ticket) -> bool:
    return ticket.line is not None and isinstance(ticket, Source) and not ticket.is_over


def _finish(ports: SequencePorts, streaming: Streaming, batch: Batch, outcome: Outcome) -> Outcome:
    streaming.catch_up()
    if batch.queue.bound is None and isinstance(outcome, Returned):  # a warm-up runs once
        for m in outcome.rescheduled:
            ticket = batch.tickets[m]
            if isinstance(ticket, Source):
                streaming.over(ticket)
    return ports.finish(batch, outcome)
