"""The configuration that a model.py completes in `auto_complete_config`.

Decided here: Triton's ModelConfig class of its Python backend: what a model may add, and that it may not contradict
what the user wrote. This file does not know where the configuration came from or what becomes of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from flowserve.config.suggest import did_you_mean

_BOTH: Final = ("name", "data_type", "dims", "reshape", "is_shape_tensor", "is_non_linear_format_io")
_PROPERTIES: Final[Mapping[str, tuple[str, ...]]] = {
    "input": (*_BOTH, "optional", "allow_ragged_batch", "format"),
    "output": (*_BOTH, "label_filename"),
}


class ModelConfig:
    """A configuration as a dictionary (the JSON form of config.pbtxt), with Triton's methods that fill in what is
    missing.

    They raise ValueError where the model says something else than the user did.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """A copy of the whole configuration."""
        return copy.deepcopy(self._model_config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """The most rows the model takes. A smaller number that the user wrote stands."""
        written = self._model_config.get("max_batch_size", 0)
        if written > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {written}, but in auto_complete_config function, model "
                f"supports max_batch_size {max_batch_size}"
            )
        if not written:
            self._model_config["max_batch_size"] = max_batch_size

    def add_input(self, model_input: Mapping[str, Any]) -> None:
        """`model_input` has "name", "data_type", "dims" and, where wanted, "optional" and the like."""
        self._add("input", model_input)

    def add_output(self, model_output: Mapping[str, Any]) -> None:
        """`model_output` has "name", "data_type" and "dims"."""
        self._add("output", model_output)

    def set_dynamic_batching(self) -> None:
        """Switch the dynamic batcher on where the user chose no scheduler."""
        chosen = {"dynamic_batching", "sequence_batching", "ensemble_scheduling"} & self._model_config.keys()
        if chosen - {"dynamic_batching"}:
            raise ValueError(
                f"configuration specified scheduling choice {', '.join(sorted(chosen))}, not dynamic_batching"
            )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        """`transaction_policy` has "decoupled", a bool."""
        unknown = transaction_policy.keys() - {"decoupled"}
        if unknown:
            raise ValueError(f"model transaction policy has unknown properties {', '.join(sorted(unknown))}")
        written = self._model_config.get("model_transaction_policy", {})
        if written.get("decoupled", False) and not transaction_policy.get("decoupled", False):
            raise ValueError("configuration specified a decoupled model, but in auto_complete_config it is not")
        self._model_config["model_transaction_policy"] = dict(transaction_policy)

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        for needed in ("name", "data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{kind} added in auto_complete_config function lacks '{needed}': {dict(tensor)}")
        for unknown in (key for key in tensor if key not in _PROPERTIES[kind]):
            hint = did_you_mean(unknown, _PROPERTIES[kind])
            raise ValueError(
                f"{kind} '{tensor['name']}' added in auto_complete_config function has the property '{unknown}', which "
                f"{kind}s do not have{hint and f' ({hint})'}"
            )
        if isinstance(tensor["dims"], str) or not isinstance(tensor["dims"], Iterable):
            raise ValueError(
                f"{kind} '{tensor['name']}' added in auto_complete_config function has dims {tensor['dims']!r}, which "
                "are no list, as in [4]"
            )
        tensors: list[dict[str, Any]] = self._model_config.setdefault(kind, [])
        written = next((entry for entry in tensors if entry["name"] == tensor["name"]), None)
        if written is None:
            tensors.append({**tensor, "dims": list(tensor["dims"])})
            return
        for field in ("data_type", "dims"):
            found = written.get(field)
            ours = list(tensor[field]) if field == "dims" else tensor[field]
            if found in (None, [], "TYPE_INVALID"):
                written[field] = ours
            elif found != ours:
                raise ValueError(
                    f"unable to add {kind} '{tensor['name']}': model configuration specified {field} {found}, but in "
                    f"auto_complete_config function it has {field} {ours}"
                )
