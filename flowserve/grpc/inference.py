"""Inference requests of grpcio's calls: from grpcio's event loop to the engine and back.

Decides which part runs in which event loop; both are on one thread (`guest`). A request is decoded, submitted and
encoded in grpcio's loop. The engine's callbacks run inside its step, so they only resolve a future or post a callback
to grpcio's loop. A cancelled call withdraws its request. Callers: `service`, `stream`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Internal, Unavailable, Unsupported
from flowserve.grpc.decode import ReceivedMessage
from flowserve.grpc.encode import MessageEncoder, Parts, encode_response
from flowserve.grpc.guest import GuestLoop
from flowserve.memory import raw
from flowserve.memory.client_memory import ClientMemory, Portion, RegionWindow
from flowserve.observe.log_fields import of_context
from flowserve.runtime.engine.classification import rank
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine, ResponseIterator
from flowserve.runtime.threads import INLINE_BYTES_MAX, Pause, in_steps
from flowserve.runtime.tracing.tracing import Watch
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array, BytesLike, DType, Response

T = TypeVar("T")
STOPPING: Final = "Server is stopping"
# The beginning is Triton's text.
ONE_RESPONSE: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"
STREAMED: Final = object()  # the outcome of a request whose responses follow one by one
UNSENT_MAX: Final = 8  # responses to one decoupled request that the client has not read yet

# A Response, a FlowserveError, STREAMED, or None for the end of a decoupled request's responses.
CallOutcome = Any
OnCallOutcome = Callable[[CallOutcome], object]

_log = logging.getLogger("flowserve.grpc")

TRACEPARENT: Final = "traceparent"


class EngineAccess:
    """What the calls of a server share. Work that belongs into trio's loop runs as tasks of `nursery`."""

    def __init__(self, engine: Engine, memory: ClientMemory, guest: GuestLoop, nursery: trio.Nursery) -> None:
        self.engine = engine
        self.memory = memory
        self.guest = guest
        self.nursery = nursery
        self.encoder = MessageEncoder()

    async def infer(self, message: ReceivedMessage, context: str = "") -> Parts:
        """The single response to a request. `context`: the caller's trace context. Raises FlowserveError."""
        is_accepted = False
        if message.late:
            with self.engine.announced() as is_accepted:
                await self.read_late(message)
            if message.error is not None:
                raise message.error
        call = InferCall(self, message, context)
        try:
            frame = call.submit(is_accepted=is_accepted)
            if frame is None:
                raise Unsupported(f"{ONE_RESPONSE}: '{message.target[0]}' answers in a stream")
            if not frame.record.done:
                await self._wait(frame)
            response = self.engine.response(frame)
            return call.encode(response) or await call.encode_in_steps(response)
        finally:
            call.close()

    async def read_late(self, message: ReceivedMessage) -> None:
        """Read the late inputs on a thread, if they are large, after the message's types and shapes were checked. A
        failure is kept in the message. Small inputs are left to `submit`.
        """
        late = message.late
        if message.error is not None or sum(_bytes_of(source) for _, source in late) <= INLINE_BYTES_MAX:
            return
        request = message.request
        try:
            stand_ins = {name: raw.stand_in(name, dtype, shape) for (name, dtype, shape, _), _ in late}
            deployment = self.engine.deployments.find(*message.target)
            self.engine.check(deployment, replace(request, inputs={**request.inputs, **stand_ins}))
            windows = [self.memory.window(source) if isinstance(source, Portion) else source for _, source in late]
            room = [self._room(deployment, dtype, _bytes_of(source)) for (_, dtype, _, _), source in late]
            read = partial(_read, message, windows, room, deployment.arena is not None)
            request.inputs |= await self.run_in_trio(lambda: in_steps(read))
            message.late = []
        except FlowserveError as error:
            message.error = error.with_traceback(None)

    @staticmethod
    def _room(deployment: Deployment, dtype: DType, nbytes: int) -> Array | None:
        """Memory for an input: that of the worker process that reads it, if there is one."""
        is_placed = nbytes > INLINE_BYTES_MAX and deployment.arena is not None
        if not is_placed or dtype in (DType.BYTES, DType.BOOL):
            return None
        assert deployment.arena is not None
        return deployment.arena.lease(nbytes).view()

    async def _wait(self, frame: Frame) -> None:
        """Wait until the request is done; withdraw it if the call is cancelled."""
        done: asyncio.Future[None] = self.guest.loop.create_future()

        def wake(frame: Frame) -> None:
            if not done.done():
                done.set_result(None)
                self.guest.wake()

        frame.record.waiter = wake
        try:
            await done
        except asyncio.CancelledError:
            if not frame.record.done:
                self.engine.withdraw(frame)
            raise

    async def run_in_trio(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, run as a task in trio's loop, which is cancelled with the call."""
        ended: asyncio.Future[CallOutcome] = self.guest.loop.create_future()
        scope = trio.CancelScope()

        def resolve(outcome: CallOutcome) -> None:
            if not ended.done():
                ended.set_result(outcome)

        async def run() -> None:
            outcome: CallOutcome = Unavailable(STOPPING)
            try:
                with scope:
                    outcome = await work()
            except FlowserveError as error:
                outcome = error
            except Exception as error:
                outcome = internal_error(error)
            finally:
                self.guest.post(resolve, outcome)

        self.nursery.start_soon(run)
        try:
            outcome: T | FlowserveError = await ended
        except asyncio.CancelledError:
            scope.cancel()
            raise
        if isinstance(outcome, FlowserveError):
            raise outcome
        return outcome


def _bytes_of(source: Portion | BytesLike) -> int:
    return source.size if isinstance(source, Portion) else len(source)


def _read(
    message: ReceivedMessage,
    windows: Sequence[RegionWindow | BytesLike],
    room: Sequence[Array | None],
    stays_encoded: bool,
    pause: Pause,
) -> dict[str, Array]:
    """The late inputs of a message. `stays_encoded`: as for `raw.decode_large`. Raises `Invalid`."""
    arrays: dict[str, Array] = {}
    for ((name, dtype, shape, count), _), window, place in zip(message.late, windows, room, strict=True):
        data = window.read(place) if isinstance(window, RegionWindow) else window
        pause()
        model = message.target[0]
        arrays[name] = raw.decode_large(data, name, model, dtype, shape, count, pause, stays_encoded=stays_encoded)
    return arrays


class InferCall:
    """One request. `submit` is for a single response; `begin` reports the outcome, or all responses of a decoupled
    model, to callbacks.
    """

    __slots__ = (
        "_access",
        "_context",
        "_delivered",
        "_deployment",
        "_frame",
        "_room",
        "_scope",
        "_watch",
        "_windows",
        "message",
    )

    def __init__(self, access: EngineAccess, message: ReceivedMessage, context: str = "") -> None:
        self._access = access
        self.message = message
        self._context = context
        self._watch: Watch | None = None  # if it is traced
        self._frame: Frame | None = None
        self._scope: trio.CancelScope | None = None  # of the task that delivers the responses of a decoupled model
        self._delivered: trio.Event | None = None  # set when that task has delivered the last one
        self._windows: dict[str, RegionWindow] = {}

    def submit(self, *, is_accepted: bool = False) -> Frame | None:
        """Submit the request. For a decoupled model returns None without submitting it. `is_accepted`: as for the
        engine. Raises FlowserveError.
        """
        engine, memory, message = self._access.engine, self._access.memory, self.message
        watch = engine.traces.sample(message.target[0], self._context) if engine.traces.is_on else None
        if watch is not None:
            watch.mark("GRPC_WAITREAD_START")
            self._watch = watch
        deployment = self._deployment = engine.deployments.find(*message.target)
        request = message.request
        for (name, dtype, shape, count), source in message.late:
            data = memory.window(source).read() if isinstance(source, Portion) else source
            request.inputs[name] = raw.decode(data, name, message.target[0], dtype, shape, count)
        if message.portions:
            self._windows = memory.windows(message.portions)
        request.stamp, request.trace_context = engine.next_stamp(), self._context
        if watch is not None:
            watch.mark("GRPC_WAITREAD_END")
        if deployment.is_decoupled:
            return None
        make = None if watch is None else watch.make(deployment.make_frame)
        self._frame = engine.submit(deployment, request, make, is_accepted=is_accepted)
        return self._frame

    def begin(
        self,
        on_outcome: OnCallOutcome,
        on_response: OnCallOutcome,
        before: InferCall | None = None,
        *,
        is_accepted: bool = False,
    ) -> None:
        """Submit the request and report to callbacks in the loop. `on_outcome` is called once. For a decoupled model
        its argument is STREAMED, and `on_response` gets each response, and the end unless the last one is final: None,
        or the error. `before`: the preceding request of its sequence, whose responses are delivered first.
        `is_accepted`: as for the engine.
        """
        # One iteration of trio's loop runs tasks in random order, so the order must be enforced.
        turn = self._delivered = None if before is None else before._delivered
        try:
            frame = self.submit(is_accepted=is_accepted)
            if frame is None:
                self._room = trio.Semaphore(UNSENT_MAX)
                self._scope = trio.CancelScope()
                responses = self._access.engine.stream(
                    self._deployment, self.message.request, self._watch, is_accepted=is_accepted
                )
                self._delivered = trio.Event()
                self._access.nursery.start_soon(
                    self._deliver, responses, self._scope, on_response, turn, self._delivered
                )
        except FlowserveError as error:
            on_outcome(error)
            return
        except Exception as error:
            on_outcome(internal_error(error, self._context))
            return
        if frame is None:
            on_outcome(STREAMED)
        elif frame.record.done:
            on_outcome(self._outcome(frame))
        else:
            frame.record.waiter = lambda frame: self._access.guest.post(on_outcome, self._outcome(frame))

    def cancel(self) -> None:
        """Withdraw the request. No effect once it is done."""
        if self._scope is not None:
            self._scope.cancel()
        if self._frame is not None and not self._frame.record.done:
            self._access.engine.withdraw(self._frame)

    def close(self) -> None:
        """End its trace, and its part of the budget. Idempotent."""
        if self.message.reservation is not None:
            self.message.reservation.end()
        if self._watch is not None:
            self._watch.close()

    def sent(self) -> None:
        """One of a decoupled model's responses was sent."""
        self._room.release()

    def encode(self, response: Response, *, is_final: bool | None = None) -> Parts | None:
        """The response; None if this takes long, which is work for `encode_in_steps`. Called once. Raises
        FlowserveError if the response cannot be sent in the requested form.
        """
        watch = self._watch
        if watch is not None:
            watch.mark("GRPC_SEND_START")
        if self.message.classes:
            rank(response, self.message.classes, self._deployment)
        parts = self._access.encoder.encode(response, self._windows, is_final=is_final)
        if watch is not None and parts is not None:
            watch.mark("GRPC_SEND_END")
        return parts

    async def encode_in_steps(self, response: Response, *, is_final: bool | None = None) -> Parts:
        """The response for which `encode` returned None, encoded on a thread. Raises as `encode` does."""
        encode = partial(encode_response, response, self._windows, is_final=is_final)
        parts = await self._access.run_in_trio(lambda: in_steps(encode))
        if self._watch is not None:
            self._watch.mark("GRPC_SEND_END")
        return parts

    def _outcome(self, frame: Frame) -> CallOutcome:
        """The response or the error. Raises nothing, because it is called inside the engine's step."""
        try:
            return self._access.engine.response(frame)
        except FlowserveError as error:
            return error
        except Exception as error:
            return internal_error(error, self._context)

    async def _deliver(
        self,
        responses: ResponseIterator,
        scope: trio.CancelScope,
        on_response: OnCallOutcome,
        turn: trio.Event | None,
        delivered: trio.Event,
    ) -> None:
        post = self._access.guest.post
        end: FlowserveError | None = Unavailable(STOPPING)
        has_ended = False
        try:
            with scope:
                async with responses:
                    if turn is not None:
                        await turn.wait()
                    async for response in responses:
                        await self._room.acquire()
                        has_ended = response.is_final
                        post(on_response, response)
            end = None
        except FlowserveError as error:
            end = error.with_traceback(None)  # avoids a reference cycle with this frame
        except Exception as error:
            end = internal_error(error, self._context)
        finally:
            if not has_ended:
                post(on_response, end)
            delivered.set()


def trace_context(context: Any) -> str:
    """The trace context of a call, "" for none."""
    return str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, ""))


def internal_error(error: Exception, context: str = "") -> Internal:
    """The error for clients after an unexpected exception, which is logged. `context`: the request's trace context."""
    _log.error("a call could not be answered", exc_info=error, extra=of_context(context))
    return Internal("internal server error")
