"""What a Python model adds to its own configuration, by `auto_complete_config`.

Decided here: what of it is taken. Whether the model's code runs in this process or in one made for the question is the
caller's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from flowserve.backends import triton_python_backend_utils as pb_utils
from flowserve.backends.base import ModelFiles
from flowserve.backends.python_import import forget_model
from flowserve.backends.python_source import Source
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Invalid
from flowserve.values import DType, TensorSpec

ENTRY: Final = f"{__name__}:completed_here"
_INT32_END: Final = 2**31
_INT64_END: Final = 2**63
_BY_CONFIG_NAME: Final = {dtype.config_name: dtype for dtype in DType}


def completed_here(config: ModelConfig, files: ModelFiles) -> dict[str, Any] | None:
    """What the model's `auto_complete_config` makes of its configuration, None where it has none; in the process where
    it is called.
    """
    source = Source(config, files)
    module = source.import_fresh()
    try:
        function = getattr(source.model_class(module), "auto_complete_config", None)
        if function is None:
            return None
        with source.running("auto_complete_config"):
            answer = function(pb_utils.ModelConfig(json.dumps(config.json)))
    finally:
        forget_model(module)
    if not isinstance(answer, pb_utils.ModelConfig):
        raise Invalid(
            f"auto_complete_config function in model '{config.name}' must return a valid pb.ModelConfig object, "
            f"it returned {type(answer).__name__}"
        )
    return answer.as_dict()


def completion(config: ModelConfig, written: Mapping[str, Any]) -> Completion:
    """What the model added to its configuration. Tensors are given whole: the user's own are among them, unchanged.
    Raises Invalid where what it says cannot be one.
    """
    _check(config, written)
    policy = written.get("model_transaction_policy")
    return Completion(
        inputs=tuple(_spec(config, entry) for entry in written.get("input", ())) or None,
        outputs=tuple(_spec(config, entry) for entry in written.get("output", ())) or None,
        max_batch_size=None if config.max_batch_size else written.get("max_batch_size") or None,
        dynamic_batching="dynamic_batching" in written and config.dynamic_batching is None,
        decoupled=None if policy is None else bool(policy.get("decoupled", False)),
    )


def _check(config: ModelConfig, written: object) -> None:
    """Whether what is taken of it is of the types that a configuration has: models are free to write anything."""

    def expect(is_right: bool, where: str, found: object, wanted: str) -> None:
        if not is_right:
            raise Invalid(
                f"auto_complete_config function in model '{config.name}': {where} is {found!r:.80} where {wanted} is"
                " expected"
            )

    def integers(where: str, found: object) -> None:
        expect(isinstance(found, list), where, found, "a list of integers")
        for one in found:  # type: ignore[attr-defined]  # it is a list
            expect(type(one) is int and abs(one) < _INT64_END, where, found, "a list of integers")

    expect(isinstance(written, dict), "the configuration", written, "a dictionary")
    fields: dict[str, Any] = written  # type: ignore[assignment]  # it is one
    rows = fields.get("max_batch_size", 0)
    expect(type(rows) is int and 0 <= rows < _INT32_END, "max_batch_size", rows, "an integer from 0 to 2147483647")
    policy = fields.get("model_transaction_policy", {})
    expect(isinstance(policy, dict), "model_transaction_policy", policy, "a dictionary")
    expect(policy.get("decoupled") in (True, False, None), "decoupled", policy.get("decoupled"), "True or False")
    for side in ("input", "output"):
        expect(isinstance(fields.get(side, []), list), side, fields.get(side), "a list")
        for index, entry in enumerate(fields.get(side, [])):
            where = f"{side}[{index}]"
            expect(isinstance(entry, dict), where, entry, "a dictionary")
            for name in ("name", "data_type", "label_filename"):
                expect(_is_text(entry.get(name, "")), f"{where}.{name}", entry.get(name), "text")
            for name in ("optional", "allow_ragged_batch"):
                expect(entry.get(name, False) in (True, False), f"{where}.{name}", entry.get(name), "True or False")
            integers(f"{where}.dims", entry.get("dims", []))
            if entry.get("reshape") is not None:
                expect(isinstance(entry["reshape"], dict), f"{where}.reshape", entry["reshape"], "a dictionary")
                integers(f"{where}.reshape", entry["reshape"].get("shape", []))


def _is_text(found: object) -> bool:
    try:
        return isinstance(found, str) and found.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _spec(config: ModelConfig, entry: Mapping[str, Any]) -> TensorSpec:
    dtype = _BY_CONFIG_NAME.get(entry["data_type"])
    if dtype is None:
        raise Invalid(
            f"auto_complete_config function in model '{config.name}': tensor '{entry['name']}' has data type "
            f"'{entry['data_type']}', which is none of {', '.join(_BY_CONFIG_NAME)}"
        )
    reshape = entry.get("reshape")
    return TensorSpec(
        name=entry["name"],
        dtype=dtype,
        dims=tuple(int(dim) for dim in entry["dims"]),
        optional=bool(entry.get("optional", False)),
        ragged=bool(entry.get("allow_ragged_batch", False)),
        reshape=None if reshape is None else tuple(int(dim) for dim in reshape.get("shape", ())),
        labels=entry.get("label_filename", ""),
    )
