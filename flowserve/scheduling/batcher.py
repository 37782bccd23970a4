"""Which waiting tickets of one model leave together, and when.

Membership and timing of batches are decided in this file and nowhere else. It never learns the time by itself:
callers bring `now_ns`. It does not know instances: it is asked (`take`) only when one is free, so that a batch may
grow until an instance takes it.

Always true after every call (see `check`):
  (1) tickets leave in the order they came;
  (2) no batch exceeds the model's maximum, and all its tickets share one key;
  (3) right after `take` said "not yet", `deadline` lies in the future.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

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


class Batcher(Protocol):
    """What a model's queue does, whichever scheduler the model asked for. `may_wait`: it has deadlines at all."""

    may_wait: bool

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set."""

    def take(self, now_ns: int) -> list[Ticket] | None:
        """The next batch, taken out of the queue, or None: nobody waits, or they wait for company."""

    def deadline(self) -> int | None:
        """When time alone may change the answer of `take`. None: never. Asking early or twice is harmless."""

    def withdraw(self, flow: Flow) -> int:
        """Drop every ticket of a flow that will not be answered; returns how many there were."""

    def __len__(self) -> int: ...

    def check(self) -> None: ...


class OneByOne:
    """Triton's default scheduler: every request is an execution of its own, first come first served."""

    __slots__ = ("_waiting",)
    may_wait = False

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()

    def put(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def take(self, now_ns: int) -> list[Ticket] | None:
        return [self._waiting.popleft()] if self._waiting else None

    def deadline(self) -> int | None:
        return None

    def withdraw(self, flow: Flow) -> int:
        return _withdraw(self._waiting, flow)

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        _check_order(self._waiting)


class DynamicBatcher:
    """Triton's dynamic batcher: preferred sizes, a delay, a maximum; sizes are rows, not requests.

    The queue is walked in order and never skipped. What closes a batch at once: the next ticket does not fit, or has
    another key. Otherwise, while the delay is not over, only a preferred size leaves (the largest reached), and the
    queue waits for company; once it is over (or there is none), everything leaves, up to the maximum.
    """

    __slots__ = ("_delay_ns", "_largest", "_max", "_preferred", "_waiting", "may_wait")

    def __init__(self, policy: BatchPolicy) -> None:
        self._max = policy.max_batch_size
        self._preferred = frozenset(policy.preferred)
        self._largest = max(policy.preferred)
        self._delay_ns = policy.max_queue_delay_ns
        self.may_wait = policy.max_queue_delay_ns > 0
        self._waiting: deque[Ticket] = deque()

    def put(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def take(self, now_ns: int) -> list[Ticket] | None:
        waiting = self._waiting
        if not waiting:
            return None
        count = self._count_to_send(now_ns)
        if count == len(waiting):
            batch = [*waiting]
            waiting.clear()
            return batch
        popleft = waiting.popleft
        return [popleft() for _ in range(count)] or None

    def _count_to_send(self, now_ns: int) -> int:
        """How many of the oldest tickets leave now; 0: wait for company."""
        waiting = self._waiting
        key = waiting[0].key
        overdue = self._delay_ns > 0 and now_ns - waiting[0].queued_ns >= self._delay_ns
        size = count = candidate = 0
        closed = False
        for ticket in waiting:
            bigger = size + (ticket.rows or 1)  # a request of no rows takes a place like any other, as on Triton
            if count and (bigger > self._max or ticket.key != key):
                closed = True
                break
            if bigger > self._largest and not candidate and count and not overdue:
                # No preferred size was met and the next ticket would jump over the largest: what is there is the batch.
                return count
            size = bigger
            count += 1
            if size in self._preferred:
                candidate = count
            if size >= self._max:
                break
        if candidate and not overdue:
            return candidate
        if closed or overdue or not self._delay_ns or size >= self._largest:
            return count
        return 0

    def deadline(self) -> int | None:
        if not self._delay_ns or not self._waiting:
            return None
        return self._waiting[0].queued_ns + self._delay_ns

    def withdraw(self, flow: Flow) -> int:
        return _withdraw(self._waiting, flow)

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        _check_order(self._waiting)


def _withdraw(waiting: deque[Ticket], flow: Flow) -> int:
    kept = [ticket for ticket in waiting if ticket.flow is not flow]
    gone = len(waiting) - len(kept)
    if gone:
        waiting.clear()
        waiting.extend(kept)
    return gone


def _check_order(waiting: deque[Ticket]) -> None:
    times = [ticket.queued_ns for ticket in waiting]
    assert times == sorted(times), "(1) the queue is not in order of arrival"
    assert not any(ticket.flow.done for ticket in waiting), "a ticket of an answered flow still waits"
