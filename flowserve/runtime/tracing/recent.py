"""The last requests of deployments that a viewer watches, for the live page.

Decides which of them are traced: up to ten a second of each watched deployment, so that watching costs a busy server
little, and none without viewers. Keeps the last fifty of each. Does not know what a trace records (tracing.py) nor how
it is shown. Used on the engine's event loop: `Traces` asks and puts, the live page reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from flowserve.observe.trace import Trace

KEPT: Final = 50
_APART_NS: Final = 100_000_000  # between two that are traced


class _Watched:
    """One deployment: how many watch it, and its last traces with their numbers."""

    def __init__(self) -> None:
        self.viewers = 0
        self.next_ns = 0
        self.traces: deque[tuple[int, Trace]] = deque(maxlen=KEPT)


class Recent:
    """`changed` is called when the first deployment is watched, and when the last no longer is."""

    def __init__(self, clock: Callable[[], int], changed: Callable[[], None]) -> None:
        self._clock = clock
        self._changed = changed
        self._watched: dict[str, _Watched] = {}
        self._numbers = count(1)

    @property
    def is_on(self) -> bool:
        """Whether a deployment is watched."""
        return bool(self._watched)

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Record requests to a deployment in the block; "" records none."""
        if not name:
            yield
            return
        watched = self._watched.setdefault(name, _Watched())
        watched.viewers += 1
        self._changed()
        try:
            yield
        finally:
            watched.viewers -= 1
            if not watched.viewers:
                del self._watched[name]
                self._changed()

    def wants(self, name: str) -> bool:
        """Whether the next request to a deployment is to be traced."""
        watched = self._watched.get(name)
        if watched is None:
            return False
        now_ns = self._clock()
        if now_ns < watched.next_ns:
            return False
        watched.next_ns = now_ns + _APART_NS
        return True

    def put(self, trace: Trace) -> None:
        """Keep the trace of a request that is over."""
        watched = self._watched.get(trace.graph.name)
        if watched is not None:
            watched.traces.append((next(self._numbers), trace))

    def since(self, name: str, number: int) -> list[tuple[int, Trace]]:
        """The kept traces after that number, oldest first."""
        watched = self._watched.get(name)
        return [] if watched is None else [one for one in watched.traces if one[0] > number]
