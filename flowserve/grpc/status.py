"""The one table from what happened to a gRPC status, and how much of an error's text travels.

Decided here: the codes, and that details stay below what clients take of a call's trailers (8 KiB, with everything that
is not printable ASCII written as three bytes). What went wrong and how it reads is decided where it happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from grpc import StatusCode

from flowserve.errors import FlowserveError

STATUS: Final[Mapping[str, StatusCode]] = {
    "invalid": StatusCode.INVALID_ARGUMENT,
    "already_exists": StatusCode.ALREADY_EXISTS,
    "too_large": StatusCode.RESOURCE_EXHAUSTED,
    "forbidden": StatusCode.PERMISSION_DENIED,
    "not_found": StatusCode.NOT_FOUND,
    "unavailable": StatusCode.UNAVAILABLE,
    "unsupported": StatusCode.UNIMPLEMENTED,
    "cancelled": StatusCode.CANCELLED,
    "internal": StatusCode.INTERNAL,
}
_DETAILS_MAX: Final = 6000


def status_of(error: FlowserveError) -> StatusCode:
    """The status for `error`'s class."""
    return STATUS[error.kind]


def text_of(error: FlowserveError) -> str:
    """The error as a message's field may hold it: somebody's name may not be Unicode."""
    return str(error).encode("utf-8", "backslashreplace").decode()


def details_of(error: FlowserveError) -> str:
    """The error as a call's details, cut where it is too long for them."""
    text = text_of(error)
    room = _DETAILS_MAX
    for place, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if room < 0:
            return f"{text[:place]} ..."
    return text
