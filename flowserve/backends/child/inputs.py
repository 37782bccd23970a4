"""The inputs of a batch, as a model's process sees them.

Decided here: where tensors lie that others wrote, and what becomes of the memory once the model is done with them.
Everything is mapped privately: a model may write into any of its inputs, and only its own pages change. After the run
those pages are thrown away, or a block that is used again would show them; only a model that goes on holding an
input keeps its pages, and the server is told when it has let go. A tensor that lies where such a held one does is
read past its pages.

This file does not know what is done with the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowserve.memory import bytes_codec
from flowserve.memory.assemble import scatter
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

# Where bytes lie: a segment's number, first and last offset.
Range = tuple[Segment, int, int]


class Run:
    """What one batch has in hands. `ended` counts leases that are over; it is a list because its append is atomic."""

    __slots__ = ("ended", "leases", "number", "ranges")

    def __init__(self, number: int) -> None:
        self.number = number
        self.leases = 0
        self.ended: list[None] = []
        self.ranges: list[Range] = []

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.leases


class Inputs:
    """Turns columns of a `RUN` message into tensors."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool, let_go: Callable[[], None]) -> None:
        self._model = model
        self._specs = specs
        self._batches = batches
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, Run] = {}  # by number: runs whose inputs the model still holds
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
        return [self._column(run, spec, column, members) for spec, column in zip(self._specs, columns, strict=True)]

    def finish(self, run: Run) -> bool:
        """The run is over and its tensors are dropped. Whether the model still holds some of them."""
        if run.is_over:
            self._forget_writes(run)
            return False
        self._held[run.number] = run
        if run.is_over:  # in between, on a thread of the model's
            self._late(run)
        return True

    def _column(self, run: Run, spec: TensorSpec, column: Any, members: int) -> list[Tensor | None]:
        if column is None:
            return [None] * members
        if type(column) is list:
            return [None if one is None else self._whole(run, spec, *one) for one in column]
        segment, offset, nbytes, shape, rows = column
        array = self._array(run, spec, segment, offset, nbytes, shape)
        if self._batches:
            return [*scatter(array, rows)]
        return [Tensor(array)]

    def _whole(self, run: Run, spec: TensorSpec, segment: int, offset: int, nbytes: int, shape: Any) -> Tensor:
        array = self._array(run, spec, segment, offset, nbytes, shape)
        return Tensor(array, 0, len(array)) if self._batches else Tensor(array)

    def _array(self, run: Run, spec: TensorSpec, number: int, offset: int, nbytes: int, shape: Any) -> Array:
        dtype = spec.dtype
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        memory = self._memory(run, self._segments[number], offset, nbytes)
        if dtype is DType.BYTES:
            count = int(np.prod(shape))
            return bytes_codec.decode(memory.data, count, name=spec.name, model=self._model).reshape(shape)
        return np.ndarray(shape, dtype.numpy, memory)

    def _memory(self, run: Run, segment: Segment, offset: int, nbytes: int) -> Array:
        if self._held and self._is_held(segment, offset, offset + nbytes):
            copy = np.empty(nbytes, np.uint8)
            segment.read_into(copy, offset)
            return copy
        run.leases += 1
        run.ranges.append((segment, offset, offset + nbytes))
        return Lease(segment, offset, nbytes, self._ended, run).view()

    def _ended(self, run: Run) -> None:
        """One lease is over: mostly before the run is, else on whatever thread the model let go on."""
        run.ended.append(None)
        if self._held and run.is_over:
            self._late(run)

    def _late(self, run: Run) -> None:
        if self._held.pop(run.number, None) is not None:  # once, whoever comes first
            self._forget_writes(run)
            self.gone.append(run.number)
            self._let_go()

    def _forget_writes(self, run: Run) -> None:
        for piece in run.ranges:
            holder = self._holder(piece) if self._held else None
            if holder is None:
                piece[0].forget_writes(piece[1], piece[2])
            else:
                holder.ranges.append(piece)  # they share a page: its writes go when both are over

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
