"""Shape conversion along an edge whose two ends declare a tensor differently.

Decides which edges need a conversion (few; the others have None and cost nothing), and how the shape changes: by an
ensemble's `reshape`, and by a leading 1 that is added or removed between a model with a batch dimension and one
without. It is derived from the configurations alone: the ranks at both ends show whether a dimension is missing. Does
not convert tensors (`memory/tensor`). Callers: `compile`, `wiring`, `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowserve.values import TensorSpec

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Each of `reshapes` is applied first, from dims to dims without the batch dimension. Then, with `batch` 1, a
    leading 1 is added; with `batch` -1 a leading 1 is removed.
    """

    reshapes: tuple[tuple[Dims, Dims], ...] = ()
    batch: int = 0


def conversion(
    reshapes: tuple[tuple[Dims, Dims], ...], dims: Dims, batches: bool, wanted: Dims, wants_batches: bool
) -> Conversion | None:
    """The conversion of an edge whose producer writes `dims` (after the reshapes) and whose consumer reads `wanted`.

    If only one end batches, equal ranks mean that the batch dimension is missing at the other end; otherwise the other
    end's dims are the full shape.
    """
    batch = 0
    if batches != wants_batches and len(dims) == len(wanted):
        batch = 1 if wants_batches else -1
    return Conversion(reshapes, batch) if reshapes or batch else None


def inside(spec: TensorSpec) -> TensorSpec:
    """An ensemble's input or output as its steps see it, after `reshape`."""
    return spec if spec.reshape is None else replace(spec, dims=spec.reshape, reshape=None)


def reshaped(shape: Dims, dims: Dims, target: Dims) -> Dims:
    """`shape`, which matches `dims`, converted to `target`: the sizes of varying dims fill those of the target in
    order.
    """
    varying = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(varying) if dim == -1 else dim for dim in target)
