"""The last requests to each deployment, while a page shows them.

Decides which requests are kept, how many, and for how long after the page's last poll. Failed requests are kept, and as
many traced requests a second as a reader can follow; for all others a counter is checked. The poll renews a lease; the
first request after its end stops the recording, so that a server without a viewer does not trace for it. The record of
a request is text of bounded length, without tensors or traces.

Callers: `traces`, which passes the traces, the engine for failed requests without one, and the live page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from flowserve.graph.types import ModelKey
from flowserve.observe.server_timing import server_timing
from flowserve.observe.statistics import ERROR_CHARS
from flowserve.observe.trace import Trace
from flowserve.runtime.clock import SECOND_NS, ClockNs, wall_clock_ms
from flowserve.scheduling.frames.frame import Frame

KEPT_MAX: Final = 50  # of each deployment
DEPLOYMENTS_MAX: Final = 64  # a further one replaces the one whose last request is the oldest
TRACED_PER_S: Final = 50
LEASE_NS: Final = 5 * SECOND_NS


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that is over. `number` grows; `took_ns` is None for a refused one; `timing` is its timeline in the
    format of `observe/server_timing`, "" without one.
    """

    number: int
    at_ms: int
    took_ns: int | None
    rows: int | None
    request_id: str
    error: str
    timing: str

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at_ms": self.at_ms,
            "ms": None if self.took_ns is None else self.took_ns / 1_000_000,
            "rows": self.rows,
            "id": self.request_id,
            "error": self.error,
            "timing": self.timing,
        }


class RecentRequests:
    """The last requests of an engine, on its event loop's thread. `is_traced`: whether a request in flight has a trace,
    which arrives by `add`.
    """

    def __init__(self, is_traced: Callable[[Frame], bool], clock: ClockNs) -> None:
        self.is_open = False
        self._is_traced = is_traced
        self._clock = clock
        self._kept: dict[ModelKey, deque[RecentRequest]] = {}  # ordered by the time of the newest request
        self._numbers = count(1)
        self._wanted_until_ns = 0
        self._second_ns = -SECOND_NS  # the beginning of the second for which `_left` counts
        self._left = 0

    def since(self, key: ModelKey, after: int) -> list[RecentRequest]:
        """The requests with a higher number than `after`, oldest first; renews the lease."""
        self._wanted_until_ns = self._clock() + LEASE_NS
        self.is_open = True
        return [one for one in self._kept.get(key, ()) if one.number > after]

    def wants_trace(self) -> bool:
        """Whether to trace the request that begins now; closes the recording if the lease has ended."""
        now_ns = self._clock()
        if now_ns > self._wanted_until_ns:
            self.is_open = False
            self._kept.clear()
            return False
        if now_ns - self._second_ns >= SECOND_NS:
            self._second_ns, self._left = now_ns, TRACED_PER_S
        self._left -= 1
        return self._left >= 0

    def add(self, trace: Trace) -> None:
        """Keep a traced request that is over."""
        took_ns = trace.ended_ns - trace.arrived_ns
        key = ModelKey(trace.graph.name, trace.graph.version)
        self._keep(key, took_ns, trace.rows, trace.request_id, trace.error, server_timing(trace))

    def failed(self, frame: Frame) -> None:
        """Keep a failed request, unless its trace will follow."""
        if not self._is_traced(frame):
            key = ModelKey(frame.record.owner.name, frame.record.owner.version)
            self._keep(
                key, self._clock() - frame.record.arrived_ns, None, frame.request.id, str(frame.record.error), ""
            )

    def refused(self, key: ModelKey, request_id: str, error: str) -> None:
        """Keep a request that the engine did not begin."""
        self._keep(key, None, None, request_id, error, "")

    def _keep(
        self, key: ModelKey, took_ns: int | None, rows: int | None, request_id: str, error: str, timing: str
    ) -> None:
        if not self.is_open:
            return
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = deque(maxlen=KEPT_MAX)
            if len(self._kept) >= DEPLOYMENTS_MAX:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        number, at_ms = next(self._numbers), wall_clock_ms()
        kept.append(RecentRequest(number, at_ms, took_ns, rows, request_id[:ERROR_CHARS], error[:ERROR_CHARS], timing))
