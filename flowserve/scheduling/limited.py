"""The dispatcher with a rate limiter: which waiting batch goes next where not all can run at once.

Decided here: in which order queues are looked at, what cannot run is skipped, and what was skipped too often is waited
for. A batch is taken out of its queue only when an instance and all of that instance's resources are free, so it goes
on growing until then. Without `--rate-limit` none of this exists: dispatcher.py looks at each queue by itself.

Always true between two calls of `pump` (see `check`), besides what dispatcher.py promises:
  (5) an instance that runs holds its resources, and nobody else holds any;
  (6) no ticket waits beside a free instance with free resources unless its batcher waits for company, or somebody else
      was overtaken too often and these are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Final

from flowserve.errors import FlowserveError
from flowserve.graph.types import ModelKey
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.flows import tell_nobody
from flowserve.scheduling.limiter import Account, Limiter, Needs, Resource
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow

# So many executions may take what a waiting queue needs, while it comes before them; then its resources are kept.
OVERTAKEN_MAX: Final = 16


class _Contender:
    """A queue at the limiter: the accounts of its instances, and how often it was overtaken since it last ran."""

    __slots__ = ("accounts", "is_idle", "overtaken", "queue")

    def __init__(self, queue: ModelQueue, accounts: dict[Hashable, Account]) -> None:
        self.queue = queue
        self.accounts = accounts
        self.overtaken = 0
        self.is_idle = True  # nothing waited when it was last looked at

    def is_due(self, now_ns: int) -> bool:
        """Whether its tickets have stopped waiting for company; before, nobody overtakes them."""
        deadline = self.queue.batcher.deadline()
        return deadline is None or deadline <= now_ns


class LimitedDispatcher(Dispatcher):
    """Composes router, batchers, instances and a limiter."""

    def __init__(
        self,
        run: Callable[[Batch], None],
        answered: Callable[[Flow], None],
        limiter: Limiter,
        overtaken_max: int = OVERTAKEN_MAX,
        refused: Callable[[ModelQueue, Ticket, FlowserveError], None] = tell_nobody,
        told: Callable[[StreamFlow], None] = tell_nobody,
        withdrawn: Callable[[ModelQueue], None] = tell_nobody,
    ) -> None:
        super().__init__(run, answered, refused, told, withdrawn)
        self.limiter = limiter
        self._overtaken_max = overtaken_max
        self._contenders: dict[ModelQueue, _Contender] = {}
        self._waiting: dict[ModelQueue, None] = {}  # queues to look at, in the order in which they came to wait

    def add(self, queue: ModelQueue) -> None:
        super().add(queue)
        accounts = self.limiter.add(queue.needs or [Needs({})] * len(queue.instances))
        self._contenders[queue] = _Contender(queue, dict(zip(queue.instances, accounts, strict=True)))

    def remove(self, queue: ModelQueue) -> None:
        super().remove(queue)
        self.limiter.remove(self._contenders.pop(queue).accounts.values())
        self._waiting.pop(queue, None)

    def pump(self, now_ns: int) -> None:
        """Queue what arrived, in order, then start what can start, whoever's turn it is first."""
        if self._expiring or self._due is not None:
            self._expire(now_ns)
        if self._arrivals:
            self._queue_arrivals(now_ns)
        while True:
            while self._dirty:  # an inline batch adds to it
                self._await_turn(self._dirty.popleft(), now_ns)
            if self._start_next(now_ns):
                continue
            if not self.streams.is_due:
                return
            self.streams.settle(now_ns)

    def next_deadline(self) -> int | None:
        """When `pump` should be called even if nothing happens, or None. Time alone brings nothing to those who wait
        for resources: a batch's end does.
        """
        soonest = self._next_expiry() if self._expiring or self._due is not None else None
        for queue in self._delayed:
            if queue.free and queue not in self._waiting:
                deadline = queue.batcher.deadline()
                if deadline is not None and (soonest is None or deadline < soonest):
                    soonest = deadline
        return soonest

    def waited_for(self) -> list[ModelKey]:
        """The models for which resources are kept, because they were overtaken too often."""
        return [queue.key for queue in self._waiting if self._contenders[queue].overtaken >= self._overtaken_max]

    def _start(self, queue: ModelQueue, now_ns: int) -> None:
        """Make room in a queue that is full, whoever's turn it is first."""
        self._await_turn(queue, now_ns)
        while self._start_next(now_ns):
            pass

    def _await_turn(self, queue: ModelQueue, now_ns: int) -> None:
        queue.is_dirty = False
        if queue.order is not None:
            self._release(queue.order, now_ns)
        if queue.bound is not None:
            self._tell_orphans(queue, queue.bound, now_ns)
        contender = self._contenders.get(queue)
        if contender is None:  # removed since something happened to it
            return
        self._waiting[queue] = None
        if contender.is_idle:
            contender.is_idle = False
            self.limiter.catch_up(contender.accounts.values())

    def _start_next(self, now_ns: int) -> bool:
        """Start the first batch that can start, or find one queue that has none. False: there was nothing to do."""
        candidates = [
            (account.turn, contender, account, instance)
            for queue in self._waiting
            for contender in [self._contenders[queue]]
            for instance in queue.free
            for account in [contender.accounts[instance]]
        ]
        candidates.sort(key=_by_turn)  # stable: of equals whoever came to wait first, on the instance idle longest
        skipped: dict[_Contender, Account] = {}
        barren: list[_Contender] = []  # whose tickets, if any, are bound to other instances
        for _, contender, account, instance in candidates:
            if not self.limiter.has_room(account.needs, self._kept(skipped, contender)):
                if self._is_empty(contender.queue):
                    return self._leave(contender)
                skipped.setdefault(contender, account)
                continue
            tickets = self._next_tickets(contender.queue, instance, now_ns)
            if tickets is None and contender.queue.bound is not None:
                barren.append(contender)
                continue
            if tickets is None:
                return self._leave(contender)
            for other, needy in skipped.items():
                if not account.needs.amounts.keys().isdisjoint(needy.needs.amounts) and other.is_due(now_ns):
                    other.overtaken += 1
            contender.overtaken = 0
            self.limiter.begin(account)
            queue = contender.queue
            queue.free.remove(instance)
            queue.running += 1
            self._run(Batch(queue, instance, tickets, now_ns))
            return True
        for contender in barren:
            if contender not in skipped:
                return self._leave(contender)
        return False

    def _kept(self, skipped: dict[_Contender, Account], contender: _Contender) -> dict[Resource, int]:
        """What is kept from a contender for those before it that were overtaken too often. Nothing is kept from what
        somebody has called, or sends to, for whom they wait themselves.
        """
        kept: dict[Resource, int] = {}
        callers = self.calls.waiting_for(contender.queue) if self.calls else ()
        for other, account in skipped.items():
            if other is not contender and other.overtaken >= self._overtaken_max:
                if callers and self._waits_for(account, callers):
                    continue
                for resource, count in account.needs.amounts.items():
                    kept[resource] = kept.get(resource, 0) + count
        return kept

    def _waits_for(self, account: Account, callers: Collection[Batch]) -> bool:
        """Whether an instance that waits for resources waits for one of these executions: for what it holds itself, or
        for what others hold who wait for it, or for what is kept from those.
        """
        seen: set[Batch] = set()
        asked = {account}
        needy = [account]
        while needy:
            needs = needy.pop().needs.amounts.keys()
            holders = [batch for batch in self.calls if not needs.isdisjoint(self._account(batch).needs.amounts)]
            while holders:
                batch = holders.pop()
                if batch in callers:
                    return True
                if batch in seen:
                    continue
                seen.add(batch)
                for queue in self.calls.queues_of(batch):
                    holders += [other for other in self.calls if other.queue is queue]
                    before = [one for one in self._keepers_before(queue) if one not in asked]
                    asked.update(before)
                    needy += before
        return False

    def _keepers_before(self, queue: ModelQueue) -> list[Account]:
        """The accounts for which something that this queue needs is kept."""
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

    def _next_tickets(self, queue: ModelQueue, instance: object, now_ns: int) -> list[Ticket] | None:
        """What runs next of a queue, on that instance: the rest of a batch that failed, or a new batch."""
        if queue.bound is not None:
            return queue.bound.take_for(instance, now_ns)
        for half in [half for half in self._halves if half[0] is queue]:
            self._halves.remove(half)
            tickets = [ticket for ticket in half[1] if not ticket.flow.done]
            if tickets:
                return tickets
        taken = queue.batcher.take(now_ns)
        if taken is not None and queue.order is not None:
            queue.order.started(taken)
        return taken

    def _is_empty(self, queue: ModelQueue) -> bool:
        return not len(queue.batcher) and not any(half[0] is queue for half in self._halves)

    def _leave(self, contender: _Contender) -> bool:
        """Nothing of this queue can run, whatever is free: an arrival, a returning batch or time brings it back."""
        del self._waiting[contender.queue]
        contender.is_idle = self._is_empty(contender.queue)
        contender.overtaken = 0
        return True

    def _can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Not where those who keep their instances for ever keep resources, too, that it needs."""
        kept: dict[Resource, int] = {}
        for batch in kept_by:
            for resource, count in self._contenders[batch.queue].accounts[batch.instance].needs.amounts.items():
                kept[resource] = kept.get(resource, 0) + count
        counts = self.limiter.counts()
        busy = [batch.instance for batch in kept_by if batch.queue is queue]
        return any(
            all(counts[resource] - kept.get(resource, 0) >= count for resource, count in account.needs.amounts.items())
            for instance, account in self._contenders[queue].accounts.items()
            if instance not in busy
        )

    def _set_free(self, batch: Batch) -> None:
        self.limiter.end(self._contenders[batch.queue].accounts[batch.instance])
        super()._set_free(batch)
        self._mark(batch.queue)  # also where nothing waits: halves may follow, and an idle model's turn is forgotten

    def check(self) -> None:
        super().check()
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
            ), f"(6) {queue.key} waits beside a free instance and free resources"

    def _check_halves(self) -> None:
        for queue, _ in self._halves:
            assert not queue.free or queue in self._waiting, f"(3) {queue.key}: the rest of a batch was forgotten"


def _by_turn(candidate: tuple[int, Any, Any, Any]) -> int:
    return candidate[0]
