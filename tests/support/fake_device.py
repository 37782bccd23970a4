"""GPUs without hardware, stricter than real ones: every unordered access raises an error.

Every stream and the host have a vector clock, every allocation the times of its last write and of the reads since. Work
that accesses memory must be ordered after all conflicting work by waits and synchronisations; else it raises `Race`. So
a missing wait, or a block that is reused too early or freed while it is read, is found the first time it happens,
whereas on a real GPU it mostly has no visible effect. Work is executed when it is enqueued: any order that the clocks
allow gives the same bytes.

An event counts as complete only when the host has synchronised with it or a later one, unless the machine is created
with `is_quick`. As on CUDA, a copy may use unpinned host memory: the call then waits. Copies are counted here too, so
that tests can compare a ledger with the actual copies.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flowserve.memory.device import Allocation, DeviceQueue, Event, OutOfMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import ON_DEVICE, DeviceStream
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, Array, MemoryPlace, gpu_memory

Clock = dict[int, int]  # by writer: 0 is the host, streams are numbered from 1

_HOST: Final = 0
_ALIGNMENT: Final = 256
_POISON: Final = 0xA5


class Race(AssertionError):
    """Two unordered uses of the same memory."""


@dataclass(eq=False, kw_only=True)
class FakeStream(DeviceQueue):
    device: int
    clock: Clock = field(default_factory=dict)
    is_closed: bool = False

    @property
    def number(self) -> int:
        return self.address


@dataclass(eq=False, kw_only=True)
class FakeEvent(Event):
    clock: Clock


@dataclass(eq=False, kw_only=True)
class FakeMemory(Allocation):
    """An allocation, and the times of its last uses."""

    place: MemoryPlace
    bytes: Array
    write: tuple[int, int] | None = None
    reads: Clock = field(default_factory=dict)


class FakeMachine:
    """`count` GPUs of `memory_bytes` each, and as much pinnable memory. `is_quick`: events complete without
    synchronisation.
    """

    def __init__(self, count: int = 1, memory_bytes: int = 1 << 30, *, is_quick: bool = False) -> None:
        self.is_quick = is_quick
        self.memory_bytes = memory_bytes
        self.copies: Counter[tuple[MemoryPlace, MemoryPlace]] = Counter()
        self.synchronised = 0  # how often the host has waited
        self.lock = threading.RLock()
        self.host: Clock = {_HOST: 0}
        self._allocations: dict[int, FakeMemory] = {}
        self._addresses: list[int] = []
        self._streams = itertools.count(1)
        self.streams: list[FakeStream] = []
        self.exported: dict[bytes, FakeMemory] = {}  # memory of other processes, by handle
        self.opened: dict[Allocation, bytes] = {}
        self.current = threading.local()  # `number` is the thread's current device
        self.lost = ""  # the error with which all calls fail, if any
        self.devices = [FakeDevice(self, number) for number in range(count)]

    def used_bytes(self, place: MemoryPlace) -> int:
        return sum(one.nbytes for one in self._allocations.values() if one.place == place)

    def export(self, device: int, content: bytes) -> bytes:
        """Create memory of another process on a device, with this content. Returns its handle."""
        with self.lock:
            memory = self.allocate(gpu_memory(device), len(content))
            memory.bytes[:] = np.frombuffer(content, np.uint8)
            handle = len(self.exported).to_bytes(64, "little")
            self.exported[handle] = memory
            return handle

    def new_stream(self, device: int) -> FakeStream:
        stream = FakeStream(next(self._streams), device=device)
        self.streams.append(stream)
        return stream

    def allocate(self, place: MemoryPlace, nbytes: int) -> FakeMemory:
        with self.lock:
            if self.used_bytes(place) + nbytes > self.memory_bytes:
                raise OutOfMemory
            raw = np.full(nbytes + _ALIGNMENT, _POISON, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            memory = FakeMemory(raw.ctypes.data + start, nbytes, place=place, bytes=raw[start : start + nbytes])
            self._allocations[memory.address] = memory
            self._addresses = sorted(self._allocations)
            return memory

    def free(self, memory: FakeMemory) -> None:
        with self.lock:
            self.check(memory, self.host, writes=True, who="giving it back to the driver")
            memory.bytes.fill(_POISON)
            del self._allocations[memory.address]
            self._addresses = sorted(self._allocations)

    def find(self, address: int, nbytes: int) -> FakeMemory | None:
        """The allocation that these bytes lie in; None for memory that was not allocated here."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        memory = self._allocations[self._addresses[at]]
        if address >= memory.address + memory.nbytes:
            return None
        if address + nbytes > memory.address + memory.nbytes:
            raise AssertionError(f"{nbytes} bytes at {address:#x} reach behind the end of their allocation")
        return memory

    def enqueue(
        self, stream: FakeStream, reads: Sequence[FakeMemory | None], writes: Sequence[FakeMemory | None]
    ) -> None:
        """Add work on a stream that accesses this memory; None is host memory, for which the call waits."""
        if self.lost:
            raise RuntimeError(self.lost)
        assert not stream.is_closed, "work on a stream that was closed"
        _join(stream.clock, self.host)
        now = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for memory in reads:
            if memory is not None:
                self.check(memory, stream.clock, writes=False, who=f"a read on stream {stream.number}")
        for memory in writes:
            if memory is not None:
                self.check(memory, stream.clock, writes=True, who=f"a write on stream {stream.number}")
        for memory in reads:
            if memory is not None:
                memory.reads[stream.number] = now
        for memory in writes:
            if memory is not None:
                memory.write, memory.reads = (stream.number, now), {}
        if None in (*reads, *writes):
            _join(self.host, stream.clock)

    def check(self, memory: FakeMemory, clock: Clock, *, writes: bool, who: str) -> None:
        """Raise Race unless all conflicting uses are ordered before this clock."""
        others = dict([memory.write] if memory.write is not None else [])
        if writes:
            for other, moment in memory.reads.items():
                others[other] = max(moment, others.get(other, 0))
        for other, moment in others.items():
            if clock.get(other, 0) < moment:
                name = "the host" if other == _HOST else f"stream {other}"
                raise Race(f"{who}: nothing orders it behind the use of the same {memory.place} memory by {name}")


