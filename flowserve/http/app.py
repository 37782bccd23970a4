"""The HTTP face of the engine: which URL asks what, for every KServe v2 endpoint.

Decided here: routes, and the JSON of everything that is not inference. The app runs on any ASGI server that runs on
trio; ours (server.py) carries it faster. Endpoints of features that are absent answer 501 with the feature's name.
What is measured and counted is decided in observe/, what is ready in runtime/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import FlowserveError, TooLarge, Unavailable
from flowserve.http.asked import PREFIX, SUFFIX, asked, is_version
from flowserve.http.compression import UnknownEncoding, expand, is_compressed
from flowserve.http.connection import Connection
from flowserve.http.documents import json_response
from flowserve.http.errors import error_body, status_of
from flowserve.http.forwarding import ForwardingInferRoute
from flowserve.http.generate import GenerateRoutes
from flowserve.http.infer import InferRoute
from flowserve.http.limits import MAX_BODY_BYTES, body_too_large
from flowserve.http.live import LiveRoutes
from flowserve.http.model_control import ModelControlRoutes
from flowserve.http.openapi import openapi
from flowserve.http.restricted import restricted
from flowserve.http.settings import settings_routes
from flowserve.http.shared_memory import shared_memory_routes
from flowserve.http.traced import TracedInferRoute
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.deployment_metrics import deployment_metrics
from flowserve.observe.exposition import CONTENT_TYPE
from flowserve.observe.gpus import GpuMeter
from flowserve.observe.log_settings import LogSettings
from flowserve.observe.machine import Machine
from flowserve.observe.metrics import machine_text
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice
from flowserve.runtime.control import Control
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.engine import Engine
from flowserve.runtime.metadata import model_metadata, server_metadata
from flowserve.runtime.request_parameters import Forwarding
from flowserve.runtime.restriction import Restriction
from flowserve.values import Array

# So much of a model's shared memory may hold bodies: what is there once stays with the server. More are copied.
_ROOM_BYTES_MAX: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class AppOptions:
    """`max_body_bytes` bounds bodies that a foreign ASGI server hands on in pieces, and compressed ones, expanded; our
    own server refuses others earlier. `client_memory` and `log` are shared by everything that serves one engine.
    `forwarding`: which headers go with inference requests, as parameters. `metrics` None: there are none.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    client_memory: ClientMemory = field(default_factory=ClientMemory)
    restrictions: tuple[Restriction, ...] = ()
    forwarding: Forwarding | None = None
    metrics: MetricsChoice | None = EVERYTHING
    log: LogSettings = field(default_factory=LogSettings)


def make_app(engine: Engine, options: AppOptions | None = None, control: Control | None = None) -> ASGIApp:
    """The ASGI application that serves `engine`. `control`, where there is one, loads and unloads its models."""
    options = options or AppOptions()
    route = (engine, options.max_body_bytes, options.client_memory)
    infer = InferRoute(*route) if options.forwarding is None else ForwardingInferRoute(options.forwarding, *route)
    app = _App(engine, infer, _starlette(make_routes(engine, options, control)))
    return restricted(app, options.restrictions) if options.restrictions else app


class _App:
    """Inference in front of everything else."""

    def __init__(self, engine: Engine, infer: InferRoute, rest: ASGIApp) -> None:
        self._engine = engine
        self._infer: InferRoute | TracedInferRoute = infer
        self._rest = rest

        def trace(is_on: bool) -> None:
            self._infer = TracedInferRoute(infer, engine.traces) if is_on else infer

        engine.traces.listen(trace)
        self.begin_burst, self.end_burst = engine.begin_burst, engine.end_burst
        self.tell_around = engine.tell_around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = asked(scope)
        await (self._rest(scope, receive, send) if found is None else self._infer(scope, receive, send, found))

    def begin(self, scope: Scope, exchange: Connection) -> bool:
        """What our own server asks first: answer, or promise to, without waiting. False where that cannot be."""
        found = asked(scope)
        return found is not None and self._infer.begin(found, exchange)

    def room(self, scope: Scope, nbytes: int) -> Array | None:
        """Where our own server may receive a large body, as bytes: in the memory of the process that will read it.
        None: anywhere.
        """
        found = asked(scope)
        if found is None:
            return None
        try:
            arena = self._engine.find(found.name, found.version).arena
        except FlowserveError:
            return None  # it is said when the body is there
        if arena is None or arena.lent_bytes + nbytes > _ROOM_BYTES_MAX:
            return None
        return arena.lease(nbytes).view()


def make_metrics_app(engine: Engine, choice: MetricsChoice | None = EVERYTHING) -> ASGIApp:
    """An application that serves nothing but /metrics, for a port of their own."""
    return _starlette(_metrics_routes(engine, choice))


def make_routes(engine: Engine, options: AppOptions, control: Control | None) -> list[Route]:
    """Every endpoint there is. Inference is answered before the router; its routes turn other verbs away."""
    pages = _Pages(engine, options)
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
            Route(f"{path}{SUFFIX}", pages.nothing, methods=["POST"]),
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
    """The endpoints. Each raises a FlowserveError for what it cannot answer."""

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self._engine = engine
        self._options = options

    async def server(self, request: Request) -> Response:
        return json_response(server_metadata())

    async def live(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.is_live else 400)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.is_ready else 400)

    async def metadata(self, request: Request) -> Response:
        deployment = self._deployment(request)
        return json_response(model_metadata(deployment, request.path_params.get("version", "")))

    async def model_ready(self, request: Request) -> Response:
        try:
            outage = self._engine.outage(self._deployment(request))
        except Unavailable:
            outage = "it is not loaded"
        return json_response({"error": f"Model version not ready: {outage}"}, 400) if outage else Response()

    async def config(self, request: Request) -> Response:
        return json_response(self._deployment(request).config.json)

    async def statistics(self, request: Request) -> Response:
        name, version = _names(request)
        return json_response({"model_stats": self._engine.statistics(name, version)})

    async def all_statistics(self, request: Request) -> Response:
        return json_response({"model_stats": self._engine.statistics()})

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi())

    async def nothing(self, request: Request) -> Response:
        raise HTTPException(404)

    def _deployment(self, request: Request) -> Deployment:
        return self._engine.find(*_names(request))

    async def body(self, request: Request) -> bytes:
        """The whole body, expanded where it is compressed. Raises TooLarge."""
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
        self._machine = Machine(interval_ms=choice.interval_ms) if choice.has_machine else None
        self._gpus = GpuMeter() if choice.has_gpus else None

    async def page(self, request: Request) -> Response:
        parts = [await trio.to_thread.run_sync(machine_text, self._machine, self._gpus, self._engine.asks.metrics)]
        # On the loop and not in a thread, which would keep the interpreter for half a millisecond each time that the
        # loop lets go of it.
        for part in self._deployments.pieces(self._engine.counters()):
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


# ---------------------------------------------------------------------------------------------- answers


def _error_response(text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(text), status, headers, "application/json")


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlowserveError)
    return _error_response(str(error), status_of(error))


async def _unknown_encoding(request: Request, error: Exception) -> Response:
    return _error_response(str(error), 415)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: 404 and 405, whose text begins with their name."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    text = error.detail
    if error.status_code == 405 and "Allow" in headers:
        right = [one for one in sorted(headers["Allow"].split(", ")) if one != "HEAD"]
        text += f": {request.method} where {' or '.join(right)} is asked for"
    return _error_response(text, error.status_code, headers)


async def _broken(request: Request, error: Exception) -> Response:
    """A mistake of ours. Starlette raises it on after this, so that the server logs it."""
    return _error_response("internal server error", 500)
