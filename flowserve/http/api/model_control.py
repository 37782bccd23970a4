"""The model repository extension over HTTP: index, load, unload.

Decides the JSON of these calls. runtime/model_calls/repository_calls.py decides their valid parameters,
runtime/loading/ implements loading.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid
from flowserve.http.api.json_bodies import ReadBody, document, json_response
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.model_calls.repository_calls import (
    CONFIG,
    FILE,
    UNLOAD_DEPENDENTS,
    allowed,
    one_of_several,
    override,
    unload_dependents,
)

REPOSITORY: Final = "/v2/repository"


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
            return json_response(self._engine.deployments.index(ready_only=ready))
        return json_response(await self._control.index(ready_only=ready))

    async def load(self, request: Request) -> Response:
        parameters = _parameters(await document(request, self._body))
        await allowed(self._control).load(request.path_params["name"], override(_with_bytes(parameters)))
        return Response()

    async def unload(self, request: Request) -> Response:
        dependents = unload_dependents(_parameters(await document(request, self._body)))
        await allowed(self._control).unload(request.path_params["name"], dependents=dependents)
        return Response()

    async def one_repository(self, request: Request) -> Response:
        raise one_of_several()


def _parameters(asked: dict[str, Any]) -> dict[str, Any]:
    for key in asked:
        if key in (CONFIG, UNLOAD_DEPENDENTS) or key.startswith(FILE):
            raise Invalid(f'{key[:100]!r} is a parameter: {{"parameters": {{"{key[:100]}": ...}}}}')
    parameters = asked.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Invalid("'parameters' is a JSON object")
    return parameters


def _with_bytes(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with files, which are Base64 text in JSON, as bytes."""
    return {key: _decoded(key, value) if key.startswith(FILE) else value for key, value in parameters.items()}


def _decoded(key: str, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid(f"the parameter '{key[:100]}' is not base64: {error}") from None
    raise Invalid(f"the parameter '{key[:100]}' is a string of base64")
