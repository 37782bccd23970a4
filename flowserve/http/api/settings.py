"""The logging and trace extensions over HTTP, and a timeline of what the server does now.

Decides the endpoints, that a change is answered with the settings after it, and how long a timeline may be. observe/
decides which settings exist, and how a timeline is drawn.
"""

from __future__ import annotations

import math
from typing import Final

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid
from flowserve.http.api.json_bodies import ReadBody, document, json_response
from flowserve.observe.log_settings import LogSettings
from flowserve.observe.timeline import timeline
from flowserve.runtime.engine.engine import Engine

SECONDS_MAX: Final = 60


def settings_routes(engine: Engine, log: LogSettings, body: ReadBody) -> list[Route]:
    """`body` reads a request's body, and bounds it."""

    async def logging(request: Request) -> Response:
        if request.method == "POST":
            log.change(await document(request, body))
        return json_response(log.as_json())

    async def tracing(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name and name not in engine.deployments.entries:
            raise Invalid(f"Request for unknown model : {name} has no trace settings")
        if request.method == "POST":
            engine.traces.change(await document(request, body), name)
        return json_response(engine.traces.as_json(name))

    async def timeline_of_now(request: Request) -> Response:
        seconds = _seconds(request.query_params.get("seconds", "2"))
        with engine.traces.window() as window:
            origin_ns = engine.clock()
            await window.wait(seconds, engine.stopping)
        unfinished = await window.settle()
        drawn = await trio.to_thread.run_sync(timeline, window.traces, origin_ns, unfinished)
        return Response(drawn, media_type="application/json")

    both = ["GET", "POST"]
    return [
        Route("/v2/logging", logging, methods=both),
        Route("/v2/trace/setting", tracing, methods=both),
        Route("/v2/trace/timeline", timeline_of_now),
        Route("/v2/models/{name}/trace/setting", tracing, methods=both),
    ]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise Invalid(f"'seconds' is a number greater than 0 and at most {SECONDS_MAX}, got '{text[:40]}'")
    return seconds
