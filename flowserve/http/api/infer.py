"""POST /v2/models/{name}/infer: bodies become requests, the engine runs them, responses become bodies.

Decides the order of a request's steps: key, deployment, body, engine, response. `InferRoute.start` is the one entry for
every inference request. flowserve's own server calls it as soon as a request is complete, without a task for it
(decision 0034); under another ASGI server, Starlette calls the route as a raw ASGI endpoint, which does the same and
waits. request_target.py interprets the head, decode.py and encode.py the bodies. Does not
know sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Invalid, TooLarge
from flowserve.http.api.compression import CONTENT_ENCODING, Headers, UnknownEncoding, compress, expand
from flowserve.http.api.decode import Body, Decoder, decode_raw
from flowserve.http.api.encode import JSON_HEADERS, Encoder
from flowserve.http.api.infer_header import AnswerForm
from flowserve.http.api.json_bodies import status_of
from flowserve.http.api.options import AppOptions
from flowserve.http.api.request_target import TARGET, BodyForm, RequestTarget, body_form, request_target, trace_context
from flowserve.http.api.restricted import Guard
from flowserve.http.server.limits import body_too_large
from flowserve.http.server.response_head import HeaderTuple, error_body
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.server_timing import server_timing
from flowserve.runtime.engine.classification import rank
from flowserve.runtime.engine.deployment import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol.request_parameters import Forwarding
from flowserve.runtime.tracing.watch import Watch
from flowserve.scheduling.flow import Flow
from flowserve.values import Array, Request, Response

# Status, headers, and the body's buffers.
Encoded = tuple[int, HeaderTuple, Sequence[Any]]
Respond = Callable[[int, HeaderTuple, Sequence[Any]], None]
Spawn = Callable[[Callable[[], Awaitable[None]]], None]

SERVER_TIMING: Final = b"server-timing"
_COMPRESSING_AT_ONCE: Final = 4  # each may hold a whole expanded body
_INLINE_BYTES_MAX: Final = 16_384  # compressing more than this would block the event loop
# So much of a model's shared memory may hold bodies, which stays allocated. More are copied.
_BODY_MEMORY_MAX: Final = 1 << 28

_log = logging.getLogger("flowserve.http")


class InferRoute:
    """Responds to inference requests. One for a server: it caches data that repeats between them."""

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self.engine = engine
        self.begin_events, self.end_events = engine.begin_events, engine.end_events
        self._max_body_bytes = options.max_body_bytes
        self._guard = Guard(options.restrictions) if options.restrictions else None
        self._codec = _Codec(options.client_memory, options.forwarding)
        self._threads = trio.CapacityLimiter(_COMPRESSING_AT_ONCE)

    def body_memory(self, scope: Scope, nbytes: int) -> Array | None:
        """Where a large body is best received, as bytes: in memory shared with the process that will read it; None:
        anywhere.
        """
        target = request_target(scope)
        if target is None:
            return None
        try:
            arena = self.engine.deployments.find(target.name, target.version).arena
        except FlowserveError:
            return None  # reported when the body is there
        if arena is None or arena.lent_bytes + nbytes > _BODY_MEMORY_MAX:
            return None
        return arena.lease(nbytes).view()

    def start(self, scope: Scope, body: Body, respond: Respond, spawn: Spawn) -> Callable[[], None] | None:
        """Start a request. `respond` is called once, now or later. Returns a callable that withdraws the request if its
        client disconnects before that; None if this is not an inference request. `spawn` runs blocking work in a
        task, which is cancelled when the client disconnects.
        """
        target = scope.get(TARGET) or request_target(scope)
        if target is None:
            return None
        inference = _Inference(self.engine, self._codec, target, respond)
        try:
            try:
                if self._guard is not None:
                    self._guard.check(scope)
                inference.deployment = self.engine.deployments.find(target.name, target.version)
                form = target.form or body_form(target.headers)
                if not (form.is_compressed or form.encoding):
                    return inference.submit(body, form)
                spawn(partial(self._run_compressed, inference, form, body))
            except (FlowserveError, UnknownEncoding) as error:
                inference.respond(*refusal_of(error))
        except BaseException:
            inference.close()
            raise
        return inference.close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The route as an ASGI endpoint."""
        if request_target(scope) is None:
            raise HTTPException(404)
        body = await self._collect(receive)
        responses: list[Encoded] = []
        is_done = trio.Event()

        def respond(*encoded: Any) -> None:
            responses.append(encoded)
            is_done.set()

        async with trio.open_nursery() as nursery:
            withdraw = self.start(scope, body, respond, nursery.start_soon)
            assert withdraw is not None, "the target was looked at"
            try:
                await is_done.wait()
            except trio.Cancelled:
                withdraw()
                raise
        ((status, headers, parts),) = responses
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(parts)})

    async def _run_compressed(self, inference: _Inference, form: BodyForm, body: Body) -> None:
        """A request one of whose two bodies is compressed: large ones are work for a thread."""
        in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True, limiter=self._threads)
        try:
            if form.is_compressed:
                body = await in_thread(expand, body, self._max_body_bytes)
            status, headers, parts = await inference.run(body, form)
            if form.encoding:
                if sum(map(len, parts)) <= _INLINE_BYTES_MAX:
                    packed = compress(parts, form.encoding)
                else:
                    packed = await in_thread(compress, parts, form.encoding)
                if packed is not None:
                    headers, parts = (*headers, (CONTENT_ENCODING, form.encoding)), [packed]
        except FlowserveError as error:
            status, headers, parts = refusal_of(error)
        except Exception:
            status, headers, parts = inference.broken()
        except BaseException:
            inference.close()
            raise
        inference.respond(status, headers, parts)

    async def _collect(self, receive: Receive) -> bytes:
        """The body from a server that passes it on in pieces, never more of it than is allowed."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Invalid("the client closed in the middle of a body")
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise TooLarge(body_too_large(None, self._max_body_bytes))
            if not message.get("more_body"):
                return bytes(body)


class _Codec:
    """Bodies to requests and responses to bodies, for one server."""

    def __init__(self, client_memory: ClientMemory, forwarding: Forwarding | None) -> None:
        self.decoder = Decoder(client_memory)
        self.forwarding = forwarding
        self._encoder = Encoder()

    def encode(self, response: Response, form: AnswerForm, deployment: Deployment) -> Encoded:
        """The response in the requested form. Raises as `Encoder.encode` does."""
        if form.classes:
            rank(response, form.classes, deployment)
        parts, headers = self._encoder.encode(response, form)
        return 200, headers, parts


class _Inference:
    """One request from its body to its response, traced or not."""

    __slots__ = ("_answer_form", "_codec", "_engine", "_flow", "_respond", "_target", "_watch", "deployment")

    deployment: Deployment
    _answer_form: AnswerForm

    def __init__(self, engine: Engine, codec: _Codec, target: RequestTarget, respond: Respond) -> None:
        self._engine = engine
        self._codec = codec
        self._target = target
        self._respond = respond
        self._flow: Flow | None = None  # while its response is to come
        # Whether a request is traced is decided when only the model's name is known, as on Triton.
        self._watch: Watch | None = None
        if engine.traces.is_on:
            self._watch = engine.traces.sample(target.name, trace_context(target.headers))
        if self._watch is None and target.form is not None and target.form.is_timed:
            self._watch = engine.tracing.watch()
        if self._watch is not None:
            self._watch.mark("HTTP_RECV_START")

    def submit(self, body: Body, form: BodyForm) -> Callable[[], None]:
        """Start it. Returns a callable that withdraws it. Raises FlowserveError."""
        watch = self._watch
        make = None if watch is None else watch.make(self.deployment.make_flow)
        flow = self._engine.submit(self.deployment, self._request(body, form), make)
        if flow.done:
            self._finished(flow)
        else:
            self._flow = flow
            flow.waiter = self._finished
        return self.close

    async def run(self, body: Body, form: BodyForm) -> Encoded:
        """Run it to its end. Raises FlowserveError."""
        watch = self._watch
        make = None if watch is None else watch.make(self.deployment.make_flow)
        response = await self._engine.infer(self.deployment, self._request(body, form), make)
        return self._codec.encode(response, self._answer_form, self.deployment)

    def respond(self, status: int, headers: HeaderTuple, parts: Sequence[Any]) -> None:
        """Respond to the client."""
        watch = self._watch
        if watch is None:
            self._respond(status, headers, parts)
            return
        watch.settle()
        form = self._target.form
        if watch.trace is not None and form is not None and form.is_timed:
            headers = (*headers, (SERVER_TIMING, server_timing(watch.trace).encode()))
        watch.mark("HTTP_SEND_START")
        self._respond(status, headers, parts)
        watch.mark("HTTP_SEND_END")
        watch.close()

    def close(self) -> None:
        """The client disconnected: withdraw the request if it is not finished."""
        flow, self._flow = self._flow, None
        if flow is not None:
            self._engine.withdraw(flow)
        if self._watch is not None:
            self._watch.close()

    def _request(self, body: Body, form: BodyForm) -> Request:
        codec, length, deployment = self._codec, form.header_length, self.deployment
        if length == 0:
            inputs, rows_max = deployment.inputs, deployment.graph.max_batch_size
            request, self._answer_form = decode_raw(body, deployment.name, inputs, rows_max)
        else:
            request, self._answer_form = codec.decoder.decode(body, length, deployment.name)
        if codec.forwarding is not None:
            forward_headers(codec.forwarding, self._target.headers, request)
        if self._watch is not None:
            self._watch.mark("HTTP_RECV_END")
        request.stamp = self._engine.next_stamp()
        return request

    def _finished(self, flow: Flow) -> None:
        """Called by the engine between its steps: raises nothing."""
        self._flow = None
        try:
            engine = self._engine
            response = engine.response_from(flow) if flow.error is None else engine.response(flow)
            encoded = self._codec.encode(response, self._answer_form, flow.owner)
        except FlowserveError as error:
            encoded = refusal_of(error)
        except Exception:
            encoded = self.broken()
        (self._respond if self._watch is None else self.respond)(*encoded)

    def broken(self) -> Encoded:
        """The response to an unexpected exception."""
        _log.exception("an answer of model '%s' could not be written", self.deployment.name)
        return 500, JSON_HEADERS, [error_body("internal server error")]


def refusal_of(error: FlowserveError | UnknownEncoding) -> Encoded:
    """The response to a request that failed."""
    status = 415 if isinstance(error, UnknownEncoding) else status_of(error)
    return status, JSON_HEADERS, [error_body(str(error))]


def forward_headers(forwarding: Forwarding, headers: Headers, request: Request) -> None:
    """Add the matching headers to the request's parameters, as Latin-1 text. Raises Invalid."""
    forwarding.add(request, ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers))
