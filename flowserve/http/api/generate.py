"""POST .../generate and .../generate_stream: plain JSON in, plain JSON or server-sent events out.

Decides how the members of a JSON object become tensors and parameters (Triton's mapping: a member that is named like an
input is that input, every other is a parameter), and what a response looks like. Each response is written as soon as it
is there, and the next one is taken only when the client's socket has taken this one: backpressure for a model that
responds faster than its client reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from flowserve.errors import FlowserveError, Invalid
from flowserve.http.api.compression import is_compressed
from flowserve.http.api.decode import json_array
from flowserve.http.api.encode import (
    check_json_elements,
    json_data,
    json_parameters,
    json_pieces,
)
from flowserve.http.api.events import EventResponse, Say
from flowserve.http.api.infer import AppOptions, forward_headers
from flowserve.http.api.json_bodies import ReadBody, is_parameter, load_json, off_loop, status_of, wrong_type
from flowserve.http.api.request_json import InputHeader, check_json
from flowserve.http.api.request_target import PREFIX, is_timed, is_version, sent_names
from flowserve.http.server.request_parser import trace_context
from flowserve.http.server.response import error_body
from flowserve.memory import raw
from flowserve.observe.server_timing import server_timing
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine, ResponseIterator
from flowserve.runtime.protocol import ElementLimits
from flowserve.runtime.threads import Pause, in_steps
from flowserve.runtime.tracing.tracing import Watch
from flowserve.values import Array, BytesLike, Parameter, Request, Response, TensorSpec, implied_shape

PARAMETERS: Final = "parameters"
NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)
_ELEMENTS_MAX: Final = 1 << 20  # of a response, which is one piece of JSON
_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


def generate_routes(engine: Engine, body: ReadBody, options: AppOptions) -> list[Route]:
    """`body` reads a request's body, and bounds it."""
    generate = GenerateRoute(engine, body, options)
    return [
        route
        for path in (f"{PREFIX}{{name}}", f"{PREFIX}{{name}}/versions/{{version}}")
        for route in (
            Route(f"{path}/generate", generate.respond_once, methods=["POST"]),
            Route(f"{path}/generate_stream", generate.respond_in_events, methods=["POST"]),
        )
    ]


class GenerateRoute:
    """The two routes of a model: one response, or a stream of them."""

    def __init__(self, engine: Engine, body: ReadBody, options: AppOptions) -> None:
        self._engine, self._body = engine, body
        self._forwarding, self._limits = options.forwarding, options.elements

    async def respond_once(self, request: HttpRequest) -> HttpResponse:
        """One JSON object; an error if the model sends none or several."""
        watch = self._watch(request)
        async with await self._submit(request, watch) as answers:
            first = await anext(answers, None)
            if first is None or await anext(answers, None) is not None:
                raise Invalid(NOT_ONE)
            made = HttpResponse(await _document(first, self._limits), media_type="application/json")
        if watch is not None and watch.trace is not None and is_timed(request.headers.raw):
            made.headers["server-timing"] = server_timing(watch.trace)
        return made

    async def respond_in_events(self, request: HttpRequest) -> HttpResponse:
        """An event for each response, as it arrives. A failure before the first is an event too, with its status."""
        answers = await self._submit(request, self._watch(request))
        try:
            first = await anext(answers, None)
            text = None if first is None else await _document(first, self._limits)
            return EventResponse(partial(_tell, answers, text, self._limits), answers)
        except FlowserveError as error:
            text = error_body(str(error))
            return EventResponse(lambda say: say(text), answers, status_of(error))
        except BaseException:
            answers.leave()
            raise

    def _watch(self, request: HttpRequest) -> Watch | None:
        """How the request is traced, None if it is not."""
        name, headers, traces = request.path_params["name"], request.headers.raw, self._engine.traces
        watch = traces.sample(name, trace_context(headers)) if traces.is_on else None
        return self._engine.tracing.watch() if watch is None and is_timed(headers) else watch

    async def _submit(self, request: HttpRequest, watch: Watch | None) -> ResponseIterator:
        """Decode the request and submit it. Returns its responses."""
        engine, headers = self._engine, request.headers.raw
        if is_compressed(headers):
            raise Invalid("the generate extension takes no compressed bodies; send the body as it is")
        version = request.path_params.get("version", "")
        if version and not is_version(version):
            raise Invalid(f"'{version}' is no version")
        if watch is not None:
            watch.mark("HTTP_RECV_START")
        deployment = engine.deployments.find(request.path_params["name"], version)
        asked = await off_loop(partial(_decoded, deployment, self._limits), await self._body(request))
        if self._forwarding is not None:
            forward_headers(self._forwarding, headers, sent_names(request.scope), asked)
        asked.stamp, asked.trace_context = engine.next_stamp(), trace_context(headers)
        if watch is not None:
            watch.mark("HTTP_RECV_END")
        return engine.stream(deployment, asked, watch)


