"""Batch assembly: the tensors of a batch's members become one array, one array becomes members' tensors, and padding.

Decides when a batch is passed on as the block it already is, and when it is copied. Members that are neighbours in one
block cost nothing, whatever the batcher did in between; otherwise (a gap, a member from another block, another order)
the whole input is copied once. Rows of other members are never part of the result. Padding rows are zeros (empty
strings), never previous memory contents; they are created once and shared. These functions make the only copies between
two steps on the host; `stream` makes those on devices.

Does not know: models, requests, why these members are together, why a row is padding. Callers: workers and backends.
It runs for every input of every batch of every node, so it consists of plain loops over attributes: the path without a
copy makes no numpy call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flowserve.memory.column import in_one_piece, scatter
from flowserve.memory.pool import POOLED_BYTES_MIN, Pool
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array

__all__ = ["gather", "padding_like", "pieces", "scatter", "zeros"]  # `scatter` is in `column`


def gather(tensors: Sequence[Tensor], pool: Pool) -> tuple[Array, int]:
    """One array of all `tensors`' rows in order, and how many bytes had to be copied for it.

    There is at least one tensor; all agree in dtype and in every dimension but the first. The caller must not write to
    the array: it may be the block of the tensors itself. It is always aligned for its dtype: a view into a request body
    can have any address, and this is the only place that copies such a view.
    """
    array = in_one_piece(tensors)
    if array is None:
        return _concatenate(tensors, pool)
    if not array.flags.aligned:
        return pool.copy_of(array), array.nbytes
    return array, 0


def pieces(tensors: Sequence[Tensor]) -> list[Array]:
    """The tensors' rows in order, without a copy: one array if all tensors are neighbours, else one per tensor."""
    whole = in_one_piece(tensors)
    return [tensor.array for tensor in tensors] if whole is None else [whole]


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A read-only array of zeros, or of empty strings."""
    array: Array = np.zeros(shape, dtype)
    if dtype.hasobject:
        array.fill(b"")
    array.flags.writeable = False
    return array


_shared_zeros = lru_cache(maxsize=64)(zeros)


def padding_like(tensor: Tensor) -> Tensor:
    """Padding with the rows, type and shape of `tensor`: zeros or empty strings, read-only."""
    array = _shared_zeros(tensor.shape, tensor.block.dtype)
    return Tensor(array) if tensor.stop == WHOLE else Tensor(array, 0, len(array))


def _concatenate(tensors: Sequence[Tensor], pool: Pool) -> tuple[Array, int]:
    arrays = [tensor.array for tensor in tensors]
    first = arrays[0]
    nbytes = sum([array.nbytes for array in arrays])
    if nbytes < POOLED_BYTES_MIN or first.dtype.hasobject:
        return np.concatenate(arrays), nbytes
    shape = (sum([len(array) for array in arrays]), *first.shape[1:])
    joined = pool.take(nbytes).view(first.dtype).reshape(shape)
    np.concatenate(arrays, out=joined)
    return joined, nbytes
