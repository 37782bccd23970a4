"""The tensors in a trace: copies, within bounds.

Decides which tensors are too large to be copied, and that tensors in device memory are recorded without their data,
since a trace must not cause a transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from flowserve.memory.tensor import Tensor
from flowserve.observe.trace import QUEUE_INPUT, TensorSeen
from flowserve.values import BY_NUMPY, Array, Request, TensorSpec

TRACED_ELEMENTS_MAX: Final = 100_000  # a larger tensor is recorded without its data


def traced_tensors(
    activity: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor | None]
) -> Iterator[TensorSeen]:
    """The tensors that are present, each with its spec."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor is not None:
            array = None if tensor.place.is_gpu else _copy(tensor.array)
            yield TensorSeen(activity, spec.name, spec.dtype.wire, tensor.shape, array)


def traced_inputs(request: Request) -> Iterator[TensorSeen]:
    """The inputs of a request."""
    for name, array in request.inputs.items():
        if isinstance(array, np.ndarray):
            wire = BY_NUMPY[array.dtype].wire
            yield TensorSeen(QUEUE_INPUT, name, wire, array.shape, _copy(array))


def _copy(array: Any) -> Array | None:
    """A copy, since the memory is reused after the batch; None for a large array."""
    return np.array(array) if array.size <= TRACED_ELEMENTS_MAX else None
