"""Sequences that keep their place in the batch: Triton's strategy "direct".

Decided here: a batch reaches from slot 0 of an instance to the highest slot that has a request; whoever has none in
between is stood in for by a filler, so that each sequence is always the same row. Models that keep state by row want
that. Requests whose shapes differ from those of the one that has waited longest wait for another batch. Without
`minimum_slot_utilization` a batch leaves as soon as one request is there.
"""

from __future__ import annotations

from typing import Any

from flowserve.scheduling.lines import SequencePolicy, Slot
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.sequences import Identify, Sequences


class Nobody(Flow):
    """Stands for the request of a slot that has none: it is over before it begins, so that nothing is told of it."""

    __slots__ = ()

    def __init__(self, request: Any) -> None:
        self.request = request
        self.done = True
        self.wanted = ()
        self.tensors = []
        self.open = 0


class Direct(Sequences):
    """`share`: so large a part of the slots makes a batch before `delay_ns` is over; 0 waits for nobody.

    `nobody` is the flow of fillers; a filler's `Ticket.line` is None.
    """

    def __init__(
        self, policy: SequencePolicy, identify: Identify, nobody: Nobody, share: float = 0.0, delay_ns: int = 0
    ) -> None:
        super().__init__(policy, identify)
        self._nobody = nobody
        self._enough = share * policy.slots
        self._delay_ns = delay_ns if share else 0
        self.may_wait = self._delay_ns > 0

    def _batch(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        slots = self._slots[instance]
        ready = [slot for slot in slots if slot.line is not None and slot.line.waiting]
        if not ready:
            return None
        oldest = _oldest(ready)
        if len(ready) < self._enough and now_ns - oldest.queued_ns < self._delay_ns:
            return None
        tickets: list[Ticket] = []
        for slot in ready:
            line = slot.line
            assert line is not None
            if line.waiting[0].key != oldest.key:
                continue
            while len(tickets) < slot.number:
                tickets.append(self._filler(oldest, now_ns))
            tickets.append(self._pop(line))
        return tickets

    def _filler(self, like: Ticket, now_ns: int) -> Ticket:
        filler = Ticket(self._nobody, like.node, 1, None)
        filler.line = None
        filler.queued_ns = now_ns
        return filler

    def deadline(self) -> int | None:
        if not self._delay_ns:
            return None
        waiting = [
            _oldest(ready).queued_ns
            for instance in self._free_instances
            if (ready := [slot for slot in self._slots[instance] if slot.line is not None and slot.line.waiting])
        ]
        return min(waiting) + self._delay_ns if waiting else None


def _oldest(ready: list[Slot]) -> Ticket:
    """The request that has waited longest; of equals that in the lowest slot."""
    firsts = [slot.line.waiting[0] for slot in ready if slot.line is not None]
    oldest = firsts[0]
    for ticket in firsts:
        if ticket.queued_ns < oldest.queued_ns:
            oldest = ticket
    return oldest
