"""A column: one input or one output of a whole batch.

Decides how a batch's tensors are held as long as they are handled together: as one array with all rows, as one array
for each member, or as one tensor for each member, whichever is known; the other forms are derived on demand. So a batch
that stays together costs no object per member. Does not know models, processes or devices. Callers: workers, backends,
and the IPC with worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Final, overload

import numpy as np

from flowserve.memory.raw import EncodedBytes
from flowserve.memory.recipe import RECIPES, Recipe
from flowserve.memory.tensor import Tensor
from flowserve.values import Array

_ON_HOST: Final = (np.ndarray, EncodedBytes)


class Column(Sequence[Tensor | None]):
    """The members' tensors in order; None for a member without one. `rows[m]` is the row count of member m.

    Made by `whole`, `apart` or `of`. Reads like a list of tensors.
    """

    __slots__ = ("_arrays", "_block", "_is_examined", "_tensors", "rows")

    def __init__(
        self,
        rows: Sequence[int],
        block: Array | None = None,
        arrays: list[Array] | None = None,
        tensors: list[Tensor | None] | None = None,
    ) -> None:
        self.rows = rows
        self._block = block
        self._is_examined = tensors is None  # whether `_block` is known, None if the rows are not in one array
        self._arrays = arrays
        self._tensors = tensors

    @classmethod
    def whole(cls, block: Array, rows: Sequence[int]) -> Column:
        """All rows in one array, those of member m after those of the members before it."""
        return cls(rows, block)

    @classmethod
    def apart(cls, arrays: list[Array], rows: Sequence[int]) -> Column:
        """An array for each member, all of one dtype and one shape except for the number of rows."""
        return cls(rows, None, arrays)

    @classmethod
    def of(cls, tensors: list[Tensor | None], rows: Sequence[int]) -> Column:
        """A tensor for each member, or None."""
        return cls(rows, None, None, tensors)

    @property
    def block(self) -> Array | None:
        """All rows in order as one array on the host, without a copy. None if they are not contiguous there."""
        if not self._is_examined:
            self._is_examined = True
            tensors = self._tensors
            if (
                tensors
                and (one := tensors[0]) is not None
                and type(one) not in RECIPES
                and isinstance(one.block, _ON_HOST)
            ):
                if len(tensors) == 1 and one.start == 0 and one.stop == len(one.block):
                    self._block = one.block
                else:
                    self._block = in_one_piece(tensors)
        return self._block

    @property
    def lacks_some(self) -> bool:
        """Whether a member has no tensor."""
        return self._tensors is not None and None in self._tensors

    @property
    def arrays(self) -> list[Array]:
        """Each member's rows as an array of its own: views. Every member has a tensor."""
        found = self._arrays
        if found is None:
            block, rows = self._block, self.rows
            if block is None:
                found = [tensor.array for tensor in self.tensors if tensor is not None]
            elif len(rows) == 1:
                found = [block]
            elif rows.count(1) == len(rows) and not isinstance(block, EncodedBytes):
                # numpy divides the block itself, at half the cost of slices.
                found = [*block[:, None]]
            else:
                found = [block[stop - n : stop] for n, stop in zip(rows, accumulate(rows), strict=True)]
            self._arrays = found
        return found

    @property
    def pieces(self) -> list[Array]:
        """All rows in order, without a copy: one array, one for each member, or several for a recipe.
        Every member has a tensor.
        """
        block = self._block if self._is_examined else self.block
        if block is not None:
            return [block]
        if self._tensors is None or RECIPES.isdisjoint(map(type, self._tensors)):
            return self.arrays
        return pieces_of(self._tensors)

    @property
    def tensors(self) -> list[Tensor | None]:
        """The members' tensors."""
        found = self._tensors
        if found is None:
            if self._block is not None:
                rows = self.rows
                found = [Tensor(self._block, 0, rows[0])] if len(rows) == 1 else [*scatter(self._block, rows)]
            else:
                found = [Tensor(array, 0, n) for array, n in zip(self._arrays or (), self.rows, strict=True)]
            self._tensors = found
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all members' tensors."""
        block = self._block if self._is_examined else self.block
        return sum([tensor.nbytes for tensor in self.tensors if tensor is not None]) if block is None else block.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor | None] | None:
        return self.tensors[index]

    def __repr__(self) -> str:
        return f"Column({len(self.rows)} members)"


def whole_output(output: Sequence[Tensor | None], rows: Sequence[int]) -> Column | None:
    """A model's output as the input of another model for the same batch: one tensor of all members, which have `rows`.
    None if a member has none, or the members' shapes differ.
    """
    column = output if type(output) is Column else Column.of([*output], rows)
    # A column that is one block is complete.
    if column.block is None and (column.lacks_some or len({one.shape[1:] for one in column if one}) > 1):
        return None
    return column


def pieces_of(tensors: Sequence[Tensor | None]) -> list[Array]:
    """The tensors' rows in order, without a copy, as several arrays. None of `tensors` is None."""
    found: list[Array] = []
    for tensor in tensors:
        assert tensor is not None
        found += tensor.pieces() if isinstance(tensor, Recipe) else [tensor.array]
    return found


def in_one_piece(tensors: Sequence[Tensor | None]) -> Array | None:
    """The tensors' rows in order as one array, without a copy; None if they are not contiguous, or one is missing."""
    if type(tensors) is Column:
        return tensors.block
    first = tensors[0]
    if first is None or type(first) in RECIPES:
        return None
    block = first.block
    stop = first.start
    for tensor in tensors:
        if tensor is None or tensor.start != stop or tensor.block is not block:  # the block of a recipe is a copy
            return None
        stop = tensor.stop
    return block if stop < 0 or (first.start == 0 and stop == len(block)) else block[first.start : stop]


def scatter(array: Array, rows: Sequence[int]) -> list[Tensor]:
    """The members' tensors of a batch's `array`: `rows[m]` rows each, in order. The array is not sliced yet."""
    if len(rows) == 1:
        return [Tensor(array, 0, rows[0])]
    stops = list(accumulate(rows))
    return list(map(Tensor, repeat(array), [0, *stops], stops))
