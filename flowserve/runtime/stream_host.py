"""Where a batch meets a decoupled model, on a thread of the server's or in a process.

Decided here: what differs from a model that answers once: each request of a batch gets a sender, and the run ends when
`execute` returns, whatever is still to be answered. The thread, its queue and its end are those of instance.py, the
process is that of process_host.py.
"""

from __future__ import annotations

import threading
from typing import Any

from flowserve.backends.base import Instance, Results, Work
from flowserve.errors import FlowserveError, InstanceDied, ModelRaised
from flowserve.runtime.children import Child
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import LocalHost, Outcome, log_raised
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.process_link import Link
from flowserve.runtime.stream_link import StreamLink
from flowserve.runtime.streaming import Returned, Streaming, ThreadSender, sources
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.iterations import Source
from flowserve.scheduling.router import Ticket


class StreamHost(LocalHost):
    """One instance of a decoupled model. Always on its thread: on the loop, nobody could read what it sends."""

    def __init__(
        self, name: str, model: str, instance: Instance, input_count: int, streaming: Streaming, clock: ClockNs
    ) -> None:
        # No outputs: a run returns none, they are sent.
        super().__init__(name, model, instance, input_count, 0, None, clock, always_inline=False, may_write=True)
        self._streaming = streaming

    def start(self, batch: Batch) -> Outcome | None:
        work = self._gather(batch.tickets)
        work.senders = [self._sender(ticket) for ticket in batch.tickets]
        self._run_later(batch, work)
        return None

    def _sender(self, ticket: Ticket) -> ThreadSender:
        assert isinstance(ticket, Source)
        sender = ThreadSender(ticket, self._streaming, self._execution)
        sender.grant(self._streaming.start(ticket, sender, self))
        return sender

    def _execution(self) -> Batch | None:
        return self.running if threading.current_thread() is self._thread else None

    def _run(self, batch: Batch, work: Work, *, inline: bool) -> Outcome:
        outcome = super()._run(batch, work, inline=inline)
        if isinstance(outcome, Results):
            return Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
        assert isinstance(outcome, FlowserveError)
        if isinstance(outcome, ModelRaised):
            log_raised(outcome, self._model, self.name)
            outcome = outcome.as_told()
        for sender in work.senders or ():
            sender.fail(outcome)  # after what it has sent already; one that said that it is done is not failed
        return Returned(has_failed=True)


class StreamProcessHost(ProcessHost):
    """The same in a process of its own."""

    _waits = False  # its answers come by themselves

    def __init__(self, *arguments: Any, streaming: Streaming) -> None:
        super().__init__(*arguments)
        self.passes_on = self.receives = False
        self._streaming = streaming

    def _new_link(self, child: Child) -> StreamLink:
        return StreamLink(child.socket, self._packer, self._reader, self._streaming)

    def _send(self, link: Link, batch: Batch) -> None:
        assert isinstance(link, StreamLink)
        link.start(batch, self._gather(batch.tickets))

    def start(self, batch: Batch) -> Outcome | None:
        outcome = super().start(batch)
        if not isinstance(outcome, FlowserveError):
            return outcome
        for source in sources(batch):
            self._streaming.over(source, outcome)
        return Returned(has_failed=True)

    def _over(self, child: Child) -> None:
        link = self.link
        try:
            super()._over(child)
        finally:
            if isinstance(link, StreamLink):
                link.over(InstanceDied(child.ended))

    def _outcome(self, batch: Batch, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Results):
            return Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
        assert isinstance(outcome, FlowserveError)
        if isinstance(self.link, StreamLink):
            self.link.over(outcome, batch.tickets)
        return Returned(has_failed=True)
