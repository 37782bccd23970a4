"""Inference requests of grpcio's calls, from its loop to the engine and back.

Decided here: what happens to a request on which side. Both sides are on one thread (guest.py): a call is decoded,
begun and encoded in grpcio's loop; what the engine tells is told in the middle of its own work, and what is more than
to wake somebody waits for the loop's turn. A caller who leaves withdraws its request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Internal, Unavailable, Unsupported
from flowserve.grpc.decode import Asked
from flowserve.grpc.encode import Encoder, Parts
from flowserve.grpc.guest import Guest
from flowserve.memory import raw
from flowserve.memory.client_memory import ClientMemory, Window
from flowserve.runtime.answers import Answers
from flowserve.runtime.classification import rank
from flowserve.runtime.engine import Engine
from flowserve.runtime.watch import Watch
from flowserve.scheduling.router import Flow
from flowserve.values import Response

T = TypeVar("T")
STOPPING: Final = "Server is stopping"
# Triton's text, as its gRPC endpoint begins it.
ONE_ANSWER: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"
STREAMED: Final = object()  # the outcome of a call whose answers come one by one, and then its end
AHEAD_MAX: Final = 8  # answers that are on their way to a client that has not taken them

# A response, the error that it came to, or STREAMED.
Outcome = Any
Told = Callable[[Outcome], object]

_log = logging.getLogger("flowserve.grpc")


class Calls:
    """What all calls of a server share. What of them takes time on the engine's side are tasks in `nursery`."""

    def __init__(self, engine: Engine, memory: ClientMemory, guest: Guest, nursery: trio.Nursery) -> None:
        self.engine = engine
        self.memory = memory
        self.guest = guest
        self.nursery = nursery
        self.encoder = Encoder()

    async def infer(self, target: tuple[str, str], asked: Asked, context: str = "") -> Parts:
        """The one answer to a request. `context`: in which its caller traces it. Raises FlowserveError."""
        call = Call(self, target, asked, context)
        try:
            answered = call.submit()
            if answered is None:
                raise Unsupported(f"{ONE_ANSWER}: '{target[0]}' answers in a stream")
            if not isinstance(answered, Response):
                if not answered.done:
                    await self._answered(answered)
                answered = self.engine.response(answered)
            return call.encode(answered)
        finally:
            call.close()

    async def _answered(self, flow: Flow) -> None:
        """Until it is. Who leaves before withdraws it."""
        answered: asyncio.Future[None] = self.guest.loop.create_future()

        def wake(flow: Flow) -> None:
            if not answered.done():
                answered.set_result(None)
                self.guest.wake()

        flow.waiter = wake
        try:
            await answered
        except asyncio.CancelledError:
            if not flow.done:
                self.engine.withdraw(flow)
            raise

    async def carry_out(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, a task on the engine's side, which is cancelled when the caller leaves."""
        ended: asyncio.Future[None] = self.guest.loop.create_future()
        scope = trio.CancelScope()
        outcome: Outcome = Unavailable(STOPPING)

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        async def run() -> None:
            nonlocal outcome
            try:
                with scope:
                    outcome = await work()
            except FlowserveError as error:
                outcome = error
            except Exception as error:
                outcome = broken(error)
            finally:
                self.guest.post(tell)

        self.nursery.start_soon(run)
        try:
            await ended
        except asyncio.CancelledError:
            scope.cancel()
            raise
        if isinstance(outcome, FlowserveError):
            raise outcome
        found: T = outcome
        return found


class Call:
    """One request. Of a deployment that answers once it has a flow; of one that may answer any number of times, `begin`
    hands its answers on.
    """

    __slots__ = (
        "_calls",
        "_context",
        "_deployment",
        "_flow",
        "_handed_on",
        "_room",
        "_scope",
        "_target",
        "_watch",
        "_windows",
        "asked",
    )

    def __init__(self, calls: Calls, target: tuple[str, str], asked: Asked, context: str = "") -> None:
        self._calls = calls
        self._target = target
        self.asked = asked
        self._context = context
        self._watch: Watch | None = None  # where it is traced
        self._flow: Flow | None = None
        self._scope: trio.CancelScope | None = None  # of the task that takes many answers
        self._handed_on: trio.Event | None = None  # when it has handed on the last of them
        self._windows: dict[str, Window] = {}

    @property
    def version(self) -> str:
        """The version that answers, once it does."""
        return str(self._deployment.version)

    def submit(self) -> Response | Flow | None:
        """Begin it, or answer it on the spot. None, and nothing is begun, where its answers come one by one. Raises
        FlowserveError.
        """
        engine, asked = self._calls.engine, self.asked
        watch = engine.traces.sample(self._target[0], self._context) if engine.traces.is_on else None
        if watch is not None:
            watch.mark("GRPC_WAITREAD_START")
            self._watch = watch
        deployment = self._deployment = engine.find(*self._target)
        if asked.shared:
            self._read(asked)
        if asked.portions:
            self._windows = self._calls.memory.windows(asked.portions)
        request = asked.request
        request.stamp = engine.next_stamp()
        if watch is not None:
            watch.mark("GRPC_WAITREAD_END")
        if deployment.is_decoupled:
            return None
        if watch is None:
            answered = engine.ask(deployment, request)
            if isinstance(answered, Response):
                return answered
            self._flow = answered
        else:
            self._flow = engine.submit(deployment, request, watch.make(deployment.make_flow))
        return self._flow

    def begin(self, told: Told, many: Told, before: Call | None = None) -> None:
        """`told` is called in the loop, once, with the outcome; of a deployment that may answer any number of times
        `many` is told each answer, then what ended them: None, or the error. Not before the last of those of `before`,
        the request before it of its sequence: what is told in one turn of the loop has no order there.
        """
        turn = self._handed_on = None if before is None else before._handed_on
        try:
            answered = self.submit()
            if answered is None:
                self._room = trio.Semaphore(AHEAD_MAX)
                self._scope = trio.CancelScope()
                answers = self._calls.engine.stream(self._deployment, self.asked.request, self._watch)
                self._handed_on = trio.Event()
                self._calls.nursery.start_soon(self._hand_on, answers, self._scope, many, turn, self._handed_on)
        except FlowserveError as error:
            told(error)
            return
        except Exception as error:
            told(broken(error))
            return
        if answered is None:
            told(STREAMED)
        elif isinstance(answered, Response):
            told(answered)
        elif answered.done:
            told(self._outcome(answered))
        else:
            answered.waiter = lambda flow: self._calls.guest.post(told, self._outcome(flow))

    def leave(self) -> None:
        """Nobody wants the answer any more; harmless when there is one."""
        if self._scope is not None:
            self._scope.cancel()
        if self._flow is not None and not self._flow.done:
            self._calls.engine.withdraw(self._flow)

    def close(self) -> None:
        """It is answered, or nobody wants that any more. Harmless afterwards."""
        if self._watch is not None:
            self._watch.close()

    def taken(self) -> None:
        """The client took one of many answers."""
        self._room.release()

    def encode(self, response: Response, *, is_final: bool | None = None) -> Parts:
        """Raises FlowserveError where the answer cannot take the form it was asked for."""
        watch = self._watch
        if watch is not None:
            watch.mark("GRPC_SEND_START")
        if self.asked.classes:
            rank(response, self.asked.classes, self._deployment)
        parts = self._calls.encoder.encode(response, self._windows, is_final=is_final)
        if watch is not None:
            watch.mark("GRPC_SEND_END")
        return parts

    def _read(self, asked: Asked) -> None:
        for one in asked.shared:
            data = self._calls.memory.window(one.portion).read()
            array = raw.decode(data, one.name, self._target[0], one.dtype, one.shape, one.count)
            asked.request.inputs[one.name] = array

    def _outcome(self, flow: Flow) -> Outcome:
        """Asked for in the middle of the engine's own work, too: nothing may get out."""
        try:
            return self._calls.engine.response(flow)
        except FlowserveError as error:
            return error
        except Exception as error:
            return broken(error)

    async def _hand_on(
        self, answers: Answers, scope: trio.CancelScope, many: Told, turn: trio.Event | None, over: trio.Event
    ) -> None:
        post = self._calls.guest.post
        end: FlowserveError | None = Unavailable(STOPPING)
        try:
            with scope:
                async with answers:
                    if turn is not None:
                        await turn.wait()
                    async for response in answers:
                        await self._room.acquire()
                        post(many, response)
            end = None
        except FlowserveError as error:
            end = error.with_traceback(None)  # or this frame would hold it, and it the frame
        except Exception as error:
            end = broken(error)
        finally:
            post(many, end)
            over.set()


def broken(error: Exception) -> Internal:
    """A mistake of ours: the log has it, a client reads no more than that there was one."""
    _log.error("a call could not be answered", exc_info=error)
    return Internal("internal server error")
