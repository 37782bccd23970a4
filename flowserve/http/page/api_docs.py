"""The page /docs: the OpenAPI document of the server, with a form for each call.

Decides that Swagger UI, which is part of the package, draws it, and that the page is kept and sent compressed: it has
1.9 MB. The page contains no data; it fetches /openapi.json as any client does. Called by `routes`.
"""

from __future__ import annotations

from functools import cache
from gzip import compress, decompress

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.http.page.document import Page, asset, compose


def docs_route() -> Route:
    async def docs(request: Request) -> Response:
        page = await trio.to_thread.run_sync(_packed)
        headers, content = {**page.headers, "vary": "accept-encoding"}, page.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            content = await trio.to_thread.run_sync(decompress, content)
        return Response(content, headers=headers, media_type="text/html")

    return Route("/docs", docs)


@cache
def _packed() -> Page:
    """The page, compressed. Blocks for some 100 ms the first time."""
    page = compose(
        asset("docs.html"),
        [asset("vendor/swagger-ui.css.gz"), asset("docs.css")],
        [asset("vendor/swagger-ui-bundle.js.gz"), asset("docs.js")],
        {},
    )
    return Page(compress(page.content, 6), page.headers)
