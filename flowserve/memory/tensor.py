"""A tensor: rows of a block. Here those on the host; device_tensor.py has the others.

Decided here: what lies between two steps is never an array of its own but a range of rows of the block it was
computed in, so that a batch which stays together can be handed on as that block. Slicing is put off until somebody
needs the rows alone. This file does not know graphs, requests or backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flowserve.graph.conversion import Conversion, reshaped
from flowserve.values import HOST_MEMORY, Array, MemoryPlace

if TYPE_CHECKING:
    from flowserve.memory.stream import DeviceStream

WHOLE: Final = -1
T = TypeVar("T")


class Tensor:
    """Rows `start` to `stop` of `block` (axis 0), or all of a block that has no batch dimension (`stop` is WHOLE).

    Two tensors are neighbours when they share the block *object* and the rows of one end where the other's begin; a
    block object is never reused for other contents while a tensor refers to it.
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
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, batch dimension included, without slicing."""
        whole: tuple[int, ...] = self.block.shape
        return whole if self.stop == WHOLE else (self.stop - self.start, *whole[1:])

    @property
    def nbytes(self) -> int:
        """What the rows weigh, without slicing."""
        rows = len(self.block) if self.stop != WHOLE else 0
        return self.block.nbytes * (self.stop - self.start) // rows if rows else self.block.nbytes

    @property
    def place(self) -> MemoryPlace:
        """The memory its rows lie in."""
        return HOST_MEMORY

    def converted(self, conversion: Conversion) -> Tensor:
        """This in another shape: a view wherever the rows lie in one piece, which they do."""
        return in_another_shape(Tensor, self.array, self.stop != WHOLE, conversion)

    def to(self, place: MemoryPlace, stream: DeviceStream) -> Tensor:
        """This in the memory of `place`: itself where it lies there, else a copy, put on the stream and counted."""
        return stream.brought(self, place)

    def __repr__(self) -> str:
        return f"Tensor({self.block.dtype}, {list(self.shape)})"


def in_another_shape(make: Callable[..., T], array: Any, has_rows: bool, conversion: Conversion) -> T:
    """The tensor that `make` makes of an array whose shape was changed. Any array will do that has a shape and
    `reshape`.
    """
    lead = 1 if has_rows else 0
    for dims, target in conversion.reshapes:
        array = array.reshape(array.shape[:lead] + reshaped(array.shape[lead:], dims, target))
    shape = array.shape
    if conversion.batch > 0:
        return make(array.reshape((1, *shape)), 0, 1)
    if conversion.batch < 0:
        return make(array.reshape(shape[1:]) if shape[0] == 1 else array)
    return make(array, 0, shape[0]) if has_rows else make(array)
