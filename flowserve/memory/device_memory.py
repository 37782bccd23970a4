"""Memory for work on a GPU: pools of device memory and of pinned host memory, and the count of copies between memories.

Decides when a block may be reused. A block returns to its pool when the last tensor in it is gone (as host buffers do,
`pool`), on any thread. The device may still read it then, because the host runs ahead. So a block records, for each
stream, the event after its last use there, and its next user is ordered after all of them: another stream waits on the
device, the host waits itself, the same stream is ordered anyway. Memory goes back to the driver only after the host
has seen those events complete. Memory allocated by another library (a model's output) is wrapped in the same blocks, so
that it also stays valid until the device has finished with it. Blocks that were free for a while go back to the driver
(`release_idle`), so that a burst does not keep its memory.

Decides also the order in which memories are tried: a pool has a budget, and if a request does not fit even after all
free blocks were released to the driver, work continues more slowly in pinned, then in ordinary host memory, with one
warning. A counted copy is one crossing of a batch's tensor, however it is done: staging its rows in pinned memory is
part of that crossing.

Does not know: tensors, only bytes; copies within the host (`observe/traffic`). Callers: `stream`, `devices`, `dlpack`,
`client_memory`, backends on GPUs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from flowserve.memory.device import Allocation, Device, DeviceQueue, Event, OutOfMemory
from flowserve.memory.pool import HOST, IDLE_NS, size_class
from flowserve.values import HOST_MEMORY, MemoryPlace, gpu_memory

log = logging.getLogger("flowserve.memory")

SMALLEST_BLOCK: Final = 512  # drivers round up to this size
_UNBOUNDED: Final = 1 << 62  # ordinary host memory: that pool only adopts, it allocates nothing

Crossing = tuple[MemoryPlace, MemoryPlace]


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """`lent_bytes` are in use and `kept_bytes` are free in the pool, both within `budget_bytes`. `adopted` counts
    blocks over memory of another library that is still in use. `refused` counts calls of `take` without room.
    """

    budget_bytes: int
    lent_bytes: int
    kept_bytes: int
    adopted: int
    refused: int


class Block:
    """`nbytes` bytes at `address`, in `place`. It returns to its pool when the last reference is gone.

    Code that puts work on a stream that reads or writes the block calls `used` with an event recorded after that work.
    """

    __slots__ = ("_pool", "_uses", "address", "memory", "nbytes", "place")

    def __init__(self, pool: BlockPool, memory: Allocation | _Adopted, address: int, nbytes: int) -> None:
        self._pool = pool
        self.memory = memory  # keeps the bytes alive
        self._uses: dict[DeviceQueue, Event] = {}  # the last event of each stream; it implies the earlier ones
        self.address = address
        self.nbytes = nbytes
        self.place = pool.place

    def used(self, event: Event) -> None:
        """The stream of this event uses the block until the event."""
        self._uses[event.stream] = event

    def __del__(self) -> None:
        self._pool._ended.append((self.memory, [*self._uses.values()]))

    def __repr__(self) -> str:
        return f"Block({self.nbytes} bytes at {self.address:#x} in {self.place})"


@dataclass(slots=True)
class _Kept:
    """A free block. `since_ns`: when `release_idle` first found it."""

    memory: Allocation
    uses: list[Event]
    since_ns: int | None = None


class BlockPool:
    """The blocks of one memory. All methods may be called from any thread."""

    def __init__(self, device: Device, place: MemoryPlace, budget_bytes: int) -> None:
        self.place = place
        self._device = device
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._kept: dict[int, list[_Kept]] = {}  # free blocks by size, least recently used first
        self._lent: dict[int, int] = {}  # size by address
        self._foreign: list[tuple[_Adopted, list[Event]]] = []  # released on the host, perhaps not yet on the device
        # A block can end inside the garbage collector, even while this thread holds the lock, so its end is only
        # recorded.
        self._ended: deque[tuple[Allocation | _Adopted, list[Event]]] = deque()
        self._adopted = 0
        self._lent_bytes = self._kept_bytes = 0
        self._refused = 0

    def take(self, nbytes: int, stream: DeviceQueue | None) -> Block | None:
        """A block of at least `nbytes` for work on `stream`, or for use by the host if `stream` is None. Returns None
        if the budget or the device has no room.
        """
        size = size_class(max(nbytes, SMALLEST_BLOCK))
        with self._lock:
            self._collect_returned()
            kept = self._find(size, stream, has_room=self._has_room(size))
            memory = self._allocate(size) if kept is None else kept.memory
            if memory is None:
                self._refused += 1
                return None
            self._lent[memory.address] = size
            self._lent_bytes += size
            if kept is not None:
                self._order(kept.uses, stream)
        return Block(self, memory, memory.address, nbytes)

    def adopt(self, owner: object, address: int, nbytes: int) -> Block:
        """A block over memory allocated by another library. `owner` keeps that memory alive and is referenced until the
        device has completed the last use of the block.
        """
        with self._lock:
            self._collect_returned()
            self._adopted += 1
        return Block(self, _Adopted(owner), address, nbytes)

    def limit(self, budget_bytes: int) -> None:
        """Set a new budget. Blocks in use stay in use."""
        with self._lock:
            self._budget = budget_bytes

    def release_idle(self, now_ns: int) -> None:
        """Return the blocks to the driver that have been free for IDLE_NS and whose uses are complete. A block counts
        as free from the first call that finds it. Waits for the driver; other users of the pool wait meanwhile.
        """
        with self._lock:
            self._collect_returned()
            for size, waiting in [*self._kept.items()]:
                left = []
                for kept in waiting:
                    if kept.since_ns is None:
                        kept.since_ns = now_ns
                    if now_ns - kept.since_ns < IDLE_NS or not self._is_free(kept.uses, None):
                        left.append(kept)
                        continue
                    self._device.free(kept.memory)
                    self._kept_bytes -= size
                if left:
                    self._kept[size] = left
                else:
                    del self._kept[size]

    def statistics(self) -> BlockStatistics:
        """A snapshot."""
        with self._lock:
            self._collect_returned()
            return BlockStatistics(self._budget, self._lent_bytes, self._kept_bytes, self._adopted, self._refused)

    def _has_room(self, size: int) -> bool:
        return self._lent_bytes + self._kept_bytes + size <= self._budget

    def _find(self, size: int, stream: DeviceQueue | None, *, has_room: bool) -> _Kept | None:
        """A free block whose uses are complete or on the same stream; any free block if there is no room for more."""
        waiting = self._kept.get(size)
        if not waiting:
            return None
        at = next((i for i, kept in enumerate(waiting) if self._is_free(kept.uses, stream)), -1 if has_room else 0)
        if at < 0:
            return None
        self._kept_bytes -= size
        return waiting.pop(at)

    def _is_free(self, uses: Iterable[Event], stream: DeviceQueue | None) -> bool:
        return all(event.stream is stream or self._device.is_done(event) for event in uses)

    def _order(self, uses: Iterable[Event], stream: DeviceQueue | None) -> None:
        for event in uses:
            if stream is None:
                self._device.synchronize(event)
            elif event.stream is not stream:
                self._device.wait(stream, event)

    def _allocate(self, size: int) -> Allocation | None:
        if self._lent_bytes + size > self._budget:
            return None
        if not self._has_room(size):
            self._evict(self._lent_bytes + self._kept_bytes + size - self._budget)
        allocate = self._device.allocate if self.place.is_gpu else self._device.allocate_pinned
        for _ in range(2):
            try:
                return allocate(size)
            except OutOfMemory:
                self._evict(self._kept_bytes)
        return None

    def _evict(self, nbytes: int) -> None:
        """Return at least `nbytes` of the free blocks to the driver."""
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

    def _collect_returned(self) -> None:
        """Take back the blocks that ended, and release adopted owners whose uses are complete on the device."""
        while True:
            self._collect_ended()
            busy = [one for one in self._foreign if not self._is_free(one[1], None)]
            self._adopted -= len(self._foreign) - len(busy)
            self._foreign = busy
            if not self._ended:  # an adopted owner may have held blocks of this same pool
                return

    def _collect_ended(self) -> None:
        while self._ended:
            memory, uses = self._ended.popleft()
            if isinstance(memory, _Adopted):
                self._foreign.append((memory, uses))
                continue
            size = self._lent.pop(memory.address)
            self._lent_bytes -= size
            self._kept_bytes += size
            self._kept.setdefault(size, []).append(_Kept(memory, uses))


@dataclass(frozen=True, slots=True, eq=False)
class _Adopted:
    """Memory allocated by another library."""

    owner: object


class Ledger:
    """Copies between memories: how often and how many bytes, by source and target. The figures only grow. All methods
    may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Crossing, tuple[int, int]] = {}

    def record(self, source: MemoryPlace, to: MemoryPlace, nbytes: int) -> None:
        with self._lock:
            copies, total = self._entries.get((source, to), (0, 0))
            self._entries[source, to] = (copies + 1, total + nbytes)

    def entries(self) -> Mapping[Crossing, tuple[int, int]]:
        """A snapshot: (copies, bytes) by (source, target)."""
        with self._lock:
            return dict(self._entries)


