"""Which models' batches take no more than a share of a crowd (scheduling/crowd.py), and until when.

Decided here: those of models in processes whose batcher would otherwise take everybody, while they are quick by
measurement. Whoever says in a configuration which batches are wanted gets those. On one processor nothing runs beside
anything else, and two halves only cost more than a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from flowserve.runtime.relays import MEMBERS_MAX
from flowserve.scheduling.batcher import Batcher, DynamicBatcher
from flowserve.scheduling.crowd import Crowd

# A model is quick, here, that takes no longer for each request of a batch: about as long as the server's own part of
# one. Two halves beside that part are then no slower than a whole one after it, even where a model takes as long for a
# half as for a whole.
QUICK_NS: Final = 50_000
# Smaller batches cost most of their time for being batches. So many any batch may take: as many as go by relay.
LEAST: Final = MEMBERS_MAX
_MEMORY: Final = 8  # of so many batches each forgets one part
# How much of the processors' time a container may have: microseconds, or "max", out of so many (Linux, cgroup v2).
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


class RequestPace:
    """How long one model takes for each request of a batch of several. What was never measured is not quick."""

    __slots__ = ("_ns", "_requests")

    def __init__(self) -> None:
        self._ns = self._requests = 0.0

    def took(self, duration_ns: int, requests: int) -> None:
        """A batch took that long, from when it was sent until it was computed."""
        if requests >= LEAST:
            self._ns += duration_ns - self._ns / _MEMORY
            self._requests += requests - self._requests / _MEMORY

    @property
    def is_quick(self) -> bool:
        return 0 < self._requests * QUICK_NS >= self._ns


class Paced(Protocol):
    """An instance, as far as it is asked for anything here. It says how long its batches take to its `request_pace`."""

    request_pace: RequestPace | None


def share(batcher: Batcher, hosts: Sequence[Paced], in_flight: Callable[[], int]) -> None:
    """Say of a model in processes how many its batches take. `in_flight`: how many requests the server has begun."""
    if isinstance(batcher, DynamicBatcher) and batcher.takes_all and processors() > 1:
        pace = RequestPace()
        for host in hosts:
            host.request_pace = pace
        batcher.crowd = Crowd(in_flight, lambda: pace.is_quick, LEAST)


def processors() -> float:
    """How many the server and its models have."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
        return min(count, int(quota) / int(period))
    except (OSError, ValueError):  # there is none
        return count
