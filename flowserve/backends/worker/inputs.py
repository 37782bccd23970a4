"""The inputs of a batch, read where other processes wrote them.

Decides how tensors in shared memory become arrays, and when their pages are reset. All memory is mapped privately: a
model may write to its inputs, and only the pages of its own process change. After the run the written pages are
discarded, since a block that is reused would show them. If the model keeps an input (a view of it is alive, as its
reference count shows), its pages stay, and the server is notified once the model has released it. A later tensor at the
same place is copied past those pages.

It does not know what is done with the tensors. Called by driver.py.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from sys import getrefcount
from typing import Any

import numpy as np

from flowserve.backends.shapes import fits
from flowserve.memory import bytes_codec
from flowserve.memory.column import Column
from flowserve.memory.segment import PAGE, PageTable, Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

# A range of bytes: a segment, its first offset, and the offset behind its last.
Range = tuple[Segment, int, int]


class Run:
    """The arrays of one batch over memory that other processes wrote, and the range of each. After the run, `leases`
    are those that the model kept, and `ended` those that it has released since: a list, as its append is atomic.
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


class InputReader:
    """Turns columns of a `RUN` message into tensors."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool, let_go: Callable[[], None]) -> None:
        self._model = model
        self._specs = specs
        self._is_free = [set(spec.dims) == {-1} for spec in specs]  # whether all dims may vary
        self._batches = batches
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, Run] = {}  # by number: runs whose inputs the model keeps
        self._pages = PageTable()
        self._let_go = let_go  # called on any thread after `gone` has grown
        self.gone: deque[int] = deque()  # numbers of runs whose inputs the model has released

    def attach(self, number: int, fd: int) -> None:
        """Memory that inputs will be in. Takes `fd`."""
        if number in self._segments:  # the server and another process may both show it
            os.close(fd)
            return
        self._segments[number] = Segment.read_private(fd, number)

    def detach(self, numbers: Sequence[int]) -> None:
        """These segments hold no inputs any more."""
        for number in numbers:
            self._segments.pop(number, None)

    def segment(self, number: int) -> Segment | None:
        """The attached segment with that number."""
        return self._segments.get(number)

    def message(self, number: int, offset: int, nbytes: int) -> bytes:
        """A message in shared memory."""
        copy = np.empty(nbytes, np.uint8)
        self._segments[number].read_into(copy, offset)
        return copy.tobytes()

    def fit(self, columns: Sequence[Any]) -> bool:
        """Whether these columns, which another worker process has written, have the dims of the configuration."""
        for spec, is_free, column in zip(self._specs, self._is_free, columns, strict=True):
            if type(column) is not tuple:
                return False
            shape = column[3]
            if len(shape) != len(spec.dims) + self._batches:
                return False
            if not (is_free or fits(shape[1:] if self._batches else shape, spec.dims)):
                return False
        return True

    def take(self, run: Run, columns: Sequence[Any], rows: Sequence[int]) -> list[Column]:
        """`inputs[i]` of the batch, in the shapes of the configuration. `rows[m]`: those of member m."""
        inputs: list[Column] = []
        for spec, column in zip(self._specs, columns, strict=True):
            if column is None:
                inputs.append(Column.of([None] * len(rows), rows))
            elif type(column) is list:
                tensors = [None if one is None else self._whole(run, spec, *one) for one in column]
                inputs.append(Column.of(tensors, rows))
            else:
                array = self._array(run, spec, *column)
                inputs.append(Column(rows, array) if self._batches else Column.of([Tensor(array)], rows))
        return inputs

    def finish(self, run: Run) -> bool:
        """End a run, whose tensors the caller has dropped. Returns whether the model keeps some of them."""
        for array in run.arrays:
            if getrefcount(array) > _ALONE:
                del array
                self._keep(run)
                return True
        run.arrays.clear()
        self._forget_writes(run)
        return False

    def _keep(self, run: Run) -> None:
        # A thread of the model may release an input at this moment: the callbacks exist before the run is in `_held`.
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
        memory: Any = segment.map  # the array is no view of another: the model's views have it as base
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
        """A lease has ended, on any thread."""
        run.ended.append(lease)
        if run.is_over:
            self._late(run)

    def _late(self, run: Run) -> None:
        if self._held.pop(run.number, None) is not None:  # only the first of two threads
            self._forget_writes(run)
            self.gone.append(run.number)
            self._let_go()

    def _forget_writes(self, run: Run) -> None:
        for piece in run.ranges:
            while (holder := self._holder(piece) if self._held else None) is not None:
                holder.ranges.append(piece)  # they share a page, which is reset when both have ended
                if holder.number in self._held:
                    break  # else the holder ended at this moment, perhaps without this range
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
    """The reference count of the first array, as `finish` reads it."""
    for array in arrays:
        return getrefcount(array)
    return 0


# That count without any other reference. Measured, since it differs between versions of Python.
_ALONE = _holders([np.empty(0)])
