"""Between grpcio's thread, which runs asyncio, and the engine's, which runs trio.

Decided here: how work gets across and back: once there and once back for a call, no lock, and one waking of the other
loop for everything that is handed over before it woke. What the work is, calls.py and service.py know.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Internal, Unavailable

T = TypeVar("T")
STOPPING: Final = "Server is stopping"

_log = logging.getLogger("flowserve.grpc")


class Crossing:
    """Made on the engine's thread. `loop` is grpcio's; tasks on the engine's side run in `nursery`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._loop = loop
        self._posted: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._is_armed = False

    def hand_over(self, work: Callable[..., object], *arguments: Any) -> None:
        """From grpcio's thread: `work` is called on the engine's, which it must not bring down. In order."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(work, *arguments)

    def post(self, told: Callable[[Any], object], outcome: Any) -> None:
        """From the engine's thread: `told(outcome)` is called on grpcio's. In order."""
        self._posted.append((told, outcome))
        if not self._is_armed:
            self._is_armed = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits for anything any more
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_armed = False  # first: what is posted from now on wakes the loop again
        posted = self._posted
        while posted:
            told, outcome = posted.popleft()
            told(outcome)

    async def ask(self, question: Callable[[], T]) -> T:
        """On grpcio's thread: what `question` returns on the engine's. Raises what it raises."""
        answer = Waiting(self._loop)

        def put() -> None:
            try:
                outcome: Any = question()
            except FlowserveError as error:
                outcome = error
            except Exception as error:
                outcome = broken(error)
            self.post(answer.settle, outcome)

        self.hand_over(put)
        found: T = await answer.outcome()
        return found

    async def carry_out(self, work: Callable[[], Awaitable[T]]) -> T:
        """As `ask`, for what takes time. It is cancelled when the caller leaves."""
        answer = Waiting(self._loop)
        scope = trio.CancelScope()

        async def run() -> None:
            outcome: Any = Unavailable(STOPPING)
            try:
                with scope:
                    outcome = await work()
            except FlowserveError as error:
                outcome = error
            except Exception as error:
                outcome = broken(error)
            finally:
                self.post(answer.settle, outcome)

        self.hand_over(partial(self.nursery.start_soon, run))
        try:
            found: T = await answer.outcome()
        except asyncio.CancelledError:
            self.hand_over(scope.cancel)
            raise
        return found


class Waiting:
    """What somebody on grpcio's thread waits for."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[Any] = loop.create_future()

    def settle(self, outcome: Any) -> None:
        """The outcome, an error to be raised or what is returned."""
        if not self._future.done():  # who waited may have left
            self._future.set_result(outcome)

    async def outcome(self) -> Any:
        found = await self._future
        if isinstance(found, FlowserveError):
            raise found
        return found


def broken(error: Exception) -> Internal:
    """A mistake of ours: the log has it, a client reads no more than that there was one."""
    _log.error("a call could not be answered", exc_info=error)
    return Internal("internal server error")
