"""Shapes between a configuration and a model: `dims` outside, `reshape` inside.

Decided here: when a shape is one that `dims` promised, and how the varying sizes of one side become those of the
other. Shapes here leave out the batch dimension. This file does not know tensors or who reshapes them.
"""

from __future__ import annotations

from collections.abc import Sequence


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether `shape` is one that `dims` allows, -1 being any size."""
    # Most models have fixed shapes, and then one comparison of two tuples says it.
    return shape == dims or (
        len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))
    )


def reshaped(shape: tuple[int, ...], dims: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """`shape`, which fits `dims`, laid out as `target`: the sizes that vary in one fill those of the other from the
    left.
    """
    varying = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(varying) if dim == -1 else dim for dim in target)


def shown(shape: Sequence[int]) -> str:
    """As Triton writes it: `[-1,3,224]`."""
    return f"[{','.join(str(size) for size in shape)}]"
