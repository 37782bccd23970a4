"""Device affinity for a model with instances on several devices: a request runs on the device that holds its tensors,
unless waiting for that device costs more than copying the tensors.

Decides which device's queue a ticket joins, and when a batch may move to another device. There is one queue per device,
and one for tickets whose tensors are on none; each forms batches as the model's queue would. An instance takes from the
queue of its device and from the one without a device, oldest first unless other instances are free. It takes from
another device's queue only if no instance of that device is free and the queue's first batch has waited as long as its
copy would take. A batch that waits so long and is then copied costs at most twice as much as copying it immediately; no
estimate of the other batches' run times is needed.

The duration of a copy is computed from the bytes to copy (`CopyCost`), not measured. Does not know devices or tensors.

Always true after every call (see `check`): the tickets of a queue leave in the order of arrival. After `take` was
called for each free instance until none returns a batch, no batch waits while an instance of its device is free, and
none waits longer than its copy takes while another instance is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from flowserve.errors import FlowserveError
from flowserve.graph.regions import NO_SLOT
from flowserve.scheduling.frames.frame import Facts, Frame, Ticket
from flowserve.scheduling.queue import Queue

NO_DEVICE: Final = -1  # the device of tensors on the host: any instance must copy them

_by_age = attrgetter("oldest_ns")

# Returns the device that holds a tensor, and the tensor's size in bytes.
Residence = Callable[[Facts], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CopyCost:
    """The cost of copying a tensor to another device: a fixed time per copy, and a bandwidth. The defaults are those of
    PCIe 4 x16 with peer access: an assumption, not a measurement.
    """

    each_ns: int = 20_000
    bytes_per_ns: int = 20

    def cost_ns(self, nbytes: int) -> int:
        return self.each_ns + nbytes // self.bytes_per_ns if nbytes else 0


@dataclass(slots=True, eq=False)
class _DeviceQueue:
    """The tickets that wait for one device. A ticket's `copy_ns` is the cost of copying its tensors to another."""

    batcher: Queue

    @property
    def oldest_ns(self) -> int:
        return next(self.batcher.tickets()).queued_ns

    def move_at_ns(self, rows_max: int) -> int:
        """The time at which the first batch may move to another device."""
        rows = total = 0
        for ticket in self.batcher.tickets():
            rows += ticket.rows or 1
            if total and rows > rows_max:
                break
            total += ticket.copy_ns
        return self.oldest_ns + total


