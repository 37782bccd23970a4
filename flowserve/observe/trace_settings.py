"""The settings of Triton's trace extension, as far as there is something to set.

Decided here: what clients read (tracing is off), what is no setting at all, and that a change which would have no
effect is refused instead of being stored and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowserve.errors import Invalid, Unsupported

SETTINGS: Final[Mapping[str, Any]] = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}
_LEVELS: Final = frozenset({"OFF", "TIMESTAMPS", "TENSORS"})
_LEAST: Final[Mapping[str, int]] = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}


def change_trace_settings(asked: Mapping[str, Any]) -> None:
    """Accept what leaves the settings as they are; null is a model's way to the server's. Raises `Invalid` for what is
    no setting, `Unsupported` for what would be one if there were traces.
    """
    for key, value in asked.items():
        _check(key, value)
    for key, value in asked.items():
        if value is not None and value != SETTINGS[key]:
            raise Unsupported(f"tracing is not supported yet: '{key}' cannot be changed, trace_level is OFF")


def _check(key: str, value: Any) -> None:
    if key not in SETTINGS:
        raise Invalid(f"unknown trace setting '{key[:100]}'")
    if value is None:
        return
    if key == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if key == "trace_level":
        if not isinstance(value, list) or any(not isinstance(one, str) or one not in _LEVELS for one in value):
            raise Invalid(f"trace setting '{key}' is a list of {', '.join(sorted(_LEVELS))}")
    elif key in _LEAST:
        if not isinstance(value, str) or not _is_number(value) or int(value) < _LEAST[key]:
            raise Invalid(f"trace setting '{key}' is a whole number in a string, {_LEAST[key]} or more")
    elif not isinstance(value, str):
        raise Invalid(f"trace setting '{key}' is a string")


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20
