"""Interface to a GPU that holds tensors: memory, copies, streams and events.

Decides the methods that all device code uses, and what each side may assume. There are two implementations: the real
one (`cuda`), and one without hardware that raises wherever an ordering is missing (`testing/fake_device`). Code that
passes on the fake is correctly ordered on the real one, where such faults mostly pass unnoticed.

A *stream* is a queue of work for the device: work on one stream runs in order, work on two streams in any order. Adding
work to a stream returns at once. An *event* is a point in a stream: all work added before it. If a stream *waits* for
an event, the host is not blocked; if the host *synchronises* with one, the calling thread blocks.

All methods may be called from any thread, and one stream is used by one thread at a time. No method may be called from
a finaliser, because the garbage collector runs anywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from flowserve.values import Array


class OutOfMemory(Exception):
    """No room for an allocation. Never reaches a client: pools fall back, or raise an error that names the purpose."""


class Allocation(Protocol):
    """An allocation: `nbytes` bytes at `address`, which is at least 256-byte aligned."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class OpenedMemory:
    """Device memory of another process: one whole allocation, `nbytes` bytes at `address` in this process."""

    address: int
    nbytes: int


class Stream(Protocol):
    """`address` is the value libraries accept as a CUDA stream; never 0, which would be the default stream."""

    @property
    def address(self) -> int: ...


class Event(Protocol):
    """A point in `stream`."""

    @property
    def stream(self) -> Stream: ...


class Device(Protocol):
    """One GPU, by its number."""

    @property
    def number(self) -> int: ...

    def allocate(self, nbytes: int) -> Allocation:
        """Uninitialised device memory. Raises OutOfMemory."""

    def allocate_pinned(self, nbytes: int) -> Allocation:
        """Uninitialised pinned host memory; every device may copy from and to it. Raises OutOfMemory."""

    def free(self, memory: Allocation) -> None:
        """Return memory to the driver. The caller has synchronised with all work that used it."""

    def stream(self) -> Stream:
        """A new stream, not ordered with any other."""

    def close_stream(self, stream: Stream) -> None:
        """Close a stream. The caller has synchronised with all work on it."""

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        """Add a copy to the stream. Each address is in host memory or memory of any device. If host memory is not
        pinned, this returns only when that side is no longer needed.
        """

    def record(self, stream: Stream) -> Event:
        """An event after all work on the stream so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Work added to the stream from now on runs after the event, which may belong to another device."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event is complete."""

    def is_done(self, event: Event) -> bool:
        """Whether the event is complete. If so, the host may rely on it as after `synchronize`."""

    def open_handle(self, handle: bytes) -> OpenedMemory:
        """Map the memory of another process's handle, on this device. Not twice before closing. Raises ValueError."""

    def close_handle(self, opened: OpenedMemory) -> None:
        """Unmap the memory. The caller guarantees that no work reads or writes it."""

    def why_lost(self) -> str:
        """The error that makes the device unusable for the rest of this process, "" if usable. Does not block."""

    def current(self) -> AbstractContextManager[object]:
        """A context in which this is the thread's current CUDA device, for libraries that query it."""

    def settle(self) -> None:
        """Block the calling thread until all work on the device is complete, other libraries' work included: for
        tensors that they pass on without an event.
        """

    def host_view(self, memory: Allocation) -> Array:
        """Pinned memory as writable bytes. Call it right before the access, and after synchronising with all other
        users of that memory.
        """
