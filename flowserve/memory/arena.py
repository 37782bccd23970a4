"""Allocator of shared-memory blocks for one writer.

Decides:

* A block is whole pages, so that no two blocks share one: a reader's private writes are kept per page and must never
  appear in the tensors of another block. Tensors in a block are aligned to 64 bytes.
* Allocation is first-fit, lowest address first, and free neighbours are merged, so that warm memory is used first and
  odd sizes do not accumulate. A few single pages, the size of most small batches, are cached unmerged.
* An arena grows by whole segments, each twice as large as the last, and keeps them: warm memory costs no page faults.
  The pages of very large blocks go back to the kernel at once, those of other free memory when it was not used for
  `IDLE_NS` (`take_idle`). A segment keeps its address and its descriptor, so that no reader needs to know.
* Memory is used from the lowest address up, so what was used is known by the highest end of a block in each period
  between two calls of `take_idle`. The caller passes the time; this module reads no clock.

Does not know: messages between processes, or which processes read. One process writes an arena, from one thread at a
time; processes that receive its segments can read it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final

from flowserve.memory.pool import ALIGNMENT, IDLE_NS
from flowserve.memory.segment import PAGE, Lease, Segment

FIRST_SEGMENT_BYTES: Final = 1 << 20
# Doubling ends here. A larger block gets a segment of its own size, and its pages only for as long as it is lent.
LARGEST_SEGMENT_BYTES: Final = 1 << 28
_SPARE_MAX: Final = 8

# A block: the number of its segment, its offset there.
BlockAddress = tuple[int, int]


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Arena:
    """All blocks of one writer, over a growing list of segments."""

    def __init__(self, first_segment_bytes: int = FIRST_SEGMENT_BYTES) -> None:
        self.segments: list[Segment] = []  # in the order of creation
        self._spaces: list[_Space] = []
        self._by_number: dict[int, _Space] = {}
        self._next_bytes = first_segment_bytes
        # A lease may end inside the garbage collector, even within `take`, so its end is only noted here; append is
        # atomic.
        self._ended: deque[BlockAddress] = deque()
        self._spare: list[BlockAddress] = []  # cache of free single pages: most small batches need exactly one

    def take(self, nbytes: int) -> tuple[Segment, int]:
        """A block of at least `nbytes`: its segment, and its offset there. The caller returns it by `give_back`."""
        ended, spare = self._ended, self._spare
        while ended:
            block = ended.popleft()
            space = self._by_number[block[0]]
            if space.lent[block[1]] == PAGE and len(spare) < _SPARE_MAX:
                spare.append(block)
            else:
                space.give_back(block[1])
        size = -(-(nbytes or 1) // PAGE) * PAGE
        if spare:
            if size == PAGE:
                number, offset = spare.pop()
                return self._by_number[number].segment, offset
            self._put_back()
        for space in self._spaces:
            offset = space.take(size)
            if offset >= 0:
                return space.segment, offset
        space = self._grow(size)
        return space.segment, space.take(size)

    def lease(self, nbytes: int) -> Lease:
        """A block that is returned automatically when its last view is gone, on any thread."""
        segment, offset = self.take(nbytes)
        return Lease(segment, offset, nbytes, self._ended.append, (segment.number, offset))

    def give_back(self, blocks: Iterable[BlockAddress]) -> None:
        """Return these blocks. Only on the arena's own thread."""
        for block in blocks:
            space = self._by_number[block[0]]
            if space.lent[block[1]] == PAGE and len(self._spare) < _SPARE_MAX:
                self._spare.append(block)
            else:
                space.give_back(block[1])

    def take_idle(self, now_ns: int) -> list[Lease]:
        """Leases of free memory that may have pages and was not used for IDLE_NS. The caller empties them, on any
        thread. Only on the arena's own thread.
        """
        self._collect_ended()
        leases = []
        for space in self._spaces:
            for offset, nbytes in space.take_idle(now_ns):
                ticket = (space.segment.number, offset)
                leases.append(Lease(space.segment, offset, nbytes, self._ended.append, ticket))
        return leases

    @property
    def is_warm(self) -> bool:
        """Whether there is memory for a later call of `take_idle`."""
        return any(space.is_warm for space in self._spaces)

    @property
    def lent_bytes(self) -> int:
        """Bytes in use, in whole pages."""
        self._collect_ended()
        return sum(sum(space.lent.values()) for space in self._spaces)

    def _collect_ended(self) -> None:
        while self._ended:
            self.give_back((self._ended.popleft(),))
        self._put_back()

    def _put_back(self) -> None:
        while self._spare:
            number, offset = self._spare.pop()
            self._by_number[number].give_back(offset)

    def _grow(self, size: int) -> _Space:
        space = _Space(Segment.create(max(size, self._next_bytes)))
        self._next_bytes = min(self._next_bytes * 2, LARGEST_SEGMENT_BYTES)
        self.segments.append(space.segment)
        self._spaces.append(space)
        self._by_number[space.segment.number] = space
        return space


