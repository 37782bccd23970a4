"""Memory that two processes see: an anonymous file, mapped.

Decided here: how such memory is made, what is demanded of one that somebody else made, how arrays are written into it,
and how long it stays mapped. It is a memfd whose size is sealed: whoever could shrink it could kill its readers by
SIGBUS. It has no name, so nothing is left behind when a process is killed. A model's process reads through a descriptor
that is open for reading only, by a private mapping: what it writes there stays in pages of its own, until
`forget_writes` throws them away.

A `Lease` is what every view of a piece of a segment stands on; its end is the end of the last view. This file does not
know who uses which piece (arena.py does).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flowserve.errors import Internal
from flowserve.memory.syscalls import memfd_create
from flowserve.values import Array

if TYPE_CHECKING:
    from typing import Self  # which the oldest Python that models run in has not

PAGE: Final = mmap.PAGESIZE
# Linux's numbers: other systems have no such memory, and must be able to import this all the same.
_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing
_UINT8: Final = np.dtype(np.uint8)
_numbers = count(1)
_new_array = np.ndarray.__new__


class Segment:
    """`size` bytes at `address`, until the last lease and the last other holder are gone.

    `memory` is all of it as a uint8 array, for whoever knows which piece is his; `map` the same for arrays that are to
    stand on nothing but it. `number` names it in messages: a
    process numbers what it makes and what it reads as it is written, and who reads privately uses the number he is
    told. `fd` stays open as long as the segment, for handing it to others.
    """

    __slots__ = ("address", "fd", "map", "memory", "number", "on_end", "size")

    def __init__(self, fd: int, size: int, number: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.size = size
        self.number = number
        self.on_end: list[Callable[[int], object]] = []  # told the number, on whatever thread it ends
        self.map = memory
        self.memory: Array = np.frombuffer(memory, np.uint8)
        self.address: int = self.memory.__array_interface__["data"][0]

    @classmethod
    def create(cls, size: int) -> Segment:
        """New memory of `size` bytes (whole pages), zero, which takes room only where it is written to. Raises
        MemoryError where there is none to be had.
        """
        try:
            fd = memfd_create("flowserve", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
                memory = mmap.mmap(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:  # which whoever talks over a socket would take for the end of that
            raise MemoryError(f"shared memory of {size} bytes cannot be had: {error.strerror}") from error
        return cls(fd, size, next(_numbers), memory)

    @classmethod
    def read_shared(cls, fd: int) -> Segment:
        """What another process writes, as it writes it; read-only. Takes `fd`. Raises `Internal` where its size could
        change.
        """
        try:
            size = _sealed_size(fd)
            memory = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise Internal(f"shared memory of a child process cannot be used: {error}") from error
        return cls(fd, size, next(_numbers), memory)

    @classmethod
    def read_private(cls, fd: int, number: int) -> Segment:
        """What another process writes; writes into it stay here. Takes `fd`, which may be open for reading only."""
        size = os.fstat(fd).st_size
        return cls(fd, size, number, mmap.mmap(fd, size, access=mmap.ACCESS_COPY))

    def open_for_reading(self) -> int:
        """A new descriptor of the same memory that cannot be written through; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def forget_writes(self, start: int, stop: int) -> None:
        """Throw away what was written into the pages of a private mapping: they show the writer's bytes again."""
        first = start - start % PAGE
        self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def empty(self, start: int, stop: int) -> None:
        """Give whole pages back to the kernel, for every process: they read as zero until they are written again."""
        self.map.madvise(mmap.MADV_REMOVE, start, stop - start)

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        """Lay arrays of one type, which are alike but for their rows, side by side from there on."""
        first = arrays[0]
        if len(arrays) == 1:
            if first.size:
                try:
                    self.map[start : start + first.nbytes] = first  # type: ignore[call-overload]  # any buffer will do
                except ValueError:  # not in one piece, or of a type that is numpy's by courtesy
                    np.ndarray(first.shape, first.dtype, self.map, start)[...] = first
            return
        shape = (sum([len(array) for array in arrays]), *first.shape[1:])
        if 0 not in shape:
            np.concatenate(arrays, out=np.ndarray(shape, first.dtype, self.map, start))

    def read_into(self, target: Array, start: int) -> None:
        """Fill `target` (uint8) with the writer's bytes, whatever was written into a private mapping of them."""
        if os.preadv(self.fd, [target.data], start) != len(target):
            raise Internal(f"shared memory ends before {start + len(target)}")

    def __del__(self) -> None:
        for ended in getattr(self, "on_end", ()):
            ended(self.number)
        os.close(self.fd)


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """One loan of a piece of a segment: what `view()` and all views derived from it stand on.

    numpy lets a view of a view point past the middle one, but never past an array of another class: so every view,
    however far derived, keeps this object alive, and its end is the end of the last of them. `gone(ticket)` is called
    then, on whatever thread that happens, even inside the garbage collector: it only writes down. It is an array
    because nothing else that Python code can make is so cheap to stand on; it is read by `view` and `piece` only.
    """

    __slots__ = ("_gone", "offset", "segment", "ticket")

    segment: Segment
    offset: int
    ticket: Any
    _gone: Callable[[Any], object]

    def __new__(cls, segment: Segment, offset: int, nbytes: int, gone: Callable[[Any], object], ticket: Any) -> Self:
        """`nbytes` at `offset` of the segment."""
        self = _new_array(cls, (nbytes,), _UINT8, segment.map, offset)
        self.segment = segment
        self.offset = offset
        self.ticket = ticket
        self._gone = gone
        return self

    def view(self) -> Array:  # type: ignore[override]  # numpy's would be a lease too, and nobody's
        """The piece as a uint8 array."""
        return np.ndarray(self.shape, _UINT8, self)

    def piece(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Array:
        """The array that begins `start` bytes after the lease does. Raises ValueError where it ends after it."""
        return np.ndarray(shape, dtype, self, start)

    def __del__(self) -> None:
        gone = getattr(self, "_gone", None)
        if gone is not None:  # what numpy derives from one is none
            gone(self.ticket)


def locate(array: Array) -> tuple[Lease, int] | None:
    """The lease that a contiguous array's memory belongs to, and where in the segment it begins; None for any other
    memory.
    """
    base: object = array.base
    if type(base) is memoryview:  # of a request's body
        base = base.obj
    if type(base) is not Lease:
        base = getattr(base, "base", None)
        if type(base) is not Lease:
            return None
    if not array.flags.c_contiguous:
        return None
    if array.nbytes == base.nbytes:
        return base, base.offset  # all of it, which is cheaper to see than an address
    address: int = array.__array_interface__["data"][0]
    return base, address - base.segment.address


def _sealed_size(fd: int) -> int:
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    size = os.fstat(fd).st_size
    if size <= 0 or size % PAGE:
        raise ValueError(f"it has {size} bytes, which are no whole pages")
    return size
