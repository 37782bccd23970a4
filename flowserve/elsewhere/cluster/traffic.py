"""Flow control between the server and one machine: which batches are under way, and how many bytes may be.

Decides that a large batch waits in the server until earlier ones have been answered, if their bytes and its own exceed
the limit; that one batch may always be sent, however large; and that large batches are sent in the order of arrival,
small ones immediately. Nothing blocks. Does not know what a batch is, or how it is sent. Callers:
runtime/remote/, the metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Final

MACHINE_BYTES_MAX: Final = 256 << 20

Begin = Callable[[], object]  # starts sending a batch; called on any thread, and returns immediately


class MachineTraffic:
    """The traffic of all connections to one machine. `batches` is the number of answered batches, `way_ns` the sum of
    their transfer times there and back, without the time in which they waited or were computed there. Used on any
    thread.
    """

    def __init__(self, most: int = MACHINE_BYTES_MAX) -> None:
        self.batches = 0
        self.way_ns = 0
        self.nbytes = 0  # bytes under way
        self._most = most
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, tuple[int, Begin]] = {}

    def count(self, batch: Hashable, nbytes: int) -> None:
        """Count a small batch that is being sent."""
        with self._lock:
            self._take(batch, nbytes)

    def admit(self, batch: Hashable, nbytes: int, begin: Begin) -> None:
        """Call `begin` as soon as the limit allows the batch."""
        with self._lock:
            self._waiting[batch] = nbytes, begin
            self._begin_waiting()

    def leave(self, batch: Hashable) -> None:
        """A batch was answered, or has failed, or will not be sent. No effect if it is unknown."""
        with self._lock:
            self._waiting.pop(batch, None)
            self.nbytes -= self._under_way.pop(batch, 0)
            self._begin_waiting()

    def answered(self, way_ns: int) -> None:
        """Count an answered batch."""
        with self._lock:
            self.batches += 1
            self.way_ns += way_ns

    def _begin_waiting(self) -> None:
        while self._waiting:
            batch, (nbytes, begin) = next(iter(self._waiting.items()))
            if self.nbytes and self.nbytes + nbytes > self._most:
                return
            del self._waiting[batch]
            self._take(batch, nbytes)
            begin()

    def _take(self, batch: Hashable, nbytes: int) -> None:
        self._under_way[batch] = nbytes
        self.nbytes += nbytes
