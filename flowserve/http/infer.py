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

from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError, Invalid, TooLarge, Unsupported
from flowserve.http.decode import Body, Decoder, decode_raw
from flowserve.http.encode import HEADER_LENGTH, JSON_HEADERS, Encoder
from flowserve.http.errors import error_body, status_of
from flowserve.http.infer_header import AnswerForm
from flowserve.http.limits import body_too_large
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.engine import Engine
from flowserve.scheduling.router import Flow
from flowserve.values import Request, Response

if TYPE_CHECKING:
    from flowserve.http.connection import Connection

_log = logging.getLogger("flowserve.http")

# Status, headers, and the body's parts.
Answer = tuple[int, Sequence[tuple[bytes, bytes]], list[Any]]

PREFIX: Final = "/v2/models/"
SUFFIX: Final = "/infer"


class InferRoute:
    """Answers inference requests. One for a server: it keeps what repeats between them."""

    def __init__(self, engine: Engine, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._decoder = Decoder()
        self._encoder = Encoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, name: str, version: str) -> None:
        """Run one request and answer it, whatever comes of it."""
        # Our own server's connection takes whole bodies and gives whole answers; every other server speaks ASGI.
        exchange: Connection | None = scope.get("flowserve.exchange")
        try:
            engine = self._engine
            deployment = engine.find(name, version)
            body = await self._collect(receive) if exchange is None else exchange.take_body()
            request, form = self._decode(scope, body, deployment)
            request.stamp = engine.next_stamp()
            if exchange is None:
                answer = self._encode(await engine.infer(deployment, request), form)
            else:
                flow = engine.submit(deployment, request)
                if not flow.done:
                    exchange.promise(_Promise(self, exchange, form, flow))
                    return
                answer = self._encode(engine.response(flow), form)
        except (FlowserveError, UnknownEncoding) as error:
            answer = _refusal(error)
        if exchange is not None:
            await exchange.answer(*answer)
            return
        status, headers, parts = answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(parts)})

    def outcome(self, flow: Flow, form: AnswerForm) -> Answer:
        """The answer to a flow that is done."""
        try:
            return self._encode(self._engine.response(flow), form)
        except FlowserveError as error:
            return _refusal(error)

    def withdraw(self, flow: Flow) -> None:
        """The client left."""
        self._engine.withdraw(flow)

    def _encode(self, response: Response, form: AnswerForm) -> Answer:
        parts, headers = self._encoder.encode(response, form)
        return 200, headers, parts

    def _decode(self, scope: Scope, body: Body, deployment: Deployment) -> tuple[Request, AnswerForm]:
        header_length: int | None = None
        for name, value in scope["headers"]:
            if name == HEADER_LENGTH:
                header_length = _header_length(value)
            elif name == b"content-encoding":
                check_encoding(value)
        if header_length == 0:
            return decode_raw(body, deployment.name, deployment.inputs, deployment.graph.max_batch_size)
        return self._decoder.decode(body, header_length, deployment.name)

    async def _collect(self, receive: Receive) -> bytes:
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


class _Promise:
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


def _refusal(error: FlowserveError | UnknownEncoding) -> Answer:
    status = 415 if isinstance(error, UnknownEncoding) else status_of(error)
    return status, JSON_HEADERS, [error_body(str(error))]


class UnknownEncoding(Exception):
    """A Content-Encoding nobody here has heard of: 415."""


def check_encoding(value: bytes) -> None:
    """Refuse a compressed body, naming what is missing, instead of reading it as something it is not."""
    encoding = value.decode("latin-1").strip().lower()
    if encoding in ("gzip", "x-gzip", "deflate"):
        raise Unsupported(f"Content-Encoding '{encoding}': compressed request bodies are not supported yet")
    if encoding not in ("", "identity"):
        raise UnknownEncoding(f"unknown Content-Encoding '{encoding}'; send the body as it is")


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
