"""POST .../generate and .../generate_stream: plain JSON in, plain JSON or server-sent events out.

Decides how the members of a JSON object become tensors and parameters (Triton's mapping: a member that is named like an
input is that input, every other is a parameter), and what a response looks like. Each response is written as soon as it
is there, and the next one is taken only when the client's socket has taken this one: backpressure for a model that
responds faster than its client reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Internal, Invalid
from flowserve.http.api.compression import is_compressed
from flowserve.http.api.decode import json_array
from flowserve.http.api.encode import json_data, json_parameters
from flowserve.http.api.events import Say, send_events
from flowserve.http.api.infer import forward_headers
from flowserve.http.api.infer_header import InputHeader, check_json
from flowserve.http.api.json_bodies import ReadBody
from flowserve.http.api.json_fields import is_parameter, load_json
from flowserve.http.api.request_target import PREFIX, is_timed, is_version, trace_context
from flowserve.http.server.response_head import error_body
from flowserve.observe.server_timing import server_timing
from flowserve.runtime.engine.deployment import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.responses import ResponseIterator
from flowserve.runtime.protocol.request_parameters import Forwarding
from flowserve.runtime.tracing.watch import Watch
from flowserve.values import BY_NUMPY, Array, Parameter, Request, Response, TensorSpec

PARAMETERS: Final = "parameters"
NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)
_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


class GenerateRoutes:
    """`body` reads a request's body, and bounds it. `forwarding`: which headers become parameters, None for none."""

    def __init__(self, engine: Engine, body: ReadBody, forwarding: Forwarding | None) -> None:
        self._engine = engine
        self._body = body
        self._forwarding = forwarding

    def routes(self) -> list[Route]:
        paths = (f"{PREFIX}{{name}}", f"{PREFIX}{{name}}/versions/{{version}}")
        return [
            *(Route(f"{path}/generate", self.generate, methods=["POST"]) for path in paths),
            *(Route(f"{path}/generate_stream", self.generate_stream, methods=["POST"]) for path in paths),
        ]

    async def generate(self, request: HttpRequest) -> HttpResponse:
        """One JSON object; an error if the model sends none or several."""
        watch = self._watch(request)
        async with await self._begin(request, watch) as answers:
            first = await anext(answers, None)
            if first is None or await anext(answers, None) is not None:
                raise Invalid(NOT_ONE)
            made = HttpResponse(_document(first), media_type="application/json")
        if watch is not None and watch.trace is not None and is_timed(request.headers.raw):
            made.headers["server-timing"] = server_timing(watch.trace)
        return made

    async def generate_stream(self, request: HttpRequest) -> HttpResponse:
        """An event for each response, as it arrives. A failure before the first has a status."""
        answers = await self._begin(request, self._watch(request))
        try:
            first = await anext(answers, None)
            return _Events(answers, None if first is None else _document(first))
        except BaseException:
            answers.leave()
            raise

    def _watch(self, request: HttpRequest) -> Watch | None:
        """How the request is traced, None if it is not."""
        engine, headers = self._engine, request.headers.raw
        watch = (
            engine.traces.sample(request.path_params["name"], trace_context(headers)) if engine.traces.is_on else None
        )
        return engine.tracing.watch() if watch is None and is_timed(headers) else watch

    async def _begin(self, request: HttpRequest, watch: Watch | None) -> ResponseIterator:
        if is_compressed(request.headers.raw):
            raise Invalid("the generate extension takes no compressed bodies; send the body as it is")
        version = request.path_params.get("version", "")
        if version and not is_version(version):
            raise Invalid(f"'{version}' is no version")
        if watch is not None:
            watch.mark("HTTP_RECV_START")
        deployment = self._engine.deployments.find(request.path_params["name"], version)
        asked = _asked(await self._body(request), deployment)
        if self._forwarding is not None:
            forward_headers(self._forwarding, request.headers.raw, asked)
        asked.stamp = self._engine.next_stamp()
        if watch is not None:
            watch.mark("HTTP_RECV_END")
        return self._engine.stream(deployment, asked, watch)


