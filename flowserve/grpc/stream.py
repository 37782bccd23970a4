"""One ModelStreamInfer call: a stream of requests, and a stream of their responses.

Decides the order of responses (in request order for models with one response; in order of arrival for decoupled ones,
but in request order within a sequence), how a request's last response is marked, and that a failed request gets an
error response and the stream continues, unless the client sent the header `triton_grpc_error`. Runs in grpcio's loop.
Caller: `service`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from flowserve.errors import FlowserveError, Unavailable
from flowserve.grpc.decode import ReceivedMessage
from flowserve.grpc.encode import empty_final_response, stream_error, stream_message
from flowserve.grpc.inference import STOPPING, STREAMED, CallOutcome, EngineAccess, InferCall, internal_error

IN_FLIGHT_MAX: Final = 1024  # requests of one stream; further ones are not read

Message = bytes | FlowserveError
SequenceKey = tuple[tuple[str, str], int | str]  # the model and version, and the sequence's id
# An item of the write queue: the message, if any, and the callback after it was written. _END: the stream ends.
_Item = tuple[Message | None, Callable[[], None]]
_END: Final[_Item] = (None, lambda: None)


@dataclass(slots=True, eq=False)
class _StreamedRequest:
    """One request of a stream. `message` is its only response. `is_settled`: that response exists, or there will be
    several.
    """

    id: str
    target: tuple[str, str]
    call: InferCall | None = None
    sequence: SequenceKey | None = None
    is_settled: bool = False
    message: Message | None = None


class InferStream:
    """`prepare` completes a message, or raises its error. `trace_context`: the caller's, for all requests.
    `ends_on_error`: the first failed request ends the stream with its status.
    """

    def __init__(
        self,
        access: EngineAccess,
        prepare: Callable[[ReceivedMessage], None],
        trace_context: str = "",
        *,
        ends_on_error: bool = False,
    ) -> None:
        self._access = access
        self._prepare = prepare
        self._trace_context = trace_context
        self._ends_on_error = ends_on_error
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._order: deque[_StreamedRequest] = deque()
        self._requests: set[_StreamedRequest] = set()
        self._sequences: dict[SequenceKey, InferCall] = {}  # the last unfinished request of each sequence
        self._to_write: asyncio.Queue[_Item] = asyncio.Queue()
        self._is_read = False
        self._is_stopped = False
        self._is_over = False

    async def run(self, context: Any, stopping: asyncio.Event) -> None:
        """Run until the client has ended its side or the server is `stopping`, and all requests read before are
        answered. Raises the error that ends the stream.
        """
        ended: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_until(context, stopping))
                await self._write(context)
        except* FlowserveError as errors:
            ended = errors.exceptions[0]  # raised in here, Python before 3.11.4 would put it into a group again
        finally:
            self._release()
        if ended is not None:
            raise ended from None
        if self._is_stopped:
            raise Unavailable(STOPPING)

    def _release(self) -> None:
        """Cancel unfinished requests and drop all references to them: errors and posted callbacks may keep the stream
        alive for long, and requests would keep their models loaded.
        """
        self._is_over = True
        for request in self._requests:
            if request.call is not None:
                request.call.cancel()
                request.call.close()
                request.call = None
        self._requests.clear()
        self._order.clear()
        self._sequences.clear()
        self._to_write = asyncio.Queue()

    # ------------------------------------------------------------------ requests

    async def _read_until(self, context: Any, stopping: asyncio.Event) -> None:
        reading = asyncio.create_task(self._read(context))
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()  # raises its error
        finally:
            self._is_stopped = not reading.done()
            for task in (reading, stopped):
                task.cancel()
        self._is_read = True
        self._end_if_done()

    async def _read(self, context: Any) -> None:
        """Read until the client ends its side. A broken connection cancels the whole call."""
        while isinstance(received := await context.read(), ReceivedMessage):
            await self._room.acquire()
            if received.late:
                await self._access.read_late(received)
            self._begin(received)
        if isinstance(received, FlowserveError):
            raise received

    def _begin(self, received: ReceivedMessage) -> None:
        request = _StreamedRequest(received.request.id, received.target)
        self._requests.add(request)
        self._order.append(request)
        try:
            self._prepare(received)
        except FlowserveError as error:
            self._on_outcome(request, error)
            return
        call = request.call = InferCall(self._access, received, self._trace_context)
        before = None
        if received.request.sequence_id:
            request.sequence = request.target, received.request.sequence_id
            before = self._sequences.get(request.sequence)
            self._sequences[request.sequence] = call
        call.begin(partial(self._on_outcome, request), partial(self._on_response, request), before)

    # ------------------------------------------------------------------ responses

    def _on_outcome(self, request: _StreamedRequest, outcome: CallOutcome) -> None:
        """The request has its only response or error, or is STREAMED. Earlier requests' responses are written first."""
        if self._is_over:
            return
        request.is_settled = True
        if outcome is not STREAMED:
            request.message = self._encoded(request, outcome, is_final=True)
        while self._order and self._order[0].is_settled:
            first = self._order.popleft()
            if first.message is not None:
                self._to_write.put_nowait((first.message, partial(self._done, first)))

    def _on_response(self, request: _StreamedRequest, outcome: CallOutcome) -> None:
        """One response of a decoupled model, or the end: None, or an error."""
        if self._is_over:
            return
        call = request.call
        assert call is not None  # it is kept until its end
        message: Message | None = None
        written = partial(self._done, request)
        if outcome is not None:
            message = self._encoded(request, outcome)
            if not isinstance(outcome, FlowserveError):
                written = partial(self._sent, request)  # not call.sent, which would keep a cancelled call alive
        elif call.message.wants_final:
            message = stream_message(empty_final_response(request.target[0], call.version, request.id))
        self._to_write.put_nowait((message, written))

    def _encoded(self, request: _StreamedRequest, outcome: CallOutcome, *, is_final: bool = False) -> Message:
        if not isinstance(outcome, FlowserveError):
            assert request.call is not None  # it is kept until its end
            try:
                return stream_message(request.call.encode(outcome, is_final=is_final))
            except FlowserveError as error:
                outcome = error
            except Exception as error:
                outcome = internal_error(error)
        if self._ends_on_error:
            bare: FlowserveError = outcome.with_traceback(None)  # its frames reference the request
            return bare
        return stream_error(outcome, request.id)

    @staticmethod
    def _sent(request: _StreamedRequest) -> None:
        assert request.call is not None  # it is kept until its end
        request.call.sent()

    def _done(self, request: _StreamedRequest) -> None:
        if request.call is not None:
            request.call.close()
        if request.sequence is not None and self._sequences.get(request.sequence) is request.call:
            del self._sequences[request.sequence]
        request.call = None
        self._requests.discard(request)
        self._room.release()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_read and not self._requests:
            self._to_write.put_nowait(_END)

    async def _write(self, context: Any) -> None:
        while (item := await self._to_write.get()) is not _END:
            message, written = item
            if isinstance(message, FlowserveError):
                raise message
            if message is not None:
                await context.write(message)
            written()
