"""Triton's extensions for operating a server, over HTTP: model repository, shared memory of clients, logging, tracing;
and a timeline of what the server does now.

Decides the endpoints and the JSON of these calls, that a change of settings is answered with the settings after it, and
how long a timeline may be. The valid parameters of loading are decided in runtime/model_calls/server_requests.py, its
implementation in runtime/loading/, what a region is in memory/client_memory.py, and which settings exist and how a
timeline is drawn in observe/.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid
from flowserve.http.api.json_bodies import (
    Handler,
    ReadBody,
    document,
    json_response,
    missing,
    object_of,
    string_of,
    uint_of,
)
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.settings import LogSettings
from flowserve.observe.timeline import timeline
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.group import Group, change
from flowserve.runtime.loading.control import Control
from flowserve.runtime.model_calls.server_requests import (
    CONFIG,
    FILE,
    UNLOAD_DEPENDENTS,
    allowed,
    file_keys,
    one_of_several,
    override,
    unload_dependents,
)
from flowserve.runtime.threads import in_thread

SECONDS_MAX: Final = 60
_REPOSITORY: Final = "/v2/repository"
_POST: Final = ["POST"]
_BOTH: Final = ["GET", "POST"]


# ---------------------------------------------------------------------------------------------- model repository


def repository_routes(engine: Engine, control: Control | None, body: ReadBody) -> list[Route]:
    """Index, load, unload. `control` None: an engine that was not loaded from a repository. `body` reads a request's
    body, and bounds it, here and below.
    """

    async def index(request: Request) -> Response:
        ready = (await document(request, body)).get("ready", False)
        if not isinstance(ready, bool):
            raise Invalid('the body of a repository index request is {} or {"ready": true}')
        if control is None:
            return json_response(engine.deployments.index(ready_only=ready))
        return json_response(await control.index(ready_only=ready))

    async def load(request: Request) -> Response:
        parameters = _parameters(await document(request, body))
        files = await in_thread(partial(_files, parameters))
        await allowed(control).load(request.path_params["name"], override({**parameters, **files}))
        return Response()

    async def unload(request: Request) -> Response:
        dependents = unload_dependents(_parameters(await document(request, body)))
        await allowed(control).unload(request.path_params["name"], dependents=dependents)
        return Response()

    async def one_repository(request: Request) -> Response:
        raise one_of_several()

    return [
        Route(f"{_REPOSITORY}/index", index, methods=_POST),
        Route(f"{_REPOSITORY}/models/{{name}}/load", load, methods=_POST),
        Route(f"{_REPOSITORY}/models/{{name}}/unload", unload, methods=_POST),
        Route(f"{_REPOSITORY}/{{repository}}/index", one_repository, methods=_POST),
        Route(f"{_REPOSITORY}/{{repository}}/models/{{name}}/{{verb}}", one_repository, methods=_POST),
    ]


def _parameters(asked: dict[str, Any]) -> dict[str, Any]:
    for key in asked:
        if key in (CONFIG, UNLOAD_DEPENDENTS) or key.startswith(FILE):
            raise Invalid(f'{key[:100]!r} is a parameter: {{"parameters": {{"{key[:100]}": ...}}}}')
    parameters = asked.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Invalid("'parameters' is a JSON object")
    return parameters


def _files(parameters: dict[str, Any]) -> dict[str, bytes]:
    return {key: _decoded(key, parameters[key]) for key in file_keys(parameters)}


def _decoded(key: str, value: Any) -> bytes:
    """The contents of a file, which are Base64 text in JSON."""
    if not isinstance(value, str):
        raise Invalid(f"the parameter '{key[:100]}' is a string of base64")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise Invalid(f"the parameter '{key[:100]}' is not base64: {error}") from None


# ---------------------------------------------------------------------------------------------- shared memory


def shared_memory_routes(engine: Engine, memory: ClientMemory, body: ReadBody) -> list[Route]:
    """Status, register and unregister, for both kinds of memory."""

    async def register(request: Request) -> Response:
        asked = await document(request, body)
        if "byte_size" not in asked:
            raise missing("byte_size", "")
        key, offset, size = string_of(asked, "key"), uint_of(asked, "offset"), uint_of(asked, "byte_size")
        name = request.path_params["name"]
        undo = partial(memory.unregister, name)
        await change(group(), "register", memory.register, name, key, offset, size, undo=undo)
        return Response()

    async def register_cuda(request: Request) -> Response:
        memory.check_allowed()
        asked = await document(request, body)
        for key in ("byte_size", "raw_handle"):
            if key not in asked:
                raise missing(key, "")
        name, written = request.path_params["name"], string_of(object_of(asked, "raw_handle"), "b64", "raw_handle")
        device, size = uint_of(asked, "device_id"), uint_of(asked, "byte_size")
        undo = partial(memory.unregister_cuda, name)
        await change(group(), "register_cuda", memory.register_encoded, name, written, device, size, undo=undo)
        return Response()

    def forget(name: str, unregister: Callable[[str], None]) -> Handler:
        async def handle(request: Request) -> Response:
            await change(group(), name, unregister, request.path_params.get("name", ""))
            return Response()

        return handle

    def group() -> Group | None:
        return engine.group

    return [
        *_region_routes("/v2/systemsharedmemory", memory.status, register, forget("unregister", memory.unregister)),
        *_region_routes(
            "/v2/cudasharedmemory", memory.status_cuda, register_cuda, forget("unregister_cuda", memory.unregister_cuda)
        ),
    ]


def _region_routes(prefix: str, regions: Callable[[str], Any], register: Handler, unregister: Handler) -> list[Route]:
    """`regions` takes the name of a region, "" for all."""

    async def status(request: Request) -> Response:
        return json_response(regions(request.path_params.get("name", "")))

    region = f"{prefix}/region/{{name}}"
    return [
        Route(f"{prefix}/status", status),
        Route(f"{region}/status", status),
        Route(f"{region}/register", register, methods=_POST),
        Route(f"{prefix}/unregister", unregister, methods=_POST),
        Route(f"{region}/unregister", unregister, methods=_POST),
    ]


# ---------------------------------------------------------------------------------------------- settings, timeline


def settings_routes(engine: Engine, log: LogSettings, body: ReadBody) -> list[Route]:
    """The log and trace settings, and the timeline."""

    async def logging(request: Request) -> Response:
        if request.method == "POST":
            await change(engine.group, "log", log.change, await document(request, body))
        return json_response(log.as_json())

    async def tracing(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name and name not in engine.deployments.entries:
            raise Invalid(f"Request for unknown model : {name} has no trace settings")
        if request.method == "POST":
            await change(engine.group, "trace", engine.traces.change, await document(request, body), name)
        return json_response(engine.traces.as_json(name))

    async def timeline_of_now(request: Request) -> Response:
        seconds = _seconds(request.query_params.get("seconds", "2"))
        with engine.traces.window() as window:
            origin_ns = engine.clock()
            await window.wait(seconds, engine.stopping)
        unfinished = await window.settle()
        drawn = await trio.to_thread.run_sync(timeline, window.traces, origin_ns, unfinished)
        return Response(drawn, media_type="application/json")

    return [
        Route("/v2/logging", logging, methods=_BOTH),
        Route("/v2/trace/setting", tracing, methods=_BOTH),
        Route("/v2/trace/timeline", timeline_of_now),
        Route("/v2/models/{name}/trace/setting", tracing, methods=_BOTH),
    ]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise Invalid(f"'seconds' is a number greater than 0 and at most {SECONDS_MAX}, got '{text[:40]}'")
    return seconds
