"""Counts by size, so that percentiles can be worked out, and added up over servers, by whoever reads them.

Decided here: the edges. Durations go 1, 2, 5, 10, ... from 100 microseconds to 50 seconds, which holds every edge of
Triton's own histogram; rows go in powers of two. One observation is a search among some twenty numbers and one
addition, and a batch is one observation for all its requests wherever they waited alike. Written from one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Final

import numpy as np

from flowserve.values import Array

_MICROSECOND_NS: Final = 1000
# An observation belongs to the first edge that is not below it; what is above the last one has a place of its own.
DURATION_EDGES_NS: Final = tuple(step * 10**power * _MICROSECOND_NS for power in range(2, 8) for step in (1, 2, 5))
ROW_EDGES: Final = tuple(2**power for power in range(11))


class Histogram:
    """`counts[i]` observations up to `edges[i]`, the last of `counts` above them all."""

    __slots__ = ("counts", "edges")

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)

    def observe(self, value: int, count: int = 1) -> None:
        """`count` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += count

    def observe_all(self, values: Array, counts: Array) -> None:
        """`counts[i]` observations of `values[i]`, all at once."""
        found = np.bincount(np.searchsorted(self.edges, values), counts, len(self.counts))
        self.counts = [*map(add, self.counts, map(int, found))]

    def cumulated(self) -> list[int]:
        """How many observations were at most each edge, and last how many there were."""
        return list(accumulate(self.counts))