class _Space:
    """Free list of one segment: ranges sorted by offset, of which no two are adjacent."""

    __slots__ = ("_sizes", "_starts", "_taken", "_top", "_warm", "lent", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._starts = [0]
        self._sizes = [segment.size]
        self.lent: dict[int, int] = {}
        self._top = 0  # the highest end of a block that was taken since the last `take_idle`
        self._taken: deque[tuple[int, int]] = deque()  # earlier periods: the end in nanoseconds, and `_top`
        self._warm = 0  # no page above this offset has been written since it was emptied

    def take(self, size: int) -> int:
        """The offset of `size` bytes, -1 if no free range is large enough."""
        sizes = self._sizes
        for i, found in enumerate(sizes):
            if found >= size:
                start = self._starts[i]
                if found == size:
                    del self._starts[i], sizes[i]
                else:
                    self._starts[i] = start + size
                    sizes[i] = found - size
                self.lent[start] = size
                if start + size > self._top:
                    self._top = start + size
                return start
        return -1

    @property
    def is_warm(self) -> bool:
        return self._top > 0 or self._warm > 0

    def take_idle(self, now_ns: int) -> list[tuple[int, int]]:
        """Lend the free ranges that may have pages and were not used for IDLE_NS: their offsets and sizes."""
        taken = self._taken
        if self._top:
            taken.append((now_ns, self._top))
            self._warm = max(self._warm, self._top)
            self._top = 0
        while taken and now_ns - taken[0][0] >= IDLE_NS:
            taken.popleft()
        used = max([top for _, top in taken], default=0)
        idle = []
        for start, size in zip(self._starts, self._sizes, strict=True):
            first, stop = max(start, used), min(start + size, self._warm)
            if first < stop:
                idle.append((first, stop - first))
        self._warm = max([used, *(start + size for start, size in self.lent.items())])
        for first, size in idle:
            self._cut(first, size)
        return idle

    def _cut(self, first: int, size: int) -> None:
        """Lend a part of a free range."""
        starts, sizes = self._starts, self._sizes
        i = bisect_right(starts, first) - 1
        start, stop = starts[i], starts[i] + sizes[i]
        parts = [(a, b - a) for a, b in ((start, first), (first + size, stop)) if a < b]
        starts[i : i + 1] = [a for a, _ in parts]
        sizes[i : i + 1] = [n for _, n in parts]
        self.lent[first] = size

    def give_back(self, start: int) -> None:
        size = self.lent.pop(start)
        if size > LARGEST_SEGMENT_BYTES:
            self.segment.empty(start, start + size)
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, start)
        if i < len(starts) and start + size == starts[i]:
            size += sizes[i]
            del starts[i], sizes[i]
        if i and starts[i - 1] + sizes[i - 1] == start:
            sizes[i - 1] += size
        else:
            starts.insert(i, start)
            sizes.insert(i, size)
