"""The routes of the live page: the page itself, its events, and pictures of graphs."""

from __future__ import annotations

from base64 import b64encode
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Final

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flowserve.errors import Unavailable
from flowserve.http.api.events import Say, send_events
from flowserve.http.api.json_bodies import json_response
from flowserve.render.jsontext import graph_document
from flowserve.render.layout import Spare
from flowserve.render.svg import STYLE, render_svg
from flowserve.runtime.engine.deployment import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.protocol.sampler import INTERVAL_S, Sampler
from flowserve.version import __version__

VIEWERS_MAX: Final = 32
SCRIPTS: Final = ("base", "server", "list", "shown", "graph", "request", "timeline", "start")  # in this order one
END: Final = b'{"end":true}'  # the server ends, and so do the events
# What the page writes into the picture: as wide as it may get. assets/graph.js writes these lines.
SPARE: Final = Spare(("0000/s, batches of 000.0", "queue 00000, busy 00/00", "p50 0000 ms, p99 0000 ms"), "  0000 MB/s")


class LiveRoutes:
    """`control` None: models cannot be loaded or unloaded."""

    def __init__(self, engine: Engine, control: Control | None) -> None:
        self._engine = engine
        self._sampler = Sampler(engine)
        self._can_load = control is not None and control.is_explicit
        self._viewers = 0

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/live/events", self.events),
            Route("/live/graphs/{name}/versions/{version}", self.graph),
        ]

    async def page(self, request: Request) -> Response:
        text, policy = _page()
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(text, headers=headers, media_type="text/html")

    async def graph(self, request: Request) -> Response:
        """The picture of one graph, and the document that describes its numbers."""
        deployment = self._engine.deployments.find(request.path_params["name"], request.path_params["version"])
        facts = self._sampler.facts(deployment)
        draw = partial(render_svg, deployment.graph, facts, style="", spare=SPARE)
        return json_response(
            {
                "picture": self._sampler.picture(deployment),
                "svg": await trio.to_thread.run_sync(draw),
                "graph": graph_document(deployment.graph, facts),
            }
        )

    async def events(self, request: Request) -> Response:
        if self._viewers >= VIEWERS_MAX:
            raise Unavailable(f"{VIEWERS_MAX} viewers look at this server already; try again later")
        return _Events(self, request.query_params.get("name", ""), request.query_params.get("version", ""))

    async def tell(self, name: str, version: str, say: Say) -> None:
        """Send the whole state, then about once a second the changes, until the server ends."""
        self._viewers += 1
        try:
            seen = 0
            while not self._engine.stopping.is_set():
                self._sampler.look()
                frame = self._sampler.frame(self._watched(name, version), seen)
                frame["can_load"] = self._can_load
                seen = self._sampler.number
                await say(orjson.dumps(frame))
                with trio.move_on_after(INTERVAL_S):
                    await self._engine.stopping.wait()
            await say(END)
        finally:
            self._viewers -= 1

    def _watched(self, name: str, version: str) -> Deployment | None:
        """The deployment that is shown, if it serves."""
        entry = self._engine.deployments.entries.get(name)
        if entry is None:
            return None
        return next((one for number, one in entry.ready.items() if str(number) == version), None)


class _Events(Response):
    """An ASGI application, as every response of Starlette's is."""

    def __init__(self, live: LiveRoutes, name: str, version: str) -> None:
        super().__init__()
        self._tell = partial(live.tell, name, version)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_events(scope, receive, send, self._tell)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy by which a browser runs only the page's own script."""
    folder = files("flowserve.http.page") / "assets"
    style = (folder / "live.css").read_text("utf-8") + STYLE
    script = "\n".join((folder / f"{part}.js").read_text("utf-8") for part in SCRIPTS)
    text = (folder / "live.html").read_text("utf-8")
    for mark, part in (("<!--VERSION-->", __version__), ("/*STYLE*/", style), ("/*SCRIPT*/", script)):
        text = text.replace(mark, part, 1)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self';"
        " img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
