"""Which models' batches take no more than a share of a crowd (scheduling/crowd.py).

Decided here: those of models in processes whose batcher would otherwise take everybody, while they are quick by
measurement. Whoever says in a configuration which batches are wanted gets those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from flowserve.runtime.alone import Pace
from flowserve.scheduling.batcher import Batcher, DynamicBatcher
from flowserve.scheduling.crowd import Crowd

# Quick are batches that take no longer: about the server's own part of sixteen requests, the smallest crowd that is
# shared. So two halves beside that part are no slower than a whole one after it even where half a batch takes as long.
QUICK_NS: Final = 800_000


class Paced(Protocol):
    """An instance, as far as is asked here."""

    pace: Pace


def share(batcher: Batcher, hosts: Sequence[Paced], in_flight: Callable[[], int]) -> None:
    """Say of a model in processes how many its batches take. `in_flight`: how many requests the server has."""
    if isinstance(batcher, DynamicBatcher) and batcher.takes_all:
        batcher.crowd = Crowd(in_flight, lambda: all(host.pace.mean_ns <= QUICK_NS for host in hosts))
