"""The HTTP API of an engine: the route of every KServe v2 endpoint.

Decides the routes, and the JSON of everything that is not inference. The app runs on any ASGI server on trio. Endpoints
of features that are absent respond with 501 and the feature's name. What is measured and counted is decided in
observe/, what is ready in runtime/. Called by the command line.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import FlowserveError, NotFound, Overloaded, Unavailable
from flowserve.http.api.access import AccessRules, checked
from flowserve.http.api.compression import expand, is_compressed
from flowserve.http.api.extensions import repository_routes, settings_routes, shared_memory_routes
from flowserve.http.api.generate import generate_routes
from flowserve.http.api.infer import AppOptions, InferRoute, read_body
from flowserve.http.api.json_bodies import error_response, json_response, status_of
from flowserve.http.api.openapi import openapi
from flowserve.http.api.request_target import PREFIX, SUFFIX, is_version
from flowserve.http.api.restricted import restricted
from flowserve.http.page.routes import live_routes
from flowserve.http.server.connection import RESERVATION
from flowserve.http.server.response import RETRY_AFTER, no_memory
from flowserve.observe.combined import GRAPHS, METRICS, STATISTICS
from flowserve.observe.deployment_metrics import deployment_metrics
from flowserve.observe.exposition import CONTENT_TYPE, COUNTER, GAUGE, family
from flowserve.observe.machine import GpuMeter, MachineMeter, machine_text
from flowserve.observe.settings import EVERYTHING, MetricsChoice
from flowserve.runtime.budget import Budget
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.protocol import model_metadata, server_metadata, statistics_of_all
from flowserve.runtime.threads import in_thread
from flowserve.values import BytesLike

_log = logging.getLogger("flowserve.http")

# Outside of /v2, which belongs to the protocol.
GRAPH_STATISTICS: Final = (
    "/flowserve/stats",
    "/flowserve/models/{name}/stats",
    "/flowserve/models/{name}/versions/{version}/stats",
)


def make_app(engine: Engine, options: AppOptions | None = None, control: Control | None = None) -> ASGIApp:
    """The ASGI application that serves `engine`. `control`, if there is one, loads and unloads its models."""
    options = options or AppOptions()
    app: ASGIApp = _starlette(make_routes(engine, options, control))
    if options.restrictions:
        app = restricted(app, options.restrictions)
    return checked(app, options.access)  # outside, as the preflight requests of browsers have no keys


def make_metrics_app(
    engine: Engine,
    choice: MetricsChoice | None = EVERYTHING,
    access: AccessRules | None = None,
    budget: Budget | None = None,
) -> ASGIApp:
    """An application that serves only /metrics, for a separate port. It requires no keys. `budget`: that of the server
    for requests.
    """
    return checked(_starlette(_metrics_routes(engine, choice, budget or Budget())), access or AccessRules())


def make_routes(engine: Engine, options: AppOptions, control: Control | None) -> list[Route]:
    """All endpoints."""
    deployments = engine.deployments

    async def server(request: Request) -> Response:
        return json_response(server_metadata(engine.options.server_name))

    async def live(request: Request) -> Response:
        return _health(request, "live", deployments.is_live)

    async def ready(request: Request) -> Response:
        return _health(request, "ready", deployments.is_ready)

    async def metadata(request: Request) -> Response:
        name, version = _names(request)
        return json_response(model_metadata(deployments.find(name, version), version))

    async def model_ready(request: Request) -> Response:
        try:
            outage = await engine.unready(deployments.find(*_names(request)))
        except (NotFound, Unavailable) as error:  # 400, as on Triton
            outage = "it is not loaded" if isinstance(error, Unavailable) else str(error)
        return json_response({"error": f"Model version not ready: {outage}"}, 400) if outage else Response()

    async def config(request: Request) -> Response:
        return json_response(deployments.find(*_names(request)).config.json)

    async def statistics(request: Request) -> Response:
        return json_response({"model_stats": await statistics_of_all(engine, STATISTICS, *_names(request))})

    async def graph_statistics(request: Request) -> Response:
        return json_response({"graph_stats": await statistics_of_all(engine, GRAPHS, *_names(request))})

    async def document(request: Request) -> Response:
        return json_response(openapi())

    async def body(request: Request) -> BytesLike:
        """The whole body, expanded if it is compressed. Raises TooLarge."""
        received = await read_body(request.receive, options.max_body_bytes)
        if not is_compressed(request.headers.raw):
            return received
        # On another ASGI server there is no budget.
        reserve = [request.scope[RESERVATION]().grow] if RESERVATION in request.scope else []
        return await in_thread(partial(expand, received, options.max_body_bytes, *reserve))

    infer = InferRoute(engine, options)
    routes = [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models/stats", statistics),
        *repository_routes(engine, control, body),
        *shared_memory_routes(engine, options.client_memory, body),
        *_metrics_routes(engine, options.metrics, options.budget),
        *settings_routes(engine, options.log, body),
        *generate_routes(engine, body, options),
        Route("/openapi.json", document),
        *(Route(path, graph_statistics) for path in GRAPH_STATISTICS),
        *live_routes(engine, control),
    ]
    for path in (PREFIX + "{name}", PREFIX + "{name}/versions/{version}"):
        routes += [
            Route(path, metadata),
            Route(f"{path}/ready", model_ready),
            Route(f"{path}/config", config),
            Route(f"{path}/stats", statistics),
            Route(f"{path}{SUFFIX}", infer, methods=["POST"]),
        ]
    return routes


def _starlette(routes: list[Route]) -> Starlette:
    handlers = {HTTPException: _http_error, FlowserveError: _error, MemoryError: _no_memory, Exception: _broken}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _metrics_routes(engine: Engine, choice: MetricsChoice | None, budget: Budget) -> list[Route]:
    if choice is None:
        return []
    exposition = Exposition(engine, choice, budget)

    async def metrics(request: Request) -> Response:
        return _InParts(await exposition.parts() if engine.group is None else [await engine.group.report(METRICS)])

    return [Route("/metrics", metrics)]


class Exposition:
    """The metrics of one server, without those of others behind its port."""

    def __init__(self, engine: Engine, choice: MetricsChoice, budget: Budget) -> None:
        self._engine = engine
        self._budget = budget
        self._deployments = deployment_metrics(choice)
        self._machine = MachineMeter(interval_ms=choice.interval_ms) if choice.has_machine else None
        self._gpus = GpuMeter() if choice.has_gpus else None

    async def parts(self) -> list[bytes]:
        """Prometheus' text, in pieces."""
        engine = self._engine
        parts = [_budget_text(self._budget), _stores_text(engine)]
        parts += [wing.metrics().encode() for wing in engine.options.wings]
        own = engine.calls.server_requests.metrics
        parts.append(await trio.to_thread.run_sync(machine_text, self._machine, self._gpus, own))
        # On the event loop: a thread would hold the interpreter lock for half a millisecond each time that the loop
        # releases it.
        for part in self._deployments.pieces(engine.deployments.counters()):
            parts.append(part)
            await trio.lowlevel.checkpoint()
        return parts


