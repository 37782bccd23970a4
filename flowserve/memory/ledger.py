"""What was copied between memories: how often and how many bytes, by where from and where to.

Decided here: a copy is one crossing of a batch's tensor, however it is done: rows that are laid side by side in pinned
memory on their way to a device are part of that crossing and none of their own. What only moves within the host is
counted elsewhere (observe/traffic.py). Figures only ever grow.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from flowserve.values import MemoryPlace

Crossing = tuple[MemoryPlace, MemoryPlace]


class Ledger:
    """Written and read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Crossing, tuple[int, int]] = {}

    def record(self, source: MemoryPlace, to: MemoryPlace, nbytes: int) -> None:
        with self._lock:
            copies, total = self._entries.get((source, to), (0, 0))
            self._entries[source, to] = (copies + 1, total + nbytes)

    def entries(self) -> Mapping[Crossing, tuple[int, int]]:
        """(copies, bytes) by (from, to): a snapshot."""
        with self._lock:
            return dict(self._entries)
