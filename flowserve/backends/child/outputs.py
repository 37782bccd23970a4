"""The outputs of a batch, written where the server and the next model read them.

Decided here: how the members' outputs are laid into one block of the child's own shared memory: side by side, so that
the next model finds them as one array. This is the one time that an output is copied, however it was made. A member
that answered nothing leaves no gap. Strings go as Triton's BYTES encoding.

This file does not know how outputs came about, nor who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowserve.backends.child.protocol import APART, NOTHING, TOGETHER
from flowserve.backends.child.usual import Usual
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, Place, aligned
from flowserve.memory.assemble import pieces
from flowserve.memory.columns import Apart
from flowserve.memory.segment import Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec


class Outputs:
    """Turns columns of tensors into words of a `DONE` message."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._arena = Arena()
        self._known = 0  # how many of the arena's segments the server was told of

    def come_home(self, places: Sequence[Place]) -> None:
        """Nobody reads these blocks any more."""
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
        """One that the server was told of."""
        return next(segment for segment in self._arena.segments if segment.number == number)

    def message(self, message: bytes) -> list[int]:
        """Lay a message down. Its segment, offset and length."""
        segment, offset = self._arena.take(len(message))
        segment.memory[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
        return [segment.number, offset, len(message)]

    def place(self, columns: Sequence[Sequence[Tensor | None]]) -> list[int]:
        """Write `columns[j][m]` into one block. Returns the words from `segment` on."""
        words = [0, 0, 0]
        writes: list[tuple[int, list[Array]]] = []
        size = 0
        for spec, column in zip(self._specs, columns, strict=True):
            if type(column) is Apart:
                size = _alike(column.arrays, size, words, writes)
                continue
            # Without the test for the usual case every batch pays for a list of its own.
            present: Any = column if None not in column else [tensor for tensor in column if tensor is not None]
            if not present:
                words.append(NOTHING)
                continue
            arrays = pieces(present)
            shapes = [array.shape for array in arrays]
            shape = shapes[0]
            # Looked at as a whole: every answer of every batch comes by here.
            alike = shapes.count(shape) == len(shapes)
            if not alike and any(one[1:] != shape[1:] for one in shapes):
                size = self._apart(spec, column, size, words, writes)
                continue
            if len(shapes) > 1:
                shape = (shape[0] * len(shapes) if alike else sum([one[0] for one in shapes]), *shape[1:])
            start = aligned(size) if size else 0
            size = start + _planned(spec, arrays, start, writes)
            absent = [m for m, tensor in enumerate(column) if tensor is None] if present is not column else ()
            words += (TOGETHER, start, size - start, len(absent), *absent, len(shape), *shape)
        if size:
            segment, offset = self._arena.take(size)
            words[:3] = segment.number, offset, size
            for start, arrays in writes:
                segment.write(offset + start, arrays)
        return words

    def place_usual(self, usual: Usual, columns: Sequence[Sequence[Array]]) -> Place:
        """Write the usual answer, `columns[j][m]`, into one block. Where that lies."""
        if not usual.nbytes:
            return 0, 0
        segment, offset = self._arena.take(usual.nbytes)
        for (_, _, start), arrays in zip(usual.pieces, columns, strict=True):
            segment.write(offset + start, arrays)
        return segment.number, offset

    def _apart(
        self,
        spec: TensorSpec,
        column: Sequence[Tensor | None],
        size: int,
        words: list[int],
        writes: list[tuple[int, list[Array]]],
    ) -> int:
        """Plan an output of members whose shapes differ, in a block that has `size` bytes so far. Returns its size
        then.
        """
        words.append(APART)
        for tensor in column:
            if tensor is None:
                words.append(0)
                continue
            array = tensor.array
            start = aligned(size)
            size = start + _planned(spec, [array], start, writes)
            words += (1, start, size - start, array.ndim, *array.shape)
        return size


def _alike(arrays: list[Array], size: int, words: list[int], writes: list[tuple[int, list[Array]]]) -> int:
    """Plan an output of which every member has one row, all of one shape. As `_apart`."""
    first = arrays[0]
    shape = first.shape
    nbytes = first.nbytes * len(arrays)
    start = aligned(size) if size else 0
    words += (TOGETHER, start, nbytes, 0, len(shape), len(arrays), *shape[1:])
    writes.append((start, arrays))
    return start + nbytes


def _planned(spec: TensorSpec, arrays: list[Array], start: int, writes: list[tuple[int, list[Array]]]) -> int:
    """Note that these will be written at `start`, side by side. Returns their bytes."""
    if spec.dtype is DType.BYTES:
        arrays = [np.frombuffer(b"".join(map(bytes_codec.encode, arrays)), np.uint8)]
    writes.append((start, arrays))
    return arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
