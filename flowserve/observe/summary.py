"""Quantiles of durations over the last minute, for Prometheus summaries.

Decides the accuracy of a quantile, and the window. Values are counted in logarithmic steps of two percent, so every
quantile is within one percent of an observed value, and a minute of any traffic needs a few hundred counts. The window
has parts, and the oldest is dropped as a whole. Times come in as nanoseconds. Written from one thread; another may
read. Callers: `runtime`, `deployment_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from flowserve.observe.statistics import Statistics

WINDOW_NS: Final = 60_000_000_000
PARTS: Final = 5
_PART_NS: Final = WINDOW_NS // PARTS
_STEP: Final = math.log(1.02)
_NONE: Final = -1  # the step of the value 0


class SlidingWindow:
    """Durations of the last minute, counted by size."""

    __slots__ = ("_end_ns", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{}]  # newest last
        self._end_ns = 0  # the end of the newest part

    def observe(self, value_ns: int, now_ns: int, count: int = 1) -> None:
        """Count `count` observations of one value at `now_ns`, which may be in an earlier part."""
        if now_ns >= self._end_ns:
            self._turn(now_ns)
        part = self._parts[-1] if self._end_ns - now_ns <= _PART_NS else self._elder(now_ns)
        place = round(math.log(value_ns) / _STEP) if value_ns > 0 else _NONE
        part[place] = part.get(place, 0) + count

    def quantiles(self, wanted: Sequence[float], now_ns: int) -> list[float]:
        """The quantiles in nanoseconds; nan without observations."""
        counts: dict[int, int] = {}
        late = max(now_ns - self._end_ns, -_PART_NS) // _PART_NS + 1  # parts that have elapsed since
        for part in self._parts[max(len(self._parts) + late - PARTS, 0) :]:
            for place, count in [*part.items()]:
                counts[place] = counts.get(place, 0) + count
        return [_quantile(sorted(counts.items()), share) for share in wanted]

    def _elder(self, then_ns: int) -> dict[int, int]:
        """The part of a time before the newest one; an unused dict if that part was dropped."""
        newer = (self._end_ns - 1 - then_ns) // _PART_NS  # parts
        if newer >= PARTS:
            return {}
        missing = newer + 1 - len(self._parts)
        if missing > 0:
            self._parts = [*({} for _ in range(missing)), *self._parts]
        return self._parts[-1 - newer]

    def _turn(self, now_ns: int) -> None:
        late = (now_ns - self._end_ns) // _PART_NS + 1
        empty: list[dict[int, int]] = [{} for _ in range(min(late, PARTS))]
        self._parts = [*self._parts, *empty][-PARTS:]
        self._end_ns = self._end_ns + late * _PART_NS if self._end_ns else now_ns + _PART_NS


def _quantile(counts: Sequence[tuple[int, int]], share: float) -> float:
    left = share * sum(count for _, count in counts)
    for place, count in counts:
        left -= count
        if left <= 0:
            return 0.0 if place == _NONE else math.exp(place * _STEP)
    return math.nan


@dataclass(slots=True)
class SummarisedStatistics(Statistics):
    """Statistics that also keep quantiles of durations. `clock`: the server's, in nanoseconds."""

    clock: Callable[[], int] = field(kw_only=True)
    request_window: SlidingWindow = field(default_factory=SlidingWindow)
    queue_window: SlidingWindow = field(default_factory=SlidingWindow)
    input_window: SlidingWindow = field(default_factory=SlidingWindow)
    infer_window: SlidingWindow = field(default_factory=SlidingWindow)
    output_window: SlidingWindow = field(default_factory=SlidingWindow)
    hit_window: SlidingWindow = field(default_factory=SlidingWindow)
    miss_window: SlidingWindow = field(default_factory=SlidingWindow)

    def ran(self, *figures: int) -> None:
        Statistics.ran(self, *figures)
        _, count, total_ns, queue_ns, input_ns, infer_ns, output_ns, now_ns = figures
        self.request_window.observe(total_ns, now_ns, count)
        self.queue_window.observe(queue_ns, now_ns, count)
        self._computed(now_ns, count, input_ns, infer_ns, output_ns)

    def ran_apart(self, rows: int, totals: Sequence[int], *figures: int) -> None:
        Statistics.ran_apart(self, rows, totals, *figures)
        queue_ns, input_ns, infer_ns, output_ns, now_ns = figures
        for total_ns in totals:
            self.request_window.observe(total_ns, now_ns)
        self.queue_window.observe(queue_ns, now_ns, len(totals))
        self._computed(now_ns, len(totals), input_ns, infer_ns, output_ns)

    def succeeded(self, queued: Sequence[int], started_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        Statistics.succeeded(self, queued, started_ns, input_ns, infer_ns, output_ns)
        now_ns = started_ns + input_ns + infer_ns + output_ns
        for moment in queued:
            self.request_window.observe(now_ns - moment, now_ns)
            self.queue_window.observe(started_ns - moment, now_ns)
        self._computed(now_ns, len(queued), input_ns, infer_ns, output_ns)

    def hit(self, total_ns: int, cache_ns: int) -> None:
        Statistics.hit(self, total_ns, cache_ns)
        now_ns = self.clock()
        self.request_window.observe(total_ns, now_ns)
        self.queue_window.observe(0, now_ns)
        self.hit_window.observe(cache_ns, now_ns)

    def missed(self, cache_ns: int) -> None:
        Statistics.missed(self, cache_ns)
        self.miss_window.observe(cache_ns, self.clock())

    def _computed(self, now_ns: int, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.input_window.observe(input_ns, now_ns, count)
        self.infer_window.observe(infer_ns, now_ns, count)
        self.output_window.observe(output_ns, now_ns, count)


def summarising(clock: Callable[[], int]) -> Callable[[str, int], Statistics]:
    """A factory of such statistics, in place of `Statistics`."""
    return partial(SummarisedStatistics, clock=clock)
