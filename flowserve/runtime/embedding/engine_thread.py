"""An engine on a thread of its own, and the callers of programs that do not run on trio: blocking code, and asyncio.

Decides that a private thread runs the engine's event loop, that all requests that other threads have submitted when the
loop wakes up begin together, that a caller that stops waiting withdraws its request, and that a blocking call on an
event loop is refused. Does not know how requests run (engine/), or what the methods of an engine are (embedded.py,
`authoring`). Called by `authoring`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

import trio

from flowserve.errors import Unavailable, Unsupported
from flowserve.memory.raw import EncodedBytes
from flowserve.runtime.embedding.embedded import AsyncEngine, engine_of, keep, prepare, reached_by
from flowserve.runtime.engine.engine import Engine
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array, Request

T = TypeVar("T")


class Call:
    """A request of another thread to the deployment `name` in `version`. That thread creates it and reads its `result`
    after `on_end` was called on the engine's thread. `calls` contains it from `begin` to its end.
    """

    def __init__(
        self, name: str, version: int, request: Request, calls: set[Call], on_end: Callable[[], object]
    ) -> None:
        self._name = name
        self._version = version
        self._request = request
        self._calls = calls
        self._on_end = on_end
        self._engine: Engine | None = None
        self._frame: Frame | None = None
        self._has_left = False
        self._outputs: dict[str, Array] = {}
        self._error: Exception | None = None

    def begin(self, engine: Engine) -> None:
        """Submit the request. An error of that is its result."""
        if self._has_left:
            return
        self._engine = engine
        self._calls.add(self)
        try:
            deployment = prepare(engine, self._name, self._version, self._request)
            frame = self._frame = engine.submit(deployment, self._request)
        except Exception as error:  # raised in the caller's thread
            self.end(error)
            return
        if frame.record.done:
            self._finished(frame)
        else:
            frame.record.waiter = self._finished

    def leave(self) -> None:
        """The caller no longer waits. No effect if the request is over. It may not have begun yet: trio runs functions
        that are posted once before those that are `is_repeatable`.
        """
        self._has_left = True
        if self in self._calls and self._engine is not None and self._frame is not None:
            self._calls.discard(self)
            self._engine.withdraw(self._frame)

    def end(self, error: Exception | None = None) -> None:
        """The request is over: notify its caller."""
        self._calls.discard(self)
        self._error = error
        self._on_end()

    def result(self) -> dict[str, Array]:
        """The outputs of a request that is over. Raises its error. On the thread that made it, since large BYTES are
        decoded here.
        """
        if self._error is not None:
            raise self._error
        outputs = self._outputs
        for name, array in outputs.items():
            if isinstance(array, EncodedBytes):
                outputs[name] = array.copy()
        return keep(outputs, self._request.inputs)

    @property
    def is_large(self) -> bool:
        """Whether `result` has to decode large outputs, which takes long."""
        return any(isinstance(array, EncodedBytes) for array in self._outputs.values())

    def _finished(self, frame: Frame) -> None:
        assert self._engine is not None
        try:
            self._outputs = self._engine.response(frame).outputs
        except Exception as error:
            self.end(error)
        else:
            self.end()


class EngineThread:
    """The thread of an engine. `on_open` is called on it when all models are loaded, or when loading failed and `error`
    is set.
    """

    def __init__(self, embedding: AbstractAsyncContextManager[AsyncEngine], on_open: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.engine: AsyncEngine  # set before `on_open` is called
        self.token: trio.lowlevel.TrioToken
        self._embedding = embedding
        self._on_open = on_open
        self._scope = trio.CancelScope()
        self._new_calls: deque[Call] = deque()  # calls of other threads that have not begun
        self._calls: set[Call] = set()  # calls that have begun; used on this thread
        self._is_over = False
        begun = threading.Event()
        # A daemon thread, so that a program that does not close the engine can end.
        self._thread = threading.Thread(target=self._run, args=(begun,), name="flowserve engine", daemon=True)
        self._thread.start()
        begun.wait()

    # ------------------------------------------------------------------ on any thread

    def submit(self, name: str, version: int, request: Request, on_end: Callable[[], object]) -> Call:
        """Begin a request soon; `on_end` is called on the engine's thread. Raises Unavailable after the end."""
        call = Call(name, version, request, self._calls, on_end)
        self._new_calls.append(call)
        self.post(self._begin_calls, is_repeatable=True)
        return call

    def post(self, function: Callable[[], object], *, is_repeatable: bool = False) -> None:
        """Call a function on the engine's thread. `is_repeatable`: several posts of it may be executed once. Raises
        Unavailable after the end.
        """
        try:
            self.token.run_sync_soon(function, idempotent=is_repeatable)
        except trio.RunFinishedError:
            raise Unavailable("the engine is closed") from None

    def notify(self, function: Callable[[], object]) -> None:
        """Call a function on the engine's thread, unless it has ended."""
        with suppress(Unavailable):
            self.post(function)

    def read(self, function: Callable[[], T]) -> T:
        """The result of a function that is called on the engine's thread. Raises Unavailable after the end."""
        try:
            return trio.from_thread.run_sync(function, trio_token=self.token)
        except trio.RunFinishedError:
            raise Unavailable("the engine is closed") from None

    def close(self) -> None:
        """Start closing: requests in flight fail. May be called again; `join` waits for the end."""
        self.notify(self._scope.cancel)

    def join(self) -> None:
        self._thread.join()

    # ------------------------------------------------------------------ on its own

    def _begin_calls(self) -> None:
        if self._is_over:
            while self._new_calls:
                self._new_calls.popleft().end(Unavailable("the engine is closed"))
            return
        engine = engine_of(self.engine)
        engine.begin_events()
        try:
            while self._new_calls:
                self._new_calls.popleft().begin(engine)
        finally:
            engine.end_events()

    def _run(self, begun: threading.Event) -> None:
        try:
            trio.run(self._serve, begun)
        except BaseException as error:
            self.error = error
        finally:
            self._opened()

    def _opened(self) -> None:
        on_open, self._on_open = self._on_open, _nothing
        on_open()

    async def _serve(self, begun: threading.Event) -> None:
        self.token = trio.lowlevel.current_trio_token()
        begun.set()
        try:
            with self._scope:
                async with self._embedding as self.engine:
                    self._opened()
                    await trio.sleep_forever()
        finally:
            self._is_over = True
            for call in [*self._calls]:  # calls to instances that did not end in time
                call.end(Unavailable("the engine is closed"))


