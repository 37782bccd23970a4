"""asyncio's event loop as a guest of trio's, on one thread: grpcio's calls run on the engine's thread.

Decides when the guest loop runs (a socket is ready, a timer is due, or trio's side added a callback), and when it
yields. asyncio calls its selector's `select` with a timeout other than 0 exactly when no callback is ready, so the
selector stops the loop there and keeps the timeout for the next timer. Only asyncio's public interface is used. Does
not know grpcio. Callers: `server`, `inference`.
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
# Polls of the sockets per run: data that arrived meanwhile is handled in the same run, but the engine is not starved.
POLLS_MAX: Final = 8
ITERATIONS_MAX: Final = 1000  # per run, for callbacks that keep adding callbacks
_CLOSE_POLL_S: Final = 0.05


class _Selector(selectors.DefaultSelector):
    """Stops the loop instead of blocking. `timeout_s`: how long it would have blocked, None without a timer."""

    loop: asyncio.AbstractEventLoop
    polls = 0
    iterations = 0
    timeout_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.iterations += 1
        if timeout is not None and timeout <= 0:
            if self.iterations < ITERATIONS_MAX:
                return []  # callbacks are ready and go first
        elif self.polls < POLLS_MAX:
            self.polls += 1
            events = super().select(0)
            if events:
                return events
        self.timeout_s = timeout
        self.loop.stop()
        return []


class GuestLoop:
    """Created and used on the engine's thread. `loop` is asyncio's."""

    def __init__(self) -> None:
        self._selector = _Selector()
        if not hasattr(self._selector, "fileno"):
            raise Unsupported("gRPC needs a system on which sockets are waited for by epoll or kqueue")
        self.loop = self._selector.loop = asyncio.SelectorEventLoop(self._selector)
        self._timer_at = math.inf
        self._timer_scope = trio.CancelScope()  # of the task that waits for timers
        self._waiting: Task | None = None  # the task that waits for callbacks, while it is suspended
        self._is_running = False
        self._tasks: set[asyncio.Task[object]] = set()

    def post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call `callback` in the loop, soon and in order; not at all after `finish`."""
        # Worker threads may still respond after the server failed, and must not hide that failure in the log.
        if not self.loop.is_closed():
            self.loop.call_soon(callback, *arguments)
            self.wake()

    def start_task(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Start a task in the loop, referenced until it ends; it handles its own errors."""

        def create() -> None:
            task = self.loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.post(create)

    def wake(self) -> None:
        """Run the loop soon, because a callback was added. No effect inside the loop."""
        waiting = self._waiting
        if waiting is not None and not self._is_running:
            self._waiting = None
            reschedule(waiting)

    async def run(self) -> None:
        """Run the loop whenever it has something to do, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_callbacks, name="grpc: callbacks")
            nursery.start_soon(self._serve_timers, name="grpc: timers")
            while True:
                await wait_readable(self._selector.fileno())
                self._run_once()

    def run_sync(self, function: Callable[[], T]) -> T:
        """Call `function` in the loop, now. Returns its result, or raises its exception."""
        future: asyncio.Future[T] = self.loop.create_future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.loop.call_soon(call)
        self._run_once()
        return future.result()

    def finish(self, coroutine: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """Run the loop until `coroutine` is done or the timeout has passed, then cancel all tasks and close the loop.
        Blocks. Called when `run` has ended.
        """
        task = self.loop.create_task(coroutine)
        end = trio.current_time() + timeout_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._selector.fileno(), selectors.EVENT_READ)
            self._run_once()
            while not task.done() and trio.current_time() < end:
                waiting.select(_CLOSE_POLL_S)
                self._run_once()
        for left in asyncio.all_tasks(self.loop):
            left.cancel()
        self._run_once()
        self.loop.close()

    def _run_once(self) -> None:
        """Run all ready callbacks, and those that become ready by them."""
        self._selector.polls = self._selector.iterations = 0
        self._is_running = True
        try:
            self.loop.run_forever()
        finally:
            self._is_running = False
        timeout_s = self._selector.timeout_s
        timer_at = math.inf if timeout_s is None else trio.current_time() + timeout_s
        if timer_at != self._timer_at:
            self._timer_at = self._timer_scope.deadline = timer_at

    async def _serve_callbacks(self) -> None:
        def abort(raise_cancel: RaiseCancelT) -> Abort:
            self._waiting = None
            return Abort.SUCCEEDED

        while True:
            self._run_once()  # before the first wait too: an earlier `wake` had no task to wake
            self._waiting = current_task()
            await wait_task_rescheduled(abort)

    async def _serve_timers(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._timer_at) as self._timer_scope:
                await trio.sleep_forever()
            self._run_once()
