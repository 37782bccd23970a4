"""`flowserve.Engine`: an engine inside the user's program, without a server.

Decides what can be opened (repositories, and graphs written in Python), and the two ways to open it: under trio, and
from blocking code. Does not know how requests run (`runtime/embedding`). Callers: user programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Never

from flowserve.authoring.graph import Graph, write_private_repository
from flowserve.cli.target import PythonGraph, is_graph
from flowserve.config.types import OFF
from flowserve.errors import Invalid
from flowserve.memory.devices import devices
from flowserve.runtime.embedding.embedded import AsyncEngine, BlockingEngine, Embedding
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.workers.factory import PYTHON_EXECUTION

EngineSource = PythonGraph | str | Path


class Engine:
    """Models and graphs in this process: no server, no socket.

        with Engine(graph) as engine:
            answer = engine.infer("sound", {"TEXT": np.array([["a banana"]])})["WORD"]

        async with Engine("models/") as engine:  # under trio
            answer = (await engine.infer("sound", {"TEXT": texts}))["WORD"]

    Each source is a repository's folder or a `flowserve.Graph`. All their deployments are loaded, or those that `load`
    names with their models. Opening raises Problems or Invalid if a deployment cannot be loaded, and NotFound for a
    missing folder. `python_execution` is the place where a `model.py` runs; `gpu` False keeps everything on the CPU.
    Closing waits up to `exit_timeout_s` seconds for running requests.
    """

    def __init__(
        self,
        *sources: EngineSource,
        load: Sequence[str] | None = None,
        python_execution: Literal["process", "thread", "inline"] | None = None,
        gpu: bool = True,
        exit_timeout_s: float = 30.0,
    ) -> None:
        if not sources:
            raise Invalid("an engine of nothing: give it a repository's folder, or a graph")
        for source in sources:
            if not isinstance(source, str | Path) and not is_graph(source):
                raise Invalid(f"an engine is of repositories' folders and of graphs, not of {source!r}")
        self._sources = sources
        gpus = devices().gpus if gpu else OFF
        options = EngineOptions(python_execution=python_execution or PYTHON_EXECUTION, gpus=gpus)
        chosen = None if load is None else tuple(load)
        self._embedding = Embedding(self._find, options, chosen, exit_timeout_s)

    if not TYPE_CHECKING:  # type checkers find missing attributes themselves

        def __getattr__(self, name: str) -> Never:
            """Explain that methods exist only on the open engine."""
            text = f"'Engine' object has no attribute '{name}'"
            if not name.startswith("_") and hasattr(BlockingEngine, name):
                text += f"; it is not open: `with flowserve.Engine(...) as engine:` gives one that has {name}()"
            raise AttributeError(text)

    async def __aenter__(self) -> AsyncEngine:
        return await self._embedding.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._embedding.__aexit__(kind, error, trace)

    def __enter__(self) -> BlockingEngine:
        self._blocking = BlockingEngine(self._embedding)
        return self._blocking

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocking.close()

    def _find(self) -> tuple[list[Path], object]:
        """The repositories, and the owners of the private folders among them, which exist as long as these. Blocks."""
        folders = [Path(source) for source in self._sources if isinstance(source, str | Path)]
        graphs = [source for source in self._sources if isinstance(source, Graph)]
        private = [write_private_repository(graphs)] if graphs else []
        private += [one.write_private() for one in self._sources if not isinstance(one, str | Path | Graph)]
        return [*folders, *(one.path for one in private)], private
