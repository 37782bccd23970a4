"""Columns of a batch: whoever asks for a member's tensor, or its rows, gets what a list of tensors would have given."""

from __future__ import annotations

import numpy as np
import pytest

from flowserve.memory.assemble import pieces
from flowserve.memory.columns import Apart, Together


@pytest.mark.parametrize("rows", [[1], [1, 1, 1], [2, 1, 3], [0, 2, 0], [4]])
def test_members_side_by_side_are_views_of_their_rows(rows: list[int]) -> None:
    block = np.arange(sum(rows) * 3, dtype=np.float32).reshape(-1, 3)
    column = Together(block, rows)
    starts = np.cumsum([0, *rows])
    wanted = [block[start : start + n].tolist() for start, n in zip(starts, rows, strict=False)]
    assert [array.tolist() for array in column.arrays()] == wanted
    assert [tensor.array.tolist() for tensor in column] == wanted
    assert [column[m].array.tolist() for m in range(len(column))] == wanted
    assert [tensor.array.tolist() for tensor in column[1:]] == wanted[1:]
    assert all(np.shares_memory(array, block) for array in column.arrays() if array.size)
    assert pieces(column)[0] is block
    assert column[0] is column[0], "who asks for one after the other does not cut all of them each time"


def test_members_in_arrays_of_their_own_are_these_arrays() -> None:
    arrays = [np.full((1, 2), number, np.float32) for number in range(3)]
    column = Apart(arrays)
    assert [tensor.array is array for tensor, array in zip(column, arrays, strict=True)] == [True] * 3
    assert column[-1].array is arrays[2]
    assert [tensor.shape for tensor in column[:2]] == [(1, 2)] * 2
