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

from grpc.aio import InternalError

from flowserve.errors import FlowserveError, Unavailable
from flowserve.grpc.decode import ReceivedMessage
from flowserve.grpc.encode import empty_final_response, stream_error, stream_message
from flowserve.grpc.forward import ForwardedCall, GrpcForwarder, SequenceRelay
from flowserve.grpc.inference import STOPPING, STREAMED, CallOutcome, EngineAccess, InferCall, internal_error
from flowserve.values import Response

IN_FLIGHT_MAX: Final = 1024  # requests of one stream; further ones are not read

Message = bytes | FlowserveError
SequenceKey = tuple[tuple[str, str], int | str]  # the model and version, and the sequence's id
# The message, or the response, which is encoded when it is written: a large one on a thread.
_Outgoing = Message | Response | None


@dataclass(slots=True, eq=False)
class _StreamedRequest:
    """One request of a stream. `outgoing` is its only response. `is_settled`: that response exists, or there will be
    several.
    """

    id: str
    target: tuple[str, str]
    call: InferCall | ForwardedCall | None = None
    sequence: SequenceKey | None = None
    is_settled: bool = False
    outgoing: _Outgoing = None


# An item of the write queue: a request, one of its responses, and whether that is the last. _END: the stream ends.
_Item = tuple[_StreamedRequest, _Outgoing, bool]
_END: Final[_Item] = (_StreamedRequest("", ("", "")), None, True)


class InferStream:
    """`prepare` completes a message, or raises its error. `trace_context`: the caller's, for all requests. `forwarder`:
    sends requests of sequences to the server that has them, None where this one has all.
    `ends_on_error`: the first failed request ends the stream with its status.
    """

    def __init__(
        self,
        access: EngineAccess,
        prepare: Callable[[ReceivedMessage], None],
        trace_context: str = "",
        forwarder: GrpcForwarder | None = None,
        *,
        ends_on_error: bool = False,
    ) -> None:
        self._access = access
        self._forwarder = forwarder
        self._relays: dict[tuple[SequenceKey, int], SequenceRelay] = {}
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
        answered. Raises the error that ends the stream; grpcio's `InternalError` if the client left.
        """
        ended: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_until(context, stopping))
                await self._write(context)
        except* (FlowserveError, InternalError) as errors:
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
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
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
            if self._forwarder is not None and received.data:
                server = await self._forwarder.elsewhere(received, context)
                if server is not None:
                    await self._forward(self._forwarder, server, received, context)
                    continue
            is_accepted = False
            if received.late:
                with self._access.engine.announced() as is_accepted:
                    await self._access.read_late(received)
            self._begin(received, is_accepted=is_accepted)
            del received  # not kept until the next one
        if isinstance(received, FlowserveError):
            raise received

    def _begin(self, received: ReceivedMessage, *, is_accepted: bool = False) -> None:
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
        on_outcome, on_response = partial(self._on_outcome, request), partial(self._on_response, request)
        call.begin(on_outcome, on_response, before, is_accepted=is_accepted)

    async def _forward(self, forwarder: GrpcForwarder, server: int, received: ReceivedMessage, context: Any) -> None:
        """Send a request to the server that has its sequence."""
        request = _StreamedRequest(received.request.id, received.target)
        self._requests.add(request)
        self._order.append(request)
        try:
            is_decoupled = self._access.engine.deployments.find(*received.target).is_decoupled
        except FlowserveError as error:
            self._on_outcome(request, error.with_traceback(None))
            return
        call = request.call = ForwardedCall(received, is_decoupled=is_decoupled)
        key = (received.target, received.request.sequence_id), server
        relay = self._relays.get(key)
        if relay is None:
            relay = self._relays[key] = forwarder.relay(server, context)
        if is_decoupled:
            self._on_outcome(request, STREAMED)
        await relay.send(call, partial(self._on_forwarded, request))

    def _on_forwarded(self, request: _StreamedRequest, message: Message | None, is_last: bool) -> None:
        """A response of the other server, or the failure of the request."""
        if self._is_over:
            return
        if not request.is_settled:  # its only response
            self._on_outcome(request, message)
            return
        if isinstance(message, FlowserveError):
            message = self._failure(request, message)
        self._to_write.put_nowait((request, message, is_last))

    # ------------------------------------------------------------------ responses

    def _on_outcome(self, request: _StreamedRequest, outcome: CallOutcome) -> None:
        """The request has its only response or error, or is STREAMED. Earlier requests' responses are written first."""
        if self._is_over:
            return
        request.is_settled = True
        if isinstance(outcome, FlowserveError):
            outcome = self._failure(request, outcome)
        if outcome is not STREAMED:
            request.outgoing = outcome
        while self._order and self._order[0].is_settled:
            first = self._order.popleft()
            if first.outgoing is not None:
                self._to_write.put_nowait((first, first.outgoing, True))
                first.outgoing = None

    def _on_response(self, request: _StreamedRequest, outcome: CallOutcome) -> None:
        """One response of a decoupled model, an error, or None: the end, if no response said so."""
        if self._is_over:
            return
        call = request.call
        assert isinstance(call, InferCall)  # it is kept until its end
        is_last = not isinstance(outcome, Response) or outcome.is_final
        if isinstance(outcome, FlowserveError):
            outcome = self._failure(request, outcome)
        elif outcome is None and call.message.wants_final:
            outcome = stream_message(empty_final_response(request.target[0], request.id))
        self._to_write.put_nowait((request, outcome, is_last))

    async def _encoded(self, request: _StreamedRequest, response: Response, *, is_final: bool) -> Message:
        call = request.call
        assert isinstance(call, InferCall)  # it is kept until its end
        try:
            parts = call.encode(response, is_final=is_final)
            return stream_message(parts or await call.encode_in_steps(response, is_final=is_final))
        except FlowserveError as error:
            failure = error
        except Exception as error:
            failure = internal_error(error, self._trace_context)
        return self._failure(request, failure)

    def _failure(self, request: _StreamedRequest, error: FlowserveError) -> Message:
        if self._ends_on_error:
            return error.with_traceback(None)  # its frames reference the request
        return stream_error(error, request.id)

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
            request, message, is_last = item
            if isinstance(message, Response):
                message = await self._encoded(request, message, is_final=is_last)
            if isinstance(message, FlowserveError):
                raise message
            if message is not None:
                await context.write(message)
            if is_last:
                self._done(request)
            elif request.call is not None:
                request.call.sent()
            del item, request, message  # they are not kept while the queue is empty
