"""How many steps of each node may be under way: what `max_inflight_requests` counts.

Decided here: when a node has room for one more step. Who takes, keeps and gives back slots, and when, is decided in
streams.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from flowserve.graph.plan import PlanNode

if TYPE_CHECKING:
    from flowserve.scheduling.iterations import Iteration
    from flowserve.scheduling.streams import StreamFlow


class Gauge(Protocol):
    """Who is shown how full a node was."""

    most_inflight: int


class Slots:
    """How many steps of each node are under way, of one request or of all that share them. `promised[n]` are behind
    credits. Who finds no room stands in `parked`, and keeps `hold`, the slot of the step that made it ready.
    `gauges[n]` is shown the most that node n ever had. `sharers`: the requests under way that share them, empty where
    they are one request's own.
    """

    __slots__ = ("gauges", "limits", "parked", "promised", "sharers", "taken")

    def __init__(self, limits: Sequence[int], gauges: Sequence[Gauge] = ()) -> None:
        self.limits = limits
        self.gauges = gauges
        self.taken = [0] * len(limits)
        self.promised = [0] * len(limits)
        self.sharers: dict[StreamFlow, None] = {}
        self.parked: list[deque[tuple[Iteration, PlanNode, Hold | None]]] = [deque() for _ in limits]

    def has_room(self, n: int) -> bool:
        return not self.limits[n] or self.taken[n] + self.promised[n] < self.limits[n]

    def take(self, n: int) -> None:
        self.taken[n] += 1
        if self.gauges and self.taken[n] > self.gauges[n].most_inflight:
            self.gauges[n].most_inflight = self.taken[n]

    def check(self) -> None:
        for n, limit in enumerate(self.limits):
            assert not limit or 0 <= self.taken[n] + self.promised[n] <= limit, f"(1) node {n} is over its limit"
            assert not self.parked[n] or not self.has_room(n), f"(1) a step of node {n} waits beside a free slot"


class Hold:
    """The slot of a step that is over, kept until `count` steps that it made ready have slots of their own."""

    __slots__ = ("count", "n", "stream")

    def __init__(self, stream: StreamFlow, n: int) -> None:
        self.stream = stream
        self.n = n
        self.count = 0
