"""Which of many waiting things is due next: a heap that forgets what it is told to forget.

Decided here: how deadlines are kept, so that adding, forgetting and asking cost little however many wait. What was
forgotten is let go of at once, not when its time would have come. It does not know what a deadline means.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SLACK = 32  # so many forgotten entries may lie in the heap beside as many as there are live ones


class Deadlines(Generic[T]):
    """Each thing has at most one deadline, in nanoseconds of whichever clock its owner uses."""

    __slots__ = ("_entries", "_heap", "_number")

    def __init__(self) -> None:
        # (deadline, number, what holds the thing: emptied when it is forgotten). Numbers part equal deadlines.
        self._heap: list[tuple[int, int, list[T]]] = []
        self._entries: dict[T, list[T]] = {}
        self._number = 0

    def add(self, thing: T, at_ns: int) -> None:
        """`thing`, which has no deadline yet, is due at `at_ns`."""
        holder = self._entries[thing] = [thing]
        self._number += 1
        heappush(self._heap, (at_ns, self._number, holder))

    def discard(self, thing: T) -> None:
        """`thing` is not due any more. Harmless where it never was."""
        holder = self._entries.pop(thing, None)
        if holder is not None:
            holder.clear()
            if len(self._heap) > 2 * len(self._entries) + _SLACK:
                self._heap = [entry for entry in self._heap if entry[2]]
                heapify(self._heap)

    def soonest(self) -> int | None:
        """When the next thing is due, or None."""
        heap = self._heap
        while heap and not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ns: int) -> list[T]:
        """Everything whose time has come, soonest first, and among equals in the order it was added; forgotten now."""
        found: list[T] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            holder = heappop(heap)[2]
            for thing in holder:
                del self._entries[thing]
                found.append(thing)
        return found

    def __contains__(self, thing: T) -> bool:
        return thing in self._entries

    def __len__(self) -> int:
        return len(self._entries)
