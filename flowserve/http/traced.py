"""The inference route while requests are traced: which of them are.

Decided here: the choice is made before anything else is known of a request but its model's name, as on Triton, and
what is not chosen goes the common way. The context in which a caller traces comes in the header `traceparent`. A
server that traces nothing has the plain route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.types import Receive, Scope, Send

from flowserve.http.compression import Headers, UnknownEncoding
from flowserve.http.infer import InferRoute, goes_elsewhere
from flowserve.runtime.traces import Traces

if TYPE_CHECKING:
    from flowserve.http.connection import Connection

TRACEPARENT: Final = b"traceparent"


class TracedInferRoute:
    """Stands before the plain route."""

    def __init__(self, route: InferRoute, traces: Traces) -> None:
        self._route = route
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send, name: str, version: str) -> None:
        """Run one request and answer it, whatever comes of it."""
        exchange: Connection | None = scope.get("flowserve.exchange")
        if exchange is not None and self.begin(scope["headers"], exchange, name, version):
            return
        watch = self._traces.sample(name, context_of(scope["headers"]))
        if watch is None:
            await self._route(scope, receive, send, name, version)
            return
        try:
            await self._route.traced(scope, receive, send, name, version, watch)
        finally:
            watch.close()

    def begin(self, headers: Headers, exchange: Connection, name: str, version: str) -> bool:
        """As the plain route's: answer, or promise to, without waiting. False where that cannot be."""
        try:
            if goes_elsewhere(headers):
                return False
        except UnknownEncoding:
            return False
        watch = self._traces.sample(name, context_of(headers))
        if watch is None:
            return self._route.begin(headers, exchange, name, version)
        self._route.begin_traced(headers, exchange, name, version, watch)
        return True


def context_of(headers: Headers) -> str:
    """The context that a request came with, "" for none."""
    return next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT), "")