class DeviceMemory:
    """One GPU's pools. `pinned` and `ledger` are shared by all GPUs of a server; `sharing` is the lock that is held
    while a tensor with several readers is copied to this GPU.
    """

    def __init__(self, device: Device, budget_bytes: int, pinned: BlockPool, ledger: Ledger) -> None:
        self.device = device
        self.place = gpu_memory(device.number)
        self.pool = BlockPool(device, self.place, budget_bytes)
        self.pinned = pinned
        self.ledger = ledger
        self.sharing = threading.Lock()
        self._adopted_host = BlockPool(device, HOST_MEMORY, _UNBOUNDED)
        self._has_warned = False
        self._copying = threading.Lock()
        self._copy_stream: DeviceQueue | None = None

    def take(self, nbytes: int, stream: DeviceQueue) -> Block:
        """A block that work on `stream` may read and write: device memory, else pinned, else ordinary host memory."""
        block = self.pool.take(nbytes, stream)
        if block is not None:
            return block
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the pool of %s (%d bytes) has no room for %d bytes more: tensors lie in host memory meanwhile",
                self.place,
                self.pool.statistics().budget_bytes,
                nbytes,
            )
        return self.take_on_host(nbytes, stream)

    def take_on_host(self, nbytes: int, stream: DeviceQueue | None) -> Block:
        """A block of host memory, pinned if there is room. `stream` None: the host is the first to write it."""
        block = self.pinned.take(nbytes, stream)
        if block is not None:
            return block
        array = HOST.take(nbytes)
        return self._adopted_host.adopt(array, array.ctypes.data, nbytes)

    def copy_and_wait(self, source: MemoryPlace, to: MemoryPlace, target: int, origin: int, nbytes: int) -> None:
        """Copy `nbytes` bytes between the host and this GPU, from address `origin` to `target`, and block until that is
        done: for tensors of other libraries and of clients. Instances use `stream` instead.
        """
        device = self.device
        with self._copying:
            if self._copy_stream is None:
                self._copy_stream = device.stream()
            device.copy(target, origin, nbytes, self._copy_stream)
            device.synchronize(device.record(self._copy_stream))
        self.ledger.record(source, to, nbytes)
