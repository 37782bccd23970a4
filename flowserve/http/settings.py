"""The logging and trace extensions over HTTP.

Decided here: the endpoints, and that each answers with the settings in force. What may be set is decided in observe/.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid
from flowserve.http.documents import ReadBody, document, json_response
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.engine import Engine


def settings_routes(engine: Engine, log: LogSettings, body: ReadBody) -> list[Route]:
    """`body` reads a request's body, and bounds it."""

    async def logging(request: Request) -> Response:
        if request.method == "POST":
            log.change(await document(request, body))
        return json_response(log.as_json())

    async def tracing(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name and name not in engine.entries:
            raise Invalid(f"request for unknown model '{name}': it has no trace settings")
        if request.method == "POST":
            engine.traces.change(await document(request, body), name)
        return json_response(engine.traces.as_json(name))

    both = ["GET", "POST"]
    return [
        Route("/v2/logging", logging, methods=both),
        Route("/v2/trace/setting", tracing, methods=both),
        Route("/v2/models/{name}/trace/setting", tracing, methods=both),
    ]
