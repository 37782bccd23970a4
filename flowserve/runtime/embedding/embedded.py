"""The engine embedded in a program, under trio or blocking: names and arrays in, arrays out.

Decides the ownership of arrays between program and models (inputs are lent for the time of a request and never written
to; outputs own their memory), and that opening loads all models or fails with every reason. The caller decides where
models come from; engine.py decides how requests run.

Decides too that a private thread runs the event loop of a program that blocks (scripts, notebooks, threads), that the
requests which threads have made by one wake-up of that loop are begun together, and that a blocking call on an event
loop is refused.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import numpy as np
import trio

from flowserve.backends.base import NO_FILES
from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.repository.override import Override
from flowserve.runtime.engine.engine import Engine, ResponseIterator, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ALL, Control, ControlOptions, open_control
from flowserve.scheduling.flow import Flow
from flowserve.values import Array, Parameter, Request

log = logging.getLogger("flowserve.runtime")

# Returns the repositories, and an object that keeps them on disk; may block.
Found = Callable[[], tuple[Sequence[Path], object]]


class RequestOptions(TypedDict, total=False):
    """The options of a request. `outputs`: the requested names, by default all. `timeout_us`: the maximum time in a
    queue, if the model's queue policy allows a timeout per request.
    """

    outputs: tuple[str, ...] | None
    id: str
    priority: int
    timeout_us: int
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    parameters: Mapping[str, Parameter]


class AsyncEngine:
    """The result of `async with flowserve.Engine(...)`. Its methods are called on the trio loop that opened it."""

    def __init__(self, engine: Engine, control: Control) -> None:
        self._engine = engine
        self._control = control

    async def infer(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """Run one request; its outputs by name. Arrays have the batch dimension in front where the deployment batches.

        The inputs are lent: the caller must not change them before the response has arrived, and the engine never does.
        BYTES are arrays of `bytes` or `str`. The outputs belong to the caller, also after the engine is closed; they
        are read-only if another request may read the same memory.

        `version` 0: the latest. Raises NotFound, Unavailable or Invalid for a request that cannot run, ModelFailed if a
        step fails. Cancelling the caller withdraws the request.
        """
        engine = self._engine
        deployment = engine.deployments.find(name, str(version) if version else "")
        given = _lend_all(inputs)
        request = _request(given, options)
        request.stamp = engine.next_stamp()
        response = await engine.infer(deployment, request)
        return keep(response.outputs, given)

    def stream(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Begin a request with any number of responses, each like the result of `infer`:

            async with engine.stream("count", {"TO": to}) as answers:
                async for answer in answers:
                    print(answer["NUMBER"])

        Leaving the block withdraws the request. A model that sends faster than responses are taken is paused.
        """
        engine = self._engine
        deployment = engine.deployments.find(name, str(version) if version else "")
        given = _lend_all(inputs)
        request = _request(given, options)
        request.stamp = engine.next_stamp()
        return Stream(engine.stream(deployment, request), given)

    async def load(
        self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """Load a deployment of the repository, or reload it if its files changed. The previous deployment serves until
        then, and stays if the load fails. Raises Invalid.

        `config`, JSON text or its value, replaces its configuration until it is loaded without one. `files`, with a
        `config`, replace its files: contents by path in its folder ("1/model.onnx").
        """
        text = config if isinstance(config, str) else json.dumps(config)
        await self._control.load(name, Override(text, files) if text or files else None)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a name; returns when the last request that ran on it has finished. `dependents`: its steps too, except
        those loaded by name or used by another ensemble.
        """
        await self._control.unload(name, dependents=dependents)

    async def index(self) -> list[dict[str, str]]:
        """Rows of the repository index: the models and their states."""
        return await self._control.index()

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """Rows of the statistics extension: of one name, one version, or of all deployments. Raises Invalid."""
        return self._engine.deployments.statistics(name, str(version) if version else "")

    def begin_all(self, calls: deque[Call]) -> None:
        """Begin these requests of other threads, which removes them, and run one step for all. Each is ended as soon as
        it is over (`Call.end`).
        """
        self._engine.begin_events()
        try:
            while calls:
                calls.popleft().begin(self._engine)
        finally:
            self._engine.end_events()


class Call:
    """A request of another thread, to the deployment `name` in `version`. That thread makes it and waits for it;
    `begin` and `end` are called on the event loop's thread. `calls` contains it from `begin` to `end`.
    """

    def __init__(self, name: str, version: int, request: Request, calls: set[Call]) -> None:
        self._name = name
        self._version = version
        self._request = request
        self._calls = calls
        self._engine: Engine | None = None
        self._flow: Flow | None = None
        self._outputs: dict[str, Array] = {}
        self._error: Exception | None = None
        self._is_pending = threading.Lock()  # held until `end`
        self._is_pending.acquire()

    def begin(self, engine: Engine) -> None:
        """Submit it. An error of that is its result."""
        self._engine = engine
        self._calls.add(self)
        try:
            self._request.stamp = engine.next_stamp()
            deployment = engine.deployments.find(self._name, str(self._version) if self._version else "")
            flow = self._flow = engine.submit(deployment, self._request)
        except Exception as error:  # raised in the caller's thread
            self.end(error)
            return
        if flow.done:
            self._finished(flow)
        else:
            flow.waiter = self._finished

    def leave(self) -> None:
        """Its caller does not wait any more. No effect on one that is over. On the event loop's thread."""
        if self in self._calls and self._engine is not None and self._flow is not None:
            self._calls.discard(self)
            self._engine.withdraw(self._flow)

    def end(self, error: Exception | None = None) -> None:
        """It is over: wake its caller."""
        self._calls.discard(self)
        self._error = error
        self._is_pending.release()

    def wait(self) -> dict[str, Array]:
        """Wait on the caller's thread for its end. Returns the outputs, or raises its error."""
        self._is_pending.acquire()
        if self._error is not None:
            raise self._error
        return self._outputs

    def _finished(self, flow: Flow) -> None:
        assert self._engine is not None
        try:
            self._outputs = self._engine.response(flow).outputs
        except Exception as error:
            self.end(error)
        else:
            self.end()


class Stream:
    """The responses to one request: an async iterator, and a context manager that withdraws the request at its end."""

    def __init__(self, answers: ResponseIterator, given: Mapping[str, Array]) -> None:
        self._answers = answers
        self._given = given

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Withdraw the request. No effect on a finished one."""
        self._answers.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Array]:
        """Raises StopAsyncIteration after the last response; the error of a failed request after its responses."""
        return keep((await anext(self._answers)).outputs, self._given)


class Embedding:
    """Opens an engine, loads models, and closes it: the async context manager behind `flowserve.Engine`."""

    def __init__(
        self, found: Found, options: EngineOptions, load: tuple[str, ...] | None, exit_timeout_s: float
    ) -> None:
        """`load`: the names of deployments, None for all."""
        self._found = found
        self._options = options
        self._control = ControlOptions("explicit", (ALL,) if load is None else load)
        self._exit_timeout_s = exit_timeout_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncEngine:
        if not trio.lowlevel.in_trio_task():
            raise Unsupported(
                "`async with flowserve.Engine(...)` is for trio; under asyncio open it by `with`, and ask on a thread:"
                " await asyncio.to_thread(engine.infer, ...)"
            )
        repositories, kept = await trio.to_thread.run_sync(self._found)
        self._stack.callback(lambda: kept)  # the folder exists until the engine is closed
        try:
            opened = open_engine(self._options, exit_timeout_s=self._exit_timeout_s, on_close=_log_hanging)
            engine = await self._stack.enter_async_context(opened)
            control = await self._stack.enter_async_context(open_control(engine, repositories, self._control))
            # Failures are reported together, after all loads.
            failures = await control.start(lambda event: None)
            if failures:
                reasons = "\n".join(f"{name}: {reason}" for name, reason in failures.items())
                total = len(engine.deployments.entries)
                raise Invalid(f"{len(failures)} of {total} models failed to load:\n{reasons}")
        except BaseException:
            await self._stack.aclose()
            raise
        return AsyncEngine(engine, control)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's exception is not passed to the nurseries inside, which would wrap it in nested groups.
        await self._stack.aclose()


def _request(given: dict[str, Array], options: RequestOptions) -> Request:
    request = Request(given, **options)
    if options:
        _check_numbers(request)
    return request


def _check_numbers(request: Request) -> None:
    """Refuse values that a queue cannot look up or compare, which would end the engine. Raises Invalid."""
    if isinstance(request.sequence_id, np.integer):  # messages to processes hold Python's integers only
        request.sequence_id = int(request.sequence_id)
    if not isinstance(request.sequence_id, Hashable):
        raise Invalid(f"sequence_id {request.sequence_id!r} is neither a text nor a whole number")
    for name, number in (("priority", request.priority), ("timeout_us", request.timeout_us)):
        if not isinstance(number, Integral):
            raise Invalid(f"{name} {number!r} is no whole number")


def _lend_all(inputs: Mapping[str, Array]) -> dict[str, Array]:
    if not isinstance(inputs, Mapping):
        raise Invalid(f"inputs are arrays by name, {{'INPUT': array}}, and not {type(inputs).__name__}")
    return {port: lend(port, array) for port, array in inputs.items()}


def lend(name: str, array: Array) -> Array:
    """A caller's array in the form for models: read-only, in C order, BYTES as `bytes`. Copied only if necessary.
    Raises Invalid.
    """
    if not isinstance(array, np.ndarray):
        raise Invalid(f"input '{name}' is a {type(array).__name__}; give a numpy array")
    if array.dtype.kind in "OUS":
        return _as_bytes(name, array)
    # A view: the flags of the caller's array must not change.
    view = array.view(np.ndarray) if array.flags.c_contiguous else np.ascontiguousarray(array)
    view.setflags(write=False)
    return view


def keep(outputs: dict[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
    """Copy the outputs that share memory with the inputs, which the caller may change from now on."""
    for name, array in outputs.items():
        # A view of an input is read-only like the input.
        if not array.flags.writeable and any(np.may_share_memory(array, one) for one in given.values()):
            outputs[name] = array.copy()
    return outputs


def _as_bytes(name: str, array: Array) -> Array:
    elements = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
    strange = next((one for one in elements if not isinstance(one, bytes)), None)
    if strange is not None:
        raise Invalid(f"input '{name}' has a {type(strange).__name__} in it; BYTES are arrays of bytes or str")
    made = np.empty(array.shape, np.object_)
    made.ravel()[:] = elements
    return made


def _log_hanging(hung: Sequence[str]) -> None:
    if hung:
        log.warning("not closed within the exit timeout: %s", ", ".join(hung))


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
        self._new_calls: deque[Call] = deque()  # made by any threads
        self._calls: set[Call] = set()  # begun; on the engine's thread
        self._is_over = False
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
        _refuse_on_a_loop()
        given = _lend_all(inputs)
        call = Call(name, version, _request(given, options), self._calls)
        self._new_calls.append(call)
        try:
            self._token.run_sync_soon(self._begin_calls, idempotent=True)
        except trio.RunFinishedError:
            raise Unavailable("the engine is closed") from None
        try:
            return keep(call.wait(), given)
        except KeyboardInterrupt:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(call.leave)
            raise

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

    def _begin_calls(self) -> None:
        if self._is_over:
            while self._new_calls:
                self._new_calls.popleft().end(Unavailable("the engine is closed"))
        else:
            self._engine.begin_all(self._new_calls)

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
        try:
            with self._scope:
                async with self._embedding as self._engine:
                    self._opened.set()
                    await trio.sleep_forever()
        finally:
            self._is_over = True
            for call in [*self._calls]:  # of instances that did not end in time
                call.end(Unavailable("the engine is closed"))


def _refuse_on_a_loop() -> None:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return
    raise Unsupported(
        "a blocking engine was called on an event loop, which would wait for itself; there, use"
        " `async with flowserve.Engine(...)` and await"
    )
