"""Triton's two sequence batching strategies, "direct" and "oldest", and iterative sequences with either.

Decides which requests form a batch, and in which order a rescheduled request runs again. Slots, backlog and the ends of
sequences are those of `Sequences`.

Direct: a sequence keeps its row in the batch. A batch extends from slot 0 of an instance to the highest slot with a
request; a slot without one gets a filler, so that each sequence is always the same row, as models that keep state by
row require. Requests whose shapes differ from those of the oldest one wait for another batch. Without
`minimum_slot_utilization` a batch leaves as soon as one request waits.

Oldest: requests are batched in order of arrival. Each instance has a dynamic batcher over the first waiting request of
each of its sequences, the candidates. The next request of a sequence becomes a candidate when the one before it has
left, so that no batch contains two requests of one sequence. There are no fillers. An instance runs one batch at a
time, so the responses of a sequence keep their order.

Iterative: each sequence is one request, which its model reschedules until it is finished. Decides the sequence id of a
request that names none, that a rescheduled request is the next of its sequence, and that a sequence ends when its last
request is not rescheduled. A batch contains the requests that have a slot and are ready, so requests join and leave
between any two executions (continuous batching).

Always true after every call of an iterative batcher, besides what is true of the strategy (see `Iterative.check`):
  (1) each sequence has a request that waits, runs, or waits for a retry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any

from flowserve.errors import FlowserveError
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.sequence.batcher import Identify, Sequences
from flowserve.scheduling.sequence.sequence import (
    RequestSequence,
    SequenceId,
    SequencePolicy,
    Slot,
    StateShapeKey,
    without_start,
)

_by_arrival = attrgetter("queued_ns")


class Direct(Sequences):
    """`share`: the fraction of the slots that forms a batch before `delay_ns` has passed; 0: a batch leaves
    immediately.

    `filler` is the frame of all fillers; a filler's `Ticket.sequence` is None.
    """

    def __init__(
        self, policy: SequencePolicy, identify: Identify, filler: Frame, share: float = 0.0, delay_ns: int = 0
    ) -> None:
        super().__init__(policy, identify)
        self._filler = filler
        self._requests_min = share * policy.slots
        self._delay_ns = delay_ns if share else 0
        self.may_wait = self._delay_ns > 0

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        ready = self._ready(instance)
        if not ready:
            return None
        oldest = _oldest(ready)
        if len(ready) < self._requests_min and now_ns - oldest.queued_ns < self._delay_ns:
            return None
        tickets: list[Ticket] = []
        for slot in ready:
            sequence = slot.sequence
            assert sequence is not None
            if sequence.waiting[0].key != oldest.key:
                continue
            while len(tickets) < slot.number:
                filler = Ticket(self._filler, oldest.node, 1, None, now_ns)
                filler.sequence = None
                tickets.append(filler)
            tickets.append(self._pop(sequence))
        return tickets

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [_oldest(ready).queued_ns for instance in self._free_instances if (ready := self._ready(instance))]
        return min(waiting) + self._delay_ns if waiting else None

    def _ready(self, instance: Any) -> list[Slot]:
        """The slots of an instance that have a waiting request, by number."""
        return [slot for slot in self.slots[instance] if slot.sequence is not None and slot.sequence.waiting]


def _oldest(ready: list[Slot]) -> Ticket:
    """The request that has waited longest; of several the one in the lowest slot."""
    return min((slot.sequence.waiting[0] for slot in ready if slot.sequence is not None), key=_by_arrival)


class Oldest(Sequences):
    """`batches` decides how many candidates form a batch; its delay counts from when a request became a candidate."""

    def __init__(self, policy: SequencePolicy, identify: Identify, batches: BatchPolicy) -> None:
        super().__init__(policy, identify)
        self._batches = batches
        self._delay_ns = batches.max_queue_delay_ns
        self.may_wait = batches.max_queue_delay_ns > 0
        # Those of an instance are in ascending order of `candidate_ns`.
        self._candidates: dict[Any, OrderedDict[Ticket, None]] = {}

    def serve(self, instances: Sequence[Any], free: Any) -> None:
        super().serve(instances, free)
        self._candidates = {instance: OrderedDict() for instance in instances}

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        candidates = self._candidates[instance]
        if not candidates:
            return None
        first = next(iter(candidates))
        is_overdue = self._delay_ns > 0 and now_ns - first.candidate_ns >= self._delay_ns
        size = self._batches.count(candidates, first.key, is_overdue)
        if not size:
            return None
        batch = [candidates.popitem(last=False)[0] for _ in range(size)]
        for ticket in batch:
            sequence = ticket.sequence
            self._pop(sequence)
            if sequence.waiting:
                self._head_added(sequence)
        return batch

    def _head_added(self, sequence: RequestSequence) -> None:
        assert sequence.slot is not None
        first = sequence.waiting[0]
        first.candidate_ns = self._now_ns
        self._candidates[sequence.slot.instance][first] = None

    def _head_removed(self, sequence: RequestSequence) -> None:
        assert sequence.slot is not None
        del self._candidates[sequence.slot.instance][sequence.waiting[0]]

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [
            next(iter(found)).candidate_ns for instance in self._free_instances if (found := self._candidates[instance])
        ]
        return min(waiting) + self._delay_ns if waiting else None

    def check(self) -> None:
        super().check()
        for instance, candidates in self._candidates.items():
            sequences = [slot.sequence for slot in self.slots[instance] if slot.sequence is not None]
            heads = [id(sequence.waiting[0]) for sequence in sequences if sequence.waiting]
            assert sorted(map(id, candidates)) == sorted(heads), "(3) the candidates are not the first of each sequence"
            times = [ticket.candidate_ns for ticket in candidates]
            assert times == sorted(times), "(3) the candidates are not in order"


class Iterative(Sequences):
    """The additions to either strategy."""

    def __init__(self, policy: SequencePolicy, identify: Identify, *arguments: Any) -> None:
        super().__init__(policy, self._identify_request, *arguments)
        self._identify_given = identify
        self._numbers = count(1)

    def reschedule(self, ticket: Ticket, now_ns: int) -> None:
        """Queue a request again that ran. Called before `take` of its instance; no effect if it is over."""
        if ticket.frame.record.done:
            return
        self._now_ns = ticket.queued_ns = now_ns
        sequence: RequestSequence = ticket.sequence
        if isinstance(ticket.key, StateShapeKey):
            ticket.key = replace(ticket.key, is_start=False)
        if sequence.waiting:  # another request of the same id
            self._head_removed(sequence)
        sequence.waiting.appendleft(ticket)
        sequence.rescheduled = ticket
        self._tickets.append(ticket)
        self._head_added(sequence)

    def withdraw(self, *frames: Frame) -> int:
        """Remove the tickets of a request that is over. Other requests of the same id do not depend on them."""
        gone = [ticket for frame in frames for ticket in self._tickets.withdraw(frame)]
        for ticket in gone:
            if self._orphans.pop(ticket, None) is None:
                self._remove(ticket, ticket.sequence)
        return len(gone)

    def id_of(self, frame: Frame) -> SequenceId:
        return self._identify_given(frame)[0]

    def _identify_request(self, frame: Frame) -> tuple[SequenceId, bool, bool]:
        """The sequence parameters of a request. One without a correlation id gets an id that only its model sees."""
        sequence_id, is_start, _ = self._identify_given(frame)
        if not sequence_id:
            return self._new_id(), True, False
        if not is_start and self.is_live(sequence_id):
            raise without_start(self.policy, sequence_id, "each of its requests is a sequence of its own")
        return sequence_id, is_start, False

    def _new_id(self) -> SequenceId:
        ids: Iterator[SequenceId] = map(str, self._numbers) if self.policy.id_type == "BYTES" else self._numbers
        return next(sequence_id for sequence_id in ids if not self.is_live(sequence_id))

    def _remove(self, ticket: Ticket, sequence: RequestSequence) -> None:
        """Remove a ticket from its sequence, which ends if it has no other."""
        if ticket in sequence.waiting:  # else it waits for a retry, and is left out when that runs
            is_first = sequence.slot is not None and sequence.waiting[0] is ticket
            if is_first:
                self._head_removed(sequence)
            sequence.waiting.remove(ticket)
            if is_first and sequence.waiting:
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
        return {ticket.sequence for part in parts for ticket in part if not ticket.frame.record.done}

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
