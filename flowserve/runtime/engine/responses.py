"""The responses to one request, one after the other, as its caller takes them.

Decides how the caller takes the next response, waits for it, and cancels before the last one. A response that is not
taken is backpressure: a decoupled model waits in its send once enough of them are not taken. A request to a deployment
that responds once has one response. Does not know how responses come about. Made by `Engine.stream`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.runtime.tracing.watch import Watch
from flowserve.scheduling.flow import Flow
from flowserve.scheduling.streaming.iterations import StreamFlow
from flowserve.values import Response


class ServesFlows(Protocol):
    """The engine, as it is seen here."""

    def withdraw(self, flow: Flow) -> None: ...
    def drop_responses(self, flow: Flow) -> None: ...
    def taken(self) -> None: ...
    def response(self, flow: Flow) -> Response: ...
    def response_from(self, flow: Flow) -> Response: ...


class ResponseIterator:
    """An async iterator over responses, and a context manager: leaving it withdraws a request that is not over.

    Raises the error of the request after the responses before it. For one task.
    """

    def __init__(self, engine: ServesFlows, flow: Flow, watch: Watch | None = None) -> None:
        self._engine = engine
        self._flow = flow
        self._watch = watch  # where the request is traced
        self._is_taken = False  # the response of a flow that has one only

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """No more responses are wanted. Harmless at the end."""
        if not self._flow.done:
            self._engine.withdraw(self._flow)
        else:
            self._engine.drop_responses(self._flow)
        if self._watch is not None:
            self._watch.close()

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> Response:
        flow = self._flow
        while True:
            if isinstance(flow, StreamFlow):
                response = flow.take()
                if response is not None:
                    self._engine.taken()
                    return self._engine.response_from(response)
            elif flow.done and not self._is_taken:
                self._is_taken = True
                return self._engine.response(flow)
            if flow.done:
                if flow.error is not None:
                    self._engine.response(flow)  # raises it
                raise StopAsyncIteration
            await self._wait()

    async def _wait(self) -> None:
        task = current_task()
        self._flow.waiter = lambda _: reschedule(task)

        def stop_waiting(_: RaiseCancelT) -> Abort:
            self._flow.waiter = None
            return Abort.SUCCEEDED

        await wait_task_rescheduled(stop_waiting)
