"""Triton's iterative sequences: each sequence is one request, which its model reschedules until it is finished.

Decides the sequence id of a request that names none, that a rescheduled request is the next of its sequence, and that a
sequence ends when its last request is not rescheduled. A batch contains the requests that have a slot and are ready, so
requests join and leave between any two executions (continuous batching). Slots, backlog and batches are those of
`Sequences`.

Always true after every call, besides what is true of the strategy (see `check`):
  (1) each sequence has a request that waits, runs, or waits for a retry.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from flowserve.errors import FlowserveError
from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.sequence.batcher import Identify, Sequences
from flowserve.scheduling.sequence.direct import Direct
from flowserve.scheduling.sequence.oldest import Oldest
from flowserve.scheduling.sequence.sequence import (
    RequestSequence,
    SequenceId,
    SequencePolicy,
    StateShapeKey,
    without_start,
)


class Iterative(Sequences):
    """The additions to either strategy."""

    def __init__(self, policy: SequencePolicy, identify: Identify, *arguments: Any) -> None:
        super().__init__(policy, self._identify_request, *arguments)
        self._identify_given = identify
        self._numbers = count(1)

    def reschedule(self, ticket: Ticket, now_ns: int) -> None:
        """Queue a request again that ran. Called before `take_for` of its instance; no effect if it is over."""
        if ticket.flow.done:
            return
        self._now_ns = ticket.queued_ns = now_ns
        sequence: RequestSequence = ticket.sequence
        if isinstance(ticket.key, StateShapeKey):
            ticket.key = ticket.key.rescheduled()
        if sequence.waiting:  # another request of the same id
            self._head_removed(sequence)
        sequence.waiting.appendleft(ticket)
        sequence.rescheduled = ticket
        self._count += 1
        self._head_added(sequence)

    def withdraw(self, flow: Flow) -> int:
        """Remove the tickets of a flow that is over. Other requests of the same id do not depend on them."""
        gone = 0
        for sequence in [*self._sequences]:
            left = sum(ticket.flow.done for ticket in sequence.waiting)
            if left:
                gone += left
                self._remove_done(sequence, left)
        for ticket in self._withdrawn_again():
            gone += 1
            self._end_where_done(ticket.sequence)
        return gone + self._ended.withdraw()

    def id_of(self, flow: Flow) -> SequenceId:
        return self._identify_given(flow)[0]

    def _identify_request(self, flow: Flow) -> tuple[SequenceId, bool, bool]:
        """The sequence parameters of a request. One without a correlation id gets an id that only its model sees."""
        sequence_id, is_start, _ = self._identify_given(flow)
        if not sequence_id:
            return self._new_id(), True, False
        if not is_start and self.is_live(sequence_id):
            raise without_start(self.policy, sequence_id, "each of its requests is a sequence of its own")
        return sequence_id, is_start, False

    def _new_id(self) -> SequenceId:
        while True:
            number = next(self._numbers)
            sequence_id = str(number) if self.policy.id_type == "BYTES" else number
            if not self.is_live(sequence_id):
                return sequence_id

    def _remove_done(self, sequence: RequestSequence, gone: int) -> None:
        is_first = sequence.slot is not None and sequence.waiting[0].flow.done
        if is_first:
            self._head_removed(sequence)
        rest = [ticket for ticket in sequence.waiting if not ticket.flow.done]
        sequence.waiting.clear()
        sequence.waiting.extend(rest)
        self._count -= gone
        if rest and is_first:
            self._head_added(sequence)
        self._end_where_done(sequence)

    def _is_back(self, instance: Any) -> None:
        ran = [*self._last_batch[instance]]
        super()._is_back(instance)
        for sequence in ran:
            self._end_where_done(sequence)
            if sequence.waiting and sequence.waiting[0] is not sequence.rescheduled:
                sequence.rescheduled = None

    def _end_where_done(self, sequence: RequestSequence) -> None:
        is_busy = sequence.waiting or sequence.is_running
        if sequence in self._sequences and not is_busy and sequence not in self._retried_sequences():
            self._end(sequence, "")

    def _retried_sequences(self) -> set[RequestSequence]:
        """The sequences with a request that waits for a retry."""
        parts = [part for parts in self._retries.values() for part in parts]
        return {ticket.sequence for part in parts for ticket in part if not ticket.flow.done}

    def _end(self, sequence: RequestSequence, reason: str, error: FlowserveError | None = None) -> None:
        super()._end(sequence, "", error)  # no reason is kept: a sequence has one request
        sequence.rescheduled = None  # breaks the reference cycle of sequence and ticket, which holds the tensors

    def check(self) -> None:
        super().check()
        again = self._retried_sequences()
        for sequence in self._sequences:
            assert sequence.waiting or sequence.is_running or sequence in again, f"(1) {sequence} was not ended"


class IterativeDirect(Iterative, Direct):
    """Iterative sequences with strategy direct: a request keeps its row in the batch until it is finished."""


class IterativeOldest(Iterative, Oldest):
    """Iterative sequences with strategy oldest: requests are batched in order of arrival and rescheduling."""
