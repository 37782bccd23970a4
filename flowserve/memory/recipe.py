"""A tensor whose rows are in several places: picked from another tensor, or joined from several tensors in order.

Decides that such rows are not copied when they are chosen but when they are read: a batch copies them directly from the
tensors that contain them, on the host or on a device, and an array that a reader needs is made once and kept. Does not
know why these rows belong together. Callers: `rows`, which makes them; `column` and `stream`, which pass their parts to
the code that copies a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from flowserve.graph.types import Conversion
from flowserve.memory.raw import EncodedBytes
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, Array, MemoryPlace


class Recipe(Tensor, ABC):
    """A tensor whose rows are elsewhere. It always has a batch dimension, and its rows count from 0."""

    __slots__ = ("_made",)

    _made: Array | None

    @abstractmethod
    def parts(self) -> list[Tensor]:
        """The rows in order, as ranges of other tensors, none of which is a recipe."""

    def pieces(self) -> list[Array]:
        """The rows in order, as arrays on the host, without a copy. Text that stayed encoded is decoded."""
        return [self._made] if self._made is not None else [*map(host_array, self.parts())]

    @property
    def block(self) -> Array:  # type: ignore[override]  # made when it is first read
        if self._made is None:
            pieces = self.pieces()
            self._made = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return self._made

    @property
    def array(self) -> Array:
        return self.block

    @property
    def place(self) -> MemoryPlace:
        """The memory of a part that is not on the host, if there is one."""
        return next((part.place for part in self.parts() if part.place != HOST_MEMORY), HOST_MEMORY)

    @property
    def nbytes(self) -> int:
        return sum([part.nbytes for part in self.parts()])


class Picked(Recipe):
    """Some rows of another tensor, in any order. `rows`: their numbers there, at least one."""

    __slots__ = ("_of", "_rows")

    def __init__(self, of: Tensor, rows: Array) -> None:
        self._of = of
        self._rows = rows
        self._made = None
        self.start = 0
        self.stop = len(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._of.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._of.dtype

    def parts(self) -> list[Tensor]:
        rows, of = self._rows, self._of
        numbers = rows.tolist()
        starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        return parts_of([of.part(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(starts)])

    def part(self, start: int, stop: int) -> Tensor:
        return Picked(self._of, self._rows[start:stop])

    def converted(self, conversion: Conversion) -> Tensor:
        return super().converted(conversion) if conversion.batch else Picked(self._of.converted(conversion), self._rows)


class Joined(Recipe):
    """The rows of several tensors, one after the other. They agree in dtype and in every dimension but the first."""

    __slots__ = ("_parts",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = parts_of(tensors)
        self._made = None
        self.start = 0
        self.stop = sum([one.stop - one.start for one in self._parts])

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop, *self._parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._parts[0].dtype

    def parts(self) -> list[Tensor]:
        return self._parts

    def part(self, start: int, stop: int) -> Tensor:
        found = []
        first = 0  # the number of the part's first row
        for part in self._parts:
            rows = part.stop - part.start
            a, b = max(start - first, 0), min(stop - first, rows)
            if a < b:
                found.append(part.part(a, b))
            first += rows
        return found[0] if len(found) == 1 else Joined(found)

    def converted(self, conversion: Conversion) -> Tensor:
        if conversion.batch:
            return super().converted(conversion)
        return Joined([part.converted(conversion) for part in self._parts])


RECIPES: Final = frozenset({Picked, Joined})


def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same rows, as tensors that are no recipes."""
    if RECIPES.isdisjoint(map(type, tensors)):
        return [*tensors]
    found: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, Recipe):
            found += tensor.parts()
        else:
            found.append(tensor)
    return found


def host_array(tensor: Tensor) -> Array:
    """The rows of a tensor in host memory. Text that stayed encoded is decoded."""
    array = tensor.array
    if isinstance(array, EncodedBytes):
        return array.ravel().reshape(array.shape)
    return array
