"""A heap of deadlines whose entries can be discarded.

Decides how deadlines are stored: `add`, `discard` and `soonest` take amortised logarithmic time, and a discarded item
is released immediately, not at its deadline. Does not know what a deadline means.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SLACK = 32  # the heap is rebuilt when its discarded entries exceed its live ones by this number


class Deadlines(Generic[T]):
    """Items with at most one deadline each, in nanoseconds of the caller's clock."""

    __slots__ = ("_entries", "_heap", "_number")

    def __init__(self) -> None:
        # (deadline, number, a list with the item, emptied by `discard`). Equal deadlines are ordered by number.
        self._heap: list[tuple[int, int, list[T]]] = []
        self._entries: dict[T, list[T]] = {}
        self._number = 0

    def add(self, item: T, at_ns: int) -> None:
        """Set the deadline of `item`, which has none."""
        holder = self._entries[item] = [item]
        self._number += 1
        heappush(self._heap, (at_ns, self._number, holder))

    def discard(self, item: T) -> None:
        """Remove the deadline of `item`. No effect if it has none."""
        holder = self._entries.pop(item, None)
        if holder is not None:
            holder.clear()
            if len(self._heap) > 2 * len(self._entries) + _SLACK:
                self._heap = [entry for entry in self._heap if entry[2]]
                heapify(self._heap)

    def soonest(self) -> int | None:
        """The next deadline, or None."""
        heap = self._heap
        while heap and not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ns: int) -> list[T]:
        """Remove and return the items whose deadline has passed, in order of deadline and then of `add`."""
        found: list[T] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            holder = heappop(heap)[2]
            for item in holder:
                del self._entries[item]
                found.append(item)
        return found

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __len__(self) -> int:
        return len(self._entries)
