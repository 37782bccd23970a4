"""What a Python model adds to its own configuration, by `auto_complete_config`.

Decided here: what of it is taken. Whether the model's code runs in this process or in one made for the question is the
caller's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flowserve.backends import triton_python_backend_utils as pb_utils
from flowserve.backends.base import ModelFiles
from flowserve.backends.python_import import forget_model
from flowserve.backends.python_source import Source
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Invalid, Problem, Problems
from flowserve.values import DType, TensorSpec

ENTRY: Final = f"{__name__}:completed_here"
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
        max_batch_size=None if config.max_batch_size else int(written.get("max_batch_size") or 0) or None,
        dynamic_batching="dynamic_batching" in written and config.dynamic_batching is None,
        decoupled=None if policy is None else bool(policy.get("decoupled", False)),
    )


def _check(config: ModelConfig, written: object) -> None:
    """Whether all of it is of the types that a configuration has: models are free to write anything into it."""
    from flowserve.config.parse import parse  # with protobuf, which the process that asks the model does without

    try:
        problems: Sequence[Problem] = parse(json.dumps(written), "", "json").problems
    except Problems as found:
        problems = found.problems
    if problems:
        place = problems[0].place
        where = f"{place.path}: " if place and place.path else ""
        raise Invalid(f"auto_complete_config function in model '{config.name}': {where}{problems[0].message}")


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
