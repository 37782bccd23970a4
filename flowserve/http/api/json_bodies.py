"""JSON bodies of the endpoints other than inference, and the HTTP status of each kind of failure.

Decides the statuses, and that such a request's body is a JSON object or empty. The text of a failure is decided
by the code that raises it, the meaning of the members by each endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from flowserve.errors import FlowserveError, Invalid
from flowserve.http.api.json_fields import load_json
from flowserve.http.server.response_head import error_body

ReadBody = Callable[[Request], Awaitable[bytes]]
Handler = Callable[[Request], Awaitable[Response]]

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


async def document(request: Request, body: ReadBody) -> dict[str, Any]:
    """The object in the request's body, empty if there is none. Raises `Invalid`, and the errors of `body`."""
    text = await body(request)
    found = load_json(text) if text else {}
    if not isinstance(found, dict):
        raise Invalid("failed to parse the request JSON buffer: the body is a JSON object, or empty")
    return found


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_response(text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """`{"error": text}`."""
    return Response(error_body(text), status, headers, "application/json")
