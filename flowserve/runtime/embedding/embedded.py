"""The engine embedded in a program: names and arrays in, arrays out.

Decides the ownership of arrays between program and models (inputs are lent for the duration of a request and never
written to; outputs own their memory), how lists become arrays, and that opening loads all models or fails with every
reason. The caller decides where models come from; engine.py decides how requests run. Does not know how code that is
not on the engine's event loop reaches it (`Caller`, engine_thread.py). Callers: `authoring`, `cli`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack

import numpy as np
import trio

from flowserve.backends.base import NO_FILES
from flowserve.errors import Invalid
from flowserve.memory.raw import EncodedBytes
from flowserve.repository.override import Override
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine, ResponseIterator, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ALL, Control, ControlOptions, open_control
from flowserve.runtime.threads import Pause, in_steps
from flowserve.values import Array, DType, Parameter, Request, TensorSpec

log = logging.getLogger("flowserve.runtime")
T = TypeVar("T")

# An array, or lists of numbers, texts or bytes, nested as its dimensions.
ArrayLike = Array | Sequence[Any]
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


class Caller(Protocol):
    """How the code that calls an `AsyncEngine` reaches the engine's event loop."""

    async def infer(self, name: str, version: int, request: Request) -> dict[str, Array]: ...

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await a coroutine function on the engine's loop. Cancelling the caller cancels it."""

    def read(self, function: Callable[[], T]) -> T:
        """The result of a function that is called on the engine's loop and does not wait."""

    def notify(self, function: Callable[[], object]) -> None:
        """Call a function on the engine's loop, soon; not if the engine is closed."""


class OnTrio:
    """Callers are tasks of the trio loop on which the engine runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def infer(self, name: str, version: int, request: Request) -> dict[str, Array]:
        deployment = prepare(self._engine, name, version, request)
        response = await self._engine.infer(deployment, request)
        return keep(await _decoded(response.outputs), request.inputs)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        return await work()

    def read(self, function: Callable[[], T]) -> T:
        return function()

    def notify(self, function: Callable[[], object]) -> None:
        function()


class AsyncEngine:
    """The result of `async with flowserve.Engine(...)`. Its methods are called on the trio loop that opened it, or on
    any loop of asyncio if it was opened on one. Cancelling a caller withdraws its request.
    """

    def __init__(self, engine: Engine, control: Control, caller: Caller) -> None:
        self._engine = engine
        self._control = control
        self._caller = caller

    async def infer(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """As `flowserve.Engine.infer`, awaited."""
        return await self._caller.infer(name, version, new_request(inputs, options))

    def stream(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Stream:
        """A request with any number of responses, each like the result of `infer`. It begins with the block:

            async with engine.stream("count", {"TO": to}) as answers:
                async for answer in answers:
                    print(answer["NUMBER"])

        Leaving the block withdraws the request. A model that sends faster than responses are taken is paused.
        """
        return Stream(self._engine, self._caller, name, version, new_request(inputs, options))

    async def load(
        self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """As `flowserve.Engine.load`, awaited."""
        text = config if isinstance(config, str) else json.dumps(config)
        override = Override(text, files) if text or files else None
        await self._caller.run(partial(self._control.load, name, override))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """As `flowserve.Engine.unload`, awaited."""
        await self._caller.run(partial(self._control.unload, name, dependents=dependents))

    async def index(self) -> list[dict[str, str]]:
        """As `flowserve.Engine.index`, awaited."""
        return await self._caller.run(self._control.index)

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.statistics`. Under asyncio it waits for the engine's current step."""
        chosen = str(version) if version else ""
        return self._caller.read(partial(self._engine.deployments.statistics, name, chosen))

    def graph_statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """As `flowserve.Engine.graph_statistics`. Waits as `statistics`."""
        chosen = str(version) if version else ""
        return self._caller.read(partial(self._engine.deployments.graph_statistics, name, chosen))


def engine_of(embedded: AsyncEngine) -> Engine:
    """The engine itself. A function, so that editors do not offer it as an attribute of `AsyncEngine`."""
    return embedded._engine


def reached_by(caller: Caller, embedded: AsyncEngine) -> AsyncEngine:
    """The same engine for other callers."""
    return AsyncEngine(embedded._engine, embedded._control, caller)


