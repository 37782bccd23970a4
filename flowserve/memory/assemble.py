"""How the members of a batch become one array, and one array members again.

Decided here: when a batch may be handed on as it lies and when it is copied together; these two functions make the
only copies between two steps on the host (stream.py has those on devices). Members that lie side by side in one block
cost nothing, whatever the batcher did to them in between; anything else (a gap, a foreign member, another order) copies
that input whole, once. Rows of members that are not in the list are never part of the result.

This file does not know models, requests or why these members are together. It runs for every input of every batch of
every node, so it is written as plain loops over attributes: no numpy call is made on the path that copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

import numpy as np

from flowserve.memory.pool import POOLED_BYTES_MIN, Pool
from flowserve.memory.tensor import Tensor
from flowserve.values import Array


def gather(tensors: Sequence[Tensor], pool: Pool) -> tuple[Array, int]:
    """One array of all `tensors`' rows in order, and how many bytes had to be copied for it.

    The tensors agree in dtype and in every dimension but the first, and there is at least one. The array is read-only
    in spirit: it may be the very block the tensors lie in. It is always aligned for its dtype: a view into a request
    body can lie at any address, and this is the one place where such a view is copied.
    """
    array = in_one_piece(tensors)
    if array is None:
        return _concatenate(tensors, pool)
    if not array.flags.aligned:
        return _copy_aligned(array, pool)
    return array, 0


def pieces(tensors: Sequence[Tensor]) -> list[Array]:
    """The tensors' rows in order, as few arrays as they lie in: one where all are neighbours. Nothing is copied."""
    whole = in_one_piece(tensors)
    return [tensor.array for tensor in tensors] if whole is None else [whole]


def in_one_piece(tensors: Sequence[Tensor]) -> Array | None:
    """The tensors' rows in order, where they lie as one array; else None. Nothing is copied."""
    if type(tensors) is not list:  # a column may know that, and not be taken apart to find out (columns.py)
        known: Array | None = getattr(tensors, "array", None)
        if known is not None:
            return known
    first = tensors[0]
    block = first.block
    stop = first.start
    for tensor in tensors:
        if tensor.block is not block or tensor.start != stop:
            return None
        stop = tensor.stop
    return block if stop < 0 or (first.start == 0 and stop == len(block)) else block[first.start : stop]


def scatter(array: Array, rows: Sequence[int]) -> list[Tensor]:
    """The members' shares of a batch's `array`: `rows[m]` rows each, in order. Nothing is sliced here."""
    if len(rows) == 1:
        return [Tensor(array, 0, rows[0])]
    stops = list(accumulate(rows))
    return list(map(Tensor, repeat(array), [0, *stops], stops))


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


def _copy_aligned(array: Array, pool: Pool) -> tuple[Array, int]:
    if array.nbytes < POOLED_BYTES_MIN:
        return np.array(array, order="C"), array.nbytes
    copy = pool.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy, array.nbytes
