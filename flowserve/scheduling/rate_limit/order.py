"""The order in which waiting queues get their batches under a rate limiter.

Decides which queue is next, that a queue whose resources are held is skipped, and that resources are reserved for a
queue that was overtaken too often. A batch is taken from its queue only when an instance and all of that instance's
resources are free, so it grows until then. Without `--rate-limit` this class is not used and the scheduler considers
each queue by itself. Does not start batches: `next` returns the one to start. Called by the scheduler only.

Always true between two calls of `Scheduler.schedule` (see `check`):
  (5) a running instance holds its resources; no other instance holds any;
  (6) no ticket waits while an instance and its resources are free unless its batcher waits for more tickets, or another
      queue was overtaken too often and the resources are reserved for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from flowserve.graph.types import ModelKey
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.call_graph import CallGraph
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.rate_limit.limiter import Account, Limiter, Needs, Resource

# The number of executions that may overtake a waiting queue and take its resources; then these are reserved for it.
OVERTAKEN_MAX: Final = 16


@dataclass(slots=True, eq=False)
class _Contender:
    """A queue at the limiter: the accounts of its instances, and how often it was overtaken since its last batch."""

    queue: ModelQueue
    accounts: dict[Hashable, Account]
    overtaken: int = 0
    is_idle: bool = True  # whether it was empty when it left `_waiting`

    def is_due(self, now_ns: int) -> bool:
        """Whether its batching delay has passed; before that, a batch of another queue does not count as overtaking."""
        deadline = self.queue.batcher.deadline()
        return deadline is None or deadline <= now_ns


@dataclass(eq=False)
class RateLimit:
    """The queues of a server at its limiter. `calls`: the executions that wait for others."""

    limiter: Limiter
    _overtaken_max: int
    _calls: CallGraph
    _contenders: dict[ModelQueue, _Contender] = field(default_factory=dict)
    # Queues to consider, in the order in which they began to wait.
    _waiting: dict[ModelQueue, None] = field(default_factory=dict)

    def add(self, queue: ModelQueue) -> None:
        """Add a model."""
        accounts = self.limiter.add(queue.needs or [Needs({})] * len(queue.instances))
        self._contenders[queue] = _Contender(queue, dict(zip(queue.instances, accounts, strict=True)))

    def remove(self, queue: ModelQueue) -> None:
        """Remove a model."""
        self.limiter.remove(self._contenders.pop(queue).accounts.values())
        self._waiting.pop(queue, None)

    def wait(self, queue: ModelQueue) -> None:
        """The queue changed: the next calls of `next` consider it."""
        contender = self._contenders.get(queue)
        if contender is None:  # removed since it changed
            return
        self._waiting[queue] = None
        if contender.is_idle:
            contender.is_idle = False
            self.limiter.catch_up(contender.accounts.values())

    def is_waiting(self, queue: ModelQueue) -> bool:
        """Whether a queue waits for resources: it can continue after the end of a batch, not by time alone."""
        return queue in self._waiting

    def next(self, now_ns: int) -> tuple[ModelQueue, Any, list[Ticket]] | None:
        """The next batch to start, as (queue, instance, tickets); its resources are held from now on. None: no batch
        can start.
        """
        while isinstance(found := self._next(now_ns), _Contender):
            # Stop considering a queue without a ready batch until an arrival, a complete batch or its deadline.
            del self._waiting[found.queue]
            found.is_idle = not len(found.queue.batcher)
            found.overtaken = 0
        return found

    def _next(self, now_ns: int) -> tuple[ModelQueue, Any, list[Ticket]] | _Contender | None:
        """The first batch that can start, None if there is none; a contender without a ready batch, if one is found
        before.
        """
        candidates = [
            (account.turn, contender, account, instance)
            for queue in self._waiting
            for contender in [self._contenders[queue]]
            for instance in queue.free
            for account in [contender.accounts[instance]]
        ]
        # Stable: at equal turns the queue that waits longest, and the instance that is idle longest.
        candidates.sort(key=itemgetter(0))
        skipped: dict[_Contender, Account] = {}
        unready: list[_Contender] = []  # contenders whose tickets, if any, are bound to other instances
        for _, contender, account, instance in candidates:
            if not self.limiter.has_room(account.needs, self._reserved(skipped, contender)):
                if not len(contender.queue.batcher):
                    return contender
                skipped.setdefault(contender, account)
                continue
            tickets = contender.queue.batcher.take(instance, now_ns)
            if tickets is None and contender.queue.bound is not None:
                unready.append(contender)
                continue
            if tickets is None:
                return contender
            for other, needy in skipped.items():
                if not account.needs.amounts.keys().isdisjoint(needy.needs.amounts) and other.is_due(now_ns):
                    other.overtaken += 1
            contender.overtaken = 0
            self.limiter.begin(account)
            return contender.queue, instance, tickets
        return next((contender for contender in unready if contender not in skipped), None)

    def ended(self, batch: Batch) -> None:
        """A batch freed its instance and its resources."""
        self.limiter.end(self._account(batch))

    def waited_for(self) -> list[ModelKey]:
        """The models for which resources are reserved, because they were overtaken too often."""
        return [queue.key for queue in self._waiting if self._contenders[queue].overtaken >= self._overtaken_max]

    def can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Whether a batch of this queue could ever start if these batches never freed their instances and resources."""
        kept: Counter[Resource] = Counter()
        for batch in kept_by:
            kept.update(self._account(batch).needs.amounts)
        total = self.limiter.total
        busy = [batch.instance for batch in kept_by if batch.queue is queue]
        return any(
            all(total[resource] - kept[resource] >= count for resource, count in account.needs.amounts.items())
            for instance, account in self._contenders[queue].accounts.items()
            if instance not in busy
        )

    def _reserved(self, skipped: dict[_Contender, Account], contender: _Contender) -> Mapping[Resource, int]:
        """The resources that are reserved for contenders before this one that were overtaken too often. They are not
        reserved against a queue that these contenders wait for, in a BLS call or in send().
        """
        kept: Counter[Resource] = Counter()
        overtaken = [
            account
            for other, account in skipped.items()
            if other is not contender and other.overtaken >= self._overtaken_max
        ]
        callers = self._calls.waiting_for(contender.queue) if overtaken and self._calls else ()
        for account in overtaken:
            if not (callers and self._waits_for(account, callers)):
                kept.update(account.needs.amounts)
        return kept

    def _waits_for(self, account: Account, callers: Collection[Batch]) -> bool:
        """Whether an instance that waits for resources depends on one of these executions: on resources that it holds,
        that executions waiting for it hold, or that are reserved against those.
        """
        seen: set[Batch] = set()
        visited = {account}
        needy = [account]
        while needy:
            needs = needy.pop().needs.amounts.keys()
            holders = [batch for batch in self._calls if not needs.isdisjoint(self._account(batch).needs.amounts)]
            while holders:
                batch = holders.pop()
                if batch in callers:
                    return True
                if batch in seen:
                    continue
                seen.add(batch)
                for queue in self._calls.queues_of(batch):
                    holders += [other for other in self._calls if other.queue is queue]
                    before = [one for one in self._reserved_before(queue) if one not in visited]
                    visited.update(before)
                    needy += before
        return False

    def _reserved_before(self, queue: ModelQueue) -> list[Account]:
        """The accounts for which a resource that this queue needs is reserved."""
        needs = {name for account in self._contenders[queue].accounts.values() for name in account.needs.amounts}
        return [
            account
            for other in self._waiting
            if other is not queue and self._contenders[other].overtaken >= self._overtaken_max
            for account in self._contenders[other].accounts.values()
            if not needs.isdisjoint(account.needs.amounts)
        ]

    def _account(self, batch: Batch) -> Account:
        return self._contenders[batch.queue].accounts[batch.instance]

    def check(self) -> None:
        """Assert the numbered invariants. For tests and simulation, between two calls of `schedule`."""
        running = [
            account
            for contender in self._contenders.values()
            for instance, account in contender.accounts.items()
            if instance not in contender.queue.free and instance not in contender.queue.away
        ]
        self.limiter.check(running)
        for queue in self._waiting:
            for instance in queue.free:
                self._check_skipped(queue, self._contenders[queue].accounts[instance])

    def _check_skipped(self, queue: ModelQueue, account: Account) -> None:
        if self.limiter.has_room(account.needs, {}):
            kept = [self._contenders[other] for other in self._waiting if other is not queue]
            assert any(
                other.overtaken >= self._overtaken_max
                and not needy.needs.amounts.keys().isdisjoint(account.needs.amounts)
                for other in kept
                for needy in other.accounts.values()
            ), f"(6) {queue.key} waits although an instance and its resources are free"