class AffinityBatcher:
    """The batcher of a model with device affinity. `make` creates the FIFO queue of one device; `rows_max` is the
    largest batch of it. `device_of` returns an instance's device.
    """

    may_wait = True
    may_expire = False
    joins_max = 0
    is_shared = True

    def __init__(
        self,
        make: Callable[[], Queue],
        rows_max: int,
        device_of: Callable[[Any], int],
        residence: Residence,
        copy_cost: CopyCost | None = None,
    ) -> None:
        self._make = make
        self._rows_max = max(rows_max, 1)
        self._device_of = device_of
        self._residence = residence
        self._copy_cost = copy_cost or CopyCost()
        self._queues: dict[int, _DeviceQueue] = {NO_DEVICE: _DeviceQueue(make())}
        self._free: Collection[Any] = ()
        self._available: Counter[int] = Counter()  # the number of available instances, by device
        self._retries: list[tuple[int, list[Ticket]]] = []  # parts of failed batches, with the device they failed on
        self._now_ns = 0  # the time of the last call
        self._count = 0  # the number of waiting tickets, including those of `_retries`
        # Computed by `_look`; valid until a ticket or an instance is added or removed, or time passes.
        self._seen: tuple[int, int] = (-1, 0)  # the number of free instances, and the time
        self._free_on: Counter[int] = Counter()  # the number of free instances, by device
        self._unserved: set[int] = set()  # devices whose instances can take nothing

    def serve(self, instances: Sequence[Any], free: Collection[Any]) -> None:
        """Set the instances; `free` is a live view of those without a batch. Called once, before any other method."""
        self._free = free
        self._available = Counter(map(self._device_of, instances))
        for device in self._available:
            self._queues[device] = _DeviceQueue(self._make())

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; its `queued_ns` is set."""
        self._now_ns = ticket.queued_ns
        self._forget()
        home, ticket.copy_ns = self._home_of(ticket)
        self._queues[home].batcher.put(ticket)
        self._count += 1

    def _home_of(self, ticket: Ticket) -> tuple[int, int]:
        """The device with most of the ticket's bytes, and the cost of copying them to another."""
        sizes: Counter[int] = Counter()
        for slot in {*ticket.node.inputs} - {NO_SLOT}:
            handle = ticket.tensors[slot]
            if handle is not None:
                device, nbytes = self._residence(handle)
                sizes[device] += nbytes
        del sizes[NO_DEVICE]
        if not sizes:
            return NO_DEVICE, 0
        home, nbytes = max(sizes.items(), key=lambda pair: (pair[1], -pair[0]))
        return (home, self._copy_cost.cost_ns(nbytes)) if self._available[home] else (NO_DEVICE, 0)

    def take(self, instance: Any, now_ns: int) -> list[Ticket] | None:
        self._now_ns = now_ns
        if not self._count:
            return None
        self._look()
        device = self._device_of(instance)
        if device in self._unserved:
            return None
        taken = self._next_part(device) if self._retries else None
        for queue in self._open_to(device, now_ns) if taken is None else ():
            taken = queue.batcher.take(instance, now_ns)
            if taken is not None:
                break
        if taken is None:
            self._unserved.add(device)
            return None
        self._count -= len(taken)
        self._forget()
        return taken

    def _look(self) -> None:
        """Count the free instances on each device, unless nothing has changed. The number of free instances shows a
        change: they become free without a call to this class, but are taken through a call that invalidates the counts.
        """
        seen = len(self._free), self._now_ns
        if seen != self._seen:
            self._seen = seen
            self._free_on = Counter(map(self._device_of, self._free))
            self._unserved.clear()

    def _forget(self) -> None:
        """Invalidate the counts of `_look`: a ticket or an instance was added or removed."""
        self._seen = (-1, 0)

    def _open_to(self, device: int, now_ns: int) -> list[_DeviceQueue]:
        """The queues that an instance of a device may take from, in order."""
        own = [queue for home in (device, NO_DEVICE) if len((queue := self._queues[home]).batcher)]
        if len(self._free) == 1:  # otherwise the other free instances can take tickets without a device
            own.sort(key=_by_age)
        others = [
            queue
            for home, queue in self._queues.items()
            if len(queue.batcher) and home not in (device, NO_DEVICE) and self._may_leave(home, queue, now_ns)
        ]
        return own + sorted(others, key=_by_age)

    def _may_leave(self, home: int, queue: _DeviceQueue, now_ns: int) -> bool:
        if self._is_free(home):
            return False
        return not self._available[home] or queue.move_at_ns(self._rows_max) <= now_ns

    def _is_free(self, device: int) -> bool:
        self._look()
        return self._free_on[device] > 0

    def _next_part(self, device: int) -> list[Ticket] | None:
        for retry in sorted(self._retries, key=lambda retry: retry[0] != device):
            if retry[0] == device or not self._is_free(retry[0]):
                self._retries.remove(retry)
                tickets = [ticket for ticket in retry[1] if not ticket.frame.record.done]
                if tickets:
                    return tickets
        return None

    def again(self, instance: Any, parts: Sequence[list[Ticket]]) -> None:
        """A batch failed; run these parts of it, each as a batch, on its device if an instance of that is free."""
        self._forget()
        self._retries += [(self._device_of(instance), part) for part in parts if part]
        self._count += sum(map(len, parts))

    def clear(self) -> list[Ticket]:
        everything = [ticket for _, part in self._retries for ticket in part]
        self._retries.clear()
        for queue in self._queues.values():
            everything += queue.batcher.tickets()
            queue.batcher = self._make()
        self._count = 0
        self._forget()
        return everything

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Always empty: no ticket depends on one instance."""
        return ()

    def lost(self, instance: Any) -> None:
        """An instance without a batch became unavailable."""
        self._available[self._device_of(instance)] -= 1
        self._forget()

    def found(self, instance: Any) -> None:
        """The instance is available again."""
        self._available[self._device_of(instance)] += 1
        self._forget()

    def deadline(self) -> int | None:
        moments = [
            at
            for home, queue in self._queues.items()
            if len(queue.batcher) and (at := self._due(home, queue)) is not None
        ]
        return min(moments, default=None)

    def _due(self, home: int, queue: _DeviceQueue) -> int | None:
        """When time alone lets an instance that is free now take a queue's first batch."""
        if home != NO_DEVICE and self._available[home] and not self._is_free(home):
            move_at_ns = queue.move_at_ns(self._rows_max)
            if move_at_ns > self._now_ns:
                return move_at_ns
        return queue.batcher.deadline()

    def expiry(self) -> int | None:
        return None

    def expire(self, now_ns: int) -> Sequence[Ticket]:
        return ()

    def withdraw(self, *frames: Frame) -> int:
        gone = sum(queue.batcher.withdraw(*frames) for queue in self._queues.values())
        for _, part in self._retries:
            kept = [ticket for ticket in part if not ticket.frame.record.done]
            gone += len(part) - len(kept)
            part[:] = kept
        self._count -= gone
        self._forget()
        return gone

    def __len__(self) -> int:
        return self._count

    def check(self) -> None:
        waiting = sum(len(part) for _, part in self._retries)
        for queue in self._queues.values():
            queue.batcher.check()
            waiting += len(queue.batcher)
            times = [ticket.queued_ns for ticket in queue.batcher.tickets()]
            assert times == sorted(times), "a queue is not in order of arrival"
            assert not any(ticket.frame.record.done for ticket in queue.batcher.tickets()), (
                "a ticket of a finished request waits"
            )
        assert self._count == waiting, "a ticket is lost or doubled"
