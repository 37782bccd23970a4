"""Triton's sequence batching strategy "oldest": requests are batched in order of arrival.

Decides which requests form a batch: each instance has a dynamic batcher over the first waiting request of each of its
sequences, the candidates. The next request of a sequence becomes a candidate when the one before it has left, so that
no batch contains two requests of one sequence. There are no fillers. An instance runs one batch at a time, so the
responses of a sequence keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowserve.scheduling.flow import Ticket
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.sequence.batcher import Identify, Sequences
from flowserve.scheduling.sequence.sequence import RequestSequence, SequencePolicy


class Oldest(Sequences):
    """`batches` decides how many candidates form a batch; its delay counts from when a request became a candidate."""

    def __init__(self, policy: SequencePolicy, identify: Identify, batches: BatchPolicy) -> None:
        super().__init__(policy, identify)
        self._batches = batches
        self._delay_ns = batches.max_queue_delay_ns
        self.may_wait = batches.max_queue_delay_ns > 0
        # A ticket's `lane` is the time at which it became a candidate, so each deque is in ascending order of `lane`.
        self._candidates: dict[Any, deque[Ticket]] = {}

    def serve(self, instances: Sequence[Any], free: Any) -> None:
        super().serve(instances, free)
        self._candidates = {instance: deque() for instance in instances}

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        candidates = self._candidates[instance]
        if not candidates:
            return None
        first = candidates[0]
        is_overdue = self._delay_ns > 0 and now_ns - first.lane >= self._delay_ns
        count = self._batches.count(candidates, first.key, is_overdue)
        if not count:
            return None
        batch = [candidates.popleft() for _ in range(count)]
        for ticket in batch:
            sequence = ticket.sequence
            self._pop(sequence)
            if sequence.waiting:
                self._head_added(sequence)
        return batch

    def _head_added(self, sequence: RequestSequence) -> None:
        assert sequence.slot is not None
        first = sequence.waiting[0]
        first.lane = self._now_ns
        self._candidates[sequence.slot.instance].append(first)

    def _head_removed(self, sequence: RequestSequence) -> None:
        assert sequence.slot is not None
        self._candidates[sequence.slot.instance].remove(sequence.waiting[0])

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [first[0].lane for instance in self._free_instances if (first := self._candidates[instance])]
        return min(waiting) + self._delay_ns if waiting else None

    def check(self) -> None:
        super().check()
        for instance, candidates in self._candidates.items():
            sequences = [slot.sequence for slot in self._slots[instance] if slot.sequence is not None]
            heads = [id(sequence.waiting[0]) for sequence in sequences if sequence.waiting]
            assert sorted(map(id, candidates)) == sorted(heads), "(3) the candidates are not the first of each sequence"
            times = [ticket.lane for ticket in candidates]
            assert times == sorted(times), "(3) the candidates are not in order"
