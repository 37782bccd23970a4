"""A model with instances on several devices: a request stays on the device its tensors lie on, unless waiting for that
device costs more than taking them to another.

Decided here: who waits for which device, and for how long. Tickets wait in a line for each device, and in one more if
their tensors lie on none; each line forms batches as the model's queue would. An instance takes what is at home with it
or nowhere, whoever waits longest unless others are free too. It takes from another device's line only when no instance
of that device is free, and the first batch of the line has waited as long as its copy would take: whoever waits so long
and is then copied after all has lost at most as much again as by being copied at once, and nobody had to guess how long
the others would run.

What a copy takes is worked out from the bytes that would have to be copied (`Moves`), not measured. This file does not
know what devices or tensors are.

Always true after every call (see `check`): the tickets of a line leave in the order they came. And of whoever asks for
each free instance, until none gets anything: no batch is left beside a free instance of its device, nor longer than its
copy takes beside any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowserve.errors import FlowserveError
from flowserve.graph.plan import NO_SLOT
from flowserve.scheduling.batcher import Batcher
from flowserve.scheduling.router import Facts, Flow, Ticket

NOWHERE: Final = -1  # what tensors on the host are on: they must be copied whoever reads them

# What a tensor lies on, and how many bytes it has.
Residence = Callable[[Facts], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Moves:
    """What it costs to take a tensor to another device: so much for any, and so many bytes in a nanosecond. As it
    stands, what a bus of PCIe 4 with 16 lanes does where devices reach each other: an assumption, not a measurement.
    """

    each_ns: int = 20_000
    bytes_per_ns: int = 20

    def cost_ns(self, nbytes: int) -> int:
        return self.each_ns + nbytes // self.bytes_per_ns if nbytes else 0


class _Line:
    """What waits for one device. `costs` are those of the tickets in `batcher`, in the same order."""

    __slots__ = ("batcher", "costs")

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.costs: deque[tuple[Ticket, int]] = deque()

    @property
    def oldest_ns(self) -> int:
        return self.costs[0][0].queued_ns

    def patience_ns(self, rows_max: int) -> int:
        """Until when the first batch rather waits than moves."""
        rows = total = 0
        for ticket, cost in self.costs:
            rows += ticket.rows or 1
            if total and rows > rows_max:
                break
            total += cost
        return self.oldest_ns + total

    def take(self, now_ns: int) -> list[Ticket] | None:
        taken = self.batcher.take(now_ns)
        for _ in taken or ():
            self.costs.popleft()
        return taken


class Affine:
    """The queue of such a model. `make` makes the queue of one line, first in, first out; `rows_max` is the most rows
    that it puts into a batch. `device_of` tells an instance's device.
    """

    may_wait = True
    may_expire = False

    def __init__(
        self,
        make: Callable[[], Batcher],
        rows_max: int,
        device_of: Callable[[Any], int],
        residence: Residence,
        moves: Moves | None = None,
    ) -> None:
        self._make = make
        self._rows_max = max(rows_max, 1)
        self._device_of = device_of
        self._residence = residence
        self._moves = moves or Moves()
        self._lines: dict[int, _Line] = {NOWHERE: _Line(make())}
        self._free: Collection[Any] = ()
        self._there: Counter[int] = Counter()  # instances that are not away, by device
        self._again: dict[int, deque[list[Ticket]]] = {}  # parts of batches that raised, by the device they raised on
        self._now_ns = 0  # the latest moment that was heard of

    def serve(self, instances: Sequence[Any], free: Collection[Any]) -> None:
        """These run what is taken; `free` always holds those of them that run nothing. Called once, before anything."""
        self._free = free
        self._there = Counter(map(self._device_of, instances))
        for device in self._there:
            self._lines[device] = _Line(self._make())
            self._again[device] = deque()

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set."""
        self._now_ns = ticket.queued_ns
        home, cost = self._home(ticket)
        line = self._lines[home]
        line.batcher.put(ticket)
        line.costs.append((ticket, cost))

    def _home(self, ticket: Ticket) -> tuple[int, int]:
        """The device on which most of its tensors lie, and what it would cost to take them to another."""
        sizes: Counter[int] = Counter()
        for slot in {*ticket.node.inputs} - {NO_SLOT}:
            handle = ticket.flow.tensors[slot]
            if handle is not None:
                device, nbytes = self._residence(handle)
                sizes[device] += nbytes
        del sizes[NOWHERE]
        if not sizes:
            return NOWHERE, 0
        home, nbytes = max(sizes.items(), key=lambda pair: (pair[1], -pair[0]))
        return (home, self._moves.cost_ns(nbytes)) if self._there[home] else (NOWHERE, 0)

    def take_for(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        """The next batch for an instance that is free, or None."""
        self._now_ns = now_ns
        device = self._device_of(instance)
        part = self._next_part(device)
        if part is not None:
            return part
        for line in self._open_to(device, now_ns):
            taken = line.take(now_ns)
            if taken is not None:
                return taken
        return None

    def _open_to(self, device: int, now_ns: int) -> list[_Line]:
        """The lines that an instance of a device may take from, in the order in which it does."""
        own = [line for home in (device, NOWHERE) if (line := self._lines[home]).costs]
        if len(self._free) == 1:  # else others are free to take what is at home nowhere
            own.sort(key=_by_age)
        others = [
            line
            for home, line in self._lines.items()
            if line.costs and home not in (device, NOWHERE) and self._may_leave(home, line, now_ns)
        ]
        return own + sorted(others, key=_by_age)

    def _may_leave(self, home: int, line: _Line, now_ns: int) -> bool:
        if self._is_free(home):
            return False
        return not self._there[home] or line.patience_ns(self._rows_max) <= now_ns

    def _is_free(self, device: int) -> bool:
        return any(self._device_of(instance) == device for instance in self._free)

    def _next_part(self, device: int) -> list[Ticket] | None:
        for home, parts in sorted(self._again.items(), key=lambda pair: pair[0] != device):
            while parts and (home == device or not self._is_free(home)):
                tickets = [ticket for ticket in parts.popleft() if not ticket.flow.done]
                if tickets:
                    return tickets
        return None

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch raised; these parts of it are to run, each by itself, where it did if there is a free instance."""
        self._again[self._device_of(instance)].extend(part for part in parts if part)

    def take(self, now_ns: int) -> list[Ticket] | None:
        """All that waits, for whoever refuses it. None: nobody waits."""
        everything = [ticket for parts in self._again.values() for part in parts for ticket in part]
        for parts in self._again.values():
            parts.clear()
        for line in self._lines.values():
            everything += [ticket for ticket, _ in line.costs]
            line.batcher = self._make()
            line.costs.clear()
        return everything or None

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Nothing that waits here belongs to one instance."""
        return ()

    def lost(self, instance: Any) -> None:
        """An instance that runs nothing is not there any more."""
        self._there[self._device_of(instance)] -= 1

    def found(self, instance: Any) -> None:
        """It is there again."""
        self._there[self._device_of(instance)] += 1

    def deadline(self) -> int | None:
        moments = [at for home, line in self._lines.items() if line.costs and (at := self._due(home, line)) is not None]
        return min(moments, default=None)

    def _due(self, home: int, line: _Line) -> int | None:
        """When time alone may give a line's first batch to an instance that is free now."""
        if home != NOWHERE and self._there[home] and not self._is_free(home):
            patience_ns = line.patience_ns(self._rows_max)
            if patience_ns > self._now_ns:
                return patience_ns
        return line.batcher.deadline()

    def expiry(self) -> int | None:
        return None

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        return ()

    def withdraw(self, flow: Flow) -> int:
        gone = 0
        for line in self._lines.values():
            here = line.batcher.withdraw(flow)
            if here:
                gone += here
                line.costs = deque(one for one in line.costs if one[0].flow is not flow and not one[0].flow.done)
        for part in self._parts():
            kept = [ticket for ticket in part if not ticket.flow.done]
            gone += len(part) - len(kept)
            part[:] = kept
        return gone

    def __len__(self) -> int:
        return sum(len(line.costs) for line in self._lines.values()) + sum(map(len, self._parts()))

    def _parts(self) -> Iterator[list[Ticket]]:
        for parts in self._again.values():
            yield from parts

    def check(self) -> None:
        for line in self._lines.values():
            line.batcher.check()
            assert len(line.costs) == len(line.batcher), "a ticket is lost, or counted twice"
            times = [ticket.queued_ns for ticket, _ in line.costs]
            assert times == sorted(times), "a line is not in order of arrival"
            assert not any(ticket.flow.done for ticket, _ in line.costs), "a ticket of an answered flow still waits"


def _by_age(line: _Line) -> int:
    return line.oldest_ns
