"""Shapes between a configuration and a model.

Decided here: when a shape is one that `dims` promised, when it is known before, and how shapes are written. Shapes here
leave out the batch dimension. This file does not know tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowserve.values import DType, TensorSpec


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether `shape` is one that `dims` allows, -1 being any size."""
    # Most models have fixed shapes, and then one comparison of two tuples says it.
    return shape == dims or (
        len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))
    )


def shown(shape: Sequence[int]) -> str:
    """As Triton writes it: `[-1,3,224]`."""
    return f"[{','.join(str(size) for size in shape)}]"


def has_fixed_shapes(specs: Sequence[TensorSpec]) -> bool:
    """Whether what these hold takes the same room in every row."""
    return not any(spec.dtype is DType.BYTES or -1 in spec.dims for spec in specs)
