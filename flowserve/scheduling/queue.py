"""The queue of one model: which waiting tickets leave together as a batch, and when.

Decides when a batch is complete (`BatchPolicy.count`), in which order tickets leave (priority levels), which ticket is
refused because its level is full, when a ticket's timeout passes, that parts of a failed batch run before waiting
tickets, and in which order outcomes leave a model with `preserve_ordering` (`Order`). `take` is called only when an
instance is free, so a batch may grow until then. Does not read a clock: callers pass `now_ns`. Called by the scheduler
only.

A *level* is a priority, 1 the highest; 0 is the level of a queue without priorities. A *lane* is a FIFO list of
tickets. Each level has two: its live tickets, and behind them the tickets whose timeout passed under the action DELAY.

Always true after every call (see `Queue.check`):
  (1) the tickets of a lane leave in the order of arrival;
  (2) no batch exceeds the model's maximum, all its tickets share one key, and no level exceeds its size limit;
  (3) right after `take` returned None, `deadline` is None or in the future; no ticket is returned or refused twice, or
      refused before its timeout;
  (4) no lane with tickets is omitted from more than `OVERTAKEN_MAX` batches in a row, plus one for each other lane that
      waits as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice, pairwise, takewhile
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from flowserve.errors import FlowserveError, Unavailable
from flowserve.scheduling.frames.frame import Facts, Frame, Ticket

# After this many batches without a ticket of a lane, the next batch begins with that lane. Under Triton's strict
# priority rule a steady stream of high-priority requests starves all others; this limit costs one batch in 33.
OVERTAKEN_MAX: Final = 32

T = TypeVar("T", bound=Hashable)

_SLACK = 32  # the heap is rebuilt when its discarded entries exceed its live ones by this number
# (m, ticket, outputs, errors): the results of the batch in which the ticket was the m-th, as for `Scheduler.complete`.
HeldOutcome = tuple[int, Ticket, Sequence[Sequence[Facts | None]], Mapping[int, FlowserveError]]


class Deadlines(Generic[T]):
    """A heap of items with at most one deadline each, in nanoseconds of the caller's clock. `add`, `discard` and
    `soonest` take amortised logarithmic time, and a discarded item is released immediately, not at its deadline.
    `entries` has the items as its keys.
    """

    __slots__ = ("_heap", "_number", "entries")

    def __init__(self) -> None:
        # (deadline, number, a list with the item, emptied by `discard`). Equal deadlines are ordered by number.
        self._heap: list[tuple[int, int, list[T]]] = []
        self.entries: dict[T, list[T]] = {}
        self._number = 0

    def add(self, item: T, at_ns: int) -> None:
        """Set the deadline of `item`, which has none."""
        holder = self.entries[item] = [item]
        self._number += 1
        heappush(self._heap, (at_ns, self._number, holder))

    def discard(self, item: T) -> None:
        """Remove the deadline of `item`. No effect if it has none."""
        holder = self.entries.pop(item, None)
        if holder is not None:
            holder.clear()
            if len(self._heap) > 2 * len(self.entries) + _SLACK:
                self._heap = [entry for entry in self._heap if entry[2]]
                heapify(self._heap)

    def soonest(self) -> int | None:
        """The next deadline, or None."""
        heap = self._heap
        while heap and not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ns: int) -> list[T]:
        """Remove and return the items whose deadline has passed, in order of deadline and then of `add`."""
        found: list[T] = []
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            holder = heappop(heap)[2]
            for item in holder:
                del self.entries[item]
                found.append(item)
        return found

    def __contains__(self, item: T) -> bool:
        return item in self.entries

    def __len__(self) -> int:
        return len(self.entries)


class Tickets:
    """Tickets in order. Those of one request are removed without a search.

    `waiting`: the tickets by their request. A request may have several, for several steps of one model: the key of each
    further one, its `twins`, is the ticket itself. A dict would be slow as a queue: the search for its first entry
    passes all removed ones.
    """

    __slots__ = ("twins", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Hashable, Ticket] = OrderedDict()
        self.twins: dict[Frame, list[Ticket]] = {}

    def append(self, ticket: Ticket) -> None:
        if self.waiting.setdefault(ticket.frame, ticket) is not ticket:
            self.append_twin(ticket)

    def append_twin(self, ticket: Ticket) -> None:
        """As `append`, for a ticket whose request already has one here."""
        self.waiting[ticket] = ticket
        self.twins.setdefault(ticket.frame, []).append(ticket)

    def insert(self, ticket: Ticket) -> None:
        """Insert a ticket by its `order`, among tickets in that order. The cost is proportional to the number of
        tickets behind it.
        """
        behind = [*takewhile(lambda key: self.waiting[key].order > ticket.order, reversed(self.waiting))]
        self.append(ticket)
        for key in reversed(behind):
            self.waiting.move_to_end(key)

    def pop(self, count: int) -> list[Ticket]:
        """Remove and return the first tickets."""
        popitem = self.waiting.popitem
        batch = [popitem(last=False)[1] for _ in range(count)]
        if self.twins:
            self.forget_twins(batch)
        return batch

    def forget_twins(self, removed: Iterable[Ticket]) -> None:
        """Remove these tickets from `twins`; they are no longer in `waiting`."""
        for ticket in removed:
            twins = self.twins.get(ticket.frame, [])
            if ticket in twins:
                twins.remove(ticket)
                if not twins:
                    del self.twins[ticket.frame]

    def discard(self, ticket: Ticket) -> None:
        """Remove a ticket. No effect if it is not here."""
        if self.waiting.get(ticket.frame) is ticket:
            del self.waiting[ticket.frame]
        elif self.waiting.pop(ticket, None) is not None:
            self.forget_twins((ticket,))

    def withdraw(self, frame: Frame) -> list[Ticket]:
        """Remove and return the tickets of a request."""
        first = self.waiting.pop(frame, None)
        gone = [] if first is None else [first]
        if self.twins:
            gone += [self.waiting.pop(ticket) for ticket in self.twins.pop(frame, ())]
        return gone

    def first(self) -> Ticket:
        return next(iter(self.waiting.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.waiting.values())

    def __len__(self) -> int:
        return len(self.waiting)

    def check(self) -> None:
        for key, ticket in self.waiting.items():
            assert key is ticket.frame or (key is ticket and ticket in self.twins[ticket.frame]), f"{ticket} is lost"
        assert sum(map(len, self.twins.values())) <= len(self.waiting), "a ticket is remembered that does not wait"


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """`preferred` batch sizes in rows, ascending and never empty. `max_queue_delay_ns` counts from the arrival of the
    oldest ticket. `is_single`: every request is a batch of its own, whatever its rows (Triton's default scheduler).
    """

    max_batch_size: int
    preferred: tuple[int, ...]
    max_queue_delay_ns: int = 0
    is_single: bool = False

    @classmethod
    def simple(cls, max_batch_size: int, max_queue_delay_ns: int = 0) -> BatchPolicy:
        """Batches up to the maximum; without a delay they leave immediately."""
        return cls(max_batch_size, (max_batch_size,), max_queue_delay_ns)

    @classmethod
    def single(cls) -> BatchPolicy:
        """One request per execution."""
        return cls(1, (1,), is_single=True)

    @property
    def takes_all(self) -> bool:
        """Whether all waiting tickets leave immediately, up to the maximum, whatever their number."""
        return not (self.is_single or self.max_queue_delay_ns) and self.preferred == (self.max_batch_size,)

    def count(self, walk: Iterable[Ticket], key: Hashable, is_overdue: bool) -> int:
        """The number of tickets at the front of `walk` that leave now as one batch; 0: they wait for more.

        No ticket of the walk is skipped, and `key` is its first ticket's. A batch is complete immediately if the next
        ticket does not fit or has another key. Otherwise, until the delay has passed, only a preferred size leaves (the
        largest that was reached); after the delay, or without one, all tickets leave, up to the maximum.
        """
        if self.is_single:
            return 1
        limit = self.max_batch_size
        preferred = self.preferred
        largest = preferred[-1]
        size = count = candidate = 0
        is_complete = False
        for ticket in walk:
            bigger = size + (ticket.rows or 1)  # a request of 0 rows counts as one row, as on Triton
            if count and (bigger > limit or ticket.key != key):
                is_complete = True
                break
            if bigger > largest and not candidate and count and not is_overdue:
                # No preferred size was met and the next ticket would exceed the largest: the batch is complete.
                return count
            size = bigger
            count += 1
            if size in preferred:
                candidate = count
            if size >= limit:
                break
        if candidate and not is_overdue:
            return candidate
        if is_complete or is_overdue or not self.max_queue_delay_ns or size >= largest:
            return count
        return 0


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """The queue policy of one level. `max_size` counts requests (0: no limit). `timeout_ns`: how long each may wait (0:
    no limit, whatever a request says, as on Triton). `may_override`: a smaller timeout of a request applies instead.
    `is_delayed`: a ticket whose timeout passed moves behind the others of its level instead of being refused.
    """

    max_size: int = 0
    timeout_ns: int = 0
    may_override: bool = False
    is_delayed: bool = False

    def timeout_of(self, frame: Frame) -> int:
        """How long a request may wait, in nanoseconds; 0: no limit."""
        own_ns, timeout_ns = frame.record.timeout_ns, self.timeout_ns
        return own_ns if self.may_override and 0 < own_ns < timeout_ns else timeout_ns


@dataclass(frozen=True, slots=True)
class Levels:
    """`count` priority levels, 0 for a queue without priorities. `default` is the level of requests whose priority is
    not a level, `policy` the policy of levels that are not in `policies`.
    """

    count: int = 0
    default: int = 0
    policy: LevelPolicy = LevelPolicy()
    policies: Mapping[int, LevelPolicy] = field(default_factory=dict)

    def of(self, priority: int) -> int:
        return priority if 1 <= priority <= self.count else self.default

    def policy_of(self, level: int) -> LevelPolicy:
        return self.policies.get(level, self.policy)

    @property
    def is_plain(self) -> bool:
        """One level, without a size limit or timeouts."""
        policy = self.policy
        return not (self.count or self.policies or policy.max_size or policy.timeout_ns)


PLAIN: Final = Levels()


class Batcher(Protocol):
    """Where the tickets of a model wait: the general queue here, the sequence batcher, or device affinity.

    `may_wait`: tickets may wait for more tickets while an instance is free. `may_expire`: tickets may time out, and
    `put` may refuse one. `joins_max`: the largest number of requests of a batch on a route that passes this queue
    unchanged, if the queue is empty; 0: none, because this queue decides about each request.
    """

    may_wait: bool
    may_expire: bool
    joins_max: int

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set. Raises Unavailable if the queue is full, Invalid if the request
        belongs to no sequence.
        """

    def take(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        """Remove and return the next batch for an instance that is free; only a `BoundBatcher` asks which. None: there
        is none for it, or its tickets wait for more. The caller has called `expire` with `now_ns` before.
        """

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch failed; run these parts of it, each as a batch, before tickets that have not run."""

    def clear(self) -> list[Ticket]:
        """Remove and return all waiting tickets, to be refused."""

    def deadline(self) -> int | None:
        """When time alone may change the result of `take`. None: never. An early or repeated `take` has no effect."""

    def expiry(self) -> int | None:
        """When the next ticket's timeout passes, whether or not an instance is free. None: never."""

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        """Remove and return the tickets whose timeout has passed, to be refused. An early call has no effect."""

    def withdraw(self, *frames: Frame) -> int:
        """Remove every ticket of a request that is over; `frames` are its frames.
        Returns the number of tickets. The cost does not depend on the number of other tickets.
        """

    def __len__(self) -> int: ...

    def check(self) -> None: ...


@runtime_checkable
class BoundBatcher(Batcher, Protocol):
    """A batcher whose tickets may be bound to one instance: the sequence batcher, and device affinity. `take` is called
    for each free instance, and not again before the batch that it returned for that instance is complete. `is_shared`:
    an instance may take tickets that another would take otherwise.
    """

    is_shared: bool

    def serve(self, instances: Sequence[Any], free: Collection[Any]) -> None:
        """Set the instances; `free` is a live view of those without a batch. Called once, before any other method."""

    def lost(self, instance: Any) -> None:
        """An instance without a batch became unavailable."""

    def found(self, instance: Any) -> None:
        """The instance is available again."""

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Tickets that can no longer run, each with the reason; each is returned once."""


class Queue:
    """Triton's default scheduler and dynamic batcher, with priority levels and queue policies.

    A batch is filled from the levels, highest first, and may span them. The delay counts from the arrival of the oldest
    waiting ticket, whatever its level.
    """

    def __init__(self, policy: BatchPolicy, levels: Levels = PLAIN) -> None:
        self._policy = policy
        self._levels = levels
        self.delay_ns = policy.max_queue_delay_ns
        self.may_wait = policy.max_queue_delay_ns > 0
        self._is_plain = levels.is_plain
        self.may_expire = not self._is_plain
        # A queue with levels, limits or timeouts decides about each request.
        self.joins_max = 0 if not self._is_plain else 1 if policy.is_single else 1 << 30 if policy.takes_all else 0
        self._plain = Tickets()  # the only lane of a queue without levels, limits and timeouts
        self._waiting = self._plain.waiting
        # The lanes of any other queue. Only those with tickets: a configuration may have billions of levels.
        self._lanes: dict[int, Tickets] = {}  # number 2 * level, and 2 * level + 1 for its delayed tickets
        self._count = 0  # the number of tickets in lanes
        self._numbers: list[int] = []  # the numbers of the lanes, ascending: the order in which a batch is filled
        self._served: dict[int, int] = {}  # lane -> `_batches` when it was last served or created; longest ago first
        self._batches = 0
        self._orders = count()  # many tickets arrive in one loop iteration, at the same `queued_ns`
        self._expiries: Deadlines[Ticket] = Deadlines()
        self._retries: deque[list[Ticket]] = deque()  # parts of failed batches

    def put(self, ticket: Ticket) -> None:
        if self._is_plain:
            if (
                self._waiting.setdefault(ticket.frame, ticket) is not ticket
            ):  # `append`, inlined: a call less per ticket
                self._plain.append_twin(ticket)
            return
        frame = ticket.frame
        level = self._levels.of(frame.record.priority)
        policy = self._levels.policy_of(level)
        if policy.max_size and self._size(level) >= policy.max_size:
            where = f"priority level {level}" if level else "the queue"
            raise Unavailable(
                f"Exceeds maximum queue size: {where} of model '{ticket.node.model.name}' has room for"
                f" {policy.max_size}; try again later"
            )
        timeout_ns = policy.timeout_of(frame)
        if timeout_ns:
            self._expiries.add(ticket, ticket.queued_ns + timeout_ns)
        self._lane(2 * level).append(ticket)
        self._count += 1
        ticket.lane = 2 * level
        ticket.order = next(self._orders)

    def take(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        if self._retries:
            return self._retries.popleft()
        if not self._is_plain:
            return self._take_from_lanes(now_ns)
        waiting = self._waiting
        if not waiting:
            return None
        if len(waiting) == 1 and not self.delay_ns:
            batch = [waiting.popitem()[1]]
        else:
            oldest = next(iter(waiting.values()))
            is_overdue = self.delay_ns > 0 and now_ns - oldest.queued_ns >= self.delay_ns
            count = self._policy.count(waiting.values(), oldest.key, is_overdue)
            if count < len(waiting):
                return self._plain.pop(count) or None
            batch = [*waiting.values()]
            waiting.clear()
        if self._plain.twins:
            self._plain.forget_twins(batch)
        return batch

    def _take_from_lanes(self, now_ns: int) -> list[Ticket] | None:
        lanes = self._lanes
        if not lanes:
            return None
        walk = self._walk()
        waiting = chain.from_iterable(lanes[number] for number in walk)
        is_overdue = self.delay_ns > 0 and now_ns - self._oldest_ns() >= self.delay_ns
        count = self._policy.count(waiting, lanes[walk[0]].first().key, is_overdue)
        if not count:
            return None
        self._batches += 1
        self._count -= count
        batch: list[Ticket] = []
        for number in walk:
            if not count:
                break
            lane = lanes[number]
            here = min(count, len(lane))
            count -= here
            batch += lane.pop(here)
            del self._served[number]
            if lane:
                self._served[number] = self._batches
            else:
                self._close(number)
        if self._expiries:
            for ticket in batch:
                self._expiries.discard(ticket)
        return batch

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        self._retries.extend(part for part in parts if part)

    def clear(self) -> list[Ticket]:
        everything: list[Ticket] = []
        while taken := self.take(None, 1 << 62):
            everything += taken
        return everything

    def deadline(self) -> int | None:
        if not self.delay_ns or not (self._waiting or self._count):
            return None
        return self._oldest_ns() + self.delay_ns

    def expiry(self) -> int | None:
        return self._expiries.soonest()

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        refused = []
        for ticket in self._expiries.due(now_ns):
            level = ticket.lane // 2
            self._remove(ticket)
            if self._levels.policy_of(level).is_delayed:
                ticket.lane = 2 * level + 1
                self._lane(ticket.lane).insert(ticket)
                self._count += 1
            else:
                refused.append(ticket)
        return refused

    def withdraw(self, *frames: Frame) -> int:
        retried = self._withdraw_retries() if self._retries else 0
        if self._is_plain:
            return retried + sum(len(self._plain.withdraw(frame)) for frame in frames)
        before = self._count
        for frame in frames:
            level = self._levels.of(frame.record.priority)
            for number in (2 * level, 2 * level + 1):
                lane = self._lanes.get(number)
                gone = lane.withdraw(frame) if lane is not None else ()
                for ticket in gone:
                    self._expiries.discard(ticket)
                self._count -= len(gone)
                if lane is not None and not lane:
                    self._close(number)
        return retried + before - self._count

    def _withdraw_retries(self) -> int:
        """Remove the tickets of requests that are over from the parts of failed batches."""
        before = sum(map(len, self._retries))
        parts = [[ticket for ticket in part if not ticket.frame.record.done] for part in self._retries]
        self._retries = deque(part for part in parts if part)
        return before - sum(map(len, self._retries))

    def tickets(self) -> Iterator[Ticket]:
        """All tickets that wait for their first run, lane by lane."""
        return iter(self._plain) if self._is_plain else chain.from_iterable(self._lanes.values())

    def _walk(self) -> list[int]:
        """The numbers of the lanes in the order in which the next batch is filled."""
        longest_ago = next(iter(self._served))
        if self._batches - self._served[longest_ago] < OVERTAKEN_MAX:
            return [*self._numbers]
        return [longest_ago, *(number for number in self._numbers if number != longest_ago)]

    def _oldest_ns(self) -> int:
        if self._is_plain:
            return self._plain.first().queued_ns
        return min(lane.first().queued_ns for lane in self._lanes.values())

    def _size(self, level: int) -> int:
        return len(self._lanes.get(2 * level, ())) + len(self._lanes.get(2 * level + 1, ()))

    def _lane(self, number: int) -> Tickets:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = Tickets()
            insort(self._numbers, number)
            self._served[number] = self._batches
        return lane

    def _remove(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.lane]
        lane.discard(ticket)
        self._count -= 1
        if not lane:
            self._close(ticket.lane)

    def _close(self, number: int) -> None:
        """Remove an empty lane."""
        del self._lanes[number]
        self._served.pop(number, None)
        del self._numbers[bisect_left(self._numbers, number)]

    def __len__(self) -> int:
        if self._retries:
            return sum(map(len, self._retries)) + (len(self._waiting) or self._count)
        return len(self._waiting) if self._is_plain else self._count

    def check(self) -> None:
        for lane in (self._plain, *self._lanes.values()):
            lane.check()
        assert self._is_plain or self._count == sum(map(len, self._lanes.values())), "a ticket is lost or doubled"
        waiting = chain(self.tickets(), chain.from_iterable(self._retries))
        assert not any(ticket.frame.record.done for ticket in waiting), "a ticket of an answered request still waits"
        if self._is_plain:
            times = [ticket.queued_ns for ticket in self._plain]
            assert times == sorted(times), "(1) the queue is not in order of arrival"
            return
        assert self._numbers == sorted(self._lanes), "a lane is lost"
        assert self._served.keys() == self._lanes.keys(), "a lane is forgotten"
        since = [*self._served.values()]
        assert since == sorted(since), "(4) the lane that waits longest is not known"
        for number, lane in self._lanes.items():
            assert lane, "an empty lane is kept"
            assert all(a.order < b.order for a, b in pairwise(lane)), "(1) a lane is not in order of arrival"
            assert all(ticket.lane == number for ticket in lane), "a ticket has another lane than it waits in"
            policy = self._levels.policy_of(number // 2)
            assert not policy.max_size or self._size(number // 2) <= policy.max_size, "(2) a level is too long"
            timed = [number % 2 == 0 and policy.timeout_of(ticket.frame) > 0 for ticket in lane]
            assert [ticket in self._expiries for ticket in lane] == timed, "(3) a timeout is lost or left"
        assert len(self._expiries) <= len(self), "(3) a ticket times out that does not wait"


class Order:
    """The started tickets of a model with `preserve_ordering`, and the outcomes that wait for an earlier one: outcomes
    leave in the order in which their requests started.

    An outcome is held until every ticket that started before it has left or belongs to a finished request. A failure is
    an outcome too. A ticket that never ran (refused, expired, cancelled) is not in the order and delays no other. The
    configuration rules ensure that batches leave their queue in order of arrival, so the order of starting is the order
    of arrival; a failed batch that is retried in halves keeps its position.
    """

    __slots__ = ("_started",)

    def __init__(self) -> None:
        # Each with its outcome when it is held. A dict would be slow: the search for its first entry passes all removed
        # ones.
        self._started: OrderedDict[Ticket, HeldOutcome | None] = OrderedDict()

    def started(self, tickets: Sequence[Ticket]) -> None:
        """Append tickets that start, in this order. Those that started before keep their place."""
        for ticket in tickets:
            self._started.setdefault(ticket, None)

    def hold(
        self,
        tickets: Sequence[Ticket],
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
    ) -> None:
        """Hold the outcomes of a complete batch."""
        for m, ticket in enumerate(tickets):
            if not ticket.frame.record.done:
                self._started[ticket] = (m, ticket, outputs, errors)

    def pop(self) -> HeldOutcome | None:
        """Remove and return the next outcome in order; None if an earlier one is missing."""
        started = self._started
        while started:
            ticket, outcome = next(iter(started.items()))
            if outcome is None and not ticket.frame.record.done:
                return None
            del started[ticket]
            if outcome is not None:
                return outcome
        return None

    def __iter__(self) -> Iterator[Ticket]:
        """The started tickets, in order."""
        return iter(self._started)

    def ahead_of(self, frame: Frame) -> Iterator[Ticket]:
        """The started tickets before the first one of `frame`; all of them if it has none."""
        return takewhile(lambda ticket: ticket.frame.whole is not frame, self._started)

    def check(self) -> None:
        """Assert that no outcome could leave. For tests and simulation, between two calls of `schedule`."""
        is_next = [
            outcome is not None or ticket.frame.record.done for ticket, outcome in islice(self._started.items(), 1)
        ]
        assert not any(is_next), "an outcome that could leave is held"