async def _tell(answers: ResponseIterator, first: bytes | None, limits: ElementLimits, say: Say) -> None:
    if first is not None:
        await say(first)
    try:
        async for response in answers:
            await say(await _document(response, limits))
    except FlowserveError as error:
        await say(error_body(str(error)))


# ---------------------------------------------------------------------------------------------- requests


def _decoded(deployment: Deployment, limits: ElementLimits, body: BytesLike) -> Request:
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
    strings = (array.size for array in inputs.values() if array.dtype.hasobject)
    raw.check_bytes_elements(strings, deployment.name, limits.bytes_elements)
    request_id = document.get("id", "")
    return Request(inputs, id=request_id if isinstance(request_id, str) else str(request_id), parameters=parameters)


def _members(body: BytesLike) -> Iterable[tuple[str, Any]]:
    """The members of the object, in order, those of `parameters` among them; duplicates are kept."""
    pairs: tuple[tuple[str, Any], ...] = json.loads(bytes(body), object_pairs_hook=tuple)  # arrays are lists
    for name, value in pairs:
        if name == PARAMETERS:
            if not isinstance(value, tuple):
                raise wrong_type(PARAMETERS, "object")
            yield from value
        else:
            yield name, value


def _tensor(spec: TensorSpec, value: Any, *, batches: bool) -> Array:
    check_json(spec.name, spec.dtype)
    data = value if isinstance(value, list) else [value]
    if any(isinstance(one, list | tuple) for one in data):
        raise Invalid(f"Unable to parse '{spec.name}': a scalar or a flat array is expected")
    dims = (-1, *spec.dims) if batches else spec.dims
    shape = implied_shape(dims, len(data))
    if shape is None:
        raise Invalid(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: it has {len(data)} elements, "
            f"the shape is {[*dims]}"
        )
    return json_array(InputHeader(spec.name, spec.dtype, shape, len(data), None, data))


# ---------------------------------------------------------------------------------------------- responses


async def _document(response: Response, limits: ElementLimits) -> bytes:
    """The response as a JSON object. Raises as `json_data` and `check_json_elements` do."""
    elements = sum(array.size for array in response.outputs.values())
    check_json_elements(elements, response.model, min(limits.json_elements, _ELEMENTS_MAX))
    strings = [array for array in response.outputs.values() if array.dtype.hasobject]
    if elements <= raw.INLINE_ELEMENTS_MAX and not any(map(raw.is_long, strings)):
        return _document_of(response, _value)
    return await in_steps(lambda pause: _document_of(response, partial(_value_in_pieces, pause)))


def _document_of(response: Response, value_of: Callable[[str, str, Array], Any]) -> bytes:
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model
    document["model_version"] = str(response.version)
    document |= json_parameters(response.parameters)
    document |= {name: value_of(response.model, name, array) for name, array in response.outputs.items()}
    return orjson.dumps(document, option=_NUMPY)


def _value(model: str, name: str, array: Array) -> Any:
    data = json_data(name, array, raw.datatype_of(array, name, model))
    if array.size != 1:
        return data
    text = orjson.dumps(data, option=_NUMPY)
    return orjson.Fragment(text[1:-1])  # the one element without its brackets


def _value_in_pieces(pause: Pause, model: str, name: str, array: Array) -> Any:
    if array.size == 1:
        return _value(model, name, array)
    pieces = json_pieces(name, array, raw.datatype_of(array, name, model), pause)
    return orjson.Fragment(b"".join((b"[", *pieces, b"]")))
