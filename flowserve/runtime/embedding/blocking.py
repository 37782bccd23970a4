"""The engine embedded in a program that blocks: scripts, notebooks, threads.

Decides that a private thread runs the event loop, and that a blocking call on an event loop is refused. `embedded.py`
decides what a request is.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeVar, Unpack

import trio

from flowserve.backends.base import NO_FILES
from flowserve.errors import Unavailable, Unsupported
from flowserve.runtime.embedding.embedded import AsyncEngine, RequestOptions, Stream
from flowserve.values import Array

T = TypeVar("T")


class BlockingEngine:
    """The result of `with flowserve.Engine(...)`. Every method blocks, and may be called from any threads without an
    event loop, concurrently; on an event loop it raises Unsupported. After `close` it raises Unavailable.
    """

    def __init__(self, embedding: AbstractAsyncContextManager[AsyncEngine]) -> None:
        """Returns when all models are loaded. Raises the error of opening."""
        self._embedding = embedding
        self._scope = trio.CancelScope()
        self._begun, self._opened = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        # A daemon thread, so that a program that does not close the engine can end.
        self._thread = threading.Thread(target=self._run, name="flowserve engine", daemon=True)
        self._thread.start()
        self._begun.wait()
        try:
            self._opened.wait()
        except BaseException:  # Ctrl-C while models load
            self.close()
            raise
        if self._error is not None:
            self._thread.join()
            raise self._error

    def infer(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """As `AsyncEngine.infer`."""
        return self._call(partial(self._engine.infer, name, inputs, version=version, **options))

    def stream(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Generator[dict[str, Array], None, None]:
        """As `AsyncEngine.stream`: an iterator over responses. Closing it withdraws the request; after a `for` that
        ends early this happens when the iterator is freed.
        """

        async def begin() -> Stream:
            return self._engine.stream(name, inputs, version=version, **options)

        async def next_response() -> dict[str, Array] | None:
            return await anext(stream, None)

        stream = self._call(begin)
        try:
            while (answer := self._call(next_response)) is not None:
                yield answer
        finally:
            # Not awaited: an iterator may be freed on the loop's thread, or after the loop has ended.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(stream.leave)

    def load(self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES) -> None:
        """As `AsyncEngine.load`."""
        self._call(partial(self._engine.load, name, config=config, files=files))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """As `AsyncEngine.unload`."""
        self._call(partial(self._engine.unload, name, dependents=dependents))

    def index(self) -> list[dict[str, str]]:
        """As `AsyncEngine.index`."""
        return self._call(self._engine.index)

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `AsyncEngine.statistics`."""

        async def read() -> list[dict[str, Any]]:
            return self._engine.statistics(name, version)

        return self._call(read)

    def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again."""
        _refuse_on_a_loop()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        _refuse_on_a_loop()
        try:
            return trio.from_thread.run(work, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine is closed") from None

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._error = error
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._begun.set()
        with self._scope:
            async with self._embedding as self._engine:
                self._opened.set()
                await trio.sleep_forever()


def _refuse_on_a_loop() -> None:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return
    raise Unsupported(
        "a blocking engine was called on an event loop, which would wait for itself; there, use"
        " `async with flowserve.Engine(...)` and await"
    )
