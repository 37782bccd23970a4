"""Columns of a batch: members' tensors and rows are the same as from a list of tensors."""

from __future__ import annotations

import numpy as np
import pytest

from flowserve.memory.assemble import pieces
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor


@pytest.mark.parametrize("rows", [[1], [1, 1, 1], [2, 1, 3], [0, 2, 0], [4]])
def test_contiguous_members_are_views_of_their_rows(rows: list[int]) -> None:
    block = np.arange(sum(rows) * 3, dtype=np.float32).reshape(-1, 3)
    column = Column.whole(block, rows)
    starts = np.cumsum([0, *rows])
    wanted = [block[start : start + n].tolist() for start, n in zip(starts, rows, strict=False)]
    assert [array.tolist() for array in column.arrays] == wanted
    assert [tensor.array.tolist() for tensor in column if tensor is not None] == wanted
    assert [tensor.array.tolist() for m in range(len(column)) if (tensor := column[m]) is not None] == wanted
    assert [tensor.array.tolist() for tensor in column[1:] if tensor is not None] == wanted[1:]
    assert all(np.shares_memory(array, block) for array in column.arrays if array.size)
    assert pieces([tensor for tensor in column if tensor is not None])[0] is block
    assert column[0] is column[0], "the tensors are created once"


def test_members_in_arrays_of_their_own_are_these_arrays() -> None:
    arrays = [np.full((1, 2), number, np.float32) for number in range(3)]
    column = Column.apart(arrays, [1] * 3)
    assert [tensor is not None and tensor.array is array for tensor, array in zip(column, arrays, strict=True)] == [
        True
    ] * 3
    last = column[-1]
    assert last is not None
    assert last.array is arrays[2]
    assert [tensor.shape for tensor in column[:2] if tensor is not None] == [(1, 2)] * 2


def test_a_column_of_tensors_is_one_array_where_they_are_neighbours() -> None:
    block = np.arange(8, dtype=np.float32).reshape(4, 2)
    neighbours: list[Tensor | None] = [Tensor(block, 0, 1), Tensor(block, 1, 4)]
    column = Column.of(neighbours, [1, 3])
    assert column.block is block
    assert not column.lacks_some
    assert Column.of([Tensor(block, 1, 4), Tensor(block, 0, 1)], [3, 1]).block is None
    with_a_gap = Column.of([Tensor(block, 0, 1), None], [1, 3])
    assert with_a_gap.block is None
    assert with_a_gap.lacks_some
    assert [*with_a_gap] == [with_a_gap[0], None]
