"""From repository folders to deployments that serve: reading, resolving, loading, opening, announcing.

Decided here: in which order that happens, how much of it at the same time, and what one failure means for the rest
(nothing but for the ensembles that need it). Reading and judging files is repository/'s, computing is backends/'.
Blocking work runs on worker threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from flowserve.backends import registry
from flowserve.backends.base import LoadedModel, ModelFiles
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Internal
from flowserve.graph.types import Graph, ModelKey
from flowserve.repository.layout import ModelFolder, find_models
from flowserve.repository.read import ReadModel, read_model
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.batchers import batcher_for, keeps_order
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.completion import complete
from flowserve.runtime.deployment import Entry
from flowserve.runtime.engine import Engine
from flowserve.runtime.instance import Host, LocalHost
from flowserve.runtime.limits import needs_of, refusals
from flowserve.runtime.placement import Placement

log = logging.getLogger("flowserve.load")

LOAD_THREADS = 4  # as tritonserver's default
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """Something happened while loading. `state` is "loading", "ready" or "failed"; `version` 0 means the whole name."""

    name: str
    version: int
    state: str
    reason: str = ""
    seconds: float = 0.0


Report = Callable[[LoadEvent], None]


async def load_repositories(engine: Engine, repositories: Sequence[Path], report: Report) -> dict[str, str]:
    """Load everything the folders hold into the engine. Returns what failed, by name, with the reason.

    Raises Problems where a repository itself cannot be read. A name that fails stays in the index as UNAVAILABLE.
    """
    return await _Load(engine, report).run(repositories)


class _Load:
    """One pass over the repositories."""

    def __init__(self, engine: Engine, report: Report) -> None:
        self._engine = engine
        self._report = report
        self._threads = trio.CapacityLimiter(LOAD_THREADS)
        self._read: dict[str, ReadModel] = {}
        self._failed: dict[str, FlowserveError] = {}

    async def run(self, repositories: Sequence[Path]) -> dict[str, str]:
        found = await self._in_thread(lambda: find_models(repositories))
        for warning in found.warnings:
            log.warning("%s", warning)
        self._failed.update(found.duplicates)
        for name in (*found.duplicates, *(folder.name for folder in found.folders)):
            self._engine.entries[name] = Entry(name, is_wanted=True)
        async with trio.open_nursery() as nursery:
            for folder in found.folders:
                nursery.start_soon(self._read_one, folder, name=f"read {folder.name}")
        self._refuse_what_is_never_let_run()
        resolution = self._resolve()
        async with trio.open_nursery() as nursery:
            for name in resolution.models:
                nursery.start_soon(self._load_one, name, resolution.graphs[name], name=f"load {name}")
        resolution = self._resolve()  # once more: an ensemble cannot serve without the models that have just failed
        for name in resolution.ensembles:
            self._announce(name, resolution.graphs[name], seconds=0.0)
        for name, error in resolution.failed.items():
            entry = self._engine.entries[name]
            entry.state, entry.reason = "UNAVAILABLE", str(error)
            self._report(LoadEvent(name, 0, "failed", str(error)))
        self._engine.loaded()
        return {name: str(error) for name, error in sorted(resolution.failed.items())}

    def _resolve(self) -> Resolution:
        configs = {name: read.config for name, read in self._read.items()}
        versions = {name: read.versions for name, read in self._read.items()}
        return resolve(configs, versions, self._failed)

    def _refuse_what_is_never_let_run(self) -> None:
        if self._engine.limiter is not None:
            configs = {name: read.config for name, read in self._read.items()}
            self._failed.update(refusals(self._engine.limiter, configs))

    async def _read_one(self, folder: ModelFolder) -> None:
        try:
            read = await self._in_thread(
                lambda: read_model(folder, registry.default_files(), complete, gpu=self._engine.options.gpu)
            )
        except FlowserveError as error:
            self._failed[folder.name] = error
            return
        for warning in read.warnings:
            log.warning("%s", warning)
        self._read[folder.name] = read

    async def _load_one(self, name: str, graphs: Mapping[int, Graph]) -> None:
        """Load every version of a plain model, or none: one that fails drops the others, as on Triton."""
        engine = self._engine
        read = self._read[name]
        started_ns = engine.clock()
        loaded: dict[int, _Loaded] = {}
        self._report(LoadEvent(name, 0, "loading"))
        try:
            for version in graphs:
                loaded[version] = await self._load_version(read, version)
        except FlowserveError as error:
            self._failed[name] = error
            for one in loaded.values():
                await self._in_thread(one.close)
            return
        for version, one in loaded.items():
            needs = [needs_of(group) for _, group in _instances(read.config) if not group.passive]
            engine.add_model(
                ModelKey(name, version),
                batcher_for(read.config),
                one.hosts,
                one.model,
                one.passive,
                needs=needs,
                keeps_order=keeps_order(read.config),
            )
        self._announce(name, graphs, seconds=(engine.clock() - started_ns) / SECOND_NS)

    async def _load_version(self, read: ReadModel, version: int) -> _Loaded:
        """Read the model and open its instances. Closes what was opened when one of them fails."""
        config = read.config
        files = ModelFiles(read.folder.repository, read.folder.path, version)
        backend = registry.find(config.backend)
        execution = self._execution(config)
        options = {"execution": execution, "runs_at_once": str(self._runs_at_once(config.backend))}
        loaded = _Loaded(await self._in_thread(lambda: backend.load(config, files, options)))
        placement = Placement() if execution == "auto" and loaded.model.may_run_inline else None
        try:
            for name, group in _instances(config):
                host = LocalHost(
                    name,
                    config.name,
                    loaded.model.instance(name, group),
                    len(config.inputs),
                    len(config.outputs),
                    placement,
                    self._engine.clock,
                    always_inline=execution == "inline",
                    may_write=not loaded.model.is_pure,
                )
                await self._in_thread(partial(host.open, self._engine.completions))
                (loaded.passive if group.passive else loaded.hosts).append(host)
        except FlowserveError:
            await self._in_thread(loaded.close)
            raise
        return loaded

    def _runs_at_once(self, backend: str) -> int:
        """How many instances of a backend this server will have: they share the cores."""
        return sum(
            len(_instances(read.config)) * len(read.versions)
            for read in self._read.values()
            if read.config.backend == backend
        )

    def _execution(self, config: ModelConfig) -> str:
        """Where the model's instances run: "inline", "thread", or "auto" (by measurement)."""
        default = self._engine.options.python_execution if config.backend == "python" else "auto"
        return config.parameters.get("execution", default)

    def _announce(self, name: str, graphs: Mapping[int, Graph], seconds: float) -> None:
        config = self._read[name].config
        for graph in graphs.values():
            self._engine.announce(config, graph)
        self._report(LoadEvent(name, 0, "ready", seconds=seconds))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Blocking work of other rooms, at most LOAD_THREADS at once. What is not a FlowserveError becomes one."""
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)
        except FlowserveError:
            raise
        except Exception as error:
            log.exception("loading failed")
            raise Internal(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _Loaded:
    """One version of a model and its open instances, until the engine owns them. `passive` ones never get work."""

    model: LoadedModel
    hosts: list[Host] = field(default_factory=list)
    passive: list[Host] = field(default_factory=list)

    def close(self) -> None:
        """Blocks."""
        for host in (*self.hosts, *self.passive):
            host.close()
        self.model.close()


def _instances(config: ModelConfig) -> list[tuple[str, InstanceGroup]]:
    """The names of all instances, and the group each belongs to."""
    return [(f"{group.name}_{number}", group) for group in config.instance_groups for number in range(group.count)]
