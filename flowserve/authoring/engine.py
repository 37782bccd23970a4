"""`flowserve.Engine`: an engine inside the user's program, without a server.

Decides what can be opened (repositories, and graphs written in Python), and the ways to open it: from blocking code,
under trio, and under asyncio. Does not know how requests run (`runtime/embedding`). Callers: user programs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from flowserve.authoring.graph import Graph, write_private_repository
from flowserve.backends.base import NO_FILES
from flowserve.cli.target import PythonGraph, is_graph
from flowserve.config.types import OFF
from flowserve.errors import Invalid, Unavailable
from flowserve.memory.devices import devices
from flowserve.runtime.embedding.embedded import (
    ArrayLike,
    AsyncEngine,
    Embedding,
    RequestOptions,
    is_on_trio,
    new_request,
)
from flowserve.runtime.embedding.engine_thread import Blocking, OnAsyncio, open_on_asyncio
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.factory import PYTHON_EXECUTION
from flowserve.values import Array

EngineSource = PythonGraph | str | Path


class Engine:
    """Models and graphs in this process: no server, no socket.

        with Engine(graph) as engine:
            answer = engine.infer("sound", {"TEXT": [["a banana"]]})["WORD"]

        async with Engine("models/") as engine:  # under trio, and under asyncio
            answer = (await engine.infer("sound", {"TEXT": texts}))["WORD"]

    Each source is a repository's folder or a `flowserve.Graph`. All their deployments are loaded, or those that `load`
    names with their models. Opening raises Problems or Invalid if a deployment cannot be loaded, and NotFound for a
    missing folder. `python_execution` is the place where a `model.py` runs; `gpu` False keeps everything on the CPU.
    `strict_outputs`: an output of a `model.py` that differs from its configuration, or is missing, is an error.
    Closing waits up to `exit_timeout_s` seconds for running requests. An engine that is closed can be opened again;
    opening one that is open raises Invalid.

    Its methods block. They may be called from any threads, but not on a loop of trio, where they raise Unsupported. An
    engine that is not open raises Unavailable. `async with` gives an engine with the same methods to be awaited.
    """

    def __init__(
        self,
        *sources: EngineSource,
        load: Sequence[str] | None = None,
        python_execution: Literal["process", "thread", "inline"] | None = None,
        gpu: bool = True,
        strict_outputs: bool = False,
        exit_timeout_s: float = 30.0,
    ) -> None:
        if not sources:
            raise Invalid("an engine of nothing: give it a repository's folder, or a graph")
        for source in sources:
            if not isinstance(source, str | Path) and not is_graph(source):
                raise Invalid(f"an engine is of repositories' folders and of graphs, not of {source!r}")
        self._sources = sources
        gpus = devices().gpus if gpu else OFF
        execution = python_execution or PYTHON_EXECUTION
        options = EngineOptions(python_execution=execution, gpus=gpus, strict_outputs=strict_outputs)
        chosen = None if load is None else tuple(load)
        self._embedding = Embedding(self._find, options, chosen, exit_timeout_s)
        self._blocking: Blocking | None = None  # once it is open for blocking code
        self._on_asyncio: OnAsyncio | None = None

    # ------------------------------------------------------------------ open for blocking code

    def __enter__(self) -> Self:
        self._blocking = Blocking(self._embedding)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def infer(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> dict[str, Array]:
        """Run one request on the deployment `name`; returns its outputs by name.

            engine.infer("digit", {"IMAGE": np.zeros((1, 28, 28), np.float32)})["LABEL"]  # shape (1, 1)

        `inputs`: an array for each input, in its data type and with the shape of its configuration; where the
        deployment batches, the batch dimension comes first, for outputs too. Nested lists become arrays of the input's
        data type. BYTES are arrays of `bytes` or `str`, and `bytes` in outputs. Inputs are lent: do not change them
        before the response has arrived; the engine never does. Outputs are the caller's, also after the engine is
        closed; they are read-only if another request may read the same memory.

        `version` 0: the latest. `options`: `outputs` (the names that are wanted), `id`, `priority`, `timeout_us` (in a
        queue, where the model allows it), `sequence_id` with `sequence_start` and `sequence_end`, `parameters`.

        Raises NotFound for an unknown name, Invalid for a request that does not fit the deployment, Unavailable where
        it cannot run now, ModelFailed if a step fails. Ctrl-C withdraws the request.
        """
        return self._open().infer(name, version, new_request(inputs, options))

    def stream(
        self, name: str, inputs: Mapping[str, ArrayLike], *, version: int = 0, **options: Unpack[RequestOptions]
    ) -> Generator[dict[str, Array], None, None]:
        """Run one request with any number of responses, each like the result of `infer`; an iterator over them.

            for answer in engine.stream("count", {"TO": [3]}):
                print(answer["NUMBER"])

        A model that sends faster than responses are taken is paused. Closing the iterator withdraws the request; after
        a `for` that ends early this happens when the iterator is freed.
        """
        caller = self._open()
        stream = caller.engine.stream(name, inputs, version=version, **options)

        async def next_response() -> dict[str, Array] | None:
            return await anext(stream, None)

        try:
            while (answer := caller.run(next_response)) is not None:
                yield answer
        finally:  # not awaited: an iterator may be freed on the loop's thread, or after the loop has ended
            caller.notify(stream.leave)

    def load(self, name: str, *, config: Mapping[str, Any] | str = "", files: Mapping[str, bytes] = NO_FILES) -> None:
        """Load a deployment of the repository, or reload it if its files changed. The previous deployment serves until
        then, and stays if the load fails. Raises Invalid.

        `config`, JSON text or its value, replaces its configuration until it is loaded without one. `files`, with a
        `config`, replace its files: contents by path in its folder ("1/model.onnx").
        """
        caller = self._open()
        caller.run(partial(caller.engine.load, name, config=config, files=files))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a name; returns when the last request that ran on it has finished. `dependents`: its steps too, except
        those loaded by name or used by another ensemble.
        """
        caller = self._open()
        caller.run(partial(caller.engine.unload, name, dependents=dependents))

    def index(self) -> list[dict[str, str]]:
        """Rows of the repository index: the models and their states."""
        caller = self._open()
        return caller.run(caller.engine.index)

    def statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """Rows of the statistics extension: of one name, one version, or of all deployments. Raises Invalid."""
        caller = self._open()
        return caller.read(partial(caller.engine.statistics, name, version))

    def graph_statistics(self, name: str = "", version: int = 0) -> list[dict[str, Any]]:
        """What flowserve counts besides: failures by reason, and batches, rows and bytes of nodes and edges
        (docs/metrics.md). Of one name, one version, or of all deployments. Raises Invalid.
        """
        caller = self._open()
        return caller.read(partial(caller.engine.graph_statistics, name, version))

    def close(self) -> None:
        """Close every instance; requests in flight fail. May be called again, and `with` calls it."""
        if self._blocking is not None:
            self._blocking.close()

    def _open(self) -> Blocking:
        if self._blocking is None:
            raise Unavailable("the engine is not open: use `with flowserve.Engine(...) as engine:`")
        return self._blocking

    # ------------------------------------------------------------------ open under trio, and under asyncio

    async def __aenter__(self) -> AsyncEngine:
        if is_on_trio():
            return await self._embedding.__aenter__()
        self._on_asyncio = await open_on_asyncio(self._embedding)
        return self._on_asyncio.engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        on_asyncio, self._on_asyncio = self._on_asyncio, None  # it may be opened again, under trio too
        if on_asyncio is None:
            await self._embedding.__aexit__(kind, error, trace)
        else:
            await on_asyncio.close()

    def _find(self) -> tuple[list[Path], object]:
        """The repositories, and the owners of the private folders among them, which exist as long as these. Blocks."""
        folders = [Path(source) for source in self._sources if isinstance(source, str | Path)]
        graphs = [source for source in self._sources if isinstance(source, Graph)]
        private = [write_private_repository(graphs)] if graphs else []
        private += [one.write_private() for one in self._sources if not isinstance(one, str | Path | Graph)]
        return [*folders, *(one.path for one in private)], private
