"""Events in simulated time, in integer nanoseconds. Does not know what they are. Callers: simulators."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Agenda:
    """Events in simulated time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()

    def at(self, at_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._tie), act))

    def advance(self, deadline_ns: int | None) -> bool:
        """Advance the time to the next event or the deadline, and run the events of that time. False: there is none."""
        instants = [self._events[0][0]] if self._events else []
        if deadline_ns is not None:
            instants.append(deadline_ns)
        if not instants:
            return False
        self.now_ns = max(self.now_ns, min(instants))
        while self._events and self._events[0][0] <= self.now_ns:
            heapq.heappop(self._events)[2]()
        return True
