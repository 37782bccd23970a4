"""Blocks of device and of pinned memory: where from, when they may be used again, and how much there may be.

Decided here: a block comes home by itself when the last tensor in it is gone, as host buffers do (pool.py), on whatever
thread that happens. But then the device may still be reading it: the host runs ahead. So a block remembers, for each
stream, the event after its last use there, and whoever gets it next is ordered behind all of them: another stream
waits on the device, the host waits itself, and the same stream is in order anyway. Memory goes back to the driver only
after the host has seen those events pass.

A pool has a budget. What does not fit, even after everything that waits here was given back, is not there: `take`
returns None, and the caller says what to do instead.

Memory that somebody else allocated (a library's output) is lent through the same blocks, so that it too outlives what
the device does with it.

This file does not know tensors, only bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flowserve.memory.device import Device, Event, Memory, OutOfMemory, Stream
from flowserve.memory.pool import size_class
from flowserve.values import MemoryPlace

SMALLEST_BLOCK: Final = 512  # what a driver rounds up to


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """`lent_bytes` are in somebody's hands, `kept_bytes` wait here, both within `budget_bytes`. `adopted` counts blocks
    whose memory is somebody else's and not free yet. `refused` counts the takes for which there was no room.
    """

    budget_bytes: int
    lent_bytes: int
    kept_bytes: int
    adopted: int
    reused: int
    refused: int


class Block:
    """`nbytes` bytes at `address`, in `place`. It lives as long as somebody holds it.

    Whoever puts work that reads or writes it on a stream calls `used` with an event recorded after that.
    """

    __slots__ = ("_held", "_pool", "_uses", "address", "nbytes", "place")

    def __init__(self, pool: BlockPool, held: object, address: int, nbytes: int) -> None:
        self._pool = pool
        self._held = held
        self._uses: dict[Stream, Event] = {}  # the last of each stream; those before it are in order
        self.address = address
        self.nbytes = nbytes
        self.place = pool.place

    @property
    def memory(self) -> object:
        """What holds the bytes: the device's `Memory`, or what was adopted."""
        return self._held

    def used(self, event: Event) -> None:
        """Its stream uses the block until this event."""
        self._uses[event.stream] = event

    def __del__(self) -> None:
        self._pool._come_home(self._held, [*self._uses.values()])

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.address:#x} in {self.place})"


@dataclass(slots=True)
class _Kept:
    memory: Memory
    uses: list[Event]


