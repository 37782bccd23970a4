"""What a tensor's shape becomes on its way along an edge whose two ends see it differently.

Decided here: which edges need that (few do; all others carry None and cost nothing), and how shapes change: an
ensemble's `reshape`, and the leading 1 that comes or goes where a model with a batch dimension meets one without.
Everything is told from the configurations: the two ends' ranks say whether a dimension is missing. Tensors are
memory/tensor.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowserve.values import TensorSpec

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """First each of `reshapes`, from dims to dims, without the batch dimension; then, with `batch` 1, a leading 1 is
    added, with -1 taken away where it is a 1.
    """

    reshapes: tuple[tuple[Dims, Dims], ...] = ()
    batch: int = 0


def conversion(
    reshapes: tuple[tuple[Dims, Dims], ...], dims: Dims, batches: bool, wanted: Dims, wants_batches: bool
) -> Conversion | None:
    """What an edge needs whose producer makes `dims` (after the reshapes) and whose consumer reads `wanted`.

    Where only one of them batches, equal ranks say that the dimension is missing at the other end; otherwise the whole
    shape is what the other end means.
    """
    batch = 0
    if batches != wants_batches and len(dims) == len(wanted):
        batch = 1 if wants_batches else -1
    return Conversion(reshapes, batch) if reshapes or batch else None


def inside(spec: TensorSpec) -> TensorSpec:
    """An ensemble's input or output as its steps see it."""
    return spec if spec.reshape is None else replace(spec, dims=spec.reshape, reshape=None)


def reshaped(shape: Dims, dims: Dims, target: Dims) -> Dims:
    """`shape`, which fits `dims`, laid out as `target`: the sizes that vary in one fill those of the other from the
    left.
    """
    varying = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(varying) if dim == -1 else dim for dim in target)
