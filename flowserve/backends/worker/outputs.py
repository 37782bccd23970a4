"""The outputs of a batch, written where the server and the next model read them.

Decides how the members' outputs are written into one block of this process's own shared memory: contiguously, so that
the next model reads them as one array. This is the only time that an output is copied, however it was made. A member
without an output leaves no gap. Strings are written in Triton's BYTES encoding.

Does not know how outputs came about, nor which process reads them. Called by main.py, and by streaming.py under a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from flowserve.backends.worker.protocol import APART, NOTHING, TOGETHER
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.column import Column
from flowserve.memory.segment import Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec


class Together(NamedTuple):
    """One output of all members but the `absent` ones, contiguous: its offset in the block, bytes, and shape."""

    start: int
    nbytes: int
    absent: Sequence[int]
    shape: tuple[int, ...]


# Without the call of Python that a constructor is.
_together: Callable[[tuple[int, int, Sequence[int], tuple[int, ...]]], Together] = partial(tuple.__new__, Together)

# One output: contiguous; or for each member None or (offset, bytes, shape); or of no member.
Output = Together | list[tuple[int, int, tuple[int, ...]] | None] | None


class Placed(NamedTuple):
    """The outputs of a batch in a block of `nbytes` bytes; segment and offset are 0 where there are none."""

    segment: int
    offset: int
    nbytes: int
    outputs: Sequence[Output]

    def words(self) -> list[int]:
        """The words of a message from `segment` on (protocol.py)."""
        words = [self.segment, self.offset, self.nbytes]
        for output in self.outputs:
            if output is None:
                words.append(NOTHING)
            elif isinstance(output, Together):
                start, nbytes, absent, shape = output
                words += (TOGETHER, start, nbytes, len(absent), *absent, len(shape), *shape)
            else:
                words.append(APART)
                for one in output:
                    if one is None:
                        words.append(0)
                    else:
                        words += (1, one[0], one[1], len(one[2]), *one[2])
        return words


class OutputWriter:
    """The shared memory that this process writes."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._arena = Arena()
        self._known = 0  # how many of the arena's segments the server knows

    def come_home(self, places: Sequence[BlockAddress]) -> None:
        """These blocks are free again."""
        for place in places:
            self._arena.give_back(place)

    def new_segments(self) -> list[Segment]:
        """Memory that the server does not know yet; each is returned once."""
        segments = self._arena.segments
        if len(segments) == self._known:
            return []
        new, self._known = segments[self._known :], len(segments)
        return new

    def segment(self, number: int) -> Segment:
        """The segment with that number."""
        return next(segment for segment in self._arena.segments if segment.number == number)

    def message(self, message: bytes) -> list[int]:
        """Write a message that is too long for a datagram. Its segment, offset and length."""
        segment, offset = self._arena.take(len(message))
        segment.memory[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
        return [segment.number, offset, len(message)]

    def place(self, columns: Sequence[Sequence[Tensor | None]]) -> Placed:
        """Write `columns[j][m]`, output j of member m, into one block."""
        outputs: list[Output] = []
        writes: list[tuple[int, list[Array]]] = []
        size = 0
        for spec, column in zip(self._specs, columns, strict=True):
            absent: Sequence[int] = ()
            if type(column) is Column and column.block is not None:
                arrays = [column.block]
            elif type(column) is Column and not column.lacks_some:
                arrays = column.arrays
            else:
                arrays = [tensor.array for tensor in column if tensor is not None]
                if not arrays:
                    outputs.append(None)
                    continue
                absent = [m for m, tensor in enumerate(column) if tensor is None]
            shape = arrays[0].shape
            if len(arrays) > 1:
                shapes = [array.shape for array in arrays]
                if shapes.count(shape) == len(shapes):
                    shape = (shape[0] * len(shapes), *shape[1:])
                elif all(one[1:] == shape[1:] for one in shapes):
                    shape = (sum([one[0] for one in shapes]), *shape[1:])
                else:
                    apart, size = _plan_apart(spec, column, size, writes)
                    outputs.append(apart)
                    continue
            start = aligned(size) if size else 0
            nbytes = _plan(spec, arrays, start, writes)
            size = start + nbytes
            outputs.append(_together((start, nbytes, absent, shape)))
        if not size:
            return Placed(0, 0, 0, outputs)
        segment, offset = self._arena.take(size)
        for start, arrays in writes:
            segment.write(offset + start, arrays)
        return Placed(segment.number, offset, size, outputs)


def _plan_apart(
    spec: TensorSpec, column: Sequence[Tensor | None], size: int, writes: list[tuple[int, list[Array]]]
) -> tuple[Output, int]:
    """Plan an output of members whose shapes differ, in a block that has `size` bytes so far. Returns it, and the size
    of the block then.
    """
    output: list[tuple[int, int, tuple[int, ...]] | None] = []
    for tensor in column:
        if tensor is None:
            output.append(None)
            continue
        array = tensor.array
        start = aligned(size)
        nbytes = _plan(spec, [array], start, writes)
        size = start + nbytes
        output.append((start, nbytes, array.shape))
    return output, size


def _plan(spec: TensorSpec, arrays: list[Array], start: int, writes: list[tuple[int, list[Array]]]) -> int:
    """Note that these will be written at `start`, one after the other. Returns their bytes."""
    if spec.dtype is DType.BYTES:
        arrays = [np.frombuffer(b"".join(map(bytes_codec.encode, arrays)), np.uint8)]
    writes.append((start, arrays))
    return arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
