"""asyncio's loop as a guest on the engine's thread: grpcio's calls run where the engine is, and none crosses threads.

Decided here: when the guest has its turn (something happened on one of its sockets, a timer is due, or somebody on
trio's side left work for it), and when a turn ends. asyncio asks its selector to wait exactly when nothing is ready,
and says for how long; so the selector is where a turn ends, and what it is told is when the next one is due. Nothing
but asyncio's public interface is used. What runs in the loop is not known here.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_readable, wait_task_rescheduled

from flowserve.errors import Unsupported

T = TypeVar("T")
# How often in one turn the sockets are looked at: what came while others were served is taken at once, and the engine
# has its turn even when there is always something.
LOOKS_MAX: Final = 8
PASSES_MAX: Final = 1000  # and when there is always something ready
_PATIENCE_S: Final = 0.05


class _Selector(selectors.DefaultSelector):
    """Never waits: it stops the loop instead. `due_s`: how long the loop would have waited then, None for ever."""

    loop: asyncio.AbstractEventLoop
    looks = 0
    passes = 0
    due_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passes += 1
        if timeout is not None and timeout <= 0:
            if self.passes < PASSES_MAX:
                return []  # something is ready: that first
        elif self.looks < LOOKS_MAX:
            self.looks += 1
            events = super().select(0)
            if events:
                return events
        self.due_s = timeout
        self.loop.stop()
        return []


class Guest:
    """Made and used on the engine's thread. `loop` is asyncio's."""

    def __init__(self) -> None:
        self._selector = _Selector()
        if not hasattr(self._selector, "fileno"):
            raise Unsupported("gRPC needs a system on which sockets are waited for by epoll or kqueue")
        self.loop = self._selector.loop = asyncio.SelectorEventLoop(self._selector)
        self._due = math.inf
        self._nap = trio.CancelScope()  # of the task that waits for timers
        self._sleeper: Task | None = None  # the task that waits for work from outside, while it does
        self._is_in_turn = False
        self._tasks: set[asyncio.Task[object]] = set()

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """`work` is called in the loop, soon. In order."""
        self.loop.call_soon(work, *arguments)
        self.wake()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """A task in the loop, kept until it is done; it deals with its own errors."""

        def create() -> None:
            task = self.loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.post(create)

    def wake(self) -> None:
        """The loop was given work. Nothing to do where it is its turn anyway."""
        sleeper = self._sleeper
        if sleeper is not None and not self._is_in_turn:
            self._sleeper = None
            reschedule(sleeper)

    async def run(self) -> None:
        """Give the guest its turns, for ever. Ends only by cancellation."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_work, name="grpc: work from outside")
            nursery.start_soon(self._serve_timers, name="grpc: timers")
            while True:
                await wait_readable(self._selector.fileno())
                self._turn()

    def at_once(self, work: Callable[[], T]) -> T:
        """What `work` returns, which is called in the loop, now. Raises what it raises."""
        future: asyncio.Future[T] = self.loop.create_future()

        def call() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self.loop.call_soon(call)
        self._turn()
        return future.result()

    def finish(self, work: Coroutine[Any, Any, object], within_s: float) -> None:
        """The last turns: until `work` is done, or for so long. Blocks; for when `run` has ended. What is posted
        afterwards is called no more.
        """
        task = self.loop.create_task(work)
        end = trio.current_time() + within_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._selector.fileno(), selectors.EVENT_READ)
            self._turn()
            while not task.done() and trio.current_time() < end:
                waiting.select(_PATIENCE_S)
                self._turn()
        for left in asyncio.all_tasks(self.loop):
            left.cancel()
        self._turn()
        self.loop.close()
        # Where the server ends by a mistake of its own, threads may still answer: the log is to name that mistake.
        vars(self)["post"] = _call_nobody

    def _turn(self) -> None:
        """Everything that is ready, and what becomes ready by it."""
        self._selector.looks = self._selector.passes = 0
        self._is_in_turn = True
        try:
            self.loop.run_forever()
        finally:
            self._is_in_turn = False
        due_s = self._selector.due_s
        due = math.inf if due_s is None else trio.current_time() + due_s
        if due != self._due:
            self._due = self._nap.deadline = due

    async def _serve_work(self) -> None:
        def abort(raise_cancel: RaiseCancelT) -> Abort:
            self._sleeper = None
            return Abort.SUCCEEDED

        while True:
            self._turn()  # before the first sleep too: a wake that came earlier woke nobody
            self._sleeper = current_task()
            await wait_task_rescheduled(abort)

    async def _serve_timers(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._due) as self._nap:
                await trio.sleep_forever()
            self._turn()


def _call_nobody(work: Callable[..., object], *arguments: Any) -> None:
    """The loop is over."""
