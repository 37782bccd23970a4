"""The inputs of a batch, as a model's process sees them.

Decided here: where tensors lie that others wrote, and what becomes of the memory once the model is done with them.
Everything is mapped privately: a model may write into any of its inputs, and only its own pages change. After the run
pages that it wrote into are thrown away, or a block that is used again would show them; only a model that goes on
holding an input keeps its pages, and the server is told when it has let go. A tensor that lies where such a held one
does is read past its pages.

Whether an input is held its array's reference count tells: every view of it, however far derived, stands on it.

This file does not know what is done with the tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from sys import getrefcount
from typing import Any

import numpy as np

from flowserve.memory import bytes_codec
from flowserve.memory.columns import Together
from flowserve.memory.pages import PageTable
from flowserve.memory.segment import PAGE, Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

# Where bytes lie: a segment's number, first and last offset.
Range = tuple[Segment, int, int]


class Run:
    """What one batch has in hands: arrays over memory that others wrote, and where each of them lies. Once it is over,
    `leases` are those that the model held then; `ended` counts those that it has let go of since, and is a list
    because its append is atomic.
    """

    __slots__ = ("arrays", "ended", "leases", "number", "ranges")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrays: list[Array] = []
        self.ranges: list[Range] = []
        self.leases: list[weakref.ref[Array]] = []
        self.ended: list[object] = []

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.leases)


class Inputs:
    """Turns columns of a `RUN` message into tensors."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool, let_go: Callable[[], None]) -> None:
        self._model = model
        self._specs = specs
        self._batches = batches
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, Run] = {}  # by number: runs whose inputs the model still holds
        self._pages = PageTable()
        self._let_go = let_go  # called, on any thread, when there is something in `gone`
        self.gone: deque[int] = deque()  # numbers of runs that were held and are no more

    def attach(self, number: int, fd: int) -> None:
        """Memory that inputs will lie in. Takes `fd`."""
        self._segments[number] = Segment.read_private(fd, number)

    def detach(self, numbers: Sequence[int]) -> None:
        """Nothing will lie in these any more."""
        for number in numbers:
            self._segments.pop(number, None)

    def message(self, number: int, offset: int, nbytes: int) -> bytes:
        """A message that lies in shared memory."""
        copy = np.empty(nbytes, np.uint8)
        self._segments[number].read_into(copy, offset)
        return copy.tobytes()

    def take(self, run: Run, columns: Sequence[Any], members: int) -> list[list[Tensor | None]]:
        """`inputs[i][m]` of the batch, in the shapes of the configuration."""
        inputs: list[Any] = []  # what is no list is read as one
        for spec, column in zip(self._specs, columns, strict=True):
            if column is None:
                inputs.append([None] * members)
            elif type(column) is list:
                inputs.append([None if one is None else self._whole(run, spec, *one) for one in column])
            else:
                segment, offset, nbytes, shape, rows = column
                array = self._array(run, spec, segment, offset, nbytes, shape)
                inputs.append(Together(array, rows) if self._batches else [Tensor(array)])
        return inputs

    def take_whole(self, run: Run, columns: Sequence[Any]) -> list[Array] | None:
        """`inputs[i]` of all members, side by side. None where some of them lie apart, or are not there, with nothing
        done.
        """
        for column in columns:
            if type(column) is not tuple:
                return None
        inputs = []
        segments, is_any_held = self._segments, bool(self._held)
        for spec, (number, offset, nbytes, shape, _) in zip(self._specs, columns, strict=True):
            if is_any_held or not nbytes or spec.dtype is DType.BYTES:
                array = self._array(run, spec, number, offset, nbytes, shape)
            else:  # as there, written out: nearly every batch comes by here, and calls are what it costs
                segment = segments[number]
                array = np.ndarray(shape, spec.dtype.numpy, segment.map, offset)
                run.arrays.append(array)
                run.ranges.append((segment, offset, offset + nbytes))
            inputs.append(array)
        return inputs

    def finish(self, run: Run) -> bool:
        """The run is over and its tensors are dropped. Whether the model still holds some of them."""
        for array in run.arrays:
            if getrefcount(array) > _ALONE:
                del array
                self._keep(run)
                return True
        run.arrays.clear()
        self._forget_writes(run)
        return False

    def _keep(self, run: Run) -> None:
        # The model may let go in this moment, on a thread of its own: told of each as soon as it stands in `_held`.
        run.leases = [weakref.ref(array, partial(self._ended, run)) for array in run.arrays]
        self._held[run.number] = run
        run.arrays.clear()

    def _whole(self, run: Run, spec: TensorSpec, segment: int, offset: int, nbytes: int, shape: Any) -> Tensor:
        array = self._array(run, spec, segment, offset, nbytes, shape)
        return Tensor(array, 0, len(array)) if self._batches else Tensor(array)

    def _array(self, run: Run, spec: TensorSpec, number: int, offset: int, nbytes: int, shape: Any) -> Array:
        dtype = spec.dtype
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        segment = self._segments[number]
        memory: Any = segment.map  # an array over it is nobody's view: what the model derives from it stands on it
        start = offset
        if self._held and self._is_held(segment, offset, offset + nbytes):
            memory, start = np.empty(nbytes, np.uint8), 0
            segment.read_into(memory, offset)
        if dtype is DType.BYTES:
            encoded = memoryview(memory)[start : start + nbytes]
            return bytes_codec.decode(encoded, prod(shape), name=spec.name, model=self._model).reshape(shape)
        array = np.ndarray(shape, dtype.numpy, memory, start)
        if memory is segment.map:
            run.arrays.append(array)
            run.ranges.append((segment, offset, offset + nbytes))
        return array

    def _ended(self, run: Run, lease: object) -> None:
        """One lease is over, on whatever thread the model let go."""
        run.ended.append(lease)
        if run.is_over:
            self._late(run)

    def _late(self, run: Run) -> None:
        if self._held.pop(run.number, None) is not None:  # once, whoever comes first
            self._forget_writes(run)
            self.gone.append(run.number)
            self._let_go()

    def _forget_writes(self, run: Run) -> None:
        for piece in run.ranges:
            while (holder := self._holder(piece) if self._held else None) is not None:
                holder.ranges.append(piece)  # they share a page: its writes go when both are over
                if holder.number in self._held:
                    break  # else the model let go of it in this very moment, and it may not have seen this piece
            else:
                if self._pages.is_written(*piece):
                    piece[0].forget_writes(piece[1], piece[2])

    def _holder(self, piece: Range) -> Run | None:
        segment, start, stop = piece
        first, last = start - start % PAGE, -(-stop // PAGE) * PAGE
        for run in [*self._held.values()]:
            if any(where is segment and begin < last and first < end for where, begin, end in run.ranges):
                return run
        return None

    def _is_held(self, segment: Segment, start: int, stop: int) -> bool:
        return any(
            where is segment and begin < stop and start < end
            for run in [*self._held.values()]
            for where, begin, end in run.ranges
        )


def _holders(arrays: list[Array]) -> int:
    """How many hold the first of these, as `finish` counts them."""
    for array in arrays:
        return getrefcount(array)
    return 0


# What that counts when nobody else holds anything. Measured here rather than written down: how many references a call
# itself makes differs between versions of Python.
_ALONE = _holders([np.empty(0)])
