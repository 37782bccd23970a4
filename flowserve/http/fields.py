"""Fields of a client's JSON: each is there and of its type, or the client reads which one is not.

Decided here: Triton's words for a missing member and for one of the wrong type, and how many entries a list or an
object may have. `where` is added to a message, to tell which of several entries is meant. What fields there are, those
who read them know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.values import fits_64_bits

_ITEMS_MAX: Final = 1024  # inputs, outputs, parameters: far more than any model has, far fewer than hurt
_UINT64_MAX: Final = 2**64 - 1
_NOTHING: Final[dict[str, Any]] = {}


def string_of(entry: Mapping[str, Any], key: str, where: str = "", default: str | None = None) -> str:
    """A string; `default` where it is missing."""
    value = entry.get(key, default)
    if value is None:
        raise missing(key, where)
    if not isinstance(value, str):
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-string as string{where}")
    return value


def array_of(entry: Mapping[str, Any], key: str, where: str = "", *, is_required: bool = False) -> list[Any]:
    """A list, empty where it is missing."""
    value = entry.get(key)
    if value is None and key not in entry:
        if is_required:
            raise missing(key, where)
        return []
    if not isinstance(value, list):
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-array as array{where}")
    if len(value) > _ITEMS_MAX:
        raise Invalid(f"Unable to parse '{key}': {len(value)} entries, at most {_ITEMS_MAX} are accepted{where}")
    return value


def object_of(entry: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """An object, empty where it is missing."""
    value = entry.get(key, _NOTHING)
    if not isinstance(value, dict):
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-object as object{where}")
    if len(value) > _ITEMS_MAX:
        raise Invalid(f"Unable to parse '{key}': {len(value)} entries, at most {_ITEMS_MAX} are accepted{where}")
    return value


def uint_of(entry: Mapping[str, Any], key: str, where: str = "") -> int:
    """A number from 0 to 2^64 - 1, 0 where it is missing."""
    value = entry.get(key, 0)
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise Invalid(
            f"Unable to parse '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer{where}"
        )
    return value


def bool_of(entry: Mapping[str, Any], key: str, where: str = "") -> bool:
    """True or false, false where it is missing."""
    value = entry.get(key, False)
    if type(value) is not bool:
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean{where}")
    return value


def is_parameter(value: object) -> bool:
    """Whether a request's parameter may be this."""
    return fits_64_bits(value) if type(value) is int else isinstance(value, str | bool | float)


def missing(key: str, where: str) -> Invalid:
    """What is said of a member that has to be there."""
    return Invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")