class FakeDevice:
    """One GPU of a `FakeMachine`."""

    def __init__(self, machine: FakeMachine, number: int) -> None:
        self.machine = machine
        self.number = number

    def allocate(self, nbytes: int) -> Allocation:
        return self.machine.allocate(gpu_memory(self.number), nbytes)

    def allocate_pinned(self, nbytes: int) -> Allocation:
        return self.machine.allocate(PINNED_MEMORY, nbytes)

    def free(self, memory: Allocation) -> None:
        assert isinstance(memory, FakeMemory)
        self.machine.free(memory)

    def stream(self) -> FakeStream:
        return self.machine.new_stream(self.number)

    def close_stream(self, stream: DeviceQueue) -> None:
        assert isinstance(stream, FakeStream)
        if any(self.machine.host.get(who, 0) < moment for who, moment in stream.clock.items()):
            raise Race(f"stream {stream.number} is closed while work is on it")
        stream.is_closed = True

    def copy(self, to: int, source: int, nbytes: int, stream: DeviceQueue) -> None:
        assert isinstance(stream, FakeStream)
        machine = self.machine
        with machine.lock:
            target, origin = machine.find(to, nbytes), machine.find(source, nbytes)
            machine.enqueue(stream, [origin], [target])
            ctypes.memmove(to, source, nbytes)
            machine.copies[_place(origin), _place(target)] += 1

    def launch(
        self,
        stream: DeviceQueue,
        reads: Sequence[DeviceArray],
        writes: Sequence[DeviceArray],
        kernel: Callable[..., None],
    ) -> None:
        """Enqueue a kernel; it gets the arrays to read, then those to write, as numpy arrays. The device accesses its
        own memory and pinned memory; for other host memory the call waits, as in libraries that copy it themselves.
        """
        assert isinstance(stream, FakeStream)
        machine = self.machine
        with machine.lock:
            used = [machine.find(array.address, array.nbytes) for array in (*reads, *writes)]
            for memory in used:
                seen = memory is None or memory.place in (PINNED_MEMORY, gpu_memory(self.number))
                assert seen, f"a kernel of gpu{self.number} on memory of another"
            machine.enqueue(stream, used[: len(reads)], used[len(reads) :])
            kernel(*map(_as_numpy, (*reads, *writes)))

    def record(self, stream: DeviceQueue) -> FakeEvent:
        assert isinstance(stream, FakeStream)
        with self.machine.lock:
            if self.machine.lost:
                raise RuntimeError(self.machine.lost)
            _join(stream.clock, self.machine.host)
            return FakeEvent(stream, clock=dict(stream.clock))

    def wait(self, stream: DeviceQueue, event: Event) -> None:
        assert isinstance(stream, FakeStream)
        assert isinstance(event, FakeEvent)
        with self.machine.lock:
            _join(stream.clock, event.clock)

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self.machine.lock:
            self.machine.synchronised += 1
            _join(self.machine.host, event.clock)

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, FakeEvent)
        with self.machine.lock:
            if self.machine.is_quick:
                _join(self.machine.host, event.clock)
            return all(self.machine.host.get(who, 0) >= moment for who, moment in event.clock.items())

    def open_handle(self, handle: bytes) -> Allocation:
        with self.machine.lock:
            memory = self.machine.exported.get(handle)
            if memory is None or memory.place != gpu_memory(self.number):
                raise ValueError("cudaErrorInvalidValue: invalid argument")
            if handle in self.machine.opened.values():
                raise ValueError("cudaErrorAlreadyMapped: it is open already")
            opened = Allocation(memory.address, memory.nbytes)
            self.machine.opened[opened] = handle
            return opened

    def close_handle(self, opened: Allocation) -> None:
        with self.machine.lock:
            handle = self.machine.opened.pop(opened)
            self.machine.check(self.machine.exported[handle], self.machine.host, writes=True, who="closing its handle")

    def why_lost(self) -> str:
        return self.machine.lost

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self.machine.current.number = getattr(self.machine.current, "number", -1), self.number
        yield
        self.machine.current.number = before

    def settle(self) -> None:
        with self.machine.lock:
            self.machine.synchronised += 1
            for stream in self.machine.streams:
                if stream.device == self.number:
                    _join(self.machine.host, stream.clock)

    def host_view(self, memory: Allocation) -> Array:
        """Counts as a write by the host: later uses of the view are not checked."""
        assert isinstance(memory, FakeMemory)
        assert memory.place == PINNED_MEMORY, f"the host does not see {memory.place}"
        machine = self.machine
        with machine.lock:
            machine.check(memory, machine.host, writes=True, who="the host looks at it")
            machine.host[_HOST] += 1
            memory.write, memory.reads = (_HOST, machine.host[_HOST]), {}
        return memory.bytes


