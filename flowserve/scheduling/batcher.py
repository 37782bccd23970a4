"""Which waiting tickets of one model leave together, and when.

How many of a walk of waiting tickets make a batch now is decided in this file and nowhere else (`BatchPolicy.count`),
but for what of a crowd is left to the next batch (crowd.py); whom the walk meets first is decided by the queue: arrival
here, levels and policies in queues.py. It never learns the time by itself: callers bring `now_ns`. It does not know
instances: it is asked (`take`) only when one is free, so that a batch may grow until an instance takes it.

Always true after every call (see `check`):
  (1) tickets leave in the order they came;
  (2) no batch exceeds the model's maximum, and all its tickets share one key;
  (3) right after `take` said "not yet", `deadline` lies in the future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowserve.scheduling.crowd import Crowd
from flowserve.scheduling.router import Flow, Ticket


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """`preferred` is ascending and never empty; the delay counts from the oldest ticket's arrival."""

    max_batch_size: int
    preferred: tuple[int, ...]
    max_queue_delay_ns: int = 0

    @classmethod
    def simple(cls, max_batch_size: int, max_queue_delay_ns: int = 0) -> BatchPolicy:
        return cls(max_batch_size, (max_batch_size,), max_queue_delay_ns)

    def count(self, walk: Iterable[Ticket], key: Hashable, is_overdue: bool) -> int:
        """How many tickets at the front of `walk` leave now as one batch; 0: they wait for company.

        The walk is never skipped, and `key` is its first ticket's. What closes a batch at once: the next ticket does
        not fit, or has another key. Otherwise, while the delay is not over, only a preferred size leaves (the largest
        reached); once it is over (or there is none), everything leaves, up to the maximum.
        """
        limit = self.max_batch_size
        preferred = self.preferred
        largest = preferred[-1]
        size = count = candidate = 0
        closed = False
        for ticket in walk:
            bigger = size + (ticket.rows or 1)  # a request of no rows takes a place like any other, as on Triton
            if count and (bigger > limit or ticket.key != key):
                closed = True
                break
            if bigger > largest and not candidate and count and not is_overdue:
                # No preferred size was met and the next ticket would jump over the largest: what is there is the batch.
                return count
            size = bigger
            count += 1
            if size in preferred:
                candidate = count
            if size >= limit:
                break
        if candidate and not is_overdue:
            return candidate
        if closed or is_overdue or not self.max_queue_delay_ns or size >= largest:
            return count
        return 0


class Batcher(Protocol):
    """What a model's queue does, whichever scheduler the model asked for.

    `may_wait`: tickets may wait for company beside a free instance. `may_expire`: their patience may end.
    """

    may_wait: bool
    may_expire: bool

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set. Raises Unavailable where the queue is full."""

    def take(self, now_ns: int) -> list[Ticket] | None:
        """The next batch, taken out of the queue, or None: nobody waits, or they wait for company. Whoever's patience
        has ended by `now_ns` was taken out before (`expire`).
        """

    def deadline(self) -> int | None:
        """When time alone may change the answer of `take`. None: never. Asking early or twice is harmless."""

    def expiry(self) -> int | None:
        """When the next ticket's patience ends, whether or not an instance is free. None: never."""

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        """Take out the tickets whose patience has ended, to be refused. Early calls are harmless."""

    def withdraw(self, flow: Flow) -> int:
        """Drop every ticket of a flow that will not be answered, its iterations' with it: they are `done`. Returns how
        many there were.
        """

    def __len__(self) -> int: ...

    def check(self) -> None: ...


class Fifo:
    """First come, first served, by whoever is patient for ever and never refused."""

    __slots__ = ("_waiting",)
    may_expire = False

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()

    def put(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def put_all(self, tickets: Iterable[Ticket]) -> None:
        self._waiting.extend(tickets)

    def expiry(self) -> int | None:
        return None

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        return ()

    def withdraw(self, flow: Flow) -> int:
        waiting = self._waiting
        kept = [ticket for ticket in waiting if ticket.flow is not flow and not ticket.flow.done]
        gone = len(waiting) - len(kept)
        if gone:
            waiting.clear()
            waiting.extend(kept)
        return gone

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        times = [ticket.queued_ns for ticket in self._waiting]
        assert times == sorted(times), "(1) the queue is not in order of arrival"
        assert not any(ticket.flow.done for ticket in self._waiting), "a ticket of an answered flow still waits"


class OneByOne(Fifo):
    """Triton's default scheduler: every request is an execution of its own, first come first served."""

    __slots__ = ()
    may_wait = False

    def take(self, now_ns: int) -> list[Ticket] | None:
        return [self._waiting.popleft()] if self._waiting else None

    def deadline(self) -> int | None:
        return None


class DynamicBatcher(Fifo):
    """Triton's dynamic batcher: preferred sizes, a delay, a maximum; sizes are rows, not requests.

    `crowd`: of whom a batch takes only a share, where it begins with a step of an ensemble whose steps are on models of
    their own. Only where `takes_all`.
    """

    __slots__ = ("_policy", "crowd", "delay_ns", "may_wait")

    def __init__(self, policy: BatchPolicy) -> None:
        super().__init__()
        self._policy = policy
        self.crowd: Crowd | None = None
        self.delay_ns = policy.max_queue_delay_ns
        self.may_wait = policy.max_queue_delay_ns > 0

    @property
    def takes_all(self) -> bool:
        """Whether those who wait together leave together at once, up to the maximum, whatever their number."""
        return not self.delay_ns and self._policy.preferred == (self._policy.max_batch_size,)

    def take(self, now_ns: int) -> list[Ticket] | None:
        waiting = self._waiting
        if not waiting:
            return None
        if len(waiting) == 1 and not self.delay_ns:
            return [waiting.popleft()]
        oldest = waiting[0]
        is_overdue = self.delay_ns > 0 and now_ns - oldest.queued_ns >= self.delay_ns
        count = self._policy.count(waiting, oldest.key, is_overdue)
        if self.crowd is not None and oldest.flow.plan.is_apart:
            count = self.crowd.share(count)
        if count == len(waiting):
            batch = [*waiting]
            waiting.clear()
            return batch
        popleft = waiting.popleft
        return [popleft() for _ in range(count)] or None

    def deadline(self) -> int | None:
        if not self.delay_ns or not self._waiting:
            return None
        return self._waiting[0].queued_ns + self.delay_ns
