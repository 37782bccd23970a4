"""The queue of one model version with its instances: all that waits for a model, and which of its instances is free.

Decides whether an instance is free, running or away, whether the model takes tickets, when time alone changes what may
run, and whether the model may be a stage of routes (`route_groups`). Does not know which tickets form a batch (`queue`)
or how an instance runs one. The runtime creates it, and takes instances away and gives them back; the scheduler queues
tickets and assigns batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flowserve.errors import Unavailable
from flowserve.graph.types import ModelKey
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.free_instances import FreeInstances
from flowserve.scheduling.queue import Batcher, BoundBatcher, Order
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.scheduling.single_flight import SingleFlight

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
        self.closed = ""  # why it refuses all tickets; "" if it does not
        self.has_times = batcher.may_wait or batcher.may_expire  # whether time may decide about its tickets
        self.may_have_tickets = False  # False: no ticket waits. Cheaper to read than the length of the queue
        self.is_changed = False  # whether it is in `_changed`
        self._changed: deque[ModelQueue] = deque()  # the queues that the scheduler has to examine
        self.is_pure = is_pure  # whether a failed batch may run again
        self.order = Order() if keeps_order else None
        self.flights = None if cache is None else SingleFlight()  # the steps that the runtime looks up in `cache`

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

    # ------------------------------------------------------------------ tickets

    def join(self, changed: deque[ModelQueue]) -> None:
        """Report changes to `changed` from now on."""
        self._changed = changed

    def mark(self) -> None:
        """Something changed: the next `schedule` examines this queue."""
        if not self.is_changed:
            self.is_changed = True
            self._changed.append(self)

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises as `Batcher.put`, and Unavailable while it is closed."""
        if self.closed:
            raise Unavailable(self.closed)
        self.batcher.put(ticket)

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch failed on this instance; run these parts of it, each as a batch, before other tickets."""
        self.batcher.again(instance, parts)
        self.may_have_tickets = True
        self.mark()

    def withdraw(self, *frames: Frame) -> tuple[int, list[Ticket]]:
        """Remove the tickets of requests that are over. Returns how many waited, and steps that have to run now: each
        waited for the result of a removed one.
        """
        count = self.batcher.withdraw(*frames)
        to_run: list[Ticket] = []
        if self.flights is not None:
            looked_up, to_run = self.flights.withdraw(*frames)
            count += looked_up
        self.mark()  # tickets behind them may form a batch now, and ordered outcomes behind them may be next
        return count, to_run

    def close(self, reason: str) -> list[Ticket]:
        """Refuse new tickets until `give_back`. Returns the waiting ones, to be refused."""
        self.closed = reason
        return self.clear()

    def clear(self) -> list[Ticket]:
        """Remove and return all waiting tickets, to be refused."""
        return [*self.batcher.clear(), *(self.flights.waiting if self.flights is not None else ())]

    @property
    def may_answer(self) -> bool:
        """Whether a step may be answered without running: not if the model keeps order and an earlier step waits."""
        return self.order is None or not len(self.batcher)

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return len(self.batcher) + (0 if self.flights is None else len(self.flights))

    def deadline(self, *, has_resources: bool) -> int | None:
        """When time alone decides about tickets: a timeout passes, or a free instance that `has_resources` may take a
        batch.
        """
        batcher = self.batcher
        expiry = batcher.expiry() if batcher.may_expire else None
        ready = batcher.deadline() if batcher.may_wait and self.free and has_resources else None
        return ready if expiry is None else expiry if ready is None else min(expiry, ready)

    # ------------------------------------------------------------------ instances

    def freed(self, instance: Any) -> None:
        """A batch has left this instance."""
        self.running -= 1
        if self.leaving and instance in self.leaving:
            self.leaving.remove(instance)
            self._lose(instance)
            return
        self.free.append(instance)
        if self.may_have_tickets or self.order is not None or self.bound is not None:
            self.mark()

    def take_away(self, instance: Any) -> None:
        """An instance becomes unavailable: now, or when its batch is complete."""
        if instance not in self.free:
            self.leaving.append(instance)
            return
        self.free.remove(instance)
        self._lose(instance)

    def _lose(self, instance: Any) -> None:
        self.away.append(instance)
        if self.bound is not None:
            self.bound.lost(instance)
            self.mark()

    def give_back(self, instance: Any) -> None:
        """An instance is available again and takes waiting tickets; reopens a closed queue."""
        self.closed = ""
        if instance in self.leaving:
            self.leaving.remove(instance)
            return
        self.away.remove(instance)
        self.free.append(instance)
        if self.bound is not None:
            self.bound.found(instance)
        self.mark()

    @property
    def is_served(self) -> bool:
        """Whether an instance can take its tickets, now or after its current batch."""
        return len(self.away) + len(self.leaving) < len(self.instances)
