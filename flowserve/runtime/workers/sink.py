"""Where the responses of a decoupled model go that runs on a thread of the server.

Decides which sender each request of a batch gets: a request that runs again has the one that it had, and a padding row
has one that nothing listens to; and that the run of a batch is over when `execute` returns, whatever is still to be
sent. Models in processes have their counterpart in process_sink.py. Does not know threads; called by local.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flowserve.backends.base import Results, Work
from flowserve.errors import FlowserveError, ModelRaised
from flowserve.runtime.workers.base import log_raised
from flowserve.runtime.workers.outcome import Outcome, Returned
from flowserve.runtime.workers.state import StateAdapter
from flowserve.runtime.workers.streaming import ResponseStreams, ThreadSender
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket
from flowserve.scheduling.streaming.iterations import Source


class RunsBatches(Protocol):
    """The worker that a sink belongs to."""

    state: StateAdapter

    def executed_here(self) -> Batch | None:
        """The batch that the calling thread executes; None for threads of the model's own."""


class ThreadSink:
    """The responses of one instance."""

    def __init__(self, streams: ResponseStreams) -> None:
        self._streams = streams

    def senders(self, worker: RunsBatches, tickets: Sequence[Ticket]) -> list[ThreadSender]:
        """A sender for each member of a batch that is about to start. On the event loop."""
        worker.state.restart(tickets)
        return [self._sender(worker, ticket) for ticket in tickets]

    def _sender(self, worker: RunsBatches, ticket: Ticket) -> ThreadSender:
        if not is_wanted(ticket):
            sender = ThreadSender(None, self._streams, worker.executed_here)
            sender.withdraw()
            return sender
        assert isinstance(ticket, Source)
        if isinstance(ticket.sender, ThreadSender):
            self._streams.goes_on(ticket)
            return ticket.sender
        sender = ThreadSender(ticket, self._streams, worker.executed_here)
        sender.grant(self._streams.start(ticket, sender, worker))
        return sender

    def outcome(self, model: str, instance: str, work: Work, outcome: Results | FlowserveError) -> Returned:
        """The outcome of a run. On the thread that ran it."""
        if isinstance(outcome, Results):
            return Returned(outcome.gathered_ns, outcome.computed_ns, rescheduled=outcome.rescheduled)
        if isinstance(outcome, ModelRaised):
            log_raised(outcome, model, instance)
            outcome = outcome.as_told()
        for sender in work.senders or ():
            sender.fail(outcome)  # after its earlier responses; a sender that is finished does not fail
        return Returned(has_failed=True)

    def finish(self, batch: Batch, outcome: Outcome) -> None:
        """Process the responses that a batch's model has sent, before the outcome of the batch. On the event loop."""
        self._streams.catch_up()
        end_warm_up(self._streams, batch, outcome)


def is_wanted(ticket: Ticket) -> bool:
    """Whether a member of a decoupled model's batch has a caller that takes responses."""
    is_padding = getattr(ticket, "sequence", ticket) is None
    return not is_padding and isinstance(ticket, Source) and not ticket.is_over


def end_warm_up(streams: ResponseStreams, batch: Batch, outcome: Outcome) -> None:
    """A warm-up of an iterative model runs once, even if the model reschedules it."""
    if batch.queue.bound is None and isinstance(outcome, Returned):
        for m in outcome.rescheduled:
            ticket = batch.tickets[m]
            if isinstance(ticket, Source):
                streams.over(ticket)
