"""Allocator of shared-memory blocks for one writer.

Decides:

* A block is whole pages, so that no two blocks share one: a reader's private writes are kept per page and must never
  appear in the tensors of another block. Tensors in a block are aligned to 64 bytes.
* Allocation is first-fit, lowest address first, and free neighbours are merged, so that warm memory is used first and
  odd sizes do not accumulate. A few single pages, the size of most small batches, are cached unmerged.
* An arena grows by whole segments, each twice as large as the last, and keeps them: warm memory costs no page faults.
  Only the pages of very large blocks go back to the kernel, so that one such request does not hold its memory forever.

Does not know: messages between processes, or which processes read. One process writes an arena, from one thread at a
time; processes that receive its segments can read it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Final

from flowserve.memory.pool import ALIGNMENT
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

    @property
    def lent_bytes(self) -> int:
        """Bytes in use, in whole pages."""
        while self._ended:
            self.give_back((self._ended.popleft(),))
        self._put_back()
        return sum(sum(space.lent.values()) for space in self._spaces)

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
    """Free list of one segment: sorted by offset, never two neighbours."""

    __slots__ = ("_sizes", "_starts", "lent", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._starts = [0]
        self._sizes = [segment.size]
        self.lent: dict[int, int] = {}

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
                return start
        return -1

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
