"""Shared memory between processes: mapped anonymous files, the lifetime of views into them, and the page table.

Decides how a segment is created, what is required of a segment received from another process, how arrays are written
into it, and how long it stays mapped. It is a memfd whose size is sealed: a process that could shrink it could kill the
readers by SIGBUS. It has no name, so nothing remains when a process is killed. A worker process reads through a
read-only descriptor and a private mapping: its writes stay in its own pages until `forget_writes` discards them. Only
pages that were written need this; `PageTable` finds them in the kernel's page table of this process, because
discarding costs a system call and a page fault per page that is read again, several times as much as the check.

A `Lease` is the base object of all views of a piece of a segment; it ends with the last view. Does not know which piece
is used for what (`arena` does). Callers: `arena`, the IPC code on both sides.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flowserve.errors import Internal
from flowserve.values import Array

if TYPE_CHECKING:
    from typing import Self  # missing in the oldest Python that models run in

PAGE: Final = mmap.PAGESIZE
# Linux's constants: other systems have no such memory but must be able to import this module.
_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing
_ENTRY_BYTES: Final = 8
# Possible highest bytes of an entry that maps the file's page, or no page: bit 63 "present" is always combined with bit
# 61 "file page" there, bit 56 is "exclusively mapped".
_UNWRITTEN: Final = b"\x00\xa0\xa1"
_UINT8: Final = np.dtype(np.uint8)
_numbers = count(1)
_of_thread = threading.local()  # has `numbers` on a thread with numbers of its own
_new_array = np.ndarray.__new__


class Segment:
    """`size` bytes at `address`, mapped until the last lease and the last other reference are gone.

    `memory` is the whole segment as a uint8 array, for callers that know their piece; `map` is the mapping itself, for
    arrays that should reference only it. `number` identifies the segment in messages: a process numbers the segments
    that it creates or reads shared, and a private reader uses the number that it receives. `fd` stays open as long as
    the segment, so that it can be passed to other processes.
    """

    __slots__ = ("address", "fd", "map", "memory", "number", "on_end", "size")

    def __init__(self, fd: int, size: int, number: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.size = size
        self.number = number
        self.on_end: list[Callable[[int], object]] = []  # called with the number, on the thread of the finaliser
        self.map = memory
        self.memory: Array = np.frombuffer(memory, np.uint8)
        self.address: int = self.memory.__array_interface__["data"][0]

    @classmethod
    def create(cls, size: int) -> Segment:
        """New zeroed memory of `size` bytes (whole pages), which is only committed where it is written. Raises
        MemoryError if none is available.
        """
        try:
            fd = _memfd_create("flowserve", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
                memory = mmap.mmap(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:  # code that uses a socket would treat an OSError as the socket's end
            raise MemoryError(f"shared memory of {size} bytes cannot be had: {error.strerror}") from error
        return cls(fd, size, new_number(), memory)

    @classmethod
    def read_shared(cls, fd: int, number: int) -> Segment:
        """A read-only shared mapping of another process's segment. Takes ownership of `fd`. Raises `Internal` if its
        size is not sealed.
        """
        try:
            size = _sealed_size(fd)
            memory = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise Internal(f"shared memory of a child process cannot be used: {error}") from error
        return cls(fd, size, number, memory)

    @classmethod
    def read_private(cls, fd: int, number: int) -> Segment:
        """A private mapping of another process's segment: writes stay in this process. Takes ownership of `fd`, which
        may be read-only.
        """
        size = os.fstat(fd).st_size
        return cls(fd, size, number, mmap.mmap(fd, size, access=mmap.ACCESS_COPY))

    def open_for_reading(self) -> int:
        """A new read-only descriptor of the same memory; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def forget_writes(self, start: int, stop: int) -> None:
        """Discard the writes to these pages of a private mapping: they show the writer's bytes again."""
        first = start - start % PAGE
        self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def empty(self, start: int, stop: int) -> None:
        """Return whole pages to the kernel, for every process: they read as zero until they are written again. Releases
        the interpreter lock, which `mmap.madvise` holds.
        """
        start_address, size = ctypes.c_void_p(self.address + start), ctypes.c_size_t(stop - start)
        if ctypes.CDLL(None, use_errno=True).madvise(start_address, size, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        """Write arrays that differ only in their number of rows, one after the other from offset `start`."""
        first = arrays[0]
        if len(arrays) == 1:
            if first.size:
                try:
                    self.map[start : start + first.nbytes] = first  # type: ignore[call-overload]  # any buffer will do
                except ValueError:  # not contiguous, or an extension type of numpy
                    np.ndarray(first.shape, first.dtype, self.map, start)[...] = first
            return
        shape = (sum([len(array) for array in arrays]), *first.shape[1:])
        if 0 not in shape:
            np.concatenate(arrays, out=np.ndarray(shape, first.dtype, self.map, start))

    def read_into(self, target: Array, start: int) -> None:
        """Fill `target` (uint8) with the writer's bytes, regardless of writes to a private mapping."""
        if os.preadv(self.fd, [target.data], start) != len(target):
            raise Internal(f"shared memory ends before {start + len(target)}")

    def __del__(self) -> None:
        for ended in getattr(self, "on_end", ()):
            ended(self.number)
        os.close(self.fd)


class PageTable:
    """Finds the pages of private mappings that this process has written. If the kernel's page table cannot be read, or
    has an unknown entry, a page counts as written. Only for the process that creates the object.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def is_written(self, segment: Segment, start: int, stop: int) -> bool:
        """Whether a page of this range was, or may have been, written since `forget_writes` was last called on it."""
        first = (segment.address + start) // PAGE
        nbytes = ((segment.address + stop - 1) // PAGE - first + 1) * _ENTRY_BYTES
        try:
            entries = os.pread(self._fd, nbytes, first * _ENTRY_BYTES)
        except OSError:
            return True
        if nbytes == _ENTRY_BYTES == len(entries):
            return entries[-1] not in _UNWRITTEN
        # The highest byte of each entry; any that is not a known unwritten state counts as a write.
        return len(entries) != nbytes or bool(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].strip(_UNWRITTEN))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A piece of a segment in use: the base object of `view()` and of all views derived from it.

    numpy collapses a view of a view to the underlying array, but never past an array of another class. So every derived
    view keeps this object alive, and it is finalised with the last of them. `gone(ticket)` is called then, on any
    thread, even inside the garbage collector, so it must only record the fact. The class is an array because no other
    base object is as cheap; its bytes are accessed through `view` and `piece` only.
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

    def view(self) -> Array:  # type: ignore[override]  # numpy's would return a Lease without a ticket
        """The piece as a uint8 array."""
        return np.ndarray(self.shape, _UINT8, self)

    def piece(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Array:
        """The array that begins `start` bytes after the lease. Raises ValueError if it would end behind the lease."""
        return np.ndarray(shape, dtype, self, start)

    def __del__(self) -> None:
        gone = getattr(self, "_gone", None)
        if gone is not None:  # arrays that numpy derives from a lease have no callback
            gone(self.ticket)


def new_number() -> int:
    """A number that no other segment of this process has."""
    return next(getattr(_of_thread, "numbers", _numbers))


def number_segments_from(first: int, *, of_thread: bool = False) -> None:
    """Number the segments that this process creates from `first` on. `of_thread`: only those of the calling thread."""
    global _numbers
    if of_thread:
        _of_thread.numbers = count(first)
    else:
        _numbers = count(first)


def locate(array: Array) -> tuple[Lease, int] | None:
    """The lease that contains a contiguous array's memory, and the array's offset in the segment; None for any other
    memory.
    """
    base: object = array.base
    if type(base) is memoryview:  # part of a request's body
        base = base.obj
    if type(base) is not Lease:
        base = getattr(base, "base", None)
        if type(base) is not Lease:
            return None
    if not array.flags.c_contiguous:
        return None
    if array.nbytes == base.nbytes:
        return base, base.offset  # the whole lease: cheaper than computing the address
    address: int = array.__array_interface__["data"][0]
    return base, address - base.segment.address


def _memfd_create(name: str, flags: int) -> int:
    """`os.memfd_create`, which is missing in Pythons built for an old C library, such as conda's. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    fd: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _sealed_size(fd: int) -> int:
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    size = os.fstat(fd).st_size
    if size <= 0 or size % PAGE:
        raise ValueError(f"it has {size} bytes, which are no whole pages")
    return size
