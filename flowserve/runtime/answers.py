"""The answers to one request, one after the other, as whoever asked takes them.

Decided here: what it means to take the next answer, to wait for it, and to leave before the end. An answer that is not
taken is backpressure: a model that answers many times waits in its send once enough of them lie here. A request to a
deployment that answers once has one answer.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from flowserve.scheduling.router import Flow
from flowserve.scheduling.streams import StreamFlow
from flowserve.values import Response

if TYPE_CHECKING:
    from flowserve.runtime.engine import Engine
    from flowserve.runtime.watch import Watch


class Answers:
    """An async iterator over responses, and a context manager: leaving it withdraws what is not answered yet.

    Raises what the request failed with, after the answers before. Made by `Engine.stream`; for one task.
    """

    def __init__(self, engine: Engine, flow: Flow, watch: Watch | None = None) -> None:
        self._engine = engine
        self._flow = flow
        self._watch = watch  # where the request is traced
        self._is_taken = False  # the one answer of a flow that has one

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody wants any more of them. Harmless at the end."""
        if not self._flow.done:
            self._engine.withdraw(self._flow)
        else:
            self._engine.dispatcher.cancel(self._flow)  # there may be answers that were not taken
        if self._watch is not None:
            self._watch.close()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Response:
        flow = self._flow
        while True:
            if isinstance(flow, StreamFlow):
                answer = flow.take()
                if answer is not None:
                    self._engine.taken()
                    return self._engine.response_from(answer)
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
