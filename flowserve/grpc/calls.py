"""One request from grpcio's thread to the engine and back.

Decided here: what happens to it on which thread. It is decoded on grpcio's, begun on the engine's (where inputs are
read from clients' memory, because regions belong to that thread), encoded on grpcio's. A caller who leaves withdraws
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from flowserve.errors import FlowserveError, Unavailable, Unsupported
from flowserve.grpc.crossing import STOPPING, Crossing, broken
from flowserve.grpc.decode import Asked
from flowserve.grpc.encode import encode
from flowserve.grpc.service_pb2 import ModelInferResponse
from flowserve.memory import raw
from flowserve.memory.client_memory import ClientMemory, Window
from flowserve.runtime.answers import Answers
from flowserve.runtime.classification import rank
from flowserve.runtime.engine import Engine
from flowserve.runtime.watch import Watch
from flowserve.scheduling.router import Flow
from flowserve.values import Response

# Triton's text, as its gRPC endpoint begins it.
ONE_ANSWER: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"
STREAMED: Final = object()  # the outcome of a call whose answers come one by one, and then its end
AHEAD_MAX: Final = 8  # answers that are on their way to a client that has not taken them

# A response, the error that it came to, or STREAMED.
Outcome = Any


class Call:
    """`told` is called on grpcio's thread, once, with the outcome. `many` is told each answer of a deployment that may
    answer any number of times, then what ended them: None, or the error. Without it such a deployment is refused.
    """

    __slots__ = (
        "_context",
        "_crossing",
        "_deployment",
        "_engine",
        "_flow",
        "_has_left",
        "_many",
        "_memory",
        "_name",
        "_room",
        "_scope",
        "_told",
        "_version",
        "_watch",
        "_windows",
        "asked",
    )

    def __init__(
        self,
        engine: Engine,
        memory: ClientMemory,
        crossing: Crossing,
        target: tuple[str, str],
        asked: Asked,
        told: Callable[[Outcome], object],
        many: Callable[[Outcome], object] | None = None,
        context: str = "",
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._crossing = crossing
        self._name, self._version = target
        self.asked = asked
        self._told = told
        self._many = many
        self._context = context
        self._watch: Watch | None = None  # where it is traced
        self._flow: Flow | None = None
        self._scope: trio.CancelScope | None = None  # of the task that takes many answers
        self._has_left = False
        self._windows: dict[str, Window] = {}

    # ------------------------------------------------------------------ on grpcio's thread

    @property
    def version(self) -> str:
        """The version that answers, once it does."""
        return str(self._deployment.version)

    def begin(self) -> None:
        self._crossing.hand_over(self._begin)

    def leave(self) -> None:
        """Nobody wants the answer any more; harmless when there is one."""
        self._crossing.hand_over(self._leave)

    def taken(self) -> None:
        """The client took one of many answers."""
        self._crossing.hand_over(self._make_room)

    def encode(self, response: Response) -> ModelInferResponse:
        """Raises FlowserveError where the answer cannot take the form it was asked for."""
        if self.asked.classes:
            rank(response, self.asked.classes, self._deployment)
        return encode(response, self._windows)

    # ------------------------------------------------------------------ on the engine's thread

    def _begin(self) -> None:
        if self._has_left:
            return
        try:
            flow = self._submit()
        except FlowserveError as error:
            self._crossing.post(self._told, error)
            self._close()
        except Exception as error:
            self._crossing.post(self._told, broken(error))
            self._close()
        else:
            if flow is None:
                self._crossing.post(self._told, STREAMED)
            elif flow.done:
                self._finish(flow)
            else:
                self._flow = flow
                flow.waiter = self._finish

    def _submit(self) -> Flow | None:
        """The flow, None where its answers come one by one."""
        engine, asked = self._engine, self.asked
        watch = engine.traces.sample(self._name, self._context) if engine.traces.is_on else None
        if watch is not None:
            watch.mark("GRPC_WAITREAD_START")
            self._watch = watch
        deployment = self._deployment = engine.find(self._name, self._version)
        if asked.shared:
            self._read(asked)
        if asked.portions:
            self._windows = self._memory.windows(asked.portions)
        request = asked.request
        request.stamp = engine.next_stamp()
        if watch is not None:
            watch.mark("GRPC_WAITREAD_END")
        if not deployment.is_decoupled:
            return engine.submit(deployment, request, None if watch is None else watch.make(deployment.make_flow))
        if self._many is None:
            raise Unsupported(f"{ONE_ANSWER}: '{deployment.name}' answers in a stream")
        self._room = trio.Semaphore(AHEAD_MAX)
        self._scope = trio.CancelScope()
        answers = engine.stream(deployment, request, watch)
        self._crossing.nursery.start_soon(self._hand_on, answers, self._scope, self._many)
        return None

    def _read(self, asked: Asked) -> None:
        for one in asked.shared:
            data = self._memory.window(one.portion).read()
            asked.request.inputs[one.name] = raw.decode(data, one.name, self._name, one.dtype, one.shape, one.count)

    def _finish(self, flow: Flow) -> None:
        """Called by the engine in the middle of its own work: nothing may get out."""
        self._flow = None
        outcome: Outcome
        try:
            outcome = self._engine.response(flow)
        except FlowserveError as error:
            outcome = error
        except Exception as error:
            outcome = broken(error)
        if self._watch is not None:
            self._watch.mark("GRPC_SEND_START")
        self._crossing.post(self._told, outcome)
        if self._watch is not None:
            self._watch.mark("GRPC_SEND_END")
            self._watch.close()

    async def _hand_on(self, answers: Answers, scope: trio.CancelScope, many: Callable[[Outcome], object]) -> None:
        end: FlowserveError | None = Unavailable(STOPPING)
        try:
            with scope:
                async with answers:
                    async for response in answers:
                        await self._room.acquire()
                        self._crossing.post(many, response)
            end = None
        except FlowserveError as error:
            end = error
        except Exception as error:
            end = broken(error)
        finally:
            self._crossing.post(many, end)

    def _make_room(self) -> None:
        self._room.release()

    def _leave(self) -> None:
        self._has_left = True
        if self._scope is not None:
            self._scope.cancel()
        if self._flow is not None:
            self._engine.withdraw(self._flow)
            self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
