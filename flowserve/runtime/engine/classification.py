"""The classification extension: an output as its largest values, each with its index and its label.

Decides the text "value:index:label", which data types can be ranked, and the order of equal values (the lower index
first). The deployment has the labels; the front ends read which outputs a client wants ranked, and how many classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from flowserve.errors import Invalid
from flowserve.runtime.engine.deployments import Deployment
from flowserve.values import BY_NUMPY, Array, DType, Response

ELEMENTS_MAX: Final = 1_000_000  # limit of one row, and of all classes: ranking runs on the event loop
_UNRANKED: Final = frozenset({DType.BOOL, DType.BYTES, DType.FP16, DType.BF16})


def check_classifiable(name: str, dtype: DType) -> None:
    """Raises `Invalid` if values of this type have no order."""
    if dtype in _UNRANKED:
        raise Invalid(
            f"class result not available for output due to unsupported type '{dtype}' (output '{name}'); "
            "ask for the tensor itself"
        )


def rank(response: Response, classes: Mapping[str, int], deployment: Deployment) -> None:
    """Replace each output that was requested as classes by its classes. Raises as `classify` does."""
    batching = deployment.graph.max_batch_size > 0
    for name, count in classes.items():
        array = response.outputs.get(name)
        if array is not None:
            labels = deployment.labels.get(name, ())
            response.outputs[name] = classify(name, array, count, labels, batching=batching)


def classify(name: str, array: Array, count: int, labels: Sequence[str], *, batching: bool) -> Array:
    """The `count` largest values of each row, largest first, as BYTES of shape [rows, n] (without a batch: [n]); n is
    the length of a row, if that is smaller. A row is everything but the batch dimension. NaN comes last.

    Raises `Invalid` for an output that cannot be ranked.
    """
    check_classifiable(name, BY_NUMPY[array.dtype])
    batching = batching and array.ndim > 0  # a number without dimensions has no rows, also if the model batches
    rows, *others = array.shape if batching else (1, *array.shape)
    width = math.prod(others)
    if width > ELEMENTS_MAX:
        raise Invalid(
            f"class result not available for output '{name}': {width} elements in a row, at most {ELEMENTS_MAX} are "
            "ranked; ask for the tensor itself"
        )
    depth = min(count, width)
    if rows * depth > ELEMENTS_MAX:
        raise Invalid(
            f"class result not available for output '{name}': {rows} rows of {depth} classes, at most {ELEMENTS_MAX} "
            "classes are made; ask for fewer, or for the tensor itself"
        )
    classes = np.empty((rows, depth), np.object_)
    for row, values in enumerate(array.reshape(rows, width)):
        largest = _largest(values, depth)
        pairs = zip(values[largest].tolist(), largest.tolist(), strict=True)
        classes[row] = [_class(value, index, labels) for value, index in pairs]
    return classes if batching else classes.reshape(depth)


def _largest(values: Array, depth: int) -> Array:
    """Indices of the `depth` largest values, largest first. Stable: equal values keep their order."""
    # NaN stays NaN, which is sorted last. Inverting the bits of integers reverses their order, and does not overflow,
    # signed or not.
    keys = -values if values.dtype.kind == "f" else ~values
    return np.argsort(keys, kind="stable")[:depth]


def _class(value: object, index: int, labels: Sequence[str]) -> bytes:
    # As C++ prints numbers: six decimals for floats, none for integers.
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
