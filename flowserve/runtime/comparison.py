"""Which of several ways to do the same thing takes the least time here and now, by measurement.

Decided here: when all are tried, and what is believed of what that shows. They are tried in turns of a few, so that a
slow moment of the machine meets each of them; then the quickest is kept for long, until all are tried again. Pure:
durations come in as nanoseconds. This file knows none of the ways.
"""

from __future__ import annotations

from typing import Final

# So many in a turn, of which the first ones find what another way left behind, and do not count.
TURN: Final = 8
_SETTLING: Final = 2
# Each has so many turns, forwards and backwards in turn: what slowly changes meanwhile speaks for none.
TURNS: Final = 4
# After that so many go the quickest way, twice as many each time that it is the same one again. Then less than one in a
# hundred of all together goes another one, which a 99th percentile does not show.
KEPT_MIN: Final = 1024
KEPT_MAX: Final = 8192
# Another way must be so much quicker: less may be chance.
_QUICKER: Final = 0.95
_LEFT_OUT: Final = 8  # the longest of so many


class Comparison:
    """Of some ways, by number; `way` is the one that the next is to go. The first is kept until another is quicker."""

    __slots__ = ("_best", "_keeps", "_kept", "_order", "_times", "_tried", "way")

    def __init__(self, ways: int) -> None:
        forwards = [*range(ways)]
        self._order = (forwards + forwards[::-1]) * (TURNS // 2)
        self._times: list[list[int]] = [[] for _ in forwards]
        self._tried = 0  # in turns
        self._keeps = KEPT_MIN
        self._kept = 0  # so many more go the quickest way
        self._best = 0
        self.way = 0

    def took(self, duration_ns: int) -> None:
        """One that went that way took so long."""
        if self._kept:
            self._kept -= 1
            if not self._kept:
                self.way = self._order[0]
            return
        if self._tried % TURN >= _SETTLING:
            self._times[self.way].append(duration_ns)
        self._tried += 1
        if self._tried < TURN * len(self._order):
            self.way = self._order[self._tried // TURN]
            return
        means = [_mean(times) for times in self._times]
        quickest = min(means)
        if quickest < means[self._best] * _QUICKER:
            self._best, self._keeps = means.index(quickest), KEPT_MIN
        else:
            self._keeps = min(2 * self._keeps, KEPT_MAX)
        self.way = self._best
        self._kept, self._tried = self._keeps, 0
        for times in self._times:
            times.clear()


def _mean(durations_ns: list[int]) -> float:
    """Of all but the longest, in which somebody else had the machine, or nobody asked."""
    counted = sorted(durations_ns)[: -(len(durations_ns) // _LEFT_OUT)]
    return sum(counted) / len(counted)
