"""A tensor in one word, `"FP32[3,-1]"`: the short notation of graphs built in Python, and of tests."""

from __future__ import annotations

import re

from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid
from flowserve.values import BY_WIRE, TensorSpec


def tensor(name: str, text: str) -> TensorSpec:
    """`tensor("X", "FP32[3,-1]")`: data type and dims without the batch dimension, -1 varies; a "?" at the end makes
    it optional. Raises Invalid.
    """
    match = re.fullmatch(r"(\w+)\s*\[([-\d,\s]*)\](\??)", text.strip())
    if match is None:
        raise Invalid(f"tensor '{name}': {text!r} is not a data type with dims, as in 'FP32[3,224,224]' or 'BYTES[1]'")
    dtype, dims, optional = match.groups()
    if dtype not in BY_WIRE:
        hint = did_you_mean(dtype.upper(), BY_WIRE) or f"known are {', '.join(BY_WIRE)}"
        raise Invalid(f"tensor '{name}': there is no data type '{dtype}' ({hint})")
    try:
        return TensorSpec(
            name, BY_WIRE[dtype], tuple(int(dim) for dim in dims.split(",") if dim.strip()), bool(optional)
        )
    except ValueError:
        raise Invalid(f"tensor '{name}': the dims of {text!r} are not whole numbers") from None
