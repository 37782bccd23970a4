"""Where a batch meets a decoupled model on a thread of the server's own process.

Decided here: what differs from a model that answers once: each request of a batch gets a sender, and the run ends when
`execute` returns, whatever is still to be answered. The thread, its queue and its end are those of instance.py.
"""

from __future__ import annotations

import threading

from flowserve.backends.base import Instance, Results, Work
from flowserve.errors import FlowserveError
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import LocalHost, Outcome
from flowserve.runtime.streaming import Returned, Streaming, ThreadSender, sources
from flowserve.scheduling.dispatcher import Batch


class StreamHost(LocalHost):
    """One instance of a decoupled model. Always on its thread: on the loop, nobody could read what it sends."""

    def __init__(
        self, name: str, model: str, instance: Instance, input_count: int, streaming: Streaming, clock: ClockNs
    ) -> None:
        # No outputs: a run returns none, they are sent.
        super().__init__(name, model, instance, input_count, 0, None, clock, always_inline=False, may_write=True)
        self._streaming = streaming

    def start(self, batch: Batch) -> Outcome | None:
        work = self._gather(batch)
        senders = []
        for source in sources(batch):
            sender = ThreadSender(source, self._streaming, self._execution)
            sender.grant(self._streaming.start(source, sender))
            senders.append(sender)
        work.senders = senders
        self.running = batch
        self._work.put((batch, work))
        return None

    def _execution(self) -> Batch | None:
        return self.running if threading.current_thread() is self._thread else None

    def _run(self, batch: Batch, work: Work, *, inline: bool) -> Outcome:
        outcome = super()._run(batch, work, inline=inline)
        if isinstance(outcome, Results):
            return Returned(outcome.gathered_ns, outcome.computed_ns)
        assert isinstance(outcome, FlowserveError)
        for sender in work.senders or ():
            sender.fail(outcome)  # after what it has sent already; one that said that it is done is not failed
        return Returned(has_failed=True)
