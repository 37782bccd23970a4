"""Triton's sequence batching strategy "direct": a sequence keeps its row in the batch.

Decides which requests form a batch: it extends from slot 0 of an instance to the highest slot with a request; a slot
without one gets a filler, so that each sequence is always the same row, as models that keep state by row require.
Requests whose shapes differ from those of the oldest one wait for another batch. Without `minimum_slot_utilization` a
batch leaves as soon as one request waits.
"""

from __future__ import annotations

from typing import Any

from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.sequence.batcher import Identify, Sequences
from flowserve.scheduling.sequence.sequence import SequencePolicy, Slot


class FillerFlow(Flow):
    """The flow of a filler. It is done from the start, so that its results are ignored."""

    __slots__ = ()

    def __init__(self, request: Any) -> None:
        self.request = request
        self.done = True
        self.wanted = ()
        self.tensors = []
        self.open = 0


class Direct(Sequences):
    """`share`: the fraction of the slots that forms a batch before `delay_ns` has passed; 0: a batch leaves
    immediately.

    `filler_flow` is the flow of all fillers; a filler's `Ticket.sequence` is None.
    """

    def __init__(
        self, policy: SequencePolicy, identify: Identify, filler_flow: FillerFlow, share: float = 0.0, delay_ns: int = 0
    ) -> None:
        super().__init__(policy, identify)
        self._filler_flow = filler_flow
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
                tickets.append(self._filler(oldest, now_ns))
            tickets.append(self._pop(sequence))
        return tickets

    def _filler(self, like: Ticket, now_ns: int) -> Ticket:
        filler = Ticket(self._filler_flow, like.node, 1, None)
        filler.sequence = None
        filler.queued_ns = now_ns
        return filler

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [_oldest(ready).queued_ns for instance in self._free_instances if (ready := self._ready(instance))]
        return min(waiting) + self._delay_ns if waiting else None

    def _ready(self, instance: Any) -> list[Slot]:
        """The slots of an instance that have a waiting request, by number."""
        return [slot for slot in self._slots[instance] if slot.sequence is not None and slot.sequence.waiting]


def _oldest(ready: list[Slot]) -> Ticket:
    """The request that has waited longest; of several the one in the lowest slot."""
    firsts = [slot.sequence.waiting[0] for slot in ready if slot.sequence is not None]
    oldest = firsts[0]
    for ticket in firsts:
        if ticket.queued_ns < oldest.queued_ns:
            oldest = ticket
    return oldest
