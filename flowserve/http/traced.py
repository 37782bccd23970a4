"""The inference route while requests are traced: which of them are, and what is marked on their way.

Decided here: the choice is made before anything else is known of a request but its model's name, as on Triton, and
what is not chosen goes the common way. The context in which a caller traces comes in the header `traceparent`. A
server that traces nothing has the plain route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.types import Receive, Scope, Send

from flowserve.errors import FlowserveError
from flowserve.http.asked import Asked
from flowserve.http.compression import Headers, UnknownEncoding
from flowserve.http.infer import InferRoute, Promised, refusal_of, say
from flowserve.http.infer_header import AnswerForm
from flowserve.runtime.traces import Traces
from flowserve.runtime.watch import Watch
from flowserve.scheduling.router import Flow

if TYPE_CHECKING:
    from flowserve.http.connection import Connection

TRACEPARENT: Final = b"traceparent"


class TracedInferRoute:
    """Stands before the plain route."""

    def __init__(self, route: InferRoute, traces: Traces) -> None:
        self._route = route
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send, asked: Asked) -> None:
        """Run one request and answer it, whatever comes of it."""
        exchange: Connection | None = scope.get("flowserve.exchange")
        if exchange is not None and self.begin(asked, exchange):
            return
        watch = self._traces.sample(asked.name, context_of(asked.headers))
        if watch is None:
            await self._route(scope, receive, send, asked)
            return
        try:
            await self._run(scope, receive, send, asked, watch)
        finally:
            watch.close()

    def begin(self, asked: Asked, exchange: Connection) -> bool:
        """As the plain route's: answer, or promise to, without waiting. False where that cannot be."""
        if not asked.is_common:
            return False
        watch = self._traces.sample(asked.name, context_of(asked.headers))
        if watch is None:
            return self._route.begin(asked, exchange)
        try:
            self._begin(asked, exchange, watch)
        except BaseException:
            watch.close()
            raise
        return True

    async def _run(self, scope: Scope, receive: Receive, send: Send, asked: Asked, watch: Watch) -> None:
        """As the plain route's call."""
        route = self._route
        exchange: Connection | None = scope.get("flowserve.exchange")
        watch.mark("HTTP_RECV_START")
        try:
            deployment = route.engine.find(asked.name, asked.version)
            body = await route.collect(receive) if exchange is None else exchange.take_body()
            answer = await route.watched(asked, body, deployment, watch)
        except (FlowserveError, UnknownEncoding) as error:
            answer = refusal_of(error)
        watch.mark("HTTP_SEND_START")
        if exchange is not None:
            exchange.reply(*answer)
        else:
            await say(send, answer)
        watch.mark("HTTP_SEND_END")

    def _begin(self, asked: Asked, exchange: Connection, watch: Watch) -> None:
        """As the plain route's, for a request that goes the common way. The watch is closed with the answer."""
        route, engine = self._route, self._route.engine
        watch.mark("HTTP_RECV_START")
        try:
            deployment = engine.find(asked.name, asked.version)
            request, form = route.read(asked, asked.header_length, exchange.body, deployment)
            watch.mark("HTTP_RECV_END")
            request.stamp = engine.next_stamp()
            flow = engine.submit(deployment, request, watch.make(deployment.make_flow))
            if not flow.done:
                exchange.promise(_TracedPromise(route, exchange, form, flow, watch))
                return
            answer = route.encode(engine.response(flow), form, deployment)
        except (FlowserveError, UnknownEncoding) as error:
            answer = refusal_of(error)
        watch.mark("HTTP_SEND_START")
        exchange.reply(*answer)
        watch.mark("HTTP_SEND_END")
        watch.close()


class _TracedPromise(Promised):
    """An answer that comes, and is traced until it is sent."""

    __slots__ = ("_watch",)

    def __init__(self, route: InferRoute, exchange: Connection, form: AnswerForm, flow: Flow, watch: Watch) -> None:
        super().__init__(route, exchange, form, flow)
        self._watch = watch

    def withdraw(self) -> None:
        super().withdraw()
        self._watch.close()

    def _keep(self, flow: Flow) -> None:
        self._watch.mark("HTTP_SEND_START")
        super()._keep(flow)
        self._watch.mark("HTTP_SEND_END")
        self._watch.close()


def context_of(headers: Headers) -> str:
    """The context that a request came with, "" for none."""
    return next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT), "")
