"""In-flight slots: how many steps of each node are under way (`max_inflight_requests`).

A step holds a slot of its node from when it is ready until it is over and the steps that it made ready have theirs. A
step without a free slot is parked. Decides nothing about which step is ready. Called by borders.py, and by streaming/,
which reserves slots for the responses of decoupled steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from flowserve.scheduling.frames.frame import Frame


class Gauge(Protocol):
    """Statistics of a node: the largest number of its steps under way."""

    most_inflight: int


class InflightSlots:
    """The number of steps of each node under way, of one request or of all requests that share the slots. `promised[n]`
    are reserved for credits. A step without a free slot is in `parked`. `gauges[n]` records the maximum of node n.
    `sharers`: the requests that share the slots, empty if they belong to one request.
    """

    __slots__ = ("gauges", "limits", "parked", "promised", "sharers", "taken")

    def __init__(self, limits: Sequence[int], gauges: Sequence[Gauge] = ()) -> None:
        self.limits = limits
        self.gauges = gauges
        self.taken = [0] * len(limits)
        self.promised = [0] * len(limits)
        self.sharers: dict[Frame, None] = {}
        self.parked: list[deque[Parked]] = [deque() for _ in limits]

    def has_room(self, n: int) -> bool:
        return not self.limits[n] or self.taken[n] + self.promised[n] < self.limits[n]

    def take(self, n: int) -> None:
        self.taken[n] += 1
        if self.gauges and self.taken[n] > self.gauges[n].most_inflight:
            self.gauges[n].most_inflight = self.taken[n]

    def forget_parked(self) -> None:
        """The one request of these slots is over: drop the steps that wait, whose frames refer to these slots."""
        for parked in self.parked:
            parked.clear()

    def check(self) -> None:
        for n, limit in enumerate(self.limits):
            assert not limit or 0 <= self.taken[n] + self.promised[n] <= limit, f"(1) node {n} is over its limit"
            assert not self.parked[n] or not self.has_room(n), f"(1) a step of node {n} waits beside a free slot"


unlimited = cache(InflightSlots)  # without limits they never change, so that requests may share them


class Parked(NamedTuple):
    """A step of node `n` of a `frame` of borders.py, or a part of it, that waits for a slot. `hold`: the slot of the
    step that made it ready.
    """

    frame: Any
    n: int
    hold: Hold | None


@dataclass(slots=True, eq=False)
class Hold:
    """The slot of a step that is over, kept until `count` steps that it made ready have slots of their own. `whole`:
    the frame of the request.
    """

    whole: Any
    n: int
    count: int = 0