def _nothing() -> None:
    pass


class Blocking:
    """Callers block their threads, which have no event loop. On a loop of trio they raise Unsupported; after `close`
    Unavailable.
    """

    def __init__(self, embedding: AbstractAsyncContextManager[AsyncEngine]) -> None:
        """Returns when all models are loaded. Raises the error of opening."""
        opened = threading.Event()
        self._thread = EngineThread(embedding, opened.set)
        try:
            opened.wait()
        except BaseException:  # Ctrl-C while models load
            self.close()
            raise
        if self._thread.error is not None:
            self._thread.join()
            raise self._thread.error
        self.engine = self._thread.engine  # its methods are called on the engine's thread
        self.notify = self._thread.notify

    def infer(self, name: str, version: int, request: Request) -> dict[str, Array]:
        _refuse_on_a_loop()
        is_pending = threading.Lock()
        is_pending.acquire()
        call = self._thread.submit(name, version, request, is_pending.release)
        try:
            is_pending.acquire()
        except BaseException:  # Ctrl-C, or what another signal handler raises
            self.notify(call.leave)
            raise
        return call.result()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Wait for a coroutine function on the engine's thread."""
        _refuse_on_a_loop()
        try:
            return trio.from_thread.run(work, trio_token=self._thread.token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine is closed") from None

    def read(self, function: Callable[[], T]) -> T:
        """The result of a function that is called on the engine's thread."""
        _refuse_on_a_loop()
        return self._thread.read(function)

    def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again."""
        _refuse_on_a_loop()
        self._thread.close()
        self._thread.join()


class OnAsyncio:
    """Callers are tasks of loops of asyncio. `engine` is the engine for them."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.engine = reached_by(self, thread.engine)
        self.read = thread.read
        self.notify = thread.notify

    async def infer(self, name: str, version: int, request: Request) -> dict[str, Array]:
        ended = _Notice()
        call = self._thread.submit(name, version, request, ended.give)
        try:
            await ended.taken
        except asyncio.CancelledError:
            self.notify(call.leave)
            raise
        return await asyncio.to_thread(call.result) if call.is_large else call.result()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        ended, scope = _Notice(), trio.CancelScope()
        results: list[T] = []
        errors: list[BaseException] = []

        async def on_the_thread() -> None:
            try:
                with scope:
                    results.append(await work())
            except Exception as error:  # raised in the caller's task
                errors.append(error)
            finally:  # also if the engine's loop ends
                ended.give()

        def start() -> None:
            try:
                trio.lowlevel.spawn_system_task(on_the_thread)
            except RuntimeError:  # the engine's loop is about to end
                ended.give()

        self._thread.post(start)
        try:
            await ended.taken
        except asyncio.CancelledError:
            self.notify(scope.cancel)
            raise
        if errors:
            raise errors[0]
        if not results:
            raise Unavailable("the engine is closed")
        return results[0]

    async def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again."""
        await _close(self._thread)


async def open_on_asyncio(embedding: AbstractAsyncContextManager[AsyncEngine]) -> OnAsyncio:
    """Returns when all models are loaded. Raises the error of opening."""
    opened = _Notice()
    thread = EngineThread(embedding, opened.give)
    try:
        await opened.taken
    except BaseException:
        await _close(thread)
        raise
    if thread.error is not None:
        thread.join()
        raise thread.error
    return OnAsyncio(thread)


async def _close(thread: EngineThread) -> None:
    thread.close()
    await asyncio.shield(asyncio.to_thread(thread.join))


class _Notice:
    """An event that is set once, on any thread, and awaited on the loop of asyncio on which it was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = self._loop.create_future()

    def give(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        if not self.taken.done():
            self.taken.set_result(None)


def _refuse_on_a_loop() -> None:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return
    raise Unsupported(
        "a blocking engine was called on an event loop, which would wait for itself; there, use"
        " `async with flowserve.Engine(...)` and await"
    )
