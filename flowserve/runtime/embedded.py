"""The engine inside somebody's own program, under trio: names and arrays in, arrays out.

Decided here: what belongs to whom between the program and the models (arrays are lent for the time of a request and
never written to; results own their memory), and that everything is loaded, or opening fails with every reason. Where
models come from is the caller's; how requests run is engine.py's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack

import numpy as np
import trio

from flowserve.errors import FlowserveError, Invalid, Unsupported
from flowserve.repository.override import Override
from flowserve.runtime.answers import Answers
from flowserve.runtime.control import ALL, Control, ControlOptions, open_control
from flowserve.runtime.engine import Engine
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.opening import open_engine
from flowserve.runtime.registry import LoadEvent
from flowserve.values import Array, Parameter, Request

log = logging.getLogger("flowserve.runtime")

NO_FILES: Final[Mapping[str, bytes]] = {}
Found = Callable[[], tuple[Sequence[Path], object]]  # the repositories, and what keeps them there; may block


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its inputs. `outputs`: the names it wants, all of them where it says nothing.
    `timeout_us`: how long it may wait in a queue, where the model's queue policy allows it to say so.
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
    """What `async with flowserve.Engine(...)` gives. Its methods are called from the trio loop that opened it."""

    def __init__(self, engine: Engine, control: Control) -> None:
        self._engine = engine
        self._control = control

    async def infer(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """Run one request; its outputs by name. Arrays have the batch dimension in front where the deployment batches.

        The inputs are lent: they must not be changed before the answer is here, and nothing changes them. BYTES are
        arrays of `bytes` or `str`. The outputs are the caller's, for as long as it likes, also after the engine is
        closed; they are read-only where somebody else may read the same memory.

        `version` 0: the latest. Raises NotFound, Unavailable or Invalid for what cannot be asked, ModelFailed where a
        step fails. A caller who is cancelled is withdrawn.
        """
        engine = self._engine
        deployment = engine.find(name, str(version) if version else "")
        given = _lend_all(inputs)
        response = await engine.infer(deployment, _request(engine, given, options))
        return keep(response.outputs, given)

    def stream(
        self, name: str, inputs: Mapping[str, Array], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Begin one request whose answers come one by one, as many as there are, each like that of `infer`:

            async with engine.stream("count", {"TO": to}) as answers:
                async for answer in answers:
                    print(answer["NUMBER"])

        Leaving the block withdraws what is not answered yet. A model that answers faster than answers are taken waits.
        """
        engine = self._engine
        deployment = engine.find(name, str(version) if version else "")
        given = _lend_all(inputs)
        return Stream(engine.stream(deployment, _request(engine, given, options)), given)

    async def load(
        self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES
    ) -> None:
        """Load a deployment of the repository, or load it again if its files changed. What served before serves on
        until then, and where this fails. Raises Invalid.

        `config`, as JSON or what JSON holds, takes the place of its configuration until it is loaded without one.
        `files`, with a `config`, take the place of its files: contents by path in its folder ("1/model.onnx").
        """
        text = config if isinstance(config, str) else json.dumps(config)
        await self._control.load(name, Override(text, files) if text or files else None)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Serve a name no longer; returns when the last request that ran on it is over. `dependents`: nor what it is
        made of, but for what was loaded by name or is part of something else.
        """
        await self._control.unload(name, dependents=dependents)

    async def index(self) -> list[dict[str, str]]:
        """What there is, and the state of each: rows of the repository index."""
        return await self._control.index()

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """Rows of the statistics extension: of one name, one version, or of all that serve. Raises Invalid."""
        return self._engine.statistics(name, str(version) if version else "")


class Stream:
    """The answers to one request: an async iterator, and a context manager that leaves when its block does."""

    def __init__(self, answers: Answers, given: Mapping[str, Array]) -> None:
        self._answers = answers
        self._given = given

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody wants any more answers. Harmless at the end."""
        self._answers.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Array]:
        """Raises StopAsyncIteration after the last, and what the request failed with after those before."""
        return keep((await anext(self._answers)).outputs, self._given)


class Embedding:
    """Opens an engine, loads into it, and closes it: the async context manager behind `flowserve.Engine`."""

    def __init__(
        self, found: Found, options: EngineOptions, load: tuple[str, ...] | None, exit_timeout_s: float
    ) -> None:
        """`load`: which deployments, None for all there are."""
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
        self._stack.callback(_hold, kept)
        try:
            opened = open_engine(self._options, exit_timeout_s=self._exit_timeout_s, on_close=_say_who_hangs)
            engine = await self._stack.enter_async_context(opened)
            control = await self._stack.enter_async_context(open_control(engine, repositories, self._control))
            failures = await control.start(_tell_nobody)
            if failures:
                raise _why_not_all(failures, len(engine.entries))
        except BaseException:
            await self._stack.aclose()
            raise
        return AsyncEngine(engine, control)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's own exception is kept from the nurseries inside: they would wrap it in groups, one in the other.
        await self._stack.aclose()


def _request(engine: Engine, given: dict[str, Array], options: RequestOptions) -> Request:
    request = Request(given, stamp=engine.next_stamp(), **options)
    if options:
        _check_numbers(request)
    return request


def _check_numbers(request: Request) -> None:
    """What no queue can look up or compare is refused here: there it would end the engine. Raises Invalid."""
    if isinstance(request.sequence_id, np.integer):  # a model in a process is told Python's numbers
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
    """A caller's array as models may see it: read-only, in C order, BYTES as `bytes`. Copied only where it has to be.
    Raises Invalid.
    """
    if not isinstance(array, np.ndarray):
        raise Invalid(f"input '{name}' is a {type(array).__name__}; give a numpy array")
    if array.dtype.kind in "OUS":
        return _as_bytes(name, array)
    # Not the caller's own object: its flags are the caller's business.
    view = array.view(np.ndarray) if array.flags.c_contiguous else np.ascontiguousarray(array)
    view.setflags(write=False)
    return view


def keep(outputs: dict[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs that share no memory with the inputs, which the caller may change from now on."""
    for name, array in outputs.items():
        # What lies in an input is as read-only as the input.
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


def _why_not_all(failures: Mapping[str, str], total: int) -> FlowserveError:
    reasons = "\n".join(f"{name}: {reason}" for name, reason in failures.items())
    return Invalid(f"{len(failures)} of {total} models failed to load:\n{reasons}")


def _say_who_hangs(hung: Sequence[str]) -> None:
    if hung:
        log.warning("not closed within the exit timeout: %s", ", ".join(hung))


def _tell_nobody(event: LoadEvent) -> None:
    """Whoever opens an engine hears of failures together, when all was tried."""


def _hold(kept: object) -> None:
    """Called when the engine is closed: until then the folder it was loaded from exists."""
