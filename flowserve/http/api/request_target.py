"""The target of an inference request: its URL and headers, parsed.

Decides the format of the route's URL and which headers are read. Clients repeat the same head, and the
server caches it (http/server/request_parser.py): the result of this file is stored in its scope. Called by the
inference routes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from flowserve.errors import Invalid
from flowserve.http.api.compression import Headers, is_compressed, wanted
from flowserve.http.api.encode import HEADER_LENGTH
from flowserve.http.api.form import FORM, boundary_of
from flowserve.http.server.request_parser import SENT_NAMES, trace_context

PREFIX: Final = "/v2/models/"
SUFFIX: Final = "/infer"
TIMING: Final = b"flowserve-timing"  # a request with this header asks for its Server-Timing
TARGET: Final = "flowserve.target"
_LENGTH: Final = re.compile(rb"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """An inference request without its body. `version` is "" for none. `header_length`: the length in bytes of the JSON
    in the body, None if all of it is JSON. `boundary`: that of a form, None if the body is not a form. `is_compressed`:
    the request's body is. `encoding`: the compression of the response's body, b"" for none. `names`: those of `headers`
    as they were sent, or in lower case if the server does not provide them. `context`: the trace context. `error`: why
    the headers are invalid, if so.
    """

    name: str
    version: str
    headers: Headers
    names: tuple[bytes, ...]
    header_length: int | None = None
    is_compressed: bool = False
    encoding: bytes = b""
    is_timed: bool = False
    boundary: bytes | None = None
    context: str = ""
    error: Invalid | None = None


def request_target(scope: Scope) -> RequestTarget | None:
    """The target of an inference request; None for any other request."""
    try:
        found: RequestTarget | None = scope[TARGET]
    except KeyError:
        found = scope[TARGET] = _request_target(scope)
    return found


def _request_target(scope: Scope) -> RequestTarget | None:
    model = _model(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
    if model is None:
        return None
    headers, names = scope["headers"], sent_names(scope)
    try:
        length, is_packed = _header_length(headers), is_compressed(headers)
        encoding, boundary = wanted(headers), _boundary(headers)
        context = trace_context(headers)
        return RequestTarget(*model, headers, names, length, is_packed, encoding, is_timed(headers), boundary, context)
    except Invalid as error:
        return RequestTarget(*model, headers, names, context=trace_context(headers), error=error.with_traceback(None))


def sent_names(scope: Scope) -> tuple[bytes, ...]:
    """The names of the request's headers as they were sent; in lower case on another ASGI server."""
    names: tuple[bytes, ...] | None = scope.get(SENT_NAMES)
    return tuple(name for name, _ in scope["headers"]) if names is None else names


def _model(path: str) -> tuple[str, str] | None:
    """The model's name and version ("" for none) that an infer URL's path names, None for any other path."""
    if not (path.endswith(SUFFIX) and path.startswith(PREFIX)):
        return None
    parts = path[len(PREFIX) : -len(SUFFIX)].split("/")
    if len(parts) == 1:
        return (parts[0], "") if parts[0] else None
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and is_version(parts[2]):
        return parts[0], parts[2]
    return None


def is_timed(headers: Headers) -> bool:
    """Whether the request has the header for its timing."""
    return any(name == TIMING and value != b"0" for name, value in headers)


def is_version(text: str) -> bool:
    """Whether `text` is a valid version in a URL; any other text makes the path unknown."""
    return text.isascii() and text.isdigit() and len(text) < 20


def _boundary(headers: Headers) -> bytes | None:
    value = next((value for name, value in reversed(headers) if name == b"content-type"), b"")
    return boundary_of(value) if value[: len(FORM)].lower() == FORM else None


def _header_length(headers: Headers) -> int | None:
    value = next((value for name, value in reversed(headers) if name == HEADER_LENGTH), None)
    if value is None:
        return None
    if _LENGTH.fullmatch(value):  # int() itself takes 1_0, too
        return int(value)
    raise Invalid(f"Unable to parse inference header size, got: {value[:40].decode('latin-1')}")