@dataclass
class FakeInstance:
    """An instance that runs a batch with one kernel, whose output has the shape of its input."""

    stream: DeviceStream
    kernel: Callable[..., None]

    def run(self, tensors: Sequence[Tensor], read_at: Sequence[int] | None = None) -> list[Tensor]:
        """The members' outputs, in the memories of `read_at` (see `DeviceStream.deliver`)."""
        rows = None if tensors[0].stop == WHOLE else [tensor.stop - tensor.start for tensor in tensors]
        device = self.stream.memory.device
        assert isinstance(device, FakeDevice)
        with self.stream.batch():
            array, _ = self.stream.gather(tensors)
            made = self.stream.empty(array.dtype, array.shape)
            device.launch(self.stream.handle, [array], [made], self.kernel)
            return self.stream.deliver([made], rows, None if read_at is None else [read_at])[0]


def move(stream: DeviceStream, tensor: Tensor, place: MemoryPlace) -> Tensor:
    """The tensor in the memory of `place`, the host or the stream's device: itself if it is there, else a copy, made in
    a separate batch. On the host if the device has no room.
    """
    if tensor.place == place or not (place.is_gpu or tensor.place.is_gpu):
        return tensor
    rows = None if tensor.stop == WHOLE else [tensor.stop - tensor.start]
    with stream.batch():
        array, _ = stream.gather([tensor])
        return stream.deliver([array], rows, [[ON_DEVICE]] if place.is_gpu else None)[0][0]


def add_one(array: Array, made: Array) -> None:
    """A kernel."""
    made[...] = array + 1


def _join(clock: Clock, other: Clock) -> None:
    for who, moment in other.items():
        if clock.get(who, 0) < moment:
            clock[who] = moment


def _place(memory: FakeMemory | None) -> MemoryPlace:
    return HOST_MEMORY if memory is None else memory.place


def _as_numpy(array: DeviceArray) -> Array:
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.address))
    return raw.view(array.dtype).reshape(array.shape)
