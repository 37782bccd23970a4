"""A batch's tensors for one input or output, of which nothing is made for a member before somebody asks for it.

Decided here: what is known of the column as a whole is kept as a whole: the one array that its members' rows lie in, or
the arrays that are theirs one by one. Whoever wants tensors reads them as from a list. It is for those who take and
give whole batches, where an object for each member costs as much as what a cheap model does with it. This file does not
know processes, nor models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

from flowserve.memory.assemble import scatter
from flowserve.memory.tensor import Tensor
from flowserve.values import Array


class Together(Sequence[Tensor]):
    """Members side by side in `array`, `rows[m]` rows each."""

    __slots__ = ("_tensors", "array", "rows")

    def __init__(self, array: Array, rows: Sequence[int]) -> None:
        self.array = array
        self.rows = rows
        self._tensors: list[Tensor] | None = None  # once one was asked for: the others will be

    def arrays(self) -> list[Array]:
        """Each member's rows: views."""
        rows = self.rows
        count = len(rows)
        if count == 1:
            return [self.array]
        if rows.count(1) == count:  # cut by numpy itself, at half of what slices cost
            return [*self.array[:, None]]
        return [self.array[stop - n : stop] for n, stop in zip(rows, accumulate(rows), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        tensors = self._tensors
        if tensors is None:
            tensors = self._tensors = scatter(self.array, self.rows)
        return tensors[index]


class Apart(Sequence[Tensor]):
    """Members of one row each, of one type and shape, in arrays of their own: `arrays[m]`."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [Tensor(array, 0, 1) for array in self.arrays[index]]
        return Tensor(self.arrays[index], 0, 1)
