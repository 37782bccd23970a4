"""A tensor in one word, `"FP32[3,-1]"`: the short notation of graphs built in Python, and of tests.

Decided here: what such a word may say, and how a configuration says it.
"""

from __future__ import annotations

import re
from typing import Any

from flowserve.config.suggest import did_you_mean
from flowserve.errors import Invalid
from flowserve.values import BY_WIRE, TensorSpec


def tensor(name: str, text: str) -> TensorSpec:
    """`tensor("X", "FP32[3,-1]")`: data type and dims without the batch dimension. -1 varies from batch to batch, and *
    also within a batch (the tensor is ragged); a "?" at the end makes it optional. Raises Invalid.
    """
    match = re.fullmatch(r"(\w+)\s*\[([-*\d,\s]*)\](\??)", str(text).strip())
    if match is None:
        raise Invalid(f"tensor '{name}': {text!r} is not a data type with dims, as in 'FP32[3,224,224]' or 'BYTES[1]'")
    dtype, dims, optional = match.groups()
    if dtype not in BY_WIRE:
        hint = did_you_mean(dtype.upper(), BY_WIRE) or f"known are {', '.join(BY_WIRE)}"
        raise Invalid(f"tensor '{name}': there is no data type '{dtype}' ({hint})")
    words = [word.strip() for word in dims.split(",") if word.strip()]
    try:
        sizes = tuple(-1 if word == "*" else int(word) for word in words)
        return TensorSpec(name, BY_WIRE[dtype], sizes, bool(optional), ragged="*" in words)
    except ValueError:
        raise Invalid(f"tensor '{name}': the dims of {text!r} are not whole numbers") from None


def input_json(spec: TensorSpec) -> dict[str, Any]:
    """An entry of `input`, as JSON spells it."""
    made = _tensor_json(spec)
    if spec.optional:
        made["optional"] = True
    if spec.ragged:
        made["allow_ragged_batch"] = True
    return made


def output_json(spec: TensorSpec) -> dict[str, Any]:
    """An entry of `output`, as JSON spells it."""
    made = _tensor_json(spec)
    if spec.labels:
        made["label_filename"] = spec.labels
    return made


def _tensor_json(spec: TensorSpec) -> dict[str, Any]:
    made: dict[str, Any] = {"name": spec.name, "data_type": spec.dtype.config_name, "dims": list(spec.dims)}
    if spec.reshape is not None:
        made["reshape"] = {"shape": list(spec.reshape)}
    return made
