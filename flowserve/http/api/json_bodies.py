"""JSON bodies: parsing one, reading its fields with their types, and responses of the endpoints other than inference.

Decides how deep JSON may nest, how many values a large body may have that is parsed at once (on a thread), Triton's
words for a missing field and for one of the wrong type, that the body of such an endpoint is a JSON object or empty,
and the HTTP status of each kind of failure. `where` is added to a message, to identify one of several entries. Does not
know which fields a request has. The text of a failure is decided by the code that raises it, the meaning of the members
by each endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from flowserve.errors import FlowserveError, Invalid, TooLarge
from flowserve.http.api.compression import UnknownEncoding
from flowserve.http.server.response import error_body
from flowserve.runtime.protocol import ITEMS_MAX
from flowserve.runtime.threads import INLINE_BYTES_MAX, in_one_piece
from flowserve.values import BytesLike, fits_64_bits

Parsed = TypeVar("Parsed")
ReadBody = Callable[[Request], Awaitable[BytesLike]]
Handler = Callable[[Request], Awaitable[Response]]

STATUS: Final[Mapping[str, int]] = {
    "invalid": 400,
    "already_exists": 400,
    "too_large": 413,
    "forbidden": 403,
    "not_found": 404,
    "unavailable": 503,
    "deadline_exceeded": 504,
    "unsupported": 501,
    "cancelled": 400,
    "internal": 500,
    "unknown": 400,
}
_UINT64_MAX: Final = 2**64 - 1
_MARKS: Final = b",[{\\"
_MARKS_MAX: Final = 1 << 20
DEPTH_MAX: Final = 100
_NOT_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTE: Final = ord('"')
_DEPTH_BLOCK: Final = 1 << 20
_STEP: Final = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1
_NO_MEMBERS: Final[dict[str, Any]] = {}
_NO_ENTRIES: Final[list[Any]] = []


def status_of(error: FlowserveError) -> int:
    """The HTTP status for `error`'s class."""
    return 415 if isinstance(error, UnknownEncoding) else STATUS[error.kind]


async def document(request: Request, body: ReadBody) -> dict[str, Any]:
    """The object in the request's body, empty if there is none. Raises `Invalid`, and the errors of `body`."""
    text = await body(request)
    found = await off_loop(load_json, text) if text else {}
    if not isinstance(found, dict):
        raise Invalid("failed to parse the request JSON buffer: the body is a JSON object, or empty")
    return found


async def off_loop(parse: Callable[[BytesLike], Parsed], text: BytesLike) -> Parsed:
    """`parse(text)`, on a thread if the text is large. Raises `TooLarge` for one that has very many values: parsing it
    would keep the interpreter for long, on any thread.
    """
    if len(text) <= INLINE_BYTES_MAX:
        return parse(text)
    return await in_one_piece(partial(_parse_large, parse, text))


def _parse_large(parse: Callable[[BytesLike], Parsed], text: BytesLike) -> Parsed:
    marks = 0
    for start in range(0, len(text), INLINE_BYTES_MAX):
        block = bytes(memoryview(text)[start : start + INLINE_BYTES_MAX])
        marks += len(block) - len(block.translate(None, _MARKS))
        if marks > _MARKS_MAX:
            raise TooLarge(
                f"a JSON body of more than {INLINE_BYTES_MAX} bytes may have {_MARKS_MAX} commas, brackets and "
                "backslashes here; an inference request (…/infer) may have more"
            )
    return parse(text)


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_response(text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """`{"error": text}`."""
    return Response(error_body(text), status, headers, "application/json")


# ---------------------------------------------------------------------------------------------- parsing


def load_json(text: BytesLike) -> Any:
    """`text` as Python values; NaN and Infinity literals are numbers. Raises `Invalid` with the place of the first
    mistake."""
    text = bytes(text)
    _check_depth(text)
    return parse_json(text)


def parse_json(text: bytes) -> Any:
    """As `load_json`, for text whose depth was checked."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        reason: ValueError = error
    if b"NaN" in text or b"Infinity" in text:
        try:
            found = json.loads(text.decode())
            if b"\\u" in text:
                json.dumps(found, ensure_ascii=False).encode()  # raises for half of a surrogate pair
            return found
        except ValueError as error:
            reason = error
    raise Invalid(f"failed to parse the request JSON buffer: {reason}")


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= DEPTH_MAX:
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
        if int(depths.max()) > DEPTH_MAX:
            raise too_deep()
        quotes, depth = int(seen[-1]), int(depths[-1])


def too_deep() -> Invalid:
    """The error for JSON that nests too deep."""
    return Invalid(f"JSON nesting depth exceeds maximum allowed limit ({DEPTH_MAX})")


def string_of(entry: Mapping[str, Any], key: str, where: str = "", default: str | None = None) -> str:
    """A string; `default` if it is missing."""
    value = entry.get(key, default)
    if value is None:
        raise missing(key, where)
    if not isinstance(value, str):
        raise wrong_type(key, "string", where)
    return value


def array_of(entry: Mapping[str, Any], key: str, where: str = "", *, is_required: bool = False) -> list[Any]:
    """A list, empty if it is missing."""
    value = entry.get(key, _NO_ENTRIES)
    if value is _NO_ENTRIES and is_required:
        raise missing(key, where)
    if not isinstance(value, list):
        raise wrong_type(key, "array", where)
    if len(value) > ITEMS_MAX:
        raise _too_many(key, value, where)
    return value


def object_of(entry: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """An object, empty if it is missing."""
    value = entry.get(key, _NO_MEMBERS)
    if not isinstance(value, dict):
        raise wrong_type(key, "object", where)
    if len(value) > ITEMS_MAX:
        raise _too_many(key, value, where)
    return value


def uint_of(entry: Mapping[str, Any], key: str, where: str = "") -> int:
    """A number from 0 to 2^64 - 1, 0 if it is missing."""
    value = entry.get(key, 0)
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise wrong_type(key, "unsigned-integer", where)
    return value


def bool_of(entry: Mapping[str, Any], key: str, where: str = "") -> bool:
    """True or false, false if it is missing."""
    value = entry.get(key, False)
    if type(value) is not bool:
        raise wrong_type(key, "boolean", where)
    return value


def is_parameter(value: object) -> bool:
    """Whether this is a valid value of a request's parameter."""
    return fits_64_bits(value) if type(value) is int else isinstance(value, str | bool | float)


def missing(key: str, where: str) -> Invalid:
    """The error text for a missing required member."""
    return Invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")


_WRITE: Final = {"array": "a list: [...]", "object": "an object: {...}", "string": "it in double quotes"}


def wrong_type(key: str, kind: str, where: str = "") -> Invalid:
    """The error for a member that is not of this kind."""
    remedy = f"; write {_WRITE[kind]}" if kind in _WRITE else ""
    return Invalid(f"Unable to parse '{key}': attempt to access JSON non-{kind} as {kind}{where}{remedy}")


def _too_many(key: str, value: list[Any] | dict[str, Any], where: str) -> Invalid:
    return Invalid(f"Unable to parse '{key}': {len(value)} entries, at most {ITEMS_MAX} are accepted{where}")
