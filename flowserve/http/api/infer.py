"""POST /v2/models/{name}/infer: bodies become requests, the engine runs them, responses become bodies.

Decides the order of a request's steps: access, key, deployment, body, engine, response. `InferRoute.start` is the one
entry for every inference request. flowserve's own server calls it as soon as a request is complete, without a task for
it (decision 0034); under another ASGI server, and for requests of web pages of other origins, Starlette calls the route
as a raw ASGI endpoint, which does the same and waits. request_target.py interprets the head, decode.py and encode.py
the bodies. Does not know sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Invalid, Overloaded, TooLarge
from flowserve.http.api.access import ADMITTED, Access, AccessRules
from flowserve.http.api.compression import CONTENT_ENCODING, Headers, compress, expand
from flowserve.http.api.decode import Decoder, LargeBody, decode_raw, no_pause
from flowserve.http.api.encode import JSON_HEADERS, Encoder, encode_large
from flowserve.http.api.form import ALL_JSON, decode_form
from flowserve.http.api.forward import HttpForwarder
from flowserve.http.api.json_bodies import status_of
from flowserve.http.api.request_json import AnswerForm
from flowserve.http.api.request_target import TARGET, RequestTarget, request_target
from flowserve.http.api.restricted import Guard
from flowserve.http.server.connection import RESERVATION, Respond, Spawn
from flowserve.http.server.request_parser import MAX_BODY_BYTES, body_too_large
from flowserve.http.server.response import RETRY_AFTER, HeaderTuple, error_body, no_memory
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_fields import of_context
from flowserve.observe.server_timing import server_timing
from flowserve.observe.settings import EVERYTHING, LogSettings, MetricsChoice
from flowserve.runtime.budget import Budget, Reservation
from flowserve.runtime.engine.classification import rank
from flowserve.runtime.engine.deployments import Deployment, MakeFrame
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import ElementLimits, Forwarding, Restriction
from flowserve.runtime.threads import INLINE_BYTES_MAX, Pause, in_steps, in_thread
from flowserve.runtime.tracing.tracing import Watch
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array, BytesLike, Request, Response


@dataclass(frozen=True, slots=True)
class AppOptions:
    """`max_body_bytes` bounds bodies that another ASGI server passes on in pieces, and compressed ones, expanded;
    flowserve's own server refuses others earlier. `elements` bounds what is decoded and encoded. `client_memory` and
    `log` are shared by all front ends of one engine. `forwarding`: the headers that become parameters of inference
    requests. `metrics` None: there are none. `access` by default: requests to addresses and localhost, from pages of
    the same origin or from no page. `budget`: that of flowserve's own server, for metrics.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    elements: ElementLimits = field(default_factory=ElementLimits)
    client_memory: ClientMemory = field(default_factory=ClientMemory)
    restrictions: tuple[Restriction, ...] = ()
    access: AccessRules = field(default_factory=AccessRules)
    forwarding: Forwarding | None = None
    metrics: MetricsChoice | None = EVERYTHING
    log: LogSettings = field(default_factory=LogSettings)
    budget: Budget = field(default_factory=Budget)


# Status, headers, and the body's buffers.
Encoded = tuple[int, HeaderTuple, Sequence[Any]]

SERVER_TIMING: Final = b"server-timing"
_INLINE_BYTES_MAX: Final = 16_384  # compressing more than this would block the event loop
# The part of a model's shared memory that may hold bodies; it stays allocated. Further bodies are copied.
_BODY_MEMORY_MAX: Final = 1 << 28

_log = logging.getLogger("flowserve.http")


