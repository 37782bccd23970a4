"""The slots of all instances of one model of sequences, and the backlog of those that got none.

Decided here: which slot a sequence gets (the lowest number that is free, of all instances), who moves in when one is
free again (whoever has waited longest), and that a slot is given back by the sequence that holds it and by no other.
When a sequence begins and ends is decided in sequences.py.

Always true after every call (see `check`):
  (1) a slot holds at most one sequence, and a sequence in a slot knows that one;
  (2) nobody is in the backlog while a slot of an instance that is there is free;
  (3) every slot that nobody has, of an instance that is there, is free, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from flowserve.scheduling.lines import Line, Slot


class Seats:
    """`count` slots of each instance. `seated` is called with every sequence that gets one, at once or later."""

    def __init__(self, count: int, seated: Callable[[Line], None]) -> None:
        self.slots: dict[Any, list[Slot]] = {}  # of each instance, by number
        self.backlog: dict[Line, None] = {}
        self._count = count
        self._seated = seated
        self._free: list[Slot] = []  # a heap

    def serve(self, instances: Sequence[Any]) -> None:
        """These have slots. Called once, before anything."""
        for rank, instance in enumerate(instances):
            self.slots[instance] = [Slot(instance, number, rank) for number in range(self._count)]
        self._free = sorted(slot for slots in self.slots.values() for slot in slots)

    def take(self, line: Line) -> None:
        """Give a sequence its slot, or its place in the backlog."""
        if self._free:
            self._seat(line, heappop(self._free))
        else:
            self.backlog[line] = None

    def leave(self, line: Line) -> None:
        """It is out of its slot, or of the backlog. Harmless where it is in neither any more."""
        slot = line.slot
        if slot is None:
            self.backlog.pop(line, None)
        elif slot.line is line:
            line.slot = slot.line = None
            if not slot.is_away:
                self._offer(slot)

    def lost(self, instance: Any) -> list[Line]:
        """An instance is not there any more. Returns the sequences that it has."""
        for slot in self.slots[instance]:
            slot.is_away = True
        self._free = sorted(slot for slot in self._free if not slot.is_away)
        return [slot.line for slot in self.slots[instance] if slot.line is not None]

    def found(self, instance: Any) -> None:
        """It is there again, with all its slots free."""
        for slot in self.slots[instance]:
            slot.is_away = False
        for slot in self.slots[instance]:
            self._offer(slot)

    @property
    def taken(self) -> int:
        """How many slots somebody has."""
        return sum(slot.line is not None for slots in self.slots.values() for slot in slots)

    def _offer(self, slot: Slot) -> None:
        if not self.backlog:
            heappush(self._free, slot)
            return
        line = next(iter(self.backlog))
        del self.backlog[line]
        self._seat(line, slot)

    def _seat(self, line: Line, slot: Slot) -> None:
        slot.line = line
        line.slot = slot
        self._seated(line)

    def check(self) -> None:
        slots = [slot for slots in self.slots.values() for slot in slots]
        assert all(slot.line is None or slot.line.slot is slot for slot in slots), "(1) a line does not know its slot"
        assert all(line.slot is None for line in self.backlog), "(1) the backlog holds who has a slot"
        free = sorted(slot for slot in slots if slot.line is None and not slot.is_away)
        assert not (free and self.backlog), "(2) somebody waits for a slot beside a free one"
        assert free == sorted(self._free), "(3) a slot is lost, or free twice"
