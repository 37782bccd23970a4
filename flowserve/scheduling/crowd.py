"""How many of those who are in flight one batch may take, where its model runs beside the server.

Decided here: half of them. With everybody in one batch the server has nothing to do until that is back, and the model
has nothing to do until they were answered and have asked again; with two halves under way, each is at the one while the
other is at the other. Only while the model is quick, since half a batch may take as long as a whole one. Who says so is
the runtime's; what is in flight comes from who counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# A crowd counts by its largest number lately: those who have just been answered are about to ask again. Of so many
# batches each forgets one part.
_MEMORY: Final = 32


class Crowd:
    """Those who are in flight, to one model. `is_quick`: whether it takes no longer than the server's own part of them.
    Any batch may take `least` of them.
    """

    __slots__ = ("_in_flight", "_is_quick", "_least", "_parts")

    def __init__(self, in_flight: Callable[[], int], is_quick: Callable[[], bool], least: int) -> None:
        self._in_flight = in_flight
        self._is_quick = is_quick
        self._least = least
        self._parts = 0  # _MEMORY for each of them

    def share(self, count: int) -> int:
        """How many leave now of `count` that could leave as one batch."""
        if count <= self._least or not self._is_quick():
            return count
        now = self._in_flight() * _MEMORY
        parts = self._parts
        self._parts = parts = now if now >= parts else parts + (now - parts) // _MEMORY
        return min(count, max(self._least, -(-parts // (2 * _MEMORY))))