class InferRoute:
    """Responds to inference requests. One for a server: it caches data that repeats between them."""

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self.engine = engine
        self.decoder = Decoder(options.client_memory, options.elements)
        self.encoder = Encoder(options.elements)
        self.forwarding = options.forwarding
        self.begin_events, self.end_events = engine.begin_events, engine.end_events
        self.max_body_bytes = options.max_body_bytes
        self.forwarder = None if engine.group is None else HttpForwarder(engine.group)
        self._access = Access(options.access)
        self._guard = Guard(options.restrictions) if options.restrictions else None

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
            return None  # reported once the body has arrived
        if arena is None or arena.lent_bytes + nbytes > _BODY_MEMORY_MAX:
            return None
        try:
            return arena.lease(nbytes).view()
        except MemoryError:
            return None  # no descriptor for more shared memory, for instance

    def start(self, scope: Scope, body: BytesLike, respond: Respond, spawn: Spawn) -> Callable[[], None] | None:
        """Start a request. `respond` is called once, now or later. Returns a callable that withdraws the request if its
        client disconnects before that; None if the app has to respond: to other requests, and to those of browsers
        that are refused or need CORS headers. `spawn` runs blocking work in a task, which is cancelled when the client
        disconnects.
        """
        target = scope.get(TARGET) or request_target(scope)
        if target is None or not (scope.get(ADMITTED) or self._access.admits(scope)):
            return None
        inference = _Inference(self, target, respond, spawn)
        try:
            try:
                if self._guard is not None:
                    self._guard.check(scope)
                inference.deployment = self.engine.deployments.find(target.name, target.version)
                if target.error is not None:  # not raised: the cached error would keep its frames
                    inference.respond(*refusal_of(target.error))
                elif target.is_compressed or target.encoding:
                    inference.start_task(body)
                else:
                    return inference.submit(body)
            except FlowserveError as error:
                inference.respond(*refusal_of(error))
        except BaseException:
            inference.close()
            raise
        return inference.close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The route as an ASGI endpoint."""
        if request_target(scope) is None:
            raise HTTPException(404)
        body = await read_body(receive, self.max_body_bytes)
        # On another ASGI server there is no budget.
        reservation = scope[RESERVATION]() if RESERVATION in scope else Reservation(Budget())
        responses: list[Encoded] = []
        is_done = trio.Event()

        def respond(*encoded: Any) -> None:
            responses.append(encoded)
            is_done.set()

        async with trio.open_nursery() as nursery:

            def spawn(work: Callable[[Reservation], Awaitable[None]]) -> None:
                nursery.start_soon(work, reservation)

            withdraw = self.start(scope, body, respond, spawn)
            assert withdraw is not None, "the target was looked at, and the app admitted the request"
            try:
                await is_done.wait()
            except trio.Cancelled:
                withdraw()
                raise
        ((status, headers, parts),) = responses
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(parts)})


class _Inference:
    """One request from its body to its response, traced or not."""

    __slots__ = (
        *("_answer_form", "_body", "_frame", "_request", "_respond", "_route", "_spawn", "_target", "_watch"),
        "deployment",
    )

    deployment: Deployment
    _answer_form: AnswerForm
    # Until the task takes them: the body, and the request in it if it is decoded already.
    _body: BytesLike
    _request: Request | None

    def __init__(self, route: InferRoute, target: RequestTarget, respond: Respond, spawn: Spawn) -> None:
        engine = route.engine
        self._route = route
        self._target = target
        self._respond = respond
        self._spawn = spawn
        self._frame: Frame | None = None  # until it is finished
        # Whether a request is traced is decided when only the model's name is known, as on Triton.
        self._watch: Watch | None = None
        if engine.traces.is_on:
            self._watch = engine.traces.sample(target.name, target.context)
        if self._watch is None and target.is_timed:
            self._watch = engine.tracing.watch()
        if self._watch is not None:
            self._watch.mark("HTTP_RECV_START")

    def submit(self, body: BytesLike) -> Callable[[], None]:
        """Start it. Returns a callable that withdraws it. Raises FlowserveError."""
        request = self._decoded(body)
        if request is None or (request.sequence_id and self._route.forwarder is not None):
            self.start_task(body, request)
            return self.close
        request.trace_context = self._target.context
        make = None if self._watch is None else self._make_traced(self._watch)
        frame = self._route.engine.submit(self.deployment, request, make)
        if frame.record.done:
            self._finished(frame)
        else:
            self._frame = frame
            frame.record.waiter = self._finished
        return self.close

    def start_task(self, body: BytesLike, request: Request | None = None) -> None:
        """Start it in a task: part of its work runs on threads, or another server may have its sequence."""
        self._body = body
        self._request = request
        self._spawn(self._run)

    async def _run(self, reservation: Reservation) -> None:
        """Run it from its body to its response. `reservation`: of the budget, for an expanded body."""
        route, target = self._route, self._target
        body, self._body = self._body, b""
        request, self._request = self._request, None
        try:
            with route.engine.announced() as is_accepted:
                if target.is_compressed:
                    body = await in_thread(partial(expand, body, route.max_body_bytes, reservation.grow))
                if request is None:
                    request = self._decoded(body) or await self._decoded_in_steps(body)
                elsewhere = None
                if request.sequence_id and route.forwarder is not None:
                    begins = request.sequence_start
                    elsewhere = await route.forwarder.elsewhere(target, request.sequence_id, begins=begins)
                if elsewhere is not None:
                    assert route.forwarder is not None
                    del request
                    self.respond(*await route.forwarder.forward(elsewhere, target, body))
                    return
            # Submitted without a wait after the block, so that a drain cannot end in between.
            body = b""  # freed before the request waits
            request.trace_context = target.context
            make = None if self._watch is None else self._make_traced(self._watch)
            response = await route.engine.infer(self.deployment, request, make, is_accepted=is_accepted)
            del request
            status, headers, parts = self._encoded(response) or await self._encoded_in_steps(response)
            if target.encoding:
                if sum(map(len, parts)) <= _INLINE_BYTES_MAX:
                    packed = compress(parts, target.encoding)
                else:
                    packed = await in_thread(partial(compress, parts, target.encoding))
                if packed is not None:
                    headers, parts = (*headers, (CONTENT_ENCODING, target.encoding)), [packed]
        except FlowserveError as error:
            status, headers, parts = refusal_of(error)
        except Exception as error:
            status, headers, parts = self.broken(error)
        except BaseException:
            self.close()
            raise
        self.respond(status, headers, parts)

    def respond(self, status: int, headers: HeaderTuple, parts: Sequence[Any]) -> None:
        """Respond to the client."""
        watch = self._watch
        if watch is None:
            self._respond(status, headers, parts)
            return
        watch.settle()
        if watch.trace is not None and self._target.is_timed:
            headers = (*headers, (SERVER_TIMING, server_timing(watch.trace).encode()))
        watch.mark("HTTP_SEND_START")
        self._respond(status, headers, parts)
        watch.mark("HTTP_SEND_END")
        watch.close()

    def close(self) -> None:
        """The client disconnected: withdraw the request if it is not finished."""
        frame, self._frame = self._frame, None
        if frame is not None:
            self._route.engine.withdraw(frame)
        if self._watch is not None:
            self._watch.close()

    def _decoded(self, body: BytesLike) -> Request | None:
        """The request; None if decoding takes long. Raises as `Decoder.decode` does."""
        route, length, deployment = self._route, self._target.header_length, self.deployment
        if length == 0:
            inputs, rows_max = deployment.inputs, deployment.graph.max_batch_size
            decoded = decode_raw(body, deployment.name, inputs, rows_max)
        elif self._target.boundary is not None:
            if len(body) > INLINE_BYTES_MAX:
                return None
            decoded = self._decoded_form(body, no_pause), ALL_JSON
        else:
            found = route.decoder.decode(body, length, deployment.name)
            if found is None:
                return None
            decoded = found
        request, self._answer_form = decoded
        if route.forwarding is not None:
            return self._completed(request)
        request.stamp = route.engine.next_stamp()  # as `_completed` does, with one call less
        return request

    def _completed(self, request: Request) -> Request:
        """The request with its fields that do not come from its body."""
        route = self._route
        if route.forwarding is not None:
            forward_headers(route.forwarding, self._target.headers, self._target.names, request)
        request.stamp = route.engine.next_stamp()
        return request

    async def _decoded_in_steps(self, body: BytesLike) -> Request:
        """The request in a large body. Its types and shapes are checked before its data is decoded. Raises as
        `_decoded` does.
        """
        route = self._route
        if self._target.boundary is not None:
            self._answer_form = ALL_JSON
            return self._completed(await in_steps(partial(self._decoded_form, body)))
        large = LargeBody(route.decoder, body, self._target.header_length, self.deployment.name)
        request = self._completed(await in_steps(large.parse))
        route.engine.check(self.deployment, request)
        large.prepare(self.deployment.arena)
        request.inputs = await in_steps(large.arrays)
        self._answer_form = large.form
        return request

    def _decoded_form(self, body: BytesLike, pause: Pause) -> Request:
        boundary, deployment = self._target.boundary, self.deployment
        assert boundary is not None
        return decode_form(body, boundary, deployment.name, deployment.inputs, deployment.graph.max_batch_size, pause)

    def _make_traced(self, watch: Watch) -> MakeFrame:
        """The function with which the engine makes the frame of a traced request."""
        watch.mark("HTTP_RECV_END")
        return watch.make(self.deployment.make_frame)

    def _encoded(self, response: Response) -> Encoded | None:
        """The response in the requested form; None if encoding takes long. Raises as `Encoder.encode` does."""
        form = self._answer_form
        if form.classes:
            rank(response, form.classes, self.deployment)
        encoded = self._route.encoder.encode(response, form)
        return None if encoded is None else (200, encoded[1], encoded[0])

    async def _encoded_in_steps(self, response: Response) -> Encoded:
        """The response for which `_encoded` returned None, encoded on a thread. Raises as `_encoded` does."""
        parts, headers = await in_steps(partial(encode_large, response, self._answer_form))
        return 200, headers, parts

    def _finished(self, frame: Frame) -> None:
        """Called by the engine between its steps: raises nothing."""
        self._frame = None
        try:
            engine = self._route.engine
            response = engine.response_from(frame) if frame.record.error is None else engine.response(frame)
            encoded = self._encoded(response)
            if encoded is None:
                self._spawn(partial(self._respond_in_steps, response))
                return
        except FlowserveError as error:
            encoded = refusal_of(error)
        except Exception as error:
            encoded = self.broken(error)
        (self._respond if self._watch is None else self.respond)(*encoded)  # one call less for most requests

    async def _respond_in_steps(self, response: Response, reservation: Reservation) -> None:
        """Respond with a large response."""
        try:
            encoded = await self._encoded_in_steps(response)
        except FlowserveError as error:
            encoded = refusal_of(error)
        except Exception as error:
            encoded = self.broken(error)
        except BaseException:
            self.close()
            raise
        self.respond(*encoded)

    def broken(self, error: Exception) -> Encoded:
        """The response to an unexpected exception, or to one for lack of memory. Called in its handler."""
        name = self.deployment.name
        extra = of_context(self._target.context, model=name)
        if isinstance(error, MemoryError):
            _log.error("an answer of model '%s' could not be written: %s", name, no_memory(error), extra=extra)
            return refusal_of(Overloaded(no_memory(error)))
        _log.exception("an answer of model '%s' could not be written", name, extra=extra)
        return 500, JSON_HEADERS, [error_body("internal server error")]


def refusal_of(error: FlowserveError) -> Encoded:
    """The response to a request that failed."""
    headers = (*JSON_HEADERS, RETRY_AFTER) if isinstance(error, Overloaded) else JSON_HEADERS
    return status_of(error), headers, [error_body(str(error))]


def forward_headers(forwarding: Forwarding, headers: Headers, names: Sequence[bytes], request: Request) -> None:
    """Add the matching headers to the request's parameters, as Latin-1 text. `names`: those of the headers as they were
    sent. Raises Invalid.
    """
    pairs = zip(names, headers, strict=True)
    forwarding.add(request, ((name.decode("latin-1"), value.decode("latin-1")) for name, (_, value) in pairs))


async def read_body(receive: Receive, limit: int) -> BytesLike:
    """The body from a server that passes it on in pieces. Raises TooLarge past `limit` bytes."""
    body: BytesLike = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Invalid("the client closed in the middle of a body")
        piece: BytesLike = message.get("body", b"")
        if not body and not message.get("more_body"):
            body = piece  # not copied
        else:
            body = bytearray(body) if not isinstance(body, bytearray) else body
            body += piece
        if len(body) > limit:
            raise TooLarge(body_too_large(None, limit))
        if not message.get("more_body"):
            return body
