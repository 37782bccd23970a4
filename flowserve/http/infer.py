"""POST /v2/models/{name}/infer as a bare ASGI callable: the hot path's first and last hop.

Decided here: what the route's URL looks like, which headers matter, and the order of a request's way: deployment,
body, engine, answer. It stands in front of Starlette's router, because Request, Response and routing objects
together cost more than everything else a small request needs (reference figures: half the throughput). What bodies
mean is decided in decode.py and encode.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import trio
from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Invalid, TooLarge
from flowserve.http.compression import (
    CODINGS,
    CONTENT_ENCODING,
    Headers,
    UnknownEncoding,
    compress,
    expand,
    is_compressed,
    matters,
    wanted,
)
from flowserve.http.decode import Body, Decoder, decode_raw
from flowserve.http.encode import HEADER_LENGTH, JSON_HEADERS, Encoder
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
Answer = tuple[int, Sequence[tuple[bytes, bytes]], list[Any]]
Decoded = tuple[Request, AnswerForm]

PREFIX: Final = "/v2/models/"
SUFFIX: Final = "/infer"
TIMING: Final = b"flowserve-timing"  # a request with this header wants to know what became of it
SERVER_TIMING: Final = b"server-timing"
_ELSEWHERE: Final = CODINGS | {TIMING}  # headers that may send a request another way than the common one
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send, name: str, version: str) -> None:
        """Run one request and answer it, whatever comes of it."""
        # Our own server's connection takes whole bodies and gives whole answers; every other server speaks ASGI.
        exchange: Connection | None = scope.get("flowserve.exchange")
        if exchange is not None and self.begin(scope["headers"], exchange, name, version):
            return
        try:
            deployment = self.engine.find(name, version)
            body = await self.collect(receive) if exchange is None else exchange.take_body()
            decoded = self.decode(scope["headers"], body, deployment)
            if decoded is None:
                answer = await self._otherwise(scope["headers"], body, deployment)
            else:
                answer = await self._infer(decoded, deployment)
        except (FlowserveError, UnknownEncoding) as error:
            answer = refusal_of(error)
        if exchange is not None:
            exchange.reply(*answer)
            return
        await say(send, answer)

    def begin(self, headers: Headers, exchange: Connection, name: str, version: str) -> bool:
        """Answer, or promise to, without waiting. False where that cannot be; then nothing has happened."""
        try:
            engine = self.engine
            deployment = engine.find(name, version)
            decoded = self.decode(headers, exchange.body, deployment)
            if decoded is None:
                return False
            request, form = decoded
            request.stamp = engine.next_stamp()
            flow = engine.submit(deployment, request)
            if not flow.done:
                exchange.promise(Promised(self, exchange, form, flow))
                return True
            answer = self.encode(engine.response(flow), form, deployment)
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

    async def _otherwise(self, headers: Headers, body: Body, deployment: Deployment) -> Answer:
        """The way of a request that asks for its timing, or one of whose two bodies is compressed."""
        if is_timed(headers):
            return await self.watched(headers, body, deployment, self.engine.tracing.watch())
        return await self._compressed(headers, body, deployment)

    async def watched(self, headers: Headers, body: Body, deployment: Deployment, watch: Watch) -> Answer:
        """The way of a request that is traced."""
        try:
            status, said, parts = await self._compressed(headers, body, deployment, watch)
        except FlowserveError as error:
            status, said, parts = refusal_of(error)
        finally:
            watch.settle()
        if watch.trace is not None and is_timed(headers):
            said = (*said, (SERVER_TIMING, server_timing(watch.trace).encode()))
        return status, said, parts

    async def _compressed(
        self, headers: Headers, body: Body, deployment: Deployment, watch: Watch | None = None
    ) -> Answer:
        """The way of a request one of whose two bodies is compressed: large ones are work for a thread."""
        if is_compressed(headers):
            limit = self._max_body_bytes
            body = await trio.to_thread.run_sync(expand, body, limit, abandon_on_cancel=True, limiter=self._threads)
        encoding = wanted(headers)
        decoded = self.decode([one for one in headers if one[0] not in _ELSEWHERE], body, deployment)
        assert decoded is not None  # nothing in these headers says that it is compressed
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

    def decode(self, headers: Headers, body: Body, deployment: Deployment) -> Decoded | None:
        """None where the body is compressed or the answer is to be, or timing is asked for: that is another way."""
        header_length: int | None = None
        for name, value in headers:
            if name == HEADER_LENGTH:
                header_length = _header_length(value)
            elif name in _ELSEWHERE and _matters(name, value):
                return None
        if header_length == 0:
            return decode_raw(body, deployment.name, deployment.inputs, deployment.graph.max_batch_size)
        return self._decoder.decode(body, header_length, deployment.name)

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


def goes_elsewhere(headers: Headers) -> bool:
    """Whether the request cannot go the common way. Raises `UnknownEncoding`."""
    return any(name in _ELSEWHERE and _matters(name, value) for name, value in headers)


def is_timed(headers: Headers) -> bool:
    """Whether the request asks for its timing."""
    return any(name == TIMING and _matters(name, value) for name, value in headers)


def refusal_of(error: FlowserveError | UnknownEncoding) -> Answer:
    status = 415 if isinstance(error, UnknownEncoding) else status_of(error)
    return status, JSON_HEADERS, [error_body(str(error))]


@lru_cache(maxsize=256)
def _matters(name: bytes, value: bytes) -> bool:
    """Whether this header, one of `_ELSEWHERE`, says anything. Raises `UnknownEncoding`."""
    return value != b"0" if name == TIMING else matters(name, value)


@lru_cache(maxsize=1024)  # a server is asked for the same few paths again and again
def target(path: str) -> tuple[str, str] | None:
    """The model's name and version ("" for none) that an infer URL's path names, or None for any other path."""
    if not (path.endswith(SUFFIX) and path.startswith(PREFIX)):
        return None
    parts = path[len(PREFIX) : -len(SUFFIX)].split("/")
    if len(parts) == 1:
        return (parts[0], "") if parts[0] else None
    if len(parts) == 3 and parts[0] and parts[1] == "versions" and is_version(parts[2]):
        return parts[0], parts[2]
    return None


def is_version(text: str) -> bool:
    """Whether `text` can stand for a version in a URL; anything else there is an unknown path."""
    return text.isascii() and text.isdigit() and len(text) < 20


def _header_length(value: bytes) -> int:
    try:
        if len(value) < 20:  # int() has its own limit, far beyond any body
            return int(value)
    except ValueError:
        pass
    raise Invalid(f"Unable to parse inference header size, got: {value[:40].decode('latin-1')}")
