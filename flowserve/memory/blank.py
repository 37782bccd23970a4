"""Rows that stand for nobody: zeros of another tensor's type and shape.

Decided here: that a place in a batch which nobody has holds zeros (empty strings), never what was in memory before,
and that such rows are made once and shared. This file does not know why a place is empty.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A read-only array of zeros, or of empty strings."""
    array: Array = np.zeros(shape, dtype)
    if dtype.hasobject:
        array.fill(b"")
    array.flags.writeable = False
    return array


_shared_zeros = lru_cache(maxsize=64)(zeros)


def blank_like(tensor: Tensor) -> Tensor:
    """As many rows as `tensor` has, of its type and shape, that hold nothing. Not to be written to."""
    array = _shared_zeros(tensor.shape, tensor.block.dtype)
    return Tensor(array) if tensor.stop == WHOLE else Tensor(array, 0, len(array))
