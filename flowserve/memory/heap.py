"""The process's memory as the operating system sees it: malloc's tuning, and the return of free memory to the system.

Decides how glibc's malloc keeps memory, and when its free memory returns to the system (`TrimRule`): malloc itself
returns only the top of its heap, so that the memory of a burst of requests would never be returned. Reads no clock.
Without glibc nothing is trimmed; without Linux nothing is returned.

Callers: the server and worker processes at their start; `pool` and `release`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any, ClassVar, Final

from flowserve.memory.segment import PAGE

MEBIBYTE: Final = 1 << 20
# The free memory, since the last trim, that causes a trim; and the pause between two looks at the free memory. A trim
# holds malloc's lock for about 0.4 ms for each MiB that it returns, and a look for up to 20 ms in a fragmented heap: so
# both are rare while requests run.
QUIET_BYTES_MIN: Final = 4 * MEBIBYTE
QUIET_PAUSE_NS: Final = 5_000_000_000
BUSY_BYTES_MIN: Final = 64 * MEBIBYTE
BUSY_PAUSE_NS: Final = 60_000_000_000
_PIECE_BYTES: Final = 4 * MEBIBYTE
# From this size on numpy requests huge pages. If one page of a huge page stays, the kernel would later fill in all
# others.
_HUGE_BYTES_MIN: Final = 4 * MEBIBYTE


def tune_malloc() -> bool:
    """Tell glibc to keep blocks of up to 32 MiB on one heap for all threads, and the heap's top in memory. False
    without glibc.

    Otherwise the kernel maps and unmaps every large array that does not come from the pool (a model's outputs, for
    instance), which more than halves the throughput with 600 KB tensors. There is one heap because `trim` does not
    return the top of the heaps that malloc makes for other threads. The settings are process-wide, so this is called at
    the start of a server and never on import.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
    mapped = mallopt(mmap_threshold, 32 * MEBIBYTE)  # the maximum on 64 bits
    trimmed = mallopt(trim_threshold, 512 * MEBIBYTE)
    alone = mallopt(arena_max, 1)
    return bool(mapped and trimmed and alone)


def discard(address: int, nbytes: int) -> None:
    """Return the whole pages of this private memory to the system; their bytes are lost. Releases the interpreter lock,
    so that other threads run meanwhile.
    """
    advise = _function("madvise")
    if advise is None:
        return
    stop = (address + nbytes) // PAGE * PAGE
    for start in range(-(-address // PAGE) * PAGE, stop, _PIECE_BYTES):  # between pieces, others map memory
        size = min(_PIECE_BYTES, stop - start)
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        if nbytes >= _HUGE_BYTES_MIN:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_NOHUGEPAGE)


def free_bytes() -> int | None:
    """The free memory of malloc, trimmed pages included; None if it is unknown. Other threads' allocations wait
    meanwhile.
    """
    mallinfo = _function("mallinfo2")
    if mallinfo is None:
        return None
    mallinfo.restype = _MallInfo
    found: int = mallinfo().fordblks
    return found


def trim() -> None:
    """Return malloc's free pages to the system. Other threads' allocations wait meanwhile."""
    malloc_trim = _function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


class TrimRule:
    """When to look at malloc's free memory, and whether to trim it, on an integer clock in nanoseconds.

    A trim is due when the free memory has grown since the last one. Memory that is in use never causes one.
    """

    def __init__(self) -> None:
        self._floor = 0  # free bytes after the last trim, or less
        self._looked_ns: int | None = None

    def may_look(self, now_ns: int, *, is_quiet: bool) -> bool:
        """Whether the pause after the last look is over. `is_quiet`: no request is running."""
        pause_ns = QUIET_PAUSE_NS if is_quiet else BUSY_PAUSE_NS
        return self._looked_ns is None or now_ns - self._looked_ns >= pause_ns

    def must_trim(self, now_ns: int, free: int | None, *, is_quiet: bool) -> bool:
        """Called at each look, with `free_bytes()`. The caller trims if this is true."""
        self._looked_ns = now_ns
        if free is None:
            return True
        self._floor = min(self._floor, free)
        if free - self._floor < (QUIET_BYTES_MIN if is_quiet else BUSY_BYTES_MIN):
            return False
        self._floor = free
        return True


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar[Any] = [
        ("before", 8 * ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("last", ctypes.c_size_t),
    ]


def _function(name: str) -> Any:
    """A function of the C library; None if there is none of that name."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
