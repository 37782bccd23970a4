"""A model's queue with priority levels, limits and timeouts: who waits in front of whom, and who waits no longer.

Decided here: whom the walk of batcher.py meets first, who is refused, when patience ends, and how often the lower
levels may be overtaken. A model that asks for none of this has a plain queue and pays for none of it. The words:
a *level* is a priority, 1 the highest; a *lane* is a line of tickets in order of arrival. Each level has two: its live
tickets, and behind them those whose timeout was over under the action DELAY.

Always true after every call (see `check`):
  (1) the tickets of a lane leave in the order they came;
  (2) no level holds more tickets than its policy allows;
  (3) no ticket is given out or refused twice, or refused before its time;
  (4) no lane that has tickets is left out of more than `OVERTAKEN_MAX` batches in a row, give or take one for each
      other lane that waits as long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from operator import attrgetter
from typing import Final

from flowserve.errors import Unavailable
from flowserve.scheduling.batcher import BatchPolicy
from flowserve.scheduling.deadlines import Deadlines
from flowserve.scheduling.router import Flow, Ticket

# So many batches may leave past a lane; the next one begins with it. Triton's strict rule lets a steady stream of
# urgent requests keep all others waiting for ever. One batch in 33 is what the urgent ones lose by this.
OVERTAKEN_MAX: Final = 32

_by_turn = attrgetter("turn")


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """What waiting on one level means. `max_size` (0: no limit) counts requests. `timeout_ns` 0: patience never ends,
    whatever a request says; `may_override`: a request's own timeout counts where it is smaller. `is_delayed`: whoever's
    time is over goes behind the others of its level instead of being refused.
    """

    max_size: int = 0
    timeout_ns: int = 0
    may_override: bool = False
    is_delayed: bool = False


@dataclass(frozen=True, slots=True)
class Levels:
    """`count` levels, 0 where there is but one line. `default` is the level of requests without one that exists, and
    `policy` that of levels for which `policies` has none.
    """

    count: int = 0
    default: int = 0
    policy: LevelPolicy = LevelPolicy()
    policies: Mapping[int, LevelPolicy] = field(default_factory=dict)

    def of(self, priority: int) -> int:
        return priority if 1 <= priority <= self.count else self.default

    def policy_of(self, level: int) -> LevelPolicy:
        return self.policies.get(level, self.policy)


class PolicyBatcher:
    """Triton's dynamic batcher with priorities and queue policies.

    The walk goes through the levels, highest first, and a batch may span them. The delay counts from the arrival of
    the oldest ticket that waits, whichever its level.
    """

    __slots__ = (
        "_batches",
        "_expiries",
        "_lanes",
        "_levels",
        "_numbers",
        "_policy",
        "_served",
        "_turns",
        "delay_ns",
        "may_wait",
    )
    may_expire = True

    def __init__(self, policy: BatchPolicy, levels: Levels) -> None:
        self._policy = policy
        self._levels = levels
        self.delay_ns = policy.max_queue_delay_ns
        self.may_wait = policy.max_queue_delay_ns > 0
        # Only lanes that hold tickets are in these: a configuration may ask for billions of levels.
        self._lanes: dict[int, deque[Ticket]] = {}  # 2 * level, and 2 * level + 1 for its delayed ones
        self._numbers: list[int] = []  # of the lanes, ascending: the order of the walk
        self._served: dict[int, int] = {}  # lane -> `_batches` when it was last served or began; longest ago first
        self._batches = 0
        self._turns = count()  # many come in one turn of the loop, and so at the same time
        self._expiries: Deadlines[Ticket] = Deadlines()

    def put(self, ticket: Ticket) -> None:
        flow = ticket.flow
        level = self._levels.of(flow.priority)
        policy = self._levels.policy_of(level)
        if policy.max_size and self._size(level) >= policy.max_size:
            line = f"priority level {level}" if level else "the queue"
            raise Unavailable(
                f"Exceeds maximum queue size: {line} of model '{ticket.node.model.name}' has room for"
                f" {policy.max_size}; try again later"
            )
        timeout_ns = policy.timeout_ns
        if timeout_ns:
            if policy.may_override and 0 < flow.timeout_ns < timeout_ns:
                timeout_ns = flow.timeout_ns
            self._expiries.add(ticket, ticket.queued_ns + timeout_ns)
        self._lane(2 * level).append(ticket)
        ticket.lane = 2 * level
        ticket.turn = next(self._turns)

    def take(self, now_ns: int) -> list[Ticket] | None:
        lanes = self._lanes
        if not lanes:
            return None
        walk = self._walk()
        waiting = chain.from_iterable([lanes[number] for number in walk])
        is_overdue = self.delay_ns > 0 and now_ns - self._oldest_ns() >= self.delay_ns
        count = self._policy.count(waiting, lanes[walk[0]][0].key, is_overdue)
        if not count:
            return None
        self._batches += 1
        batch: list[Ticket] = []
        for number in walk:
            if not count:
                break
            lane = lanes[number]
            here = min(count, len(lane))
            count -= here
            batch += [lane.popleft() for _ in range(here)]
            del self._served[number]
            if lane:
                self._served[number] = self._batches
            else:
                self._close(number)
        if self._expiries:
            for ticket in batch:
                self._expiries.discard(ticket)
        return batch

    def deadline(self) -> int | None:
        if not self.delay_ns or not self._lanes:
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
                insort(self._lane(ticket.lane), ticket, key=_by_turn)
            else:
                refused.append(ticket)
        return refused

    def withdraw(self, flow: Flow) -> int:
        gone = [ticket for ticket in self._tickets() if ticket.flow is flow or ticket.flow.done]
        for ticket in gone:
            self._expiries.discard(ticket)
            self._remove(ticket)
        return len(gone)

    def _walk(self) -> list[int]:
        """The numbers of the lanes in the order in which they are looked at now."""
        longest_ago = next(iter(self._served))
        if self._batches - self._served[longest_ago] < OVERTAKEN_MAX:
            return [*self._numbers]
        return [longest_ago, *(number for number in self._numbers if number != longest_ago)]

    def _oldest_ns(self) -> int:
        return min(lane[0].queued_ns for lane in self._lanes.values())

    def _size(self, level: int) -> int:
        return len(self._lanes.get(2 * level, ())) + len(self._lanes.get(2 * level + 1, ()))

    def _lane(self, number: int) -> deque[Ticket]:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = deque()
            insort(self._numbers, number)
            self._served[number] = self._batches
        return lane

    def _remove(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.lane]
        lane.remove(ticket)
        if not lane:
            del self._served[ticket.lane]
            self._close(ticket.lane)

    def _close(self, number: int) -> None:
        """Forget an empty lane that `_served` does not hold any more."""
        del self._lanes[number]
        del self._numbers[bisect_left(self._numbers, number)]

    def _tickets(self) -> Iterator[Ticket]:
        return chain.from_iterable(self._lanes.values())

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def check(self) -> None:
        assert self._numbers == sorted(self._lanes), "a lane is lost"
        assert self._served.keys() == self._lanes.keys(), "a lane is forgotten"
        since = [*self._served.values()]
        assert since == sorted(since), "(4) the lane that waits longest is not known"
        for number, lane in self._lanes.items():
            assert lane, "an empty lane is kept"
            assert all(a.turn < b.turn for a, b in pairwise(lane)), "(1) a lane is not in order of arrival"
            assert all(ticket.lane == number for ticket in lane), "a ticket does not know where it waits"
            policy = self._levels.policy_of(number // 2)
            assert not policy.max_size or self._size(number // 2) <= policy.max_size, "(2) a level is too long"
            is_timed = bool(policy.timeout_ns) and number % 2 == 0
            assert all((ticket in self._expiries) == is_timed for ticket in lane), "(3) a timeout is lost or left"
        assert len(self._expiries) <= len(self), "(3) somebody expires who does not wait"
        assert not any(ticket.flow.done for ticket in self._tickets()), "a ticket of an answered flow still waits"
