"""From a model's folder to open instances: reading and loading one model.

Decided here: what of it blocks and is done on worker threads (load_threads.py), and that a model comes up with all its
versions or not at all; and what it has to know of the models that are loaded beside it, which share the cores and the
rate limiter's resources. Which models, and when they take over, is operations.py's and registry.py's. Reading and
judging files is repository/'s, computing is backends/'.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from flowserve.backends import registry
from flowserve.backends.base import LoadedModel, ModelFiles
from flowserve.config.ignored import unused_cache, unused_environment
from flowserve.config.instances import instances_of
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Internal
from flowserve.graph.types import ModelKey
from flowserve.repository.layout import ModelFolder
from flowserve.repository.read import ReadModel, read_model, read_steps
from flowserve.runtime.batchers import keeps_order
from flowserve.runtime.completion import Completer
from flowserve.runtime.engine import Engine
from flowserve.runtime.environments import Environment
from flowserve.runtime.homes import queue_for
from flowserve.runtime.hosts import PROCESS, execution_of, execution_timeout_ns, host_maker, sequence_host_maker
from flowserve.runtime.instance import Host
from flowserve.runtime.iterative_ports import IterativePorts
from flowserve.runtime.limits import asks_for_resources, needs_of, refuse_what_never_runs
from flowserve.runtime.load_threads import PATIENCE_S, LoadThreads
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.runtime.warmup import read_samples, warm_up

log = logging.getLogger("flowserve.load")

T = TypeVar("T")


class Loader:
    """Reads and loads models for one engine, a few at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opening = LoadThreads()
        self._closing = LoadThreads()
        self._coming: dict[str, set[Host]] = {}  # instances that are being opened, by their model's name
        options = engine.options
        self._entered: dict[str, Environment] = {}  # what a model was asked in, until it is loaded there
        keep = self._entered.__setitem__
        self._complete = Completer(options.python_execution, engine.processes, options.backend_settings, keep)

    async def read(self, folder: ModelFolder, config_json: str = "", served: ModelConfig | None = None) -> ReadModel:
        """What a model's folder says, or `config_json` in its place. `served`: what the name is, or was last. Raises
        FlowserveError.
        """
        self._entered.pop(folder.name, None)
        try:
            read = await self._in_thread(
                lambda: read_model(
                    folder,
                    registry.default_files(),
                    self._complete,
                    gpus=self._engine.options.gpus,
                    config_json=config_json,
                    config_name=self._engine.options.model_config_name,
                    served=served,
                )
            )
        except FlowserveError:
            self._entered.pop(folder.name, None)
            raise
        operators = self._engine.options.python_execution if "execution" not in read.config.parameters else PROCESS
        forgotten = unused_cache(read.config) if self._engine.options.cache_bytes is None else ()
        for warning in (*read.warnings, *unused_environment(read.config, operators), *forgotten):
            log.warning("%s", warning)
        return read

    async def steps(self, folder: ModelFolder, config_json: str = "") -> frozenset[str]:
        """What a model's folder says that it is made of. Nothing of a model is loaded or run for that."""
        name = self._engine.options.model_config_name
        return await trio.to_thread.run_sync(
            lambda: read_steps(folder, registry.default_files(), config_json=config_json, config_name=name),
            abandon_on_cancel=True,
        )

    def company(self, models: Iterable[ReadModel]) -> Company:
        """What these, all models that this server will have, are to each other."""
        runs_at_once: Counter[str] = Counter()
        claiming = []
        for read in models:
            runs_at_once[read.config.backend] += len(instances_of(read.config)) * len(read.versions)
            if self._engine.limiter is not None and asks_for_resources(read.config):
                claiming.append(read.config)
        return Company(runs_at_once, claiming)

    async def load(self, read: ReadModel, company: Company) -> dict[int, Loaded]:
        """Open every version of a plain model, or none: one that fails drops the others, as on Triton."""
        loaded: dict[int, Loaded] = {}
        runs_at_once = company.runs_at_once[read.config.backend]
        try:
            if self._engine.limiter is not None:
                refuse_what_never_runs(self._engine.limiter, read.config, company.claiming)
            environment = await self._enter(read)
            for version in read.versions:
                loaded[version] = await self._load_version(read, version, runs_at_once, environment)
        except FlowserveError:
            await self.drop(loaded)
            raise
        finally:
            self._entered.pop(read.folder.name, None)
        return loaded

    async def drop(self, loaded: Mapping[int, Loaded]) -> None:
        """Close what was loaded and is not wanted after all."""
        for one in loaded.values():
            await self._in_thread(one.close, self._closing)

    def give(self, read: ReadModel, loaded: Mapping[int, Loaded], files: object) -> None:
        """From here on the engine owns what was loaded; graphs that are announced from now on run on it."""
        for version, one in loaded.items():
            needs = [needs_of(group) for _, group in instances_of(read.config) if not group.passive]
            self._engine.add_model(
                ModelKey(read.config.name, version),
                queue_for(read.config, one.hosts, is_limited=self._engine.limiter is not None),
                one.hosts,
                one.model,
                one.passive,
                (files, one.environment),
                needs,
                keeps_order=keeps_order(read.config),
                execution_timeout_ns=one.execution_timeout_ns,
                warm_up=one.warm_up,
            )

    async def _enter(self, read: ReadModel) -> Environment | None:
        """The environment that the model is to run in; None for the server's own."""
        config, processes = read.config, self._engine.processes
        if processes is None or execution_of(config, self._engine.options.python_execution) != PROCESS:
            return None
        return await self._in_thread(lambda: processes.environments.enter(config, read.folder.path))

    async def _load_version(
        self, read: ReadModel, version: int, runs_at_once: int, environment: Environment | None
    ) -> Loaded:
        """Read the model and open its instances. Closes what was opened when one of them fails."""
        config = read.config
        files = ModelFiles(read.folder.repository, read.folder.path, version)
        backend = registry.find(config.backend)
        execution = execution_of(config, self._engine.options.python_execution)
        settings = self._engine.options.backend_settings.get(config.backend, {})
        options = {**settings, "execution": execution, "runs_at_once": str(runs_at_once)}
        ports = None
        inner = config
        if config.sequence is not None:
            ports = await self._in_thread(lambda: self._ports(config, read.folder.path))
            inner = ports.inner
        loaded = Loaded(await self._in_thread(lambda: backend.load(inner, files, options)), environment=environment)
        try:
            engine = self._engine
            processes = engine.processes
            if processes is not None and environment is not None:
                processes = processes.within(environment)
            if ports is None:
                make_host = host_maker(config, loaded.model, execution, processes, engine.streaming, engine.clock)
            else:
                make_host = sequence_host_maker(
                    ports, loaded.model, execution, processes, engine.streaming, engine.clock
                )
            samples = await self._in_thread(lambda: read_samples(config, read.folder.path))
            for name, group in instances_of(config):
                host = make_host(name, group)
                await self._open(config.name, host)
                (loaded.passive if group.passive else loaded.hosts).append(host)
            timeout_ns = loaded.execution_timeout_ns = execution_timeout_ns(config, loaded.hosts)
            warm = partial(
                warm_up, engine, config=config, version=version, samples=samples, execution_timeout_ns=timeout_ns
            )
            for host in loaded.hosts:
                await warm(host)
            loaded.warm_up = warm if samples else None
        except FlowserveError:
            await self._in_thread(loaded.close, self._closing)
            raise
        return loaded

    async def _open(self, name: str, host: Host) -> None:
        coming = self._coming.setdefault(name, set())
        coming.add(host)
        try:
            await self._in_thread(partial(host.open, self._engine.completions))
        finally:
            coming.discard(host)

    def give_up(self, name: str, why: str) -> None:
        """End what is being opened for a name, as far as it is in processes: its load fails, with this reason."""
        self._complete.give_up(name, why)
        if self._engine.processes is not None:
            self._engine.processes.environments.give_up(name, why)
        for host in self._coming.get(name, ()):
            if isinstance(host, ProcessHost):
                host.give_up(why)

    def _ports(self, config: ModelConfig, folder: Path) -> SequencePorts:
        if config.sequence is None or not config.sequence.is_iterative:
            return SequencePorts(config, folder)
        dispatcher, clock = self._engine.dispatcher, self._engine.clock
        return IterativePorts(config, folder, lambda batch, tickets: dispatcher.reschedule(batch, tickets, clock()))

    async def _in_thread(self, work: Callable[[], T], threads: LoadThreads | None = None) -> T:
        """Blocking work of other rooms. What is not a FlowserveError becomes one."""
        try:
            return await (threads or self._opening).run(work)
        except FlowserveError:
            raise
        except Exception as error:
            log.exception("loading failed")
            raise Internal(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Company:
    """What a model has to know of the others, worked out once for all that are loaded together.

    `runs_at_once`: how many instances each backend has, which share the cores. `claiming`: the configurations of those
    that ask the rate limiter for resources.
    """

    runs_at_once: Counter[str]
    claiming: Sequence[ModelConfig]


class Gathering:
    """The models of one operation while they are read: nobody is loaded before it is known who shares the cores, but
    nobody waits for one that hangs.
    """

    def __init__(self, loader: Loader, others: Iterable[ReadModel], names: Iterable[str]) -> None:
        self._loader = loader
        self._read = {read.config.name: read for read in others}
        self._reading = set(names)
        self._is_over = trio.Event()  # when `_reading` is empty
        self._company: Company | None = None

    def has_read(self, name: str, read: ReadModel | None) -> None:
        """`read` None: nothing came of it, and what it was before counts."""
        if read is not None:
            self._read[name] = read
            self._company = None
        self._reading.discard(name)
        if not self._reading:
            self._is_over.set()

    async def company(self) -> Company:
        """Of all, or of all that could be read until nothing more came for a while."""
        left = -1
        while self._reading and len(self._reading) != left:
            left = len(self._reading)
            with trio.move_on_after(PATIENCE_S):
                await self._is_over.wait()
        if self._company is None:
            self._company = self._loader.company(self._read.values())
        return self._company


@dataclass(slots=True)
class Loaded:
    """One version of a model and its open instances, until the engine owns them. `passive` ones never get work.
    `warm_up` is for instances that are started again; None where there is nothing to run. `environment` is held as long
    as they live.
    """

    model: LoadedModel
    hosts: list[Host] = field(default_factory=list)
    passive: list[Host] = field(default_factory=list)
    execution_timeout_ns: int = 0
    warm_up: Callable[[Any], Awaitable[None]] | None = None
    environment: Environment | None = None

    def close(self) -> None:
        """Blocks."""
        for host in (*self.hosts, *self.passive):
            host.close()
        self.model.close()
