"""An engine on a thread of its own, for programs that do not run on trio: blocking code, and asyncio.

Decides that a private thread runs the engine's event loop, that all requests that other threads have submitted when the
loop wakes up begin together, that a caller that stops waiting withdraws its request, and that a blocking call on an
event loop is refused. Does not know how requests run (engine/). Called by `authoring`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import trio

from flowserve.backends.base import NO_FILES
from flowserve.errors import Unavailable, Unsupported
from flowserve.memory.raw import EncodedBytes
from flowserve.runtime.embedding.embedded import (
    ArrayLike,
    AsyncEngine,
    RequestOptions,
    Stream,
    engine_of,
    keep,
    new_request,
    prepare,
)
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
        self._flow: Frame | None = None
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
            flow = self._flow = engine.submit(deployment, self._request)
        except Exception as error:  # raised in the caller's thread
            self.end(error)
            return
        if flow.record.done:
            self._finished(flow)
        else:
            flow.record.waiter = self._finished

    def leave(self) -> None:
        """The caller no longer waits. No effect if the request is over. It may not have begun yet: trio runs functions
        that are posted once before those that are `is_repeatable`.
        """
        self._has_left = True
        if self in self._calls and self._engine is not None and self._flow is not None:
            self._calls.discard(self)
            self._engine.withdraw(self._flow)

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

    def _finished(self, flow: Frame) -> None:
        assert self._engine is not None
        try:
            self._outputs = self._engine.response(flow).outputs
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

    def submit(
        self,
        name: str,
        inputs: Mapping[str, ArrayLike],
        version: int,
        options: RequestOptions,
        on_end: Callable[[], object],
    ) -> Call:
        """Begin a request soon; `on_end` is called on the engine's thread. Raises Invalid, and Unavailable after the
        end.
        """
        call = Call(name, version, new_request(inputs, options), self._calls, on_end)
        self._new_calls.append(call)
        self.post(self._begin_calls, is_repeatable=True)
        return call

    def post(self, function: Callable[..., object], *arguments: Any, is_repeatable: bool = False) -> None:
        """Call a function on the engine's thread. `is_repeatable`: several posts of it may be executed once. Raises
        Unavailable after the end.
        """
        try:
            self.token.run_sync_soon(function, *arguments, idempotent=is_repeatable)
        except trio.RunFinishedError:
            raise Unavailable("the engine is closed") from None

    def close(self) -> None:
        """Start closing: requests in flight fail. May be called again; `join` waits for the end."""
        with suppress(Unavailable):
            self.post(self._scope.cancel)

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


class BlockingEngine:
    """The engine of blocking code. Its methods may be called from any threads without an event loop, concurrently; on
    a loop of trio they raise Unsupported. After `close` they raise Unavailable.
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

    def infer(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """As `flowserve.Engine.infer`."""
        _refuse_on_a_loop()
        is_pending = threading.Lock()
        is_pending.acquire()
        call = self._thread.submit(name, inputs, version, options, is_pending.release)
        try:
            is_pending.acquire()
        except BaseException:  # Ctrl-C, or what another signal handler raises
            with suppress(Unavailable):
                self._thread.post(call.leave)
            raise
        return call.result()

    def stream(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Generator[dict[str, Array], None, None]:
        """As `flowserve.Engine.stream`."""

        async def begin() -> Stream:
            return self._thread.engine.stream(name, inputs, version=version, **options)

        async def next_response() -> dict[str, Array] | None:
            return await anext(stream, None)

        stream = self._call(begin)
        try:
            while (answer := self._call(next_response)) is not None:
                yield answer
        finally:
            # Not awaited: an iterator may be freed on the loop's thread, or after the loop has ended.
            with suppress(Unavailable):
                self._thread.post(stream.leave)

    def load(self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES) -> None:
        """As `flowserve.Engine.load`."""
        self._call(partial(self._thread.engine.load, name, config=config, files=files))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """As `flowserve.Engine.unload`."""
        self._call(partial(self._thread.engine.unload, name, dependents=dependents))

    def index(self) -> list[dict[str, str]]:
        """As `flowserve.Engine.index`."""
        return self._call(self._thread.engine.index)

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.statistics`."""
        return self._read(self._thread.engine.statistics, name, version)

    def graph_statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.graph_statistics`."""
        return self._read(self._thread.engine.graph_statistics, name, version)

    def _read(self, function: Callable[[str, int], T], name: str, version: int) -> T:
        async def read() -> T:
            return function(name, version)

        return self._call(read)

    def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again."""
        _refuse_on_a_loop()
        self._thread.close()
        self._thread.join()

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        _refuse_on_a_loop()
        try:
            return trio.from_thread.run(work, trio_token=self._thread.token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine is closed") from None


class AsyncioEngine:
    """The engine of a program on asyncio: the result of `async with flowserve.Engine(...)` there. Its methods are those
    of `AsyncEngine`, and may be called on any loop of asyncio. Cancelling a caller withdraws its request.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def infer(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """As `flowserve.Engine.infer`, awaited."""
        ended = _Notice()
        call = self._thread.submit(name, inputs, version, options, ended.give)
        try:
            await ended.taken
        except asyncio.CancelledError:
            with suppress(Unavailable):
                self._thread.post(call.leave)
            raise
        return await asyncio.to_thread(call.result) if call.is_large else call.result()

    def stream(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> AsyncioStream:
        """As `AsyncEngine.stream`; the request begins with the block."""
        return AsyncioStream(self, partial(self._thread.engine.stream, name, inputs, version=version, **options))

    async def load(
        self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """As `flowserve.Engine.load`, awaited."""
        await self._run(partial(self._thread.engine.load, name, config=config, files=files))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """As `flowserve.Engine.unload`, awaited."""
        await self._run(partial(self._thread.engine.unload, name, dependents=dependents))

    async def index(self) -> list[dict[str, str]]:
        """As `flowserve.Engine.index`, awaited."""
        return await self._run(self._thread.engine.index)

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.statistics`. Blocks until the engine's thread has read them, after its current step."""
        return self._read(self._thread.engine.statistics, name, version)

    def graph_statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.graph_statistics`. Blocks as `statistics`."""
        return self._read(self._thread.engine.graph_statistics, name, version)

    def _read(self, function: Callable[[str, int], T], name: str, version: int) -> T:
        try:
            return trio.from_thread.run_sync(function, name, version, trio_token=self._thread.token)
        except trio.RunFinishedError:
            raise Unavailable("the engine is closed") from None

    async def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again."""
        self._thread.close()
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    def _post(self, function: Callable[[], object]) -> None:
        """Call it on the engine's thread, if the engine is not closed."""
        with suppress(Unavailable):
            self._thread.post(function)

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await a coroutine function on the engine's thread. Cancelling the caller cancels it."""
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
            self._post(scope.cancel)
            raise
        if errors:
            raise errors[0]
        if not results:
            raise Unavailable("the engine is closed")
        return results[0]


async def open_on_asyncio(embedding: AbstractAsyncContextManager[AsyncEngine]) -> AsyncioEngine:
    """Returns when all models are loaded. Raises the error of opening."""
    opened = _Notice()
    thread = EngineThread(embedding, opened.give)
    engine = AsyncioEngine(thread)
    try:
        await opened.taken
    except BaseException:
        await engine.close()
        raise
    if thread.error is not None:
        thread.join()
        raise thread.error
    return engine


class AsyncioStream:
    """The responses to one request, as `Stream`, on asyncio. `begin` begins it, on the engine's thread."""

    def __init__(self, engine: AsyncioEngine, begin: Callable[[], Stream]) -> None:
        self._engine = engine
        self._begin = begin
        self._stream: Stream | None = None

    async def __aenter__(self) -> Self:
        async def begin() -> Stream:
            return self._begin()

        self._stream = await self._engine._run(begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._engine._post(self._stream.leave)

    def __aiter__(self) -> AsyncIterator[dict[str, Array]]:
        return self._responses()

    async def _responses(self) -> AsyncIterator[dict[str, Array]]:
        if self._stream is None:
            raise Unsupported(
                "the responses of a stream are taken in its block: `async with engine.stream(...) as answers`"
            )
        while (answer := await self._engine._run(partial(_next, self._stream))) is not None:
            yield answer


async def _next(stream: Stream) -> dict[str, Array] | None:
    return await anext(stream, None)


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