class BlockPool:
    """The blocks of one memory. All methods may be called from any thread."""

    def __init__(self, device: Device, place: MemoryPlace, budget_bytes: int) -> None:
        self.place = place
        self._device = device
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, list[_Kept]] = {}  # by size; the one used longest ago first
        self._lent: dict[int, int] = {}  # size by address
        self._foreign: list[tuple[object, list[Event]]] = []  # let go of here, perhaps not yet on the device
        # A block can end inside the garbage collector, even while this thread holds the lock: it only lands here.
        self._ended: deque[tuple[object, list[Event]]] = deque()
        self._adopted = 0
        self._lent_bytes = self._kept_bytes = 0
        self._reused = self._refused = 0

    def take(self, nbytes: int, stream: Stream | None) -> Block | None:
        """A block of at least `nbytes` for work on `stream`, or for the host's own hands where that is None. None
        where the budget, or the device, has no room for it.
        """
        size = size_class(max(nbytes, SMALLEST_BLOCK))
        with self._lock:
            self._sort_in()
            kept = self._find(size, stream, has_room=self._has_room(size))
            memory = self._allocate(size) if kept is None else kept.memory
            if memory is None:
                self._refused += 1
                return None
            self._lent[memory.address] = size
            self._lent_bytes += size
            if kept is not None:
                self._reused += 1
                self._order(kept.uses, stream)
        return Block(self, memory, memory.address, nbytes)

    def adopt(self, owner: object, address: int, nbytes: int) -> Block:
        """A block over memory that somebody else allocated. `owner` keeps it there, and is held until the last use of
        the block has passed on the device.
        """
        with self._lock:
            self._sort_in()
            self._adopted += 1
        return Block(self, _Foreign(owner), address, nbytes)

    def limit(self, budget_bytes: int) -> None:
        """From now on no more is taken than this. What is lent stays lent."""
        with self._lock:
            self._budget = budget_bytes

    def trim(self) -> None:
        """Give everything that waits here back to the driver."""
        with self._lock:
            self._sort_in(wait=True)
            self._evict(self._kept_bytes)

    def statistics(self) -> BlockStatistics:
        """A snapshot."""
        with self._lock:
            self._sort_in()
            return BlockStatistics(
                self._budget,
                self._lent_bytes,
                self._kept_bytes,
                self._adopted,
                self._reused,
                self._refused,
            )

    def _has_room(self, size: int) -> bool:
        return self._lent_bytes + self._kept_bytes + size <= self._budget

    def _find(self, size: int, stream: Stream | None, *, has_room: bool) -> _Kept | None:
        """One whose uses are over or on the same stream; where there is no room for more, any."""
        waiting = self._kept.get(size)
        if not waiting:
            return None
        at = next((i for i, kept in enumerate(waiting) if self._is_free(kept.uses, stream)), -1 if has_room else 0)
        if at < 0:
            return None
        self._kept_bytes -= size
        return waiting.pop(at)

    def _is_free(self, uses: Iterable[Event], stream: Stream | None) -> bool:
        return all(event.stream is stream or self._device.is_done(event) for event in uses)

    def _order(self, uses: Iterable[Event], stream: Stream | None) -> None:
        for event in uses:
            if stream is None:
                self._device.synchronize(event)
            elif event.stream is not stream:
                self._device.wait(stream, event)

    def _allocate(self, size: int) -> Memory | None:
        if self._lent_bytes + size > self._budget:
            return None
        if not self._has_room(size):
            self._evict(self._lent_bytes + self._kept_bytes + size - self._budget)
        try:
            return self._new(size)
        except OutOfMemory:
            self._evict(self._kept_bytes)
        try:
            return self._new(size)
        except OutOfMemory:
            return None

    def _new(self, size: int) -> Memory:
        return self._device.allocate(size) if self.place.is_gpu else self._device.allocate_pinned(size)

    def _evict(self, nbytes: int) -> None:
        """Give at least so many of the kept bytes back to the driver."""
        for size in sorted(self._kept, reverse=True):
            waiting = self._kept[size]
            while waiting and nbytes > 0:
                kept = waiting.pop(0)
                self._order(kept.uses, None)
                self._device.free(kept.memory)
                self._kept_bytes -= size
                nbytes -= size
            if not waiting:
                del self._kept[size]

    def _come_home(self, held: object, uses: list[Event]) -> None:
        """Called by a finaliser, anywhere."""
        self._ended.append((held, uses))

    def _sort_in(self, *, wait: bool = False) -> None:
        self._sort_ended()
        while self._let_go(wait=wait) and self._ended:  # what was adopted may have held blocks of this very pool
            self._sort_ended()

    def _sort_ended(self) -> None:
        while self._ended:
            held, uses = self._ended.popleft()
            if isinstance(held, _Foreign):
                self._foreign.append((held, uses))
                continue
            memory: Memory = held  # type: ignore[assignment]  # blocks of this pool hold nothing else
            size = self._lent.pop(memory.address)
            self._lent_bytes -= size
            self._kept_bytes += size
            self._kept.setdefault(size, []).append(_Kept(memory, uses))

    def _let_go(self, *, wait: bool) -> int:
        """Let go of what was adopted and has passed on the device. Returns how many there were."""
        if wait:
            for uses in [one[1] for one in self._foreign]:
                self._order(uses, None)
        busy = [one for one in self._foreign if not self._is_free(one[1], None)]
        gone = len(self._foreign) - len(busy)
        self._adopted -= gone
        self._foreign = busy
        return gone


@dataclass(frozen=True, slots=True, eq=False)
class _Foreign:
    """Somebody else's memory."""

    owner: object
