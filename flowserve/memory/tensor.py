"""A tensor: rows of a block in host memory. `device_tensor` has the tensors in device memory.

Decides: a tensor between two steps is never an array of its own but a range of rows of the block it was computed in, so
that a batch that stays together can be passed on as that block. Slicing is deferred until the rows are needed alone.
Does not know: graphs, requests, backends, devices. Callers: every package that handles tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np

from flowserve.graph.types import Conversion, reshaped
from flowserve.values import HOST_MEMORY, Array, MemoryPlace, fits

WHOLE: Final = -1
T = TypeVar("T")


class Tensor:
    """Rows `start` to `stop` of `block` (axis 0), or all of a block without a batch dimension (`stop` is WHOLE).

    Two tensors are neighbours if they share the block *object* and the rows of one end where the rows of the other
    begin. A block object is never reused for other contents while a tensor refers to it.
    """

    __slots__ = ("block", "start", "stop")

    def __init__(self, block: Array, start: int = 0, stop: int = WHOLE) -> None:
        self.block = block
        self.start = start
        self.stop = stop

    @property
    def array(self) -> Array:
        """The rows as one array: a view, never a copy."""
        if self.stop == WHOLE or (self.start == 0 and self.stop == len(self.block)):
            return self.block
        return self.block[self.start : self.stop]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements."""
        found: np.dtype[Any] = self.block.dtype
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, batch dimension included, without slicing."""
        whole: tuple[int, ...] = self.block.shape
        return whole if self.stop == WHOLE else (self.stop - self.start, *whole[1:])

    @property
    def nbytes(self) -> int:
        """The size of the rows in bytes, without slicing."""
        rows = len(self.block) if self.stop != WHOLE else 0
        return self.block.nbytes * (self.stop - self.start) // rows if rows else self.block.nbytes

    @property
    def place(self) -> MemoryPlace:
        """The memory that holds the rows."""
        return HOST_MEMORY

    def part(self, start: int, stop: int) -> Tensor:
        """Some of its rows, counted from its first. No copy."""
        return Tensor(self.block, self.start + start, self.start + stop)

    def viewed(self, shape: tuple[int, ...], *, has_rows: bool) -> Tensor:
        """The same elements in another shape of equal size. `has_rows`: whether its first dimension is that of rows."""
        return Tensor(self.array.reshape(shape), 0, shape[0] if has_rows else WHOLE)

    def converted(self, conversion: Conversion) -> Tensor:
        """This tensor in another shape: always a view, because the rows are contiguous."""
        return apply_conversion(Tensor, self.array, self.stop != WHOLE, conversion)

    def __repr__(self) -> str:
        return f"Tensor({self.block.dtype}, {list(self.shape)})"


def apply_conversion(make: Callable[..., T], array: Any, has_rows: bool, conversion: Conversion) -> T:
    """The tensor that `make` builds from `array` in its converted shape. `array` needs only `shape` and `reshape`."""
    for dims, target in conversion.reshapes:
        # If only one end has a batch dimension, the dims may be the full shape at the other.
        lead = 1 if (len(array.shape) > len(dims) if conversion.batch else has_rows) else 0
        array = array.reshape(array.shape[:lead] + reshaped(array.shape[lead:], dims, target))
    shape = array.shape
    if conversion.batch > 0:
        if fits(shape, conversion.wanted):
            return make(array.reshape((1, *shape)), 0, 1)
        return make(array, 0, shape[0]) if shape else make(array)
    if conversion.batch < 0:
        is_stripped = shape[:1] == (1,) and not fits(shape, conversion.wanted)
        return make(array.reshape(shape[1:]) if is_stripped else array)
    return make(array, 0, shape[0]) if has_rows else make(array)


def with_rows(array: Array) -> Tensor:
    """An array whose first dimension is that of its rows. A number without dimensions has no rows."""
    return Tensor(array, 0, len(array)) if array.ndim else Tensor(array)
