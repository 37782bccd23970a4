"""Rows that stand for nobody hold nothing, and nobody can write to them."""

from __future__ import annotations

import numpy as np
import pytest

from flowserve.memory.blank import blank_like
from flowserve.memory.tensor import Tensor
from flowserve.values import DType


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_blank_rows_are_zeros_or_empty_strings_of_the_same_shape(dtype: DType) -> None:
    block = np.ones((3, 2), dtype.numpy)
    blank = blank_like(Tensor(block, 1, 2))
    assert blank.shape == (1, 2)
    assert blank.block.dtype == block.dtype
    nothing = b"" if dtype is DType.BYTES else 0
    assert (blank.array == nothing).all()
    assert not blank.block.flags.writeable
    assert blank_like(Tensor(block, 0, 1)).block is blank.block


def test_a_tensor_without_a_batch_dimension_has_a_blank_without_one() -> None:
    assert blank_like(Tensor(np.ones(3, np.float32))).shape == (3,)
