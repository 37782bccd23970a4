"""Padding rows are empty and read-only."""

from __future__ import annotations

import numpy as np
import pytest

from flowserve.memory.assemble import padding_like
from flowserve.memory.tensor import Tensor
from flowserve.values import DType


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_padding_rows_are_zeros_or_empty_strings_of_the_same_shape(dtype: DType) -> None:
    block = np.ones((3, 2), dtype.numpy)
    padding = padding_like(Tensor(block, 1, 2))
    assert padding.shape == (1, 2)
    assert padding.block.dtype == block.dtype
    nothing = b"" if dtype is DType.BYTES else 0
    assert (padding.array == nothing).all()
    assert not padding.block.flags.writeable
    assert padding_like(Tensor(block, 0, 1)).block is padding.block


def test_padding_for_a_tensor_without_a_batch_dimension_has_none() -> None:
    assert padding_like(Tensor(np.ones(3, np.float32))).shape == (3,)
