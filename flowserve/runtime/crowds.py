"""Which models' batches take no more than a share of a crowd (scheduling/crowd.py), and until when.

Decided here: those of models in processes whose batcher would otherwise take everybody, while they are quick by
measurement. Whoever says in a configuration which batches are wanted gets those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    if isinstance(batcher, DynamicBatcher) and batcher.takes_all:
        pace = RequestPace()
        for host in hosts:
            host.request_pace = pace
        batcher.crowd = Crowd(in_flight, lambda: pace.is_quick, LEAST)
