"""Exponential back-off for the restarts of a process that ended unexpectedly.

Decides the delays. A process that crashes immediately each time is started at most once per `longest_ns`, which bounds
the cost; the delay is reset after a process that ran for `calm_ns`. Pure: callers pass durations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Delays:
    """The first delay doubles up to the longest, until a process runs for `calm_ns`."""

    first_ns: int = _SECOND_NS // 10
    longest_ns: int = 30 * _SECOND_NS
    calm_ns: int = 10 * _SECOND_NS


DELAYS: Final = Delays()


class BackOff:
    """The restarts of one process. `ends`: the number of consecutive ends after less than `calm_ns`."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self.ends = 0

    def ended(self, lived_ns: int) -> int:
        """The process ended after `lived_ns` (0: it did not start). Returns the delay until its restart."""
        if lived_ns >= self._delays.calm_ns:
            self.ends = 0
        self.ends += 1
        # Bounded before the shift, which would otherwise create very large integers.
        return min(self._delays.first_ns << min(self.ends - 1, 60), self._delays.longest_ns)
