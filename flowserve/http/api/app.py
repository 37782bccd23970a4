"""The HTTP API of an engine: the route of every KServe v2 endpoint.

Decides the routes, and the JSON of everything that is not inference. The app runs on any ASGI server on trio. Endpoints
of features that are absent respond with 501 and the feature's name. What is measured and counted is decided in
observe/, what is ready in runtime/. Called by the command line.
"""

from __future__ import annotations

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import FlowserveError, TooLarge, Unavailable
from flowserve.http.api.compression import UnknownEncoding, expand, is_compressed
from flowserve.http.api.generate import GenerateRoutes
from flowserve.http.api.infer import InferRoute
from flowserve.http.api.json_bodies import error_response, json_response, status_of
from flowserve.http.api.model_control import ModelControlRoutes
from flowserve.http.api.openapi import openapi
from flowserve.http.api.options import AppOptions
from flowserve.http.api.request_target import PREFIX, SUFFIX, is_version
from flowserve.http.api.restricted import restricted
from flowserve.http.api.settings import settings_routes
from flowserve.http.api.shared_memory import shared_memory_routes
from flowserve.http.page.routes import LiveRoutes
from flowserve.http.server.limits import body_too_large
from flowserve.observe.deployment_metrics import deployment_metrics
from flowserve.observe.exposition import CONTENT_TYPE
from flowserve.observe.machine import GpuMeter, MachineMeter
from flowserve.observe.metrics import machine_text
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice
from flowserve.runtime.engine.deployment import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.protocol.metadata import model_metadata, server_metadata


def make_app(engine: Engine, options: AppOptions | None = None, control: Control | None = None) -> ASGIApp:
    """The ASGI application that serves `engine`. `control`, if there is one, loads and unloads its models."""
    options = options or AppOptions()
    app = _starlette(make_routes(engine, options, control))
    return restricted(app, options.restrictions) if options.restrictions else app


def make_metrics_app(engine: Engine, choice: MetricsChoice | None = EVERYTHING) -> ASGIApp:
    """An application that serves only /metrics, for a separate port."""
    return _starlette(_metrics_routes(engine, choice))


def make_routes(engine: Engine, options: AppOptions, control: Control | None) -> list[Route]:
    """All endpoints."""
    pages = _Pages(engine, options)
    infer = InferRoute(engine, options)
    routes = [
        Route("/v2", pages.server),
        Route("/v2/health/live", pages.live),
        Route("/v2/health/ready", pages.ready),
        Route("/v2/models/stats", pages.all_statistics),
        *ModelControlRoutes(engine, control, pages.body).routes(),
        *shared_memory_routes(options.client_memory, pages.body),
        *_metrics_routes(engine, options.metrics),
        *settings_routes(engine, options.log, pages.body),
        *GenerateRoutes(engine, pages.body, options.forwarding).routes(),
        Route("/openapi.json", pages.openapi),
        *LiveRoutes(engine, control).routes(),
    ]
    for path in (PREFIX + "{name}", PREFIX + "{name}/versions/{version}"):
        routes += [
            Route(path, pages.metadata),
            Route(f"{path}/ready", pages.model_ready),
            Route(f"{path}/config", pages.config),
            Route(f"{path}/stats", pages.statistics),
            Route(f"{path}{SUFFIX}", infer, methods=["POST"]),
        ]
    return routes


def _starlette(routes: list[Route]) -> Starlette:
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _http_error,
            FlowserveError: _error,
            UnknownEncoding: _unknown_encoding,
            Exception: _broken,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Pages:
    """The endpoints. Each raises a FlowserveError if it fails."""

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self._engine = engine
        self._options = options

    async def server(self, request: Request) -> Response:
        return json_response(server_metadata())

    async def live(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.deployments.is_live else 400)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.deployments.is_ready else 400)

    async def metadata(self, request: Request) -> Response:
        deployment = self._deployment(request)
        return json_response(model_metadata(deployment, request.path_params.get("version", "")))

    async def model_ready(self, request: Request) -> Response:
        try:
            outage = self._engine.deployments.outage(self._deployment(request))
        except Unavailable:
            outage = "it is not loaded"
        return json_response({"error": f"Model version not ready: {outage}"}, 400) if outage else Response()

    async def config(self, request: Request) -> Response:
        return json_response(self._deployment(request).config.json)

    async def statistics(self, request: Request) -> Response:
        name, version = _names(request)
        return json_response({"model_stats": self._engine.deployments.statistics(name, version)})

    async def all_statistics(self, request: Request) -> Response:
        return json_response({"model_stats": self._engine.deployments.statistics()})

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi())

    def _deployment(self, request: Request) -> Deployment:
        return self._engine.deployments.find(*_names(request))

    async def body(self, request: Request) -> bytes:
        """The whole body, expanded if it is compressed. Raises TooLarge."""
        limit = self._options.max_body_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise TooLarge(body_too_large(None, limit))
        if is_compressed(request.headers.raw):
            return await trio.to_thread.run_sync(expand, body, limit, abandon_on_cancel=True)
        return bytes(body)


def _metrics_routes(engine: Engine, choice: MetricsChoice | None) -> list[Route]:
    return [] if choice is None else [Route("/metrics", _Metrics(engine, choice).page)]


class _Metrics:
    def __init__(self, engine: Engine, choice: MetricsChoice) -> None:
        self._engine = engine
        self._deployments = deployment_metrics(choice)
        self._machine = MachineMeter(interval_ms=choice.interval_ms) if choice.has_machine else None
        self._gpus = GpuMeter() if choice.has_gpus else None

    async def page(self, request: Request) -> Response:
        parts = [
            await trio.to_thread.run_sync(machine_text, self._machine, self._gpus, self._engine.server_requests.metrics)
        ]
        # On the loop and not in a thread, which would keep the interpreter for half a millisecond each time that the
        # loop lets go of it.
        for part in self._deployments.pieces(self._engine.deployments.counters()):
            parts.append(part)
            await trio.lowlevel.checkpoint()
        return _InParts(parts)


class _InParts(Response):
    """The exposition, never copied into one piece: that alone would keep the loop for milliseconds."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = [part for part in parts if part]
        length = str(sum(map(len, self._parts)))
        super().__init__(headers={"content-length": length}, media_type=CONTENT_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _names(request: Request) -> tuple[str, str]:
    version = request.path_params.get("version", "")
    if version and not is_version(version):
        raise HTTPException(404)
    return request.path_params["name"], version


# ---------------------------------------------------------------------------------------------- failures


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlowserveError)
    return error_response(str(error), status_of(error))


async def _unknown_encoding(request: Request, error: Exception) -> Response:
    return error_response(str(error), 415)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: 404 and 405, whose text begins with their name."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    text = error.detail
    if error.status_code == 405 and "Allow" in headers:
        right = [one for one in sorted(headers["Allow"].split(", ")) if one != "HEAD"]
        text += f": {request.method} where {' or '.join(right)} is asked for"
    return error_response(text, error.status_code, headers)


async def _broken(request: Request, error: Exception) -> Response:
    """An internal error. Starlette raises it again after this, so that the server logs it."""
    return error_response("internal server error", 500)
