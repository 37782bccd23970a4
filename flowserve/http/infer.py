"""POST /v2/models/{name}/infer as a bare ASGI callable: the hot path's first and last hop.

Decided here: the order of a request's way: deployment, body, engine, answer. It stands in front of Starlette's router,
because Request, Response and routing objects together cost more than everything else a small request needs. What a
request's head asks for is worked out in asked.py, what bodies mean in decode.py and encode.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import trio
from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Invalid, TooLarge
from flowserve.http.asked import Asked, goes_elsewhere, header_length, is_timed
from flowserve.http.compression import CONTENT_ENCODING, UnknownEncoding, compress, expand, is_compressed, wanted
from flowserve.http.decode import Body, Decoder, decode_raw
from flowserve.http.encode import JSON_HEADERS, Encoder
from flowserve.http.errors import error_body, status_of
from flowserve.http.infer_header import AnswerForm
from flowserve.http.limits import body_too_large
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.server_timing import server_timing
from flowserve.runtime.classification import rank
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.engine import Engine
from flowserve.runtime.watch import Watch
from flowserve.scheduling.router import Flow
from flowserve.values import Request, Response

if TYPE_CHECKING:
    from flowserve.http.connection import Connection

_log = logging.getLogger("flowserve.http")

# Status, headers, and the body's parts.
Answer = tuple[int, tuple[tuple[bytes, bytes], ...], list[Any]]
Decoded = tuple[Request, AnswerForm]

SERVER_TIMING: Final = b"server-timing"
_COMPRESSING_AT_ONCE: Final = 4  # each may hold a whole expanded body
_INLINE_BYTES_MAX: Final = 16_384  # compressing more than this would keep the loop from turning


class InferRoute:
    """Answers inference requests. One for a server: it keeps what repeats between them."""

    def __init__(self, engine: Engine, max_body_bytes: int, client_memory: ClientMemory) -> None:
        self.engine = engine
        self._max_body_bytes = max_body_bytes
        self._decoder = Decoder(client_memory)
        self._encoder = Encoder()
        self._threads = trio.CapacityLimiter(_COMPRESSING_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, asked: Asked) -> None:
        """Run one request and answer it, whatever comes of it."""
        # Our own server's connection takes whole bodies and gives whole answers; every other server speaks ASGI.
        exchange: Connection | None = scope.get("flowserve.exchange")
        if exchange is not None and self.begin(asked, exchange):
            return
        try:
            deployment = self.engine.find(asked.name, asked.version)
            body = await self.collect(receive) if exchange is None else exchange.take_body()
            decoded = self.decode(asked, body, deployment)
            if decoded is None:
                answer = await self._otherwise(asked, body, deployment)
            else:
                answer = await self._infer(decoded, deployment)
        except (FlowserveError, UnknownEncoding) as error:
            answer = refusal_of(error)
        if exchange is not None:
            exchange.reply(*answer)
            return
        await say(send, answer)

    def begin(self, asked: Asked, exchange: Connection) -> bool:
        """Answer, or promise to, without waiting. False where that cannot be; then nothing has happened."""
        try:
            engine = self.engine
            deployment = engine.find(asked.name, asked.version)
            decoded = self.decode(asked, exchange.body, deployment)
            if decoded is None:
                return False
            request, form = decoded
            request.stamp = engine.next_stamp()
            answered = engine.ask(deployment, request)
            if not isinstance(answered, Response):
                if not answered.done:
                    exchange.promise(Promised(self, exchange, form, answered))
                    return True
                answered = engine.response(answered)
            answer = self.encode(answered, form, deployment)
        except (FlowserveError, UnknownEncoding) as error:
            answer = refusal_of(error)
        exchange.reply(*answer)
        return True

    def outcome(self, flow: Flow, form: AnswerForm) -> Answer:
        """The answer to a flow that is done."""
        try:
            return self.encode(self.engine.response(flow), form, flow.owner)
        except FlowserveError as error:
            return refusal_of(error)

    def withdraw(self, flow: Flow) -> None:
        """The client left."""
        self.engine.withdraw(flow)

    async def _infer(self, decoded: Decoded, deployment: Deployment, watch: Watch | None = None) -> Answer:
        """The answer, waited for here."""
        request, form = decoded
        request.stamp = self.engine.next_stamp()
        make = None if watch is None else watch.make(deployment.make_flow)
        return self.encode(await self.engine.infer(deployment, request, make), form, deployment)

    async def _otherwise(self, asked: Asked, body: Body, deployment: Deployment) -> Answer:
        """The way of a request that asks for its timing, or one of whose two bodies is compressed."""
        if is_timed(asked.headers):
            return await self.watched(asked, body, deployment, self.engine.tracing.watch())
        return await self._compressed(asked, body, deployment)

    async def watched(self, asked: Asked, body: Body, deployment: Deployment, watch: Watch) -> Answer:
        """The way of a request that is traced."""
        try:
            status, said, parts = await self._compressed(asked, body, deployment, watch)
        except FlowserveError as error:
            status, said, parts = refusal_of(error)
        finally:
            watch.settle()
        if watch.trace is not None and is_timed(asked.headers):
            said = (*said, (SERVER_TIMING, server_timing(watch.trace).encode()))
        return status, said, parts

    async def _compressed(self, asked: Asked, body: Body, deployment: Deployment, watch: Watch | None = None) -> Answer:
        """The way of a request one of whose two bodies is compressed: large ones are work for a thread."""
        headers = asked.headers
        if is_compressed(headers):
            limit = self._max_body_bytes
            body = await trio.to_thread.run_sync(expand, body, limit, abandon_on_cancel=True, limiter=self._threads)
        encoding = wanted(headers)
        decoded = self.read(asked, header_length(headers), body, deployment)
        if watch is not None:
            watch.mark("HTTP_RECV_END")
        status, said, parts = await self._infer(decoded, deployment, watch)
        if not encoding:
            return status, said, parts
        if sum(map(len, parts)) <= _INLINE_BYTES_MAX:
            made = compress(parts, encoding)
        else:
            made = await trio.to_thread.run_sync(
                compress, parts, encoding, abandon_on_cancel=True, limiter=self._threads
            )
        return (status, said, parts) if made is None else (status, (*said, (CONTENT_ENCODING, encoding)), [made])

    def encode(self, response: Response, form: AnswerForm, deployment: Deployment) -> Answer:
        """The answer in the form it was asked for. Raises as `Encoder.encode` does."""
        if form.classes:
            rank(response, form.classes, deployment)
        parts, headers = self._encoder.encode(response, form)
        return 200, headers, parts

    def decode(self, asked: Asked, body: Body, deployment: Deployment) -> Decoded | None:
        """None where the request cannot go the common way. Raises `Invalid`, `UnknownEncoding`."""
        if asked.is_common:
            return self.read(asked, asked.header_length, body, deployment)
        if goes_elsewhere(asked.headers):
            return None
        return self.read(asked, header_length(asked.headers), body, deployment)

    def read(self, asked: Asked, length: int | None, body: Body, deployment: Deployment) -> Decoded:
        """What a body says whose JSON is so long. Raises as `Decoder.decode` does."""
        if length == 0:
            return decode_raw(body, deployment.name, deployment.inputs, deployment.graph.max_batch_size)
        return self._decoder.decode(body, length, deployment.name)

    async def collect(self, receive: Receive) -> bytes:
        """The body from a server that hands it on in pieces, never more of it than is allowed."""
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


class Promised:
    """An answer that comes when its flow is done, and what a client who leaves before means."""

    __slots__ = ("_exchange", "_flow", "_form", "_route")

    def __init__(self, route: InferRoute, exchange: Connection, form: AnswerForm, flow: Flow) -> None:
        self._route = route
        self._exchange = exchange
        self._form = form
        self._flow = flow
        flow.waiter = self._keep

    def withdraw(self) -> None:
        self._route.withdraw(self._flow)

    def _keep(self, flow: Flow) -> None:
        """Called by the engine in the middle of its own work: nothing may get out."""
        try:
            answer = self._route.outcome(flow, self._form)
        except Exception:
            _log.exception("an answer of model '%s' could not be written", flow.plan.graph.name)
            answer = 500, JSON_HEADERS, [error_body("internal server error")]
        self._exchange.keep_promise(*answer)


async def say(send: Send, answer: Answer) -> None:
    """As a server hears it that is not our own."""
    status, headers, parts = answer
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"".join(parts)})


def refusal_of(error: FlowserveError | UnknownEncoding) -> Answer:
    status = 415 if isinstance(error, UnknownEncoding) else status_of(error)
    return status, JSON_HEADERS, [error_body(str(error))]
