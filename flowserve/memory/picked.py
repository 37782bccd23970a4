"""Rows picked from a tensor: a recipe that is copied where it is read, once.

Decides that a batch copies picked rows straight from the tensor that they are in, as runs of neighbouring rows, and
that a reader of an array gets one that is kept. Does not know why these rows were picked. Callers: `rows`, which makes
them, and `column`, which hands their pieces to everything that copies a batch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from flowserve.memory.raw import EncodedBytes
from flowserve.memory.tensor import Tensor
from flowserve.values import Array


class Picked(Tensor):
    """Some rows of another tensor, in an order of their own. `rows`: their numbers there."""

    __slots__ = ("_made", "_of", "_rows")

    def __init__(self, of: Tensor, rows: Array) -> None:
        self._of = of
        self._rows = rows
        self._made: Array | None = None
        self.start = 0
        self.stop = len(rows)

    @property
    def block(self) -> Array:  # type: ignore[override]  # made when it is read
        if self._made is None:
            self._made = np.take(host_array(self._of), self._rows, axis=0)
        return self._made

    @property
    def array(self) -> Array:
        return self.block

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._of.shape[1:])

    @property
    def nbytes(self) -> int:
        of = self._of
        rows = of.stop - of.start
        return of.nbytes * len(self._rows) // rows if rows else 0

    def pieces(self) -> list[Array]:
        """The rows in order, without a copy: views of runs of neighbouring rows."""
        rows, array = self._rows, self._made
        if array is not None or not len(rows):
            return [self.block]
        array = host_array(self._of)
        starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        numbers = rows.tolist()
        return [array[numbers[a] : numbers[b - 1] + 1] for a, b in pairwise(starts)]

    def part(self, start: int, stop: int) -> Picked:
        """Some of these rows."""
        return Picked(self._of, self._rows[start:stop])


def host_array(tensor: Tensor) -> Array:
    """The rows of a tensor in host memory. Text that stayed encoded is decoded."""
    array = tensor.array
    if isinstance(array, EncodedBytes):
        return array.ravel().reshape(array.shape)
    return array