class Stream:
    """The responses to one request: an async iterator, and a context manager that withdraws the request at its end."""

    def __init__(self, engine: Engine, caller: Caller, name: str, version: int, request: Request) -> None:
        self._engine = engine
        self._caller = caller
        self._name = name
        self._version = version
        self._request = request
        self._answers: ResponseIterator | None = None  # once the request has begun
        self._has_left = False

    async def __aenter__(self) -> Self:
        try:
            await self._caller.run(self._begin)
        except BaseException:
            self.leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Withdraw the request. No effect on a finished one."""
        self._has_left = True
        self._caller.notify(self._withdraw)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Array]:
        """Raises StopAsyncIteration after the last response; the error of a failed request after its responses."""
        return await self._caller.run(self._next)

    async def _begin(self) -> ResponseIterator:
        deployment = prepare(self._engine, self._name, self._version, self._request)
        self._answers = self._engine.stream(deployment, self._request)
        if self._has_left:  # a caller on another thread was cancelled before the request began
            self._answers.leave()
        return self._answers

    async def _next(self) -> dict[str, Array]:
        answers = self._answers or await self._begin()  # iterated without a block
        return keep(await _decoded((await anext(answers)).outputs), self._request.inputs)

    def _withdraw(self) -> None:
        if self._answers is not None:
            self._answers.leave()


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
        self._is_open = False

    async def __aenter__(self) -> AsyncEngine:
        if self._is_open:
            raise Invalid("the engine is open already: make a second flowserve.Engine, or use the one that is open")
        self._is_open = True
        self._stack.callback(self._closed)
        try:
            repositories, kept = await trio.to_thread.run_sync(self._found)
            self._stack.callback(lambda: kept)  # the folder exists until the engine is closed
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
        return AsyncEngine(engine, control, OnTrio(engine))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's exception is not passed to the nurseries inside, which would wrap it in nested groups.
        await self._stack.aclose()

    def _closed(self) -> None:
        self._is_open = False


def is_on_trio() -> bool:
    """Whether the caller is a task of trio."""
    return trio.lowlevel.in_trio_task()


def new_request(inputs: Mapping[str, ArrayLike], options: RequestOptions) -> Request:
    """A request of these inputs. On any thread; `prepare` completes it. Raises Invalid."""
    if not isinstance(inputs, Mapping):
        raise Invalid(f"inputs are arrays by name, {{'INPUT': array}}, and not {type(inputs).__name__}")
    given = {}
    for name, array in inputs.items():
        given[name] = lend(name, array) if isinstance(array, np.ndarray) else array
    request = Request(given, **options)  # type: ignore[arg-type]  # `prepare` converts the lists to arrays
    if options:
        _check_numbers(request)
    return request


def prepare(engine: Engine, name: str, version: int, request: Request) -> Deployment:
    """The deployment of a new request, whose lists become arrays of the deployment's data types. On the event loop.
    Raises NotFound, Unavailable and Invalid.
    """
    deployment = engine.deployments.find(name, str(version) if version else "")
    request.stamp = engine.next_stamp()
    given = request.inputs
    for key, value in given.items():
        if not isinstance(value, np.ndarray):
            given[key] = to_array(key, value, deployment.inputs.get(key))
    return deployment


def _check_numbers(request: Request) -> None:
    """Refuse values that a queue cannot look up or compare, which would end the engine. Raises Invalid."""
    if isinstance(request.sequence_id, np.integer):  # messages to processes hold Python's integers only
        request.sequence_id = int(request.sequence_id)
    if not isinstance(request.sequence_id, Hashable):
        raise Invalid(f"sequence_id {request.sequence_id!r} is neither a text nor a whole number")
    for name, number in (("priority", request.priority), ("timeout_us", request.timeout_us)):
        if not isinstance(number, Integral):
            raise Invalid(f"{name} {number!r} is no whole number")


def lend(name: str, array: Array) -> Array:
    """A caller's array in the form for models: read-only, in C order, BYTES as `bytes`. Copied only if necessary.
    Raises Invalid.
    """
    if array.dtype.kind in "OUS":
        return _as_bytes(name, array)
    # A view: the flags of the caller's array must not change.
    view = array.view(np.ndarray) if array.flags.c_contiguous else np.ascontiguousarray(array)
    view.setflags(write=False)
    return view


def to_array(name: str, value: object, spec: TensorSpec | None) -> Array:
    """The array of nested lists, in the data type of the input. Raises Invalid, also if the conversion would change a
    value.
    """
    if not isinstance(value, list | tuple):
        raise Invalid(f"input '{name}' is a {type(value).__name__}; give a numpy array, or lists")
    dtype = None if spec is None else spec.dtype
    try:
        if dtype is DType.BYTES:
            return lend(name, np.array(value, np.object_))
        found = np.array(value)
        if dtype is None or found.dtype == dtype.numpy:
            return lend(name, found)
        is_whole = dtype.numpy.kind in "iu"
        if found.dtype.kind not in ("iu" if is_whole else "iuf") or dtype is DType.BOOL:
            if found.size:
                raise Invalid(f"input '{name}' is {dtype}, and the list has {found.dtype} in it")
            return np.empty(found.shape, dtype.numpy)
        return lend(name, np.array(value, dtype.numpy))
    except (ValueError, TypeError, OverflowError) as error:
        raise Invalid(f"input '{name}': the lists are no array of {dtype or 'numbers'}: {error}") from None


async def _decoded(outputs: dict[str, Array]) -> dict[str, Array]:
    """The outputs as arrays: large BYTES from a process are decoded on a thread."""
    for name, array in outputs.items():
        if isinstance(array, EncodedBytes):
            outputs[name] = await in_steps(partial(_copy, array))
    return outputs


def _copy(array: EncodedBytes, pause: Pause) -> Array:
    array.checked(pause)
    return array.copy()


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
