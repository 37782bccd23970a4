"""The record of one request: what is known of it once, however many frames its graph has."""

from __future__ import annotations

from typing import Any, Final

from flowserve.errors import FlowserveError

# Nanoseconds, summed over several steps: queued, assembling inputs, computing, reading outputs.
Took = tuple[int, int, int, int]
TOOK_NOTHING: Final[Took] = (0, 0, 0, 0)


def longer(took: Took, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> Took:
    """The sums with one more step."""
    return took[0] + queue_ns, took[1] + input_ns, took[2] + infer_ns, took[3] + output_ns


class RequestRecord:
    """`arrived_ns` and `stamp`: when it arrived, and its place among requests that are queued together. `priority` (1
    is the highest, 0 none) and `timeout_ns` (0 none) apply to each of its steps. `done`: it is over; `error`: why it
    failed. `took`: the duration of its steps, for the statistics of the graph; members that stay in one batch share
    one object. `owner`, `waiter` and `outcome`
    (as what it is counted) belong to the runtime; scheduling does not read them.
    """

    __slots__ = (
        "arrived_ns",
        "done",
        "error",
        "outcome",
        "owner",
        "priority",
        "stamp",
        "timeout_ns",
        "took",
        "waiter",
    )

    def __init__(
        self, arrived_ns: int = 0, stamp: int = 0, owner: Any = None, priority: int = 0, timeout_ns: int = 0
    ) -> None:
        self.arrived_ns = arrived_ns
        self.stamp = stamp
        self.owner = owner
        self.priority = priority
        self.timeout_ns = timeout_ns
        self.done = False
        self.error: FlowserveError | None = None
        self.took = TOOK_NOTHING
        self.outcome: Any = None
        self.waiter: Any = None
