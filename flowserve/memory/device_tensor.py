"""Tensors in device memory: the array type, rows of it, and tensors with copies in several memories.

Decides: a tensor on a device is rows of a block, as on the host (`tensor`), so that a batch that stays together is
passed on as that block there too. A device tensor never converts itself to a numpy array: implicit copies to the host
are what makes pipelines slow. Does not copy or wait; `stream` does. Callers: `stream`, GPU workers and backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NoReturn

import numpy as np

from flowserve.graph.types import Conversion
from flowserve.memory.device import Event
from flowserve.memory.device_memory import Block
from flowserve.memory.tensor import WHOLE, Tensor, apply_conversion
from flowserve.values import MemoryPlace

NOT_ON_THE_HOST: Final = "this tensor lies in {place}, not on the host"


@dataclass(slots=True, eq=False, repr=False)
class DeviceArray:
    """Elements in row-major order in a block: the counterpart of `np.ndarray`, without arithmetic.

    `ready` is the event after which the elements are valid, None while the work that computes them is still being added
    to its stream.
    """

    block: Block
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int = 0
    ready: Event | None = None

    @property
    def place(self) -> MemoryPlace:
        return self.block.place

    @property
    def address(self) -> int:
        return self.block.address + self.offset

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> DeviceArray:
        """A view of some rows. For all rows it is this same object, because neighbours are compared by identity."""
        if start == 0 and stop == self.shape[0]:
            return self
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(
            self.block, self.dtype, (stop - start, *self.shape[1:]), self.offset + start * row, self.ready
        )

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """The same elements in another shape of equal size."""
        assert prod(shape) == prod(self.shape)
        return DeviceArray(self.block, self.dtype, shape, self.offset, self.ready)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(NOT_ON_THE_HOST.format(place=self.place))

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}, {list(self.shape)}, {self.place})"


class DeviceTensor(Tensor):
    """Rows of a `DeviceArray`."""

    __slots__ = ()

    block: DeviceArray  # type: ignore[assignment]  # it has every attribute of a block that Tensor uses

    def __init__(self, block: DeviceArray, start: int = 0, stop: int = WHOLE) -> None:
        super().__init__(block, start, stop)  # type: ignore[arg-type]  # see above

    @property
    def place(self) -> MemoryPlace:
        return self.block.place

    @property
    def array(self) -> NoReturn:
        raise TypeError(NOT_ON_THE_HOST.format(place=self.place))

    @property
    def elements(self) -> DeviceArray:
        """The rows as one array: a view, never a copy."""
        return self.block if self.stop == WHOLE else self.block.rows(self.start, self.stop)

    def part(self, start: int, stop: int) -> DeviceTensor:
        return DeviceTensor(self.block, self.start + start, self.start + stop)

    def viewed(self, shape: tuple[int, ...], *, has_rows: bool) -> DeviceTensor:
        return DeviceTensor(self.elements.reshape(shape), 0, shape[0] if has_rows else WHOLE)

    def converted(self, conversion: Conversion) -> DeviceTensor:
        return apply_conversion(DeviceTensor, self.elements, self.stop != WHOLE, conversion)


class Mirror(Tensor):
    """Rows on the host with copies on devices, for several readers in different places.

    `copies` are keyed by device number; code that makes another copy adds it under the lock of that device's memory
    (`DeviceMemory.sharing`). `original` is the tensor as computed on a device, None if it came from the host; copies
    for other devices are made from it.
    """

    __slots__ = ("copies", "original")

    def __init__(self, tensor: Tensor, original: DeviceTensor | None = None) -> None:
        super().__init__(tensor.block, tensor.start, tensor.stop)
        self.original = original
        self.copies: dict[int, DeviceTensor] = {} if original is None else {original.place.number: original}

    def part(self, start: int, stop: int) -> Mirror:
        """Some of its rows, with those of the copies that there are."""
        made = Mirror(super().part(start, stop), None if self.original is None else self.original.part(start, stop))
        made.copies.update((number, copy.part(start, stop)) for number, copy in [*self.copies.items()])
        return made

    def viewed(self, shape: tuple[int, ...], *, has_rows: bool) -> Mirror:
        original = None if self.original is None else self.original.viewed(shape, has_rows=has_rows)
        return Mirror(super().viewed(shape, has_rows=has_rows), original)

    def converted(self, conversion: Conversion) -> Mirror:
        original = None if self.original is None else self.original.converted(conversion)
        return Mirror(super().converted(conversion), original)


class DeviceMirror(DeviceTensor):
    """Rows on a device with copies on other devices, as in a `Mirror`."""

    __slots__ = ("copies",)

    def __init__(self, tensor: DeviceTensor) -> None:
        super().__init__(tensor.block, tensor.start, tensor.stop)
        self.copies: dict[int, DeviceTensor] = {}


SHARED: Final = (Mirror, DeviceMirror)


def runs(tensors: Sequence[DeviceTensor]) -> list[DeviceArray]:
    """The tensors' rows in order, as one array per group of neighbours."""
    found: list[DeviceArray] = []
    start = 0
    for m, tensor in enumerate(tensors):
        if m + 1 < len(tensors) and tensors[m + 1].block is tensor.block and tensors[m + 1].start == tensor.stop:
            continue
        first = tensors[start]
        found.append(first.block if first.stop == WHOLE else first.block.rows(first.start, tensor.stop))
        start = m + 1
    return found
