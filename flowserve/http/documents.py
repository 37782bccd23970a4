"""JSON in and out of the small calls: those that are not inference.

Decided here: that such a call's body is a JSON object or empty, and what an answer of JSON is. What the members mean,
each call knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from flowserve.errors import Invalid
from flowserve.http.infer_header import load_json

ReadBody = Callable[[Request], Awaitable[bytes]]
Handler = Callable[[Request], Awaitable[Response]]


async def document(request: Request, body: ReadBody) -> dict[str, Any]:
    """The object in the request's body, empty where there is none. Raises `Invalid`, and what `body` raises."""
    text = await body(request)
    asked = load_json(text) if text else {}
    if not isinstance(asked, dict):
        raise Invalid("failed to parse the request JSON buffer: the body is a JSON object, or empty")
    return asked


def json_response(answer: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(answer), status, media_type="application/json")
