"""Batch assembly: joins the tensors of a batch's members into one array, divides an array into members' tensors, and
makes padding.

Decides when a batch is passed on as the block it already is, and when it is copied. Members that are neighbours in one
block cost nothing, whatever the batcher did in between; otherwise (a gap, a member from another block, another order)
the whole input is copied once. Rows of other members are never part of the result. Padding rows are zeros (empty
strings), never previous memory contents; they are created once and shared. Copies between two steps are made here,
except those into the shared memory of worker processes (runtime/ipc/tensors.py), those on devices (`stream`), and the
array of a `Recipe` that is needed outside of a batch (`recipe`).

Ragged batches have members of different shapes. Decides how a ragged input is concatenated into one flat array, what
each kind of batch input contains, and how a flat output is divided by the shapes of an input. Counts are per member,
not per row: a member of two rows counts as one. Pieces of one flat array that are still neighbours are passed on as
that array, without a copy. A shape of a ragged member is its whole shape, its rows first.

Does not know: models, configurations, requests, why these members are together, why a row is padding. Callers: workers
and backends; the ONNX and TensorRT backends for ragged batches. `gather` runs for every input of every batch of every
node, so it consists of plain loops over attributes: the path without a copy makes no numpy call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.memory.column import Column, in_one_piece, pieces_of
from flowserve.memory.pool import POOLED_BYTES_MIN, Pool
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array

Shape = tuple[int, ...]
BatchInputMaker = Callable[[Sequence[Shape], Any], Array]


def gather(tensors: Sequence[Tensor | None], pool: Pool) -> tuple[Array, int]:
    """One array of all `tensors`' rows in order, and how many bytes had to be copied for it.

    There is at least one tensor, and none is None; all agree in dtype and in every dimension but the first. The caller
    must not write to the array: it may be the block of the tensors itself. It is always aligned for its dtype: a view
    into a request body can have any address, and this is the only place that copies such a view.
    """
    array = in_one_piece(tensors)
    if array is None:
        return _concatenate(pieces(tensors), pool)
    if not array.flags.aligned:
        return pool.copy_of(array), array.nbytes
    return array, 0


def pieces(tensors: Sequence[Tensor | None]) -> list[Array]:
    """The tensors' rows in order, without a copy: one array if all tensors are neighbours, else one per tensor, or
    several. None of `tensors` is None.
    """
    if type(tensors) is Column:
        return tensors.pieces
    whole = in_one_piece(tensors)
    return pieces_of(tensors) if whole is None else [whole]


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


def _concatenate(arrays: list[Array], pool: Pool) -> tuple[Array, int]:
    first = arrays[0]
    nbytes = sum([array.nbytes for array in arrays])
    if nbytes < POOLED_BYTES_MIN or first.dtype.hasobject:
        return np.concatenate(arrays), nbytes
    shape = (sum([len(array) for array in arrays]), *first.shape[1:])
    joined = pool.take(nbytes).view(first.dtype).reshape(shape)
    np.concatenate(arrays, out=joined)
    return joined, nbytes


class Piece(Tensor):
    """A member that is a piece of a flat array. `flat` is the same elements in that array, to recognise neighbours."""

    __slots__ = ("flat",)

    def __init__(self, flat: Tensor, shape: Shape, *, has_rows: bool) -> None:
        super().__init__(flat.array.reshape(shape), 0, shape[0] if has_rows else WHOLE)
        self.flat = flat


def flatten(tensors: Sequence[Tensor], pool: Pool) -> tuple[Array, int]:
    """All elements of `tensors` in order as one array of one dimension, and how many bytes had to be copied for it.

    There is at least one tensor, and all agree in dtype. As with `gather`, the caller must not write to the array.
    """
    if type(tensors[0]) is not Piece and len({tensor.block.shape[1:] for tensor in tensors}) == 1:
        array, copied = gather(tensors, pool)
        return array.reshape(-1), copied if array.flags.c_contiguous else array.nbytes
    flats = [tensor.flat if type(tensor) is Piece else Tensor(tensor.array.reshape(-1)) for tensor in tensors]
    return gather(flats, pool)


def unflatten(flat: Array, shapes: Sequence[Shape], *, has_rows: bool) -> list[Tensor]:
    """Divide `flat` into members of these shapes, in order; together they have as many elements. `has_rows` states
    whether the first dimension of a shape is the batch dimension.
    """
    stops = [*accumulate(map(prod, shapes))]
    return [
        Piece(Tensor(flat, start, stop), shape, has_rows=has_rows)
        for start, stop, shape in zip([0, *stops], stops, shapes, strict=False)
    ]


def resolved_dims(dims: Shape, source: Shape) -> Shape:
    """`dims` with each -1 replaced by the size of `source` on the same axis, which must exist."""
    return tuple(source[axis] if dim == -1 else dim for axis, dim in enumerate(dims))


def _item_shapes(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([size for rows, *inner in shapes for _ in range(rows) for size in inner], dtype)


# By Triton's names. Each takes the shapes of one source input, one per member, at least one, all of equal rank.
BATCH_INPUTS: Final[Mapping[str, BatchInputMaker]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes, dtype: np.array([*map(prod, shapes)], dtype),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes, dtype: np.array([*accumulate(map(prod, shapes))], dtype),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes, dtype: np.array(
        [*accumulate(map(prod, shapes), initial=0)], dtype
    ),
    # Only its length is significant. Triton leaves the contents uninitialised; here they are zeros.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes, dtype: np.zeros(max(map(prod, shapes)), dtype),
    "BATCH_ITEM_SHAPE": lambda shapes, dtype: _item_shapes(shapes, dtype).reshape(
        sum(rows for rows, *_ in shapes), len(shapes[0]) - 1
    ),
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes,
}
