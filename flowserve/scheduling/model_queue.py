"""The queue of one model version with its instances: the record that the scheduler has of each model.

Decides whether the model may be a stage of routes (`route_groups`). Does not know how tickets are queued (`queue`) or
how an instance runs a batch. The runtime creates it, the scheduler changes it, and both read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flowserve.graph.types import ModelKey
from flowserve.scheduling.free_instances import FreeInstances
from flowserve.scheduling.queue import Batcher, BoundBatcher, Order
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.scheduling.single_flight import Lookups

NO_GROUPS: Final[Mapping[Any, object]] = {}


class ModelQueue:
    """The waiting tickets of one model version, and its instances. `key` is its name in plans."""

    def __init__(
        self,
        key: ModelKey,
        batcher: Batcher,
        instances: Sequence[Any],
        *,
        is_pure: bool = False,
        statistics: Any = None,
        needs: Sequence[Needs] = (),
        keeps_order: bool = False,
        route_groups: Mapping[Any, object] = NO_GROUPS,
        computes_apart: bool = False,
        cache: Any = None,
    ) -> None:
        self.key = key

        # Tickets, for the scheduler.
        self.batcher = batcher
        self.closed: Batcher | None = None  # its batcher, while a `ClosedQueue` replaces it
        self.has_times = batcher.may_wait or batcher.may_expire  # whether time may decide about its tickets
        self.may_have_tickets = False  # False: no ticket waits. Cheaper to read than the length of the queue
        self.is_dirty = False  # whether it is in the scheduler's list of queues to examine
        self.is_pure = is_pure  # whether a failed batch may run again
        self.order = Order() if keeps_order else None
        self.lookups = None if cache is None else Lookups()  # the steps that the runtime looks up in `cache`

        # Instances, for the scheduler; each is free, running or away.
        self.instances = tuple(instances)
        # Longest idle first, so that batches spread over instances evenly. An instance that takes several batches at
        # once has as many entries.
        self.free: deque[Any] | FreeInstances = deque(instances)
        if len({*instances}) < len(instances):
            self.free = FreeInstances(instances)
        self.running = 0
        self.away: list[Any] = []
        self.leaving: list[Any] = []  # instances that will be away when their batch is complete
        self.needs = tuple(needs)  # the resources of each instance at a rate limiter; empty: none
        self.bound: BoundBatcher | None = None  # its batcher, if tickets may be bound to one instance
        if isinstance(batcher, BoundBatcher):
            self.bound = batcher
            assert isinstance(self.free, deque)  # each of its instances runs one batch
            batcher.serve(self.instances, self.free)

        # For the runtime.
        self.statistics = statistics  # the model's statistics
        self.cache = cache  # the model's response cache, in which the runtime looks up each step; or None

        # Routes, for the scheduler.
        #
        # Instances of one group pass batches to each other. All instances of a model are in one group, or each is in
        # its own. Models with routes between them have the same groups. None: no routes, because the scheduler decides
        # about each request or step of this model.
        is_free = not keeps_order and self.bound is None and cache is None
        groups = frozenset(route_groups.values())
        is_divided = len(groups) == len(route_groups)
        may_route = is_free and groups and None not in groups and (is_divided or len(groups) == 1)
        self.route_groups: frozenset[object] | None = groups if may_route else None
        # If there are several groups: the instance of each, and how many batches an idle instance can take.
        self.members = {group: one for one, group in route_groups.items()} if may_route and len(groups) > 1 else {}
        self.depth = len(self.instances) // len(groups) if self.members else 0
        self.computes_apart = computes_apart  # whether it can compute while other models with the same groups do

    def is_idle_in(self, group: object, taken: int = 0) -> bool:
        """Whether the instance of a group has no batch except `taken` ones. Only for a model with several groups."""
        return self.free.count(self.members[group]) == self.depth - taken

    @property
    def is_served(self) -> bool:
        """Whether an instance can take its tickets, now or after its current batch."""
        return len(self.away) + len(self.leaving) < len(self.instances)
