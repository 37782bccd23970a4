"""Tensors as a trace keeps them: copies, within bounds.

Decided here: what is too large to be kept, and that tensors in other memories than the host's are told without their
data: a trace is no reason to bring them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from flowserve.memory.tensor import Tensor
from flowserve.observe.trace import QUEUE_INPUT, TensorSeen
from flowserve.values import BY_NUMPY, Array, Request, TensorSpec

ELEMENTS_MAX: Final = 100_000  # a larger tensor is told without its data


def seen(activity: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor | None]) -> Iterator[TensorSeen]:
    """Those that are there, each by its spec."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor is not None:
            array = None if tensor.place.is_gpu else _copy(tensor.array)
            yield TensorSeen(activity, spec.name, spec.dtype.wire, tensor.shape, array)


def seen_of_request(request: Request) -> Iterator[TensorSeen]:
    """What a request brought."""
    for name, array in request.inputs.items():
        if isinstance(array, np.ndarray):
            wire = BY_NUMPY[array.dtype].wire
            yield TensorSeen(QUEUE_INPUT, name, wire, array.shape, _copy(array))


def _copy(array: Any) -> Array | None:
    """What lies there now is somebody else's in a moment."""
    return np.array(array) if array.size <= ELEMENTS_MAX else None
