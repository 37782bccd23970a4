"""The routes of the live page: the page itself, its events, pictures of graphs, the last requests; and /docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Final

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.http.api.events import EventResponse, Say
from flowserve.http.api.json_bodies import json_response
from flowserve.http.page.api_docs import docs_route
from flowserve.http.page.document import Page, asset, compose
from flowserve.http.page.sampler import INTERVAL_S, Sampler
from flowserve.render.jsontext import graph_document
from flowserve.render.layout import Direction, Spare
from flowserve.render.scopes import ensembles_of
from flowserve.render.svg import ASSETS, STYLE, render_svg
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.version import __version__

VIEWERS_MAX: Final = 32
_NUMBER_CHARS_MAX: Final = 18
_DIRECTIONS: Final[Mapping[str, Direction | None]] = {"": None, "LR": "LR", "TB": "TB"}
# In this order one script.
SCRIPTS: Final = ("base", "server", "list", "shown", "charts", "graph", "request", "timeline", "requests", "start")
END: Final = b'{"end":true}'  # the server ends, and so do the events
# What the page writes into the picture: as wide as it may get. assets/graph.js writes these lines.
SPARE: Final = Spare(
    ("0000/s, batches of 000.0", "queue 00000, busy 00/00", "p50 0000 ms, p99 0000 ms"),
    "  0000 MB/s",
    ": 00.0 % of rows",
)


def live_routes(engine: Engine, control: Control | None) -> list[Route]:
    """`control` None: models cannot be loaded or unloaded."""
    sampler = Sampler(engine)
    can_load = control is not None and control.is_explicit
    viewers = 0

    async def page(request: Request) -> Response:
        made = _page()
        return Response(made.content, headers=dict(made.headers), media_type="text/html")

    async def graph(request: Request) -> Response:
        """The picture of one graph, and the document that describes its numbers."""
        deployment = engine.deployments.find(request.path_params["name"], request.path_params["version"])
        configs = sampler.configs(deployment)
        asked = request.query_params.get("direction", "")
        if asked not in _DIRECTIONS:
            raise Invalid(f"'direction' is LR or TB, got '{asked[:40]}'")
        direction = _DIRECTIONS[asked]
        folded: Sequence[str] = request.query_params.getlist("fold")
        if "*" in folded:
            folded = ensembles_of(deployment.graph)
        draw = partial(
            render_svg, deployment.graph, configs, frozenset(folded), style="", spare=SPARE, direction=direction
        )
        return json_response(
            {
                "picture": sampler.picture(deployment),
                "svg": await trio.to_thread.run_sync(draw),
                "graph": graph_document(deployment.graph, configs),
            }
        )

    async def requests(request: Request) -> Response:
        """The last requests of one deployment after a number; more are recorded for some seconds."""
        deployment = engine.deployments.find(request.path_params["name"], request.path_params["version"])
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > _NUMBER_CHARS_MAX:
            raise Invalid(f"'after' is a number of a request, got '{after[:40]}'")
        found = engine.traces.recent(ModelKey(deployment.name, deployment.version), int(after))
        return json_response({"requests": [one.as_json() for one in found]})

    async def events(request: Request) -> Response:
        if viewers >= VIEWERS_MAX:
            raise Unavailable(f"{VIEWERS_MAX} viewers look at this server already; try again later")
        name, version = request.query_params.get("name", ""), request.query_params.get("version", "")
        return EventResponse(partial(tell, name, version))

    async def tell(name: str, version: str, say: Say) -> None:
        """Send the whole state, then about once a second the changes, until the server ends."""
        nonlocal viewers
        viewers += 1
        try:
            seen = 0
            while not engine.stopping.is_set():
                await sampler.look()
                entry = engine.deployments.entries.get(name)
                ready = {str(number): one for number, one in entry.ready.items()} if entry else {}
                frame = sampler.frame(ready.get(version), seen)  # None: the deployment does not serve
                frame["can_load"] = can_load
                seen = sampler.number
                await say(orjson.dumps(frame))
                with trio.move_on_after(INTERVAL_S):
                    await engine.stopping.wait()
            await say(END)
        finally:
            viewers -= 1

    return [
        Route("/", page),
        docs_route(),
        Route("/live/events", events),
        Route("/live/graphs/{name}/versions/{version}", graph),
        Route("/live/requests/{name}/versions/{version}", requests),
    ]


@cache
def _page() -> Page:
    shared = [(ASSETS / file).read_text("utf-8") for file in ("view.css", "view.js")]
    styles = [asset("vendor/uPlot.min.css"), asset("live.css"), STYLE, shared[0]]
    scripts = [asset(f"{part}.js") for part in SCRIPTS]
    scripts[1:1] = [asset("vendor/uPlot.iife.min.js"), shared[1]]  # after "base", which makes all of them strict
    return compose(asset("live.html"), styles, scripts, {"<!--VERSION-->": __version__})
