"""Requests of sequences that are on another server behind the same port: they are sent there, over gRPC.

Decides which metadata goes with a request, and that the requests of one sequence in a stream go through one stream to
the other server, so that they keep their order. The other server treats a request as if it had come from the client.
Where a sequence is, and how often a request is sent on, is decided in runtime/group.py. Runs in grpcio's loop. Callers:
`service`, `stream`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from flowserve.errors import FlowserveError, Internal, Unavailable
from flowserve.grpc import service_pb2 as pb
from flowserve.grpc.decode import EMPTY_FINAL, ReceivedMessage
from flowserve.grpc.encode import ERRORS, FINAL
from flowserve.grpc.inference import EngineAccess
from flowserve.runtime.group import FORWARDED, LOST, Group, elsewhere, forwards_of

_SERVICE: Final = "/inference.GRPCInferenceService/"
_OF_CALL: Final = ("user-agent", "content-type", "te", FORWARDED)
_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

# A message for the client, None for none, and whether it is the last of its request.
OnMessage = Callable[[bytes | FlowserveError | None, bool], object]


class GrpcForwarder:
    """Sends requests to the servers of `group`."""

    def __init__(self, access: EngineAccess, group: Group) -> None:
        self._access = access
        self._group = group
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def elsewhere(self, message: ReceivedMessage, context: Any) -> int | None:
        """The other server that has the request's sequence; None if there is none."""
        request = message.request
        if not request.sequence_id or message.error is not None:
            return None
        begins, forwards = request.sequence_start, _forwards(context)
        ask = partial(elsewhere, self._group, request.sequence_id, begins=begins, forwards=forwards)
        return await self._access.run_in_trio(ask)

    async def infer(self, server: int, message: ReceivedMessage, context: Any) -> bytes:
        """The response of another server. Raises its error; Unavailable if it is gone."""
        call = self._channel(server).unary_unary(f"{_SERVICE}ModelInfer")
        try:
            response: bytes = await call(message.data, metadata=_metadata(context))
        except grpc.aio.AioRpcError as error:
            raise _error(error) from None
        return response

    def relay(self, server: int, context: Any) -> SequenceRelay:
        """A relay for the requests of one sequence in one client's stream."""
        call = self._channel(server).stream_stream(f"{_SERVICE}ModelStreamInfer")(metadata=_metadata(context))
        return SequenceRelay(call)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, server: int) -> grpc.aio.Channel:
        if server not in self._channels:
            path = self._group.socket_of(server, "grpc")
            self._channels[server] = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)
        return self._channels[server]


class SequenceRelay:
    """Requests of one sequence, in order, and their responses. Made by `GrpcForwarder.relay`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: deque[tuple[ForwardedCall, OnMessage]] = deque()
        self._reading: asyncio.Task[None] | None = None

    async def send(self, call: ForwardedCall, on_message: OnMessage) -> None:
        """Send a request on; its responses are given to `on_message`."""
        self._waiting.append((call, on_message))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reading task fails all that wait
            await self._call.write(_with_final(call.message.data) if call.is_decoupled else call.message.data)

    def close(self) -> None:
        """No more requests follow, or their client has left."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        failure: FlowserveError = Unavailable(LOST)
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._received(data)
        except grpc.aio.AioRpcError as error:
            failure = _error(error)
        while self._waiting:
            _, on_message = self._waiting.popleft()
            on_message(failure, True)

    def _received(self, data: bytes) -> None:
        call, on_message = self._waiting[0]
        response = pb.ModelStreamInferResponse.FromString(data)
        told = response.infer_response
        is_last = bool(response.error_message) or not call.is_decoupled or told.parameters[FINAL].bool_param
        if is_last:
            self._waiting.popleft()
        is_mark = is_last and call.is_decoupled and not response.error_message and not told.model_version
        on_message(None if is_mark and not call.message.wants_final else data, is_last)


class ForwardedCall:
    """A request that another server runs; for streams, in the place of an `InferCall`."""

    def __init__(self, message: ReceivedMessage, *, is_decoupled: bool) -> None:
        self.message = message
        self.is_decoupled = is_decoupled

    def cancel(self) -> None:
        """No effect: its relay ends with the stream."""

    def sent(self) -> None:
        """No effect: the other server waits for its own writes."""

    def close(self) -> None:
        """End its part of the budget."""
        if self.message.reservation is not None:
            self.message.reservation.end()


def keeping(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A reader of messages that keeps the bytes of those that may be sent on."""

    def keep(data: bytes) -> Any:
        received = read(data)
        if isinstance(received, ReceivedMessage) and received.request.sequence_id:
            received.data = data
        return received

    return keep


def _with_final(data: bytes) -> bytes:
    """The message of a decoupled request, so that the end of its responses is marked."""
    message = pb.ModelInferRequest.FromString(data)
    message.parameters[EMPTY_FINAL].bool_param = True
    return message.SerializeToString()


def _forwards(context: Any) -> int:
    return forwards_of(dict(context.invocation_metadata() or ()).get(FORWARDED, "0"))


def _metadata(context: Any) -> list[tuple[str, Any]]:
    given = context.invocation_metadata() or ()
    kept = [(name, value) for name, value in given if name not in _OF_CALL and not name.startswith(("grpc-", ":"))]
    return [*kept, (FORWARDED, str(_forwards(context) + 1))]


def _error(error: grpc.aio.AioRpcError) -> FlowserveError:
    text = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in text:
        return Unavailable(LOST)
    return ERRORS.get(error.code(), Internal)(text)
