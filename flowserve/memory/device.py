"""What a GPU is, for whoever keeps tensors on it: memory, copies, streams and events, and nothing else.

Decided here: the few calls that everything above is written to, and what each side may assume. There are two devices:
the real one (cuda.py), and one without hardware that raises wherever an order is missing (testing/fake_device.py). What
holds on that one holds on the real one, where such mistakes mostly pass unnoticed.

A *stream* is a queue of work for the device: what is put on one stream runs in order, what is put on two runs in any
order. Putting work on a stream returns at once. An *event* is a moment in a stream: what was put there before it. To
*wait* for an event is the other stream's affair and costs the host nothing; to *synchronise* with one holds up the
calling thread.

All methods may be called from any thread, and one stream is used by one thread at a time. None of them is to be called
from a finaliser: the collector runs anywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from flowserve.values import Array


class OutOfMemory(Exception):
    """There is no room for an allocation. Never reaches a client: pools fall back, or say what it was for."""


class Memory(Protocol):
    """What was allocated: `nbytes` bytes at `address`. The address is at least 256-byte aligned."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class OpenedMemory:
    """Another process's memory of the device: all of one allocation, `nbytes` at `address` here."""

    address: int
    nbytes: int


class Stream(Protocol):
    """`address` is what libraries take as a CUDA stream; it is never 0, which would be the default stream."""

    @property
    def address(self) -> int: ...


class Event(Protocol):
    """A moment in `stream`."""

    @property
    def stream(self) -> Stream: ...


class Device(Protocol):
    """One GPU, by its number."""

    @property
    def number(self) -> int: ...

    def allocate(self, nbytes: int) -> Memory:
        """Memory of the device, with anything in it. Raises OutOfMemory."""

    def allocate_pinned(self, nbytes: int) -> Memory:
        """Pinned memory of the host, with anything in it; every device may copy from and to it. Raises OutOfMemory."""

    def free(self, memory: Memory) -> None:
        """Give memory back to the driver. The caller has synchronised with everything that used it."""

    def stream(self) -> Stream:
        """A new stream, ordered with no other."""

    def close_stream(self, stream: Stream) -> None:
        """The stream is used no more, and the caller has synchronised with what was put on it."""

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        """Put a copy on the stream. The addresses are in memory of any device, or the host's. Where the host's is not
        pinned, this returns only when that side is no longer needed.
        """

    def record(self, stream: Stream) -> Event:
        """The moment after all that was put on the stream so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is put on the stream from now on runs after the event, which may be of another device."""

    def synchronize(self, event: Event) -> None:
        """Return when the event has passed. Blocks the thread and nothing else."""

    def is_done(self, event: Event) -> bool:
        """Whether the event has passed. If so, the host may rely on it as after `synchronize`."""

    def open_handle(self, handle: bytes) -> OpenedMemory:
        """What another process made the handle of, on this device. Not twice before it is closed. Raises ValueError."""

    def close_handle(self, opened: OpenedMemory) -> None:
        """Nothing reads or writes it any more."""

    def why_lost(self) -> str:
        """What is wrong with it for as long as this process lives, "" where nothing is. Waits for nothing."""

    def current(self) -> AbstractContextManager[object]:
        """Within it, this is what CUDA calls the thread's current device, for libraries that ask it."""

    def settle(self) -> None:
        """Return when all is over that anybody has put on the device so far, other libraries included: for what comes
        from them without an event. Blocks the thread.
        """

    def host_view(self, memory: Memory) -> Array:
        """Pinned memory as writable bytes. Ask for it right before it is read or written, and after synchronising
        with whatever else uses it.
        """
