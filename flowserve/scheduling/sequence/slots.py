"""The slots of all instances of one model, and the backlog of sequences without a slot.

Decides which slot a sequence gets (the lowest free number of all instances) and which sequence of the backlog gets a
freed slot (the oldest). Only the sequence that holds a slot can free it. Does not know when a sequence begins and ends:
that is decided in `batcher`, which calls this module.

Always true after every call (see `SlotAllocator.check`):
  (1) a slot holds at most one sequence, and a sequence in a slot refers to that slot;
  (2) the backlog is empty while a slot of an available instance is free;
  (3) every slot of an available instance that holds no sequence is in the free list once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from flowserve.scheduling.sequence.sequence import RequestSequence, Slot


class SlotAllocator:
    """`count` slots per instance. `on_assigned` is called with each sequence that gets a slot, immediately or later."""

    def __init__(self, count: int, on_assigned: Callable[[RequestSequence], None]) -> None:
        self.slots: dict[Any, list[Slot]] = {}  # of each instance, by number
        self.backlog: OrderedDict[RequestSequence, None] = OrderedDict()
        self._count = count
        self._on_assigned = on_assigned
        self._free: list[Slot] = []  # a heap

    def serve(self, instances: Sequence[Any]) -> None:
        """Set the instances. Called once, before any other method."""
        for rank, instance in enumerate(instances):
            self.slots[instance] = [Slot(instance, number, rank) for number in range(self._count)]
        self._free = sorted(slot for slots in self.slots.values() for slot in slots)

    def take(self, sequence: RequestSequence) -> None:
        """Assign a slot to a sequence, or add it to the backlog."""
        if self._free:
            self._assign(sequence, heappop(self._free))
        else:
            self.backlog[sequence] = None

    def leave(self, sequence: RequestSequence) -> None:
        """Remove a sequence from its slot or from the backlog. No effect if it is in neither."""
        slot = sequence.slot
        if slot is None:
            self.backlog.pop(sequence, None)
        elif slot.sequence is sequence:
            sequence.slot = slot.sequence = None
            if not slot.is_away:
                self._offer(slot)

    def lost(self, instance: Any) -> list[RequestSequence]:
        """An instance became unavailable. Returns the sequences in its slots."""
        for slot in self.slots[instance]:
            slot.is_away = True
        self._free = sorted(slot for slot in self._free if not slot.is_away)
        return [slot.sequence for slot in self.slots[instance] if slot.sequence is not None]

    def found(self, instance: Any) -> None:
        """The instance is available again, with all its slots free."""
        for slot in self.slots[instance]:
            slot.is_away = False
        for slot in self.slots[instance]:
            self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        if not self.backlog:
            heappush(self._free, slot)
            return
        sequence, _ = self.backlog.popitem(last=False)
        self._assign(sequence, slot)

    def _assign(self, sequence: RequestSequence, slot: Slot) -> None:
        slot.sequence = sequence
        sequence.slot = slot
        self._on_assigned(sequence)

    def check(self) -> None:
        slots = [slot for slots in self.slots.values() for slot in slots]
        for slot in slots:
            assert slot.sequence is None or slot.sequence.slot is slot, "(1) a sequence does not refer to its slot"
        assert all(sequence.slot is None for sequence in self.backlog), "(1) a sequence with a slot is in the backlog"
        free = sorted(slot for slot in slots if slot.sequence is None and not slot.is_away)
        assert not (free and self.backlog), "(2) a sequence waits although a slot is free"
        assert free == sorted(self._free), "(3) a slot is lost, or in the free list twice"
