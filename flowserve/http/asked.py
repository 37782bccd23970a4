"""What the head of an inference request asks for, worked out once for each head.

Decided here: what the route's URL looks like, which headers matter, and which of them send a request another way than
the common one. Clients send the same head again and again, and the server keeps it (head.py): what was found stays in
its scope.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from flowserve.errors import Invalid
from flowserve.http.compression import CODINGS, Headers, UnknownEncoding, matters
from flowserve.http.encode import HEADER_LENGTH

PREFIX: Final = "/v2/models/"
SUFFIX: Final = "/infer"
TIMING: Final = b"flowserve-timing"  # a request with this header wants to know what became of it
_ELSEWHERE: Final = CODINGS | {TIMING}  # headers that may send a request another way than the common one
_FOUND: Final = "flowserve.asked"
_LENGTH: Final = re.compile(rb"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Asked:
    """An inference request but for its body. `version` is "" for none. `is_common`: nothing in the headers sends it
    another way and they are well-formed; then `header_length` is the length of the JSON in its body, None for all.
    """

    name: str
    version: str
    headers: Headers
    is_common: bool
    header_length: int | None


def asked(scope: Scope) -> Asked | None:
    """What a request asks of the inference route; None for any other request."""
    try:
        found: Asked | None = scope[_FOUND]
    except KeyError:
        found = scope[_FOUND] = _asked(scope)
    return found


def _asked(scope: Scope) -> Asked | None:
    where = target(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
    if where is None:
        return None
    headers = scope["headers"]
    try:
        if not goes_elsewhere(headers):
            return Asked(*where, headers, True, header_length(headers))
    except (Invalid, UnknownEncoding):
        pass  # said when its turn comes
    return Asked(*where, headers, False, None)


def goes_elsewhere(headers: Headers) -> bool:
    """Whether the request cannot go the common way: the body is compressed or the answer is to be, or timing is asked
    for. Raises `UnknownEncoding`.
    """
    return any(name in _ELSEWHERE and _matters(name, value) for name, value in headers)


def is_timed(headers: Headers) -> bool:
    """Whether the request asks for its timing."""
    return any(name == TIMING and _matters(name, value) for name, value in headers)


def header_length(headers: Headers) -> int | None:
    """The length of the JSON in the body; None where all of it is JSON. Raises `Invalid`."""
    return next((_length(value) for name, value in reversed(headers) if name == HEADER_LENGTH), None)


def target(path: str) -> tuple[str, str] | None:
    """The model's name and version ("" for none) that an infer URL's path names, or None for any other path."""
    if not (path.endswith(SUFFIX) and path.startswith(PREFIX)):
        return None
    parts = path[len(PREFIX) : -len(SUFFIX)].split("/")
    if len(parts) == 1:
        return (parts[0], "") if parts[0] else None
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and is_version(parts[2]):
        return parts[0], parts[2]
    return None


def is_version(text: str) -> bool:
    """Whether `text` can stand for a version in a URL; anything else there is an unknown path."""
    return text.isascii() and text.isdigit() and len(text) < 20


@lru_cache(maxsize=256)
def _matters(name: bytes, value: bytes) -> bool:
    """Whether this header, one of `_ELSEWHERE`, says anything. Raises `UnknownEncoding`."""
    return value != b"0" if name == TIMING else matters(name, value)


def _length(value: bytes) -> int:
    if _LENGTH.fullmatch(value):  # int() itself takes 1_0, too
        return int(value)
    raise Invalid(f"Unable to parse inference header size, got: {value[:40].decode('latin-1')}")
