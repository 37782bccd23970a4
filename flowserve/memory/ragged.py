"""Members of different shapes as one flat array, and flat arrays as members again.

Decided here: how a ragged input is laid end to end, what each kind of batch input says about the members, and how a
flat output is cut up by the shapes of an input. Counts are per member, not per row: a member of two rows counts as
one. Pieces of one flat array that are still neighbours go on as that array, without a copy.

This file does not know models, configurations or why these members are together. A shape is a member's whole shape,
its rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.memory.assemble import gather
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array

Shape = tuple[int, ...]
BatchInputMaker = Callable[[Sequence[Shape], Any], Array]


class Piece(Tensor):
    """A member cut out of a flat array. `flat` is the same elements there, so that neighbours can be told."""

    __slots__ = ("flat",)

    def __init__(self, flat: Tensor, shape: Shape, *, has_rows: bool) -> None:
        super().__init__(flat.array.reshape(shape), 0, shape[0] if has_rows else WHOLE)
        self.flat = flat


def flatten(tensors: Sequence[Tensor], pool: Pool) -> tuple[Array, int]:
    """All elements of `tensors` in order as one array of one dimension, and how many bytes had to be copied for it.

    The tensors agree in dtype, and there is at least one. As with `gather`, the array is read-only in spirit.
    """
    if type(tensors[0]) is not Piece and len({tensor.block.shape[1:] for tensor in tensors}) == 1:
        array, copied = gather(tensors, pool)
        return array.reshape(-1), copied if array.flags.c_contiguous else array.nbytes
    flats = [tensor.flat if type(tensor) is Piece else Tensor(tensor.array.reshape(-1)) for tensor in tensors]
    return gather(flats, pool)


def cut(flat: Array, shapes: Sequence[Shape], *, has_rows: bool) -> list[Tensor]:
    """`flat` as members of these shapes, one after the other; together they have as many elements. `has_rows` tells
    whether the first dimension of a shape is the batch's.
    """
    stops = [*accumulate(map(prod, shapes))]
    return [
        Piece(Tensor(flat, start, stop), shape, has_rows=has_rows)
        for start, stop, shape in zip([0, *stops], stops, shapes, strict=False)
    ]


def filled(dims: Shape, source: Shape) -> Shape:
    """`dims`, whose -1s take the size that `source` has at the same place, which it has."""
    return tuple(source[axis] if dim == -1 else dim for axis, dim in enumerate(dims))


def _counts(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*map(prod, shapes)], dtype)


def _running_totals(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*accumulate(map(prod, shapes))], dtype)


def _running_totals_with_zero(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*accumulate(map(prod, shapes), initial=0)], dtype)


def _largest_count_as_shape(shapes: Sequence[Shape], dtype: Any) -> Array:
    """Only its length says something. Triton leaves the contents as they are in memory; here they are zeros."""
    return np.zeros(max(map(prod, shapes)), dtype)


def _item_shapes(shapes: Sequence[Shape], dtype: Any) -> Array:
    items = sum(shape[0] for shape in shapes)
    return _item_shapes_flat(shapes, dtype).reshape(items, len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([size for rows, *inner in shapes for _ in range(rows) for size in inner], dtype)


# By Triton's names. Each takes the shapes of one source input, a member each, at least one, all of one rank.
BATCH_INPUTS: Final[Mapping[str, BatchInputMaker]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _running_totals,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _running_totals_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _largest_count_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}
