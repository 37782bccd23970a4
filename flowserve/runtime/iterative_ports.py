"""The ports of a model of iterative sequences: what a request is when it runs again, and what becomes of it afterwards.

Decided here: a request that runs again has the same inputs as before, which nobody has written to, the id of its
sequence, and no START; its state is that of its last execution. Members that the model gave back are queued again
before anybody else sees the batch, and are answered by none of it. Which batch they come with is decided in
scheduling/iterative.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flowserve.backends.base import Results, Work
from flowserve.config.types import ModelConfig
from flowserve.runtime.accounts import who_stayed
from flowserve.runtime.instance import Outcome
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.runtime.streaming import Returned
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.iterations import Source
from flowserve.scheduling.router import Ticket
from flowserve.values import Request

# Queues steps of a batch that is about to be back once more.
Reschedule = Callable[[Batch, Sequence[Ticket]], None]


class IterativePorts(SequencePorts):
    """As `SequencePorts`."""

    def __init__(self, config: ModelConfig, folder: Path, reschedule: Reschedule) -> None:
        super().__init__(config, folder)
        self._reschedule = reschedule

    def gather(self, tickets: Sequence[Ticket], *, may_write: bool = False) -> Work:
        work = super().gather(tickets, may_write=may_write)
        if work.may_write is not None:
            work.may_write = [[False] * len(tickets)] * len(work.inputs)
        return work

    def finish(self, batch: Batch, outcome: Outcome) -> Outcome:
        again = self._again(batch, outcome)
        rows = sum(ticket.line is not None for ticket in batch.tickets)
        outcome = super().finish(batch, outcome)
        batch.rows = rows
        if again:
            who_stayed(batch.queue.observer, again)  # who left meanwhile comes into no other batch to be forgotten by
            self._reschedule(batch, again)
        if batch.tickets or not isinstance(outcome, Results):
            return outcome
        batch.tickets = again
        return Returned(outcome.gathered_ns, outcome.computed_ns)

    def _requests(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> Sequence[Request]:
        return [
            replace(request, sequence_id=ticket.line.id, sequence_start=self._begins(ticket), sequence_end=False)
            for ticket, request in zip(tickets, requests, strict=True)
        ]

    def _begins(self, ticket: Ticket) -> bool:
        return ticket.line.going_on is not ticket

    def _kept(self, tickets: Sequence[Ticket], outcome: Outcome) -> list[int] | None:
        again = frozenset(outcome.rescheduled) if isinstance(outcome, Results) else frozenset()
        kept = [m for m, ticket in enumerate(tickets) if ticket.line is not None and m not in again]
        return kept if len(kept) < len(tickets) else None

    def _again(self, batch: Batch, outcome: Outcome) -> list[Ticket]:
        if batch.queue.bound is None or not isinstance(outcome, Results | Returned):
            return []  # a warm-up runs once
        again = [batch.tickets[m] for m in outcome.rescheduled]
        # A decoupled model may have said that it is done, too.
        return [one for one in again if one.line is not None and not (isinstance(one, Source) and one.is_over)]
