"""The routes of the live page: the page itself, its events, and pictures of graphs."""

from __future__ import annotations

from base64 import b64encode
from contextlib import ExitStack
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Unavailable
from flowserve.http.api.events import EventResponse, Say
from flowserve.http.api.json_bodies import json_response
from flowserve.http.page.sampler import INTERVAL_S, Sampler
from flowserve.observe.server_timing import server_timing
from flowserve.observe.trace import Trace
from flowserve.render.jsontext import graph_document
from flowserve.render.layout import Spare
from flowserve.render.svg import STYLE, render_svg
from flowserve.runtime.clock import wall_clock_ms
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.version import __version__

VIEWERS_MAX: Final = 32
_NS_PER_MS: Final = 1_000_000
SCRIPTS: Final = (
    "base",
    "server",
    "list",
    "shown",
    "charts",
    "graph",
    "request",
    "timeline",
    "recent",
    "start",
)  # in this order one
END: Final = b'{"end":true}'  # the server ends, and so do the events
# What the page writes into the picture: as wide as it may get. assets/graph.js writes these lines.
SPARE: Final = Spare(("0000/s, batches of 000.0", "queue 00000, busy 00/00", "p50 0000 ms, p99 0000 ms"), "  0000 MB/s")


def live_routes(engine: Engine, control: Control | None) -> list[Route]:
    """`control` None: models cannot be loaded or unloaded."""
    sampler = Sampler(engine)
    can_load = control is not None and control.is_explicit
    viewers = 0

    async def page(request: Request) -> Response:
        text, policy = _page()
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(text, headers=headers, media_type="text/html")

    async def graph(request: Request) -> Response:
        """The picture of one graph, and the document that describes its numbers."""
        deployment = engine.deployments.find(request.path_params["name"], request.path_params["version"])
        configs = sampler.configs(deployment)
        draw = partial(render_svg, deployment.graph, configs, style="", spare=SPARE)
        return json_response(
            {
                "picture": sampler.picture(deployment),
                "svg": await trio.to_thread.run_sync(draw),
                "graph": graph_document(deployment.graph, configs),
            }
        )

    async def events(request: Request) -> Response:
        if viewers >= VIEWERS_MAX:
            raise Unavailable(f"{VIEWERS_MAX} viewers look at this server already; try again later")
        name, version = request.query_params.get("name", ""), request.query_params.get("version", "")
        return EventResponse(partial(tell, name, version))

    async def tell(name: str, version: str, say: Say) -> None:
        """Send the whole state, then about once a second the changes, until the server ends."""
        nonlocal viewers
        viewers += 1
        recent = engine.traces.recent
        with ExitStack() as leaving:
            leaving.callback(left)
            leaving.enter_context(recent.watching(name))
            seen = told = 0
            while not engine.stopping.is_set():
                sampler.look()
                entry = engine.deployments.entries.get(name)
                ready = {str(number): one for number, one in entry.ready.items()} if entry else {}
                frame = sampler.frame(ready.get(version), seen)  # None: the deployment does not serve
                frame["can_load"] = can_load
                requests = recent.since(name, told)
                frame["requests"] = [_request(trace, engine.clock()) for _, trace in requests]
                told = requests[-1][0] if requests else told
                seen = sampler.number
                await say(orjson.dumps(frame))
                with trio.move_on_after(INTERVAL_S):
                    await engine.stopping.wait()
            await say(END)

    def left() -> None:
        nonlocal viewers
        viewers -= 1

    return [
        Route("/", page),
        Route("/live/events", events),
        Route("/live/graphs/{name}/versions/{version}", graph),
    ]


def _request(trace: Trace, now_ns: int) -> dict[str, Any]:
    """A request that is over, for the list of the last ones. `timing` as in the header Server-Timing."""
    return {
        "id": trace.request_id,
        "at_ms": wall_clock_ms() - (now_ns - trace.arrived_ns) // _NS_PER_MS,
        "ms": (trace.ended_ns - trace.arrived_ns) / _NS_PER_MS,
        "rows": trace.rows,
        "error": trace.error,
        "timing": server_timing(trace),
    }


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy by which a browser runs only the page's own scripts."""
    folder = files("flowserve.http.page") / "assets"
    vendor = files("flowserve.http.page") / "vendor"
    plots = (vendor / "uplot.js").read_text("utf-8")
    styles = [vendor / "uplot.css", folder / "live.css"]
    style = "".join(one.read_text("utf-8") for one in styles) + STYLE
    script = "\n".join((folder / f"{part}.js").read_text("utf-8") for part in SCRIPTS)
    text = (folder / "live.html").read_text("utf-8")
    parts = {"<!--VERSION-->": __version__, "/*STYLE*/": style, "/*VENDOR*/": plots, "/*SCRIPT*/": script}
    for mark, part in parts.items():
        text = text.replace(mark, part, 1)
    policy = (
        f"default-src 'none'; script-src '{_digest(plots)}' '{_digest(script)}'; style-src '{_digest(style)}';"
        " connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