def _stores_text(engine: Engine) -> bytes:
    """The family of the repositories in stores: whether the last request to each store succeeded."""
    control = engine.calls.server_requests.control
    found = [((("repository", one.name),), float(not one.outage)) for one in (control.mirrors if control else ())]
    text = "Whether the store of a repository could be asked the last time (1) or not (0)"
    return family("flowserve_repository_reachable", text, GAUGE, found).encode() if found else b""


def _budget_text(budget: Budget) -> bytes:
    """The families of the server's budget."""
    refused = [
        ((("reason", "bodies"),), budget.refused_bodies),
        ((("reason", "connections"),), budget.refused_connections),
    ]
    text = "Bytes of request bodies and gRPC messages that count against --http-max-total-input-size"
    bodies = family("flowserve_http_body_bytes", text, GAUGE, [((), budget.body_bytes)])
    text = "Open HTTP connections, which count against --http-max-connections"
    connections = family("flowserve_http_connections", text, GAUGE, [((), budget.connections)])
    text = "Requests and connections refused with 503 at these limits or without a file descriptor"
    return (bodies + connections + family("flowserve_http_refused_total", text, COUNTER, refused)).encode()


class _InParts(Response):
    """The exposition, never joined into one buffer: the copy alone would block the event loop for milliseconds."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = [part for part in parts if part]
        length = str(sum(map(len, self._parts)))
        super().__init__(headers={"content-length": length}, media_type=CONTENT_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _health(request: Request, what: str, is_so: bool) -> Response:
    """An empty body, as Triton's; a JSON object for clients that ask for JSON, as KServe's does."""
    status = 200 if is_so else 400
    if "application/json" in request.headers.get("accept", ""):
        return json_response({what: is_so}, status)
    return Response(status_code=status)


def _names(request: Request) -> tuple[str, str]:
    """The name and the version in the path, "" for none."""
    version = request.path_params.get("version", "")
    if version and not is_version(version):
        raise HTTPException(404)
    return request.path_params.get("name", ""), version


# ---------------------------------------------------------------------------------------------- failures

_INFERENCE = "inference is POST /v2/models/NAME/infer"


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlowserveError)
    headers = {name.decode(): value.decode() for name, value in (RETRY_AFTER,) if isinstance(error, Overloaded)}
    return error_response(str(error), status_of(error), headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: 404 and 405, whose text begins with their name."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    text = error.detail
    if error.status_code == 405 and "Allow" in headers:
        right = [one for one in sorted(headers["Allow"].split(", ")) if one != "HEAD"]
        text += f": {request.method} where {' or '.join(right)} is asked for"
        if request.method == "POST" and request.path_params.get("name"):
            text += f"; {_INFERENCE}"
    if error.status_code == 404:
        text += f": no such path; /docs has the list of them, and {_INFERENCE}"
    return error_response(text, error.status_code, headers)


async def _no_memory(request: Request, error: Exception) -> Response:
    assert isinstance(error, MemoryError)
    _log.error("%s %r: %s", request.method, request.url.path, no_memory(error))
    return await _error(request, Overloaded(no_memory(error)))


async def _broken(request: Request, error: Exception) -> Response:
    """An internal error. Starlette raises it again after this, so that the server logs it."""
    return error_response("internal server error", 500)
