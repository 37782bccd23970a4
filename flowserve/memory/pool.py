"""Pool of large host buffers.

Decides: buffers of 64 KiB and more are kept for reuse, because returning them to the operating system and faulting them
in again costs more than most models. A buffer returns to the pool when the last numpy view of it is gone, on any
thread, so there is no explicit release and no double release.

Buffers without a use for `IDLE_NS` go back to the operating system (`take_idle`), so that a burst of requests does not
keep its memory. This module reads no clock: the caller passes the time, and a buffer counts as free from the first call
that finds it free. So a lease does no work for this.

A buffer holds what its last user left: **the caller of `take` writes every byte before it shows the array to other
code**. Zeroing would cost a pass over memory that every caller overwrites anyway.

Does not know: tensors, only bytes. Callers: batch assembly, device memory, front ends.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final

import numpy as np

from flowserve.memory.heap import discard
from flowserve.values import Array

POOLED_BYTES_MIN: Final = 64 * 1024
KEPT_BYTES_MAX: Final = 512 * 1024 * 1024
IDLE_NS: Final = 10_000_000_000
ALIGNMENT: Final = 64  # a cache line, and the width of the widest vector instructions


class Pool:
    """Reusable buffers in size classes; at most `kept_bytes_max` bytes are kept free. All methods may be called from
    any thread. `lent_bytes` are in use, `kept_bytes` are free in the pool.
    """

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        # Free buffers by size class; the least recently used class is first, because it is the one to shrink.
        self._kept: dict[int, list[Buffer]] = {}
        # A buffer can return from inside the garbage collector, at any allocation, even while this thread holds the
        # lock. So it is only appended here (which is atomic), and the next thread that gets the lock collects it.
        self._returned: deque[Buffer] = deque()
        self.kept_bytes = 0
        self.lent_bytes = 0

    def take(self, nbytes: int) -> Array:
        """A writable, 64-byte aligned uint8 array of `nbytes`; the caller fills all of it. Its memory returns to the
        pool when the last view is gone.
        """
        if nbytes < POOLED_BYTES_MIN:
            return np.asarray(_Lease(None, Buffer(nbytes), nbytes))
        size = size_class(nbytes)
        with self._lock:
            self._collect_returned()
            self.lent_bytes += size
            buffer = self._find(size)
        if buffer is None:
            try:
                buffer = Buffer(size)  # outside the lock: this is where the kernel may be asked for memory
            except MemoryError:
                with self._lock:
                    self.lent_bytes -= size
                raise
        self._settle()
        return np.asarray(_Lease(self, buffer, nbytes))

    def copy_of(self, array: Array) -> Array:
        """A copy in row-major order, in memory of the pool if it is large."""
        if array.nbytes < POOLED_BYTES_MIN or array.dtype.hasobject:
            return array.copy()
        copy = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def take_idle(self, now_ns: int) -> list[Buffer]:
        """Remove the buffers that have been free for IDLE_NS. The caller discards them, on any thread."""
        idle: list[Buffer] = []
        with self._lock:
            self._collect_returned()
            for size, buffers in [*self._kept.items()]:
                left: list[Buffer] = []
                for buffer in buffers:
                    if buffer.free_since_ns is None:
                        buffer.free_since_ns = now_ns
                    (idle if now_ns - buffer.free_since_ns >= IDLE_NS else left).append(buffer)
                self.kept_bytes -= size * (len(buffers) - len(left))
                if left:
                    self._kept[size] = left
                else:
                    del self._kept[size]
        self._settle()
        return idle

    def forked(self) -> None:
        """This process was forked. The lock may be held by a thread that does not exist here."""
        self._lock = threading.Lock()

    def _find(self, size: int) -> Buffer | None:
        buffers = self._kept.pop(size, None)
        if buffers is None:
            return None
        buffer = buffers.pop()
        if buffers:
            self._kept[size] = buffers
        self.kept_bytes -= size
        buffer.free_since_ns = None
        return buffer

    def _take_back(self, buffer: Buffer) -> None:
        self._returned.append(buffer)
        self._settle()

    def _settle(self) -> None:
        # If another thread holds the lock, that thread checks again after releasing it, so nothing stays in
        # `_returned`.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._collect_returned()
            finally:
                self._lock.release()

    def _collect_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            size = buffer.size
            self.lent_bytes -= size
            self.kept_bytes += size
            buffers = self._kept.pop(size, [])
            buffers.append(buffer)
            self._kept[size] = buffers
        while self.kept_bytes > self._kept_bytes_max:
            size = next(iter(self._kept))
            self._kept[size].pop()
            self.kept_bytes -= size
            if not self._kept[size]:
                del self._kept[size]


class Buffer:
    """`size` bytes of memory at an aligned `address`. `free_since_ns`: when it was first found free in its pool."""

    __slots__ = ("address", "free_since_ns", "raw", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_since_ns: int | None = None
        self.raw = np.empty(size + ALIGNMENT, np.uint8)
        start = self.raw.ctypes.data
        self.address = start + -start % ALIGNMENT

    def discard(self) -> None:
        """Return its pages to the system. The buffer is not used again."""
        discard(self.address, self.size)


class _Lease:
    """The base object of all views of a taken buffer.

    numpy collapses a view of a view to the underlying array, but never past an object that is not an array. So every
    derived view keeps this object alive, and it is finalised with the last of them.
    """

    __slots__ = ("__array_interface__", "buffer", "home")

    def __init__(self, home: Pool | None, buffer: Buffer, nbytes: int) -> None:
        self.home = home
        self.buffer = buffer
        self.__array_interface__ = {"data": (buffer.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self.home is not None:
            self.home._take_back(self.buffer)


# The process's host buffers: one pool, so that buffers are reused across models and front ends.
HOST: Final = Pool()
if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=HOST.forked)


def size_class(nbytes: int) -> int:
    """The buffer size that serves `nbytes`: four classes to each power of two, so that at most a fifth is wasted."""
    shift = (nbytes - 1).bit_length() - 3
    return -(-nbytes >> shift) << shift
