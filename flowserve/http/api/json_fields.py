"""JSON that a client sent: parsing it, and reading its fields with their types.

Decides how deep JSON may nest, Triton's words for a missing field and for one of the wrong type, and how many entries a
list or an object may have. `where` is added to a message, to identify one of several entries. Does not know
which fields a request has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from flowserve.errors import Invalid
from flowserve.values import fits_64_bits

_ITEMS_MAX: Final = 1024  # inputs, outputs, parameters: far more than any model has, far fewer than hurt
_UINT64_MAX: Final = 2**64 - 1
_DEPTH_MAX: Final = 100
_NOT_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTE: Final = ord('"')
_DEPTH_BLOCK: Final = 1 << 20
_STEP: Final = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1
_NOTHING: Final[dict[str, Any]] = {}


def load_json(text: bytes | bytearray | memoryview) -> Any:
    """`text` as Python values; NaN and Infinity literals are numbers. Raises `Invalid` with the place of the first
    mistake."""
    text = bytes(text)
    _check_depth(text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if b"NaN" in text or b"Infinity" in text:
            return _load_lenient_json(text)
        raise Invalid(f"failed to parse the request JSON buffer: {error}") from None


def _load_lenient_json(text: bytes) -> Any:
    try:
        found = json.loads(text.decode())
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        return found
    except ValueError as error:
        raise Invalid(f"failed to parse the request JSON buffer: {error}") from None


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= _DEPTH_MAX:
        return
    # Brackets inside strings do not nest. All of this runs at C speed: a body may be 64 MB of short strings.
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(None, _NOT_MARKS).replace(b'""', b"")  # a pair of quotes changes nothing around it
    quotes, depth = 0, 0
    for start in range(0, len(marks), _DEPTH_BLOCK):
        block = np.frombuffer(marks, np.uint8, min(_DEPTH_BLOCK, len(marks) - start), start)
        seen = np.cumsum(block == _QUOTE) + quotes
        depths = np.cumsum(np.where(seen & 1, 0, _STEP[block])) + depth
        if int(depths.max()) > _DEPTH_MAX:
            raise Invalid(f"JSON nesting depth exceeds maximum allowed limit ({_DEPTH_MAX})")
        quotes, depth = int(seen[-1]), int(depths[-1])


def string_of(entry: Mapping[str, Any], key: str, where: str = "", default: str | None = None) -> str:
    """A string; `default` if it is missing."""
    value = entry.get(key, default)
    if value is None:
        raise missing(key, where)
    if not isinstance(value, str):
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-string as string{where}")
    return value


def array_of(entry: Mapping[str, Any], key: str, where: str = "", *, is_required: bool = False) -> list[Any]:
    """A list, empty if it is missing."""
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
    """An object, empty if it is missing."""
    value = entry.get(key, _NOTHING)
    if not isinstance(value, dict):
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-object as object{where}")
    if len(value) > _ITEMS_MAX:
        raise Invalid(f"Unable to parse '{key}': {len(value)} entries, at most {_ITEMS_MAX} are accepted{where}")
    return value


def uint_of(entry: Mapping[str, Any], key: str, where: str = "") -> int:
    """A number from 0 to 2^64 - 1, 0 if it is missing."""
    value = entry.get(key, 0)
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise Invalid(
            f"Unable to parse '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer{where}"
        )
    return value


def bool_of(entry: Mapping[str, Any], key: str, where: str = "") -> bool:
    """True or false, false if it is missing."""
    value = entry.get(key, False)
    if type(value) is not bool:
        raise Invalid(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean{where}")
    return value


def is_parameter(value: object) -> bool:
    """Whether this is a valid value of a request's parameter."""
    return fits_64_bits(value) if type(value) is int else isinstance(value, str | bool | float)


def missing(key: str, where: str) -> Invalid:
    """The error text for a missing required member."""
    return Invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")