class _Events(HttpResponse):
    """Server-sent events. An ASGI application, as every response of Starlette's is."""

    def __init__(self, answers: ResponseIterator, first: bytes | None) -> None:
        super().__init__()
        self._answers = answers
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answers:
            await send_events(scope, receive, send, self._tell)

    async def _tell(self, say: Say) -> None:
        if self._first is not None:
            await say(self._first)
        try:
            async for response in self._answers:
                await say(_document(response))
        except FlowserveError as error:
            await say(error_body(str(error)))


# ---------------------------------------------------------------------------------------------- requests


def _asked(body: bytes, deployment: Deployment) -> Request:
    document = load_json(body)
    if not isinstance(document, dict):
        raise Invalid("failed to parse the request JSON buffer: the request is not a JSON object")
    inputs: dict[str, Array] = {}
    parameters: dict[str, Parameter] = {}
    for name, value in _members(body):
        spec = deployment.inputs.get(name)
        if spec is None:
            if not is_parameter(value):
                raise Invalid(
                    f"parameter '{name}' has invalid type: it is neither an input of model '{deployment.name}' nor a "
                    "string, a number of at most 64 bits or a boolean"
                )
            parameters[name] = value
        elif name in inputs:
            raise Invalid(f"input '{name}' already exists in request")
        else:
            inputs[name] = _tensor(spec, value, batches=deployment.graph.max_batch_size > 0)
    request_id = document.get("id", "")
    return Request(inputs, id=request_id if isinstance(request_id, str) else str(request_id), parameters=parameters)


def _members(body: bytes) -> Iterable[tuple[str, Any]]:
    """The members of the object, in order, those of `parameters` among them; duplicates are kept."""
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    for name, value in pairs:
        if name == PARAMETERS:
            if not _is_object(value):
                raise Invalid("Unable to parse 'parameters': attempt to access JSON non-object as object")
            yield from value
        else:
            yield name, value


def _is_object(value: Any) -> bool:
    """Whether this was one before `object_pairs_hook` made a list of it."""
    return isinstance(value, list) and all(isinstance(one, tuple) for one in value)


def _tensor(spec: TensorSpec, value: Any, *, batches: bool) -> Array:
    check_json(spec.name, spec.dtype)
    data = value if isinstance(value, list) else [value]
    if any(isinstance(one, list | tuple) for one in data):
        raise Invalid(f"Unable to parse '{spec.name}': a scalar or a flat array is expected")
    shape = _shape(spec, len(data), batches=batches)
    return json_array(InputHeader(spec.name, spec.dtype, shape, len(data), None, data))


def _shape(spec: TensorSpec, count: int, *, batches: bool) -> tuple[int, ...]:
    """Fixed dimensions are unchanged, the innermost variable one takes the rest, the others are 1."""
    dims = (-1, *spec.dims) if batches else spec.dims
    fixed = math.prod(dim for dim in dims if dim != -1)
    varying = [i for i, dim in enumerate(dims) if dim == -1]
    shape = [1 if dim == -1 else dim for dim in dims]
    if varying and fixed:
        shape[varying[-1]] = count // fixed
    if math.prod(shape) != count:
        raise Invalid(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: it has {count} elements, the "
            f"shape is {[*dims]}"
        )
    return tuple(shape)


# ---------------------------------------------------------------------------------------------- responses


def _document(response: Response) -> bytes:
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model
    document["model_version"] = str(response.version)
    document |= json_parameters(response.parameters)
    document |= {name: _value(response.model, name, array) for name, array in response.outputs.items()}
    return orjson.dumps(document, option=_NUMPY)


def _value(model: str, name: str, array: Array) -> Any:
    dtype = BY_NUMPY.get(array.dtype)
    if dtype is None:
        raise Internal(f"model '{model}' made output '{name}' of numpy type {array.dtype}, which no datatype is")
    data = json_data(name, array, dtype)
    if array.size != 1:
        return data
    text = orjson.dumps(data, option=_NUMPY)
    return orjson.Fragment(text[1:-1])  # the one element without its brackets
