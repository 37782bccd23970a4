"""/docs: an interactive page for the OpenAPI document, which works without a network.

Decides the page, its files (Swagger UI, in `vendor/`) and what a browser may do on it. The page has no data of its
own: it reads /openapi.json and sends what its user enters. Caller: `http/api/app`.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES: Final = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_SCRIPT: Final = 'SwaggerUIBundle({ url: "openapi.json", dom_id: "#page", tryItOutEnabled: true, validatorUrl: null });'
_PAGE: Final = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>flowserve: HTTP interface</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<noscript>This page needs JavaScript. The document itself is at <a href="openapi.json">/openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
_DIGEST: Final = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
# Swagger UI sets styles on its elements, and has its pictures as data.
_HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; script-src 'self' 'sha256-{_DIGEST}'; "
    "style-src 'self' 'unsafe-inline'; img-src data:; font-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def docs_routes() -> list[Route]:
    """The page and its files."""
    return [
        Route("/docs", _page),
        *(Route(f"/docs/{name}", _file) for name in _FILES),
    ]


async def _page(request: Request) -> Response:
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


async def _file(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2]
    headers = {"content-encoding": "gzip", "x-content-type-options": "nosniff", "cache-control": "max-age=86400"}
    return Response(_compressed(name), headers=headers, media_type=_FILES[name])


@cache
def _compressed(name: str) -> bytes:
    return (files("flowserve.http.page") / "vendor" / f"{name}.gz").read_bytes()
