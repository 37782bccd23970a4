"""Ragged batches: members of different shapes as one flat array, and a flat array as members again.

Decides how a ragged input is concatenated, what each kind of batch input contains, and how a flat output is divided by
the shapes of an input. Counts are per member, not per row: a member of two rows counts as one. Pieces of one flat array
that are still neighbours are passed on as that array, without a copy.

Does not know: models, configurations, why these members are together. Callers: the ONNX and TensorRT backends. A shape
is a member's whole shape, its rows first.
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


def _counts(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*map(prod, shapes)], dtype)


def _running_totals(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*accumulate(map(prod, shapes))], dtype)


def _running_totals_with_zero(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([*accumulate(map(prod, shapes), initial=0)], dtype)


def _largest_count_as_shape(shapes: Sequence[Shape], dtype: Any) -> Array:
    """Only its length is significant. Triton leaves the contents uninitialised; here they are zeros."""
    return np.zeros(max(map(prod, shapes)), dtype)


def _item_shapes(shapes: Sequence[Shape], dtype: Any) -> Array:
    items = sum(shape[0] for shape in shapes)
    return _item_shapes_flat(shapes, dtype).reshape(items, len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Sequence[Shape], dtype: Any) -> Array:
    return np.array([size for rows, *inner in shapes for _ in range(rows) for size in inner], dtype)


# By Triton's names. Each takes the shapes of one source input, one per member, at least one, all of equal rank.
BATCH_INPUTS: Final[Mapping[str, BatchInputMaker]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _running_totals,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _running_totals_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _largest_count_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}
