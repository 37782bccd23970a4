"""One model's queue with the instances it is for, and what runs on them.

Decided here: nothing but what such a queue and such a batch hold; both are records that the machines of this room fill
in and the runtime reads. Who changes them, and when, is the dispatcher's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flowserve.graph.types import ModelKey
from flowserve.scheduling.affinity import Affine
from flowserve.scheduling.batcher import Batcher
from flowserve.scheduling.limiter import Needs
from flowserve.scheduling.ordering import Order
from flowserve.scheduling.router import Ticket
from flowserve.scheduling.sequences import Sequences


class ModelQueue:
    """One model version's waiting tickets and the instances that may take them. `key` is what plans name it by."""

    __slots__ = (
        "away",
        "batcher",
        "bound",
        "carrier",
        "closed",
        "free",
        "instances",
        "is_dirty",
        "is_pure",
        "key",
        "needs",
        "observer",
        "order",
        "passes_on",
        "receives",
        "relayed_min",
        "running",
    )

    def __init__(
        self,
        key: ModelKey,
        batcher: Batcher,
        instances: Sequence[Any],
        *,
        is_pure: bool = False,
        observer: Any = None,
        needs: Sequence[Needs] = (),
        keeps_order: bool = False,
    ) -> None:
        self.key = key
        self.batcher = batcher
        self.instances = tuple(instances)
        # Idle longest first, so that work spreads over instances evenly. Free, running and away are all instances.
        self.free: deque[Any] = deque(instances)
        self.running = 0
        self.away: list[Any] = []
        self.bound: Sequences | Affine | None = None  # its batcher, where not every instance may take every ticket
        if isinstance(batcher, Sequences | Affine):
            self.bound = batcher
            batcher.serve(self.instances, self.free)
        self.closed: Batcher | None = None  # its batcher, while one that takes nothing stands in for it
        self.is_pure = is_pure
        self.observer = observer  # the runtime's statistics of this model; nothing here reads it
        self.needs = tuple(needs)  # of each instance, for a rate limiter; empty: they need nothing
        self.order = Order() if keeps_order else None
        # For relays (relays.py): whether its instances can hand a batch on to others, how many requests they may be
        # handed at once, and who hands on: only those of one carrier to each other. That is the runtime's; nothing here
        # reads of it but `private_only`, whether it takes private ways only.
        self.passes_on = False
        self.receives = 0
        self.carrier: Any = None
        self.relayed_min = 1  # requests of a batch that is handed on
        self.is_dirty = False  # whether it stands in the dispatcher's list of queues to look at

    @property
    def is_served(self) -> bool:
        """Whether any instance is there to take its tickets, now or when it has finished what it runs."""
        return len(self.away) < len(self.instances)


class Batch:
    """Tickets that run together on one instance, until it `is_back`. `rows` is their sum."""

    __slots__ = ("instance", "is_back", "queue", "rows", "started_ns", "tickets")

    def __init__(self, queue: ModelQueue, instance: Any, tickets: list[Ticket], started_ns: int) -> None:
        self.queue = queue
        self.instance = instance
        self.tickets = tickets
        self.started_ns = started_ns
        self.is_back = False
        rows = 0
        for ticket in tickets:
            rows += ticket.rows
        self.rows = rows

    def __repr__(self) -> str:
        return f"Batch({self.queue.key}, {len(self.tickets)} tickets, rows={self.rows})"
