"""The model repository extension over HTTP: index, load, unload.

Decided here: what the JSON of these calls may say. Who may ask, and what loading means, is runtime/control.py's.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.http.documents import ReadBody, document, json_response
from flowserve.repository.override import Override
from flowserve.runtime.control import NOT_ALLOWED, Control
from flowserve.runtime.engine import Engine

REPOSITORY: Final = "/v2/repository"
FILE: Final = "file:"
CONFIG: Final = "config"
UNLOAD_DEPENDENTS: Final = "unload_dependents"


class ModelControlRoutes:
    """`control` None: an engine that was not loaded from a repository. `body` reads a request's body, and bounds it."""

    def __init__(self, engine: Engine, control: Control | None, body: ReadBody) -> None:
        self._engine = engine
        self._control = control
        self._body = body

    def routes(self) -> list[Route]:
        model, named = f"{REPOSITORY}/models/{{name}}", f"{REPOSITORY}/{{repository}}"
        return [
            Route(f"{REPOSITORY}/index", self.index, methods=["POST"]),
            Route(f"{model}/load", self.load, methods=["POST"]),
            Route(f"{model}/unload", self.unload, methods=["POST"]),
            Route(f"{named}/index", self.one_repository, methods=["POST"]),
            Route(f"{named}/models/{{name}}/{{verb}}", self.one_repository, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        asked = await document(request, self._body)
        ready = asked.get("ready", False)
        if not isinstance(ready, bool):
            raise Invalid('the body of a repository index request is {} or {"ready": true}')
        if self._control is None:
            return json_response(self._engine.index(ready_only=ready))
        return json_response(await self._control.index(ready_only=ready))

    async def load(self, request: Request) -> Response:
        parameters = _parameters(await document(request, self._body))
        await self._may_control().load(request.path_params["name"], _override(parameters))
        return Response()

    async def unload(self, request: Request) -> Response:
        parameters = _parameters(await document(request, self._body))
        _refuse_others(parameters, {UNLOAD_DEPENDENTS})
        dependents = parameters.get(UNLOAD_DEPENDENTS, False)
        if not isinstance(dependents, bool):
            raise Invalid(f"the parameter '{UNLOAD_DEPENDENTS}' is true or false")
        await self._may_control().unload(request.path_params["name"], dependents=dependents)
        return Response()

    async def one_repository(self, request: Request) -> Response:
        raise Unsupported("'repository_name' specification is not supported")

    def _may_control(self) -> Control:
        if self._control is None:
            raise Unavailable(f"{NOT_ALLOWED}; this server was not started from a repository")
        return self._control


def _parameters(asked: dict[str, Any]) -> dict[str, Any]:
    parameters = asked.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Invalid("'parameters' is a JSON object")
    return parameters


def _override(parameters: dict[str, Any]) -> Override | None:
    """What a load call brings along. None: nothing, the repository's files count."""
    files = {key.removeprefix(FILE): value for key, value in parameters.items() if key.startswith(FILE)}
    _refuse_others(parameters, {CONFIG, *(FILE + path for path in files)})
    config = parameters.get(CONFIG, "")
    if not isinstance(config, str):
        raise Invalid("the parameter 'config' is a string that holds the configuration as JSON")
    if not (config or files):
        return None
    return Override(config, {path: _decoded(path, value) for path, value in files.items()})


def _refuse_others(parameters: dict[str, Any], known: set[str]) -> None:
    for key in parameters:
        if key not in known:
            raise Invalid(f"unexpected error on creating Triton parameter: {key[:100]!r} is not known here")


def _decoded(path: str, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid(f"the parameter '{FILE}{path[:100]}' is not base64: {error}") from None
    raise Invalid(f"the parameter '{FILE}{path[:100]}' is a string of base64")
