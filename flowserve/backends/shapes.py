"""Comparison and text form of shapes.

Decides whether a shape agrees with a configuration's dims, and how shapes are written in messages. Shapes here have no
batch dimension.

Callers: the backends, and runtime/.
"""

from __future__ import annotations

from collections.abc import Sequence


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether `dims` allow `shape`; -1 allows any size."""
    # Most models have fixed shapes: then comparing two tuples suffices.
    if shape == dims:
        return True
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - a generator costs more than the comparison
        if dim not in (-1, size):
            return False
    return True


def shape_text(shape: Sequence[int]) -> str:
    """The text of a shape, as Triton writes it: `[-1,3,224]`."""
    return f"[{','.join(str(size) for size in shape)}]"
