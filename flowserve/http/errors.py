"""The one table from what happened to an HTTP status, and the one shape of an error's body.

Decided here: the numbers. What went wrong and how it reads is decided where it happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson

from flowserve.errors import FlowserveError

STATUS: Final[Mapping[str, int]] = {
    "invalid": 400,
    "already_exists": 400,
    "too_large": 413,
    "forbidden": 403,
    "not_found": 404,
    "unavailable": 503,
    "unsupported": 501,
    "cancelled": 400,
    "internal": 500,
}


def status_of(error: FlowserveError) -> int:
    """The HTTP status for `error`'s class."""
    return STATUS[error.kind]


def error_body(text: str) -> bytes:
    """`{"error": text}`. Text that is not Unicode (a lone surrogate from somebody's name) is escaped, not refused."""
    try:
        return orjson.dumps({"error": text})
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": text.encode("utf-8", "backslashreplace").decode("utf-8")})
