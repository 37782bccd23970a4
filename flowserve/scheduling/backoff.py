"""When something that ended by itself is started again: soon, and later each time it ends soon again.

Decided here: the delays. Whatever crashes at once each time is started at most once in `longest_ns`, so that it costs
next to nothing; whatever lived for `calm_ns` has proved that it can, and begins anew. Pure: durations come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Delays:
    """The first delay doubles up to the longest, until something lives for `calm_ns`."""

    first_ns: int = _SECOND_NS // 10
    longest_ns: int = 30 * _SECOND_NS
    calm_ns: int = 10 * _SECOND_NS


DELAYS: Final = Delays()


class BackOff:
    """Counts the ends of one thing. `ends`: how often in a row it did not live for long."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self.ends = 0

    def ended(self, lived_ns: int) -> int:
        """It ended after that long (0: it did not come to life). Returns after how long to start it again."""
        if lived_ns >= self._delays.calm_ns:
            self.ends = 0
        self.ends += 1
        # Bounded before the shift: nobody needs a number of a thousand digits.
        return min(self._delays.first_ns << min(self.ends - 1, 60), self._delays.longest_ns)
