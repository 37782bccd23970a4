"""Sequences whose requests are batched as they come: Triton's strategy "oldest".

Decided here: each instance has a dynamic batcher of its own over the first waiting request of each of its sequences,
the candidates. The next request of a sequence gets in line when the one before it has left, so that no batch holds two
of one sequence. There are no fillers. An instance runs one batch at a time, so that its answers keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowserve.scheduling.batcher import BatchPolicy
from flowserve.scheduling.lines import Line, SequencePolicy
from flowserve.scheduling.router import Ticket
from flowserve.scheduling.sequences import Identify, Sequences


class Oldest(Sequences):
    """`batches` decides how many candidates make a batch; its delay counts from when one became a candidate."""

    def __init__(self, policy: SequencePolicy, identify: Identify, batches: BatchPolicy) -> None:
        super().__init__(policy, identify)
        self._batches = batches
        self._delay_ns = batches.max_queue_delay_ns
        self.may_wait = batches.max_queue_delay_ns > 0
        # A ticket's `lane` is when it became a candidate, so the first of a deque has been one for longest.
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
            line = ticket.line
            self._pop(line)
            if line.waiting:
                self._leads(line)
        return batch

    def _leads(self, line: Line) -> None:
        assert line.slot is not None
        first = line.waiting[0]
        first.lane = self._now_ns
        self._candidates[line.slot.instance].append(first)

    def _left(self, line: Line) -> None:
        assert line.slot is not None
        self._candidates[line.slot.instance].remove(line.waiting[0])

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [first[0].lane for instance in self._free_instances if (first := self._candidates[instance])]
        return min(waiting) + self._delay_ns if waiting else None

    def check(self) -> None:
        super().check()
        for instance, candidates in self._candidates.items():
            lines = [slot.line for slot in self._slots[instance] if slot.line is not None and slot.line.waiting]
            assert sorted(map(id, candidates)) == sorted(id(line.waiting[0]) for line in lines), (
                "(3) the candidates are not the first of each sequence"
            )
            times = [ticket.lane for ticket in candidates]
            assert times == sorted(times), "(3) a candidate was overtaken"
