"""Histograms, from which readers compute percentiles and which can be summed over servers.

Decides the edges. Durations go 1, 2, 5, 10, ... from 100 microseconds to 50 seconds, which includes every edge of
Triton's own histogram; rows go in powers of two. An observation is a search among about twenty numbers and one
addition, and a batch is one observation for all its requests with equal waits. Written from one thread. Callers:
`statistics`, `deployment_metrics`, `rates`.
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
# An observation belongs to the first edge that is not below it; values above the last edge have their own count.
DURATION_EDGES_NS: Final = tuple(step * 10**power * _MICROSECOND_NS for power in range(2, 8) for step in (1, 2, 5))
ROW_EDGES: Final = tuple(2**power for power in range(11))


class Histogram:
    """`counts[i]` is the number of observations up to `edges[i]`; the last count is for values above all edges."""

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
        """The number of observations up to each edge, and last the total."""
        return list(accumulate(self.counts))
