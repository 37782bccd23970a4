"""Reads and loads one model: from its folder to open instances.

Decides which work blocks and runs on threads, that a load opens all of its versions or none, and which facts about
models that are loaded with it, and share the cores and the rate limiter's resources, a load depends on. `operations.py`
and `registry.py` decide which versions are loaded and when they are put in force. Does not know how files are read
(repository/), nor how models compute (backends/).

Decides too that a few loads run at once, since they share the cores. A load that takes longer than `patience_s` is
either waiting or hanging, and its slot is given to the next one. The total number of threads is bounded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import trio

from flowserve.backends import registry
from flowserve.backends.base import LoadedModel, ModelFiles
from flowserve.config.types import ASSUMED, InstanceGroup, ModelConfig, instances_of
from flowserve.config.unsupported import unused_cache, unused_environment
from flowserve.errors import FlowserveError, Internal
from flowserve.graph.types import ModelKey
from flowserve.repository.layout import ModelFolder
from flowserve.repository.read import ReadModel, examine, read_steps
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.loaded import NewModel
from flowserve.runtime.engine.wings import WingLoad
from flowserve.runtime.factory import PROCESS, MakeWorker, execution_of, execution_timeout_ns, worker_maker
from flowserve.runtime.loading.completion import Completer
from flowserve.runtime.loading.warmup import read_samples, warm_up
from flowserve.runtime.processes.environments import Environment
from flowserve.runtime.workers import policies
from flowserve.runtime.workers.base import RunsElsewhere, Worker
from flowserve.runtime.workers.state import IterativeAdapter, SequenceAdapter

log = logging.getLogger("flowserve.load")

AT_ONCE: Final = 4  # as tritonserver's default
HANG_AFTER_S: Final = 5.0
THREADS_MAX: Final = 64

T = TypeVar("T")


class LoadThreads:
    """At most `at_once` threads that have run for less than `patience_s` seconds; THREADS_MAX in total."""

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = HANG_AFTER_S) -> None:
        self._slots = trio.Semaphore(at_once)
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._patience_s = patience_s

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking `work` on a thread once a slot is free; returns or raises its result. A cancelled caller
        abandons the thread.
        """
        await self._slots.acquire()
        slot = ExitStack()
        slot.callback(self._slots.release)  # called once, even if the slot is closed several times
        values: list[T] = []
        raised: Exception | None = None

        async def lose_patience() -> None:
            await trio.sleep(self._patience_s)
            slot.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose_patience)
            try:
                values.append(await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads))
            except Exception as error:  # raised below: a nursery would wrap it
                raised = error
            finally:
                slot.close()
            nursery.cancel_scope.cancel()
        if raised is not None:
            raise raised
        return values[0]


class Loader:
    """Reads and loads models for one engine, a few at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opening = LoadThreads()
        self._closing = LoadThreads()
        self._coming: dict[str, set[Worker]] = {}  # workers that are being opened, by model
        options = engine.options
        self._entered: dict[str, Environment] = {}  # environments in which models were completed, until they are loaded
        keep = self._entered.__setitem__
        self._complete = Completer(
            options.python_execution,
            engine.loaded.processes,
            options.backend_settings,
            keep,
            is_strict=options.strict_configs,
        )

    async def read(self, folder: ModelFolder, config_json: str = "", served: ModelConfig | None = None) -> ReadModel:
        """Read a model's folder, with `config_json` in place of its configuration. `served`: the configuration with
        which the name is or was served. Raises FlowserveError.
        """
        self._entered.pop(folder.name, None)
        try:
            read = await self._in_thread(
                lambda: examine(
                    folder,
                    registry.default_files(),
                    self._complete,
                    gpus=self._engine.options.gpus if self._engine.options.wing_of(folder.name) is None else ASSUMED,
                    config_json=config_json,
                    config_name=self._engine.options.model_config_name,
                    served=served,
                    is_strict=self._engine.options.strict_configs,
                ).valid()
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
        """The steps in a model's configuration. Loads and runs nothing of the model."""
        name = self._engine.options.model_config_name
        return await trio.to_thread.run_sync(
            lambda: read_steps(folder, registry.default_files(), config_json=config_json, config_name=name),
            abandon_on_cancel=True,
        )

    async def load(self, read: ReadModel, versions: Collection[int], context: LoadContext) -> dict[int, Loaded]:
        """Open these versions of a plain model, or none: a version that fails closes the others, as on Triton. Its
        number is in the error.
        """
        loaded: dict[int, Loaded] = {}
        try:
            if self._engine.limiter is not None:
                policies.refuse_what_never_runs(self._engine.limiter, read.config, context.claiming)
            environment = await self._enter(read) if versions else None
            for version in versions:
                try:
                    loaded[version] = await self._load_version(read, version, context, environment)
                except FlowserveError as error:
                    error.version = version
                    raise
        except FlowserveError:
            await self.drop(loaded)
            raise
        finally:
            self._entered.pop(read.folder.name, None)
        return loaded

    async def drop(self, loaded: Mapping[int, Loaded]) -> None:
        """Close loaded versions that will not be used."""
        for one in loaded.values():
            await self._in_thread(one.close, self._closing)

    def give(self, read: ReadModel, loaded: Mapping[int, Loaded], files: object) -> None:
        """Pass the loaded versions to the engine, which owns them from now on."""
        for version, one in loaded.items():
            needs = [policies.needs_of(group) for _, group in instances_of(read.config) if not group.passive]
            self._engine.add_model(
                NewModel(
                    ModelKey(read.config.name, version),
                    policies.queue_for(read.config, one.workers, is_limited=self._engine.limiter is not None),
                    one.workers,
                    one.model,
                    one.passive,
                    (files, one.environment),
                    needs,
                    policies.keeps_order(read.config),
                    read.config.response_cache,
                    one.execution_timeout_ns,
                    one.warm_up,
                )
            )

    async def _enter(self, read: ReadModel) -> Environment | None:
        """The environment in which the model will run; None for the server's own."""
        config, processes = read.config, self._engine.loaded.processes
        if (
            processes is None
            or self._engine.options.wing_of(config.name) is not None
            or execution_of(config, self._engine.options.python_execution) != PROCESS
        ):
            return None
        return await self._in_thread(lambda: processes.environments.enter(config, read.folder.path))

    async def _load_version(
        self, read: ReadModel, version: int, context: LoadContext, environment: Environment | None
    ) -> Loaded:
        """Load the model and open its instances. If one fails, closes all."""
        config, engine = read.config, self._engine
        files = ModelFiles(read.folder.repository, read.folder.path, version)
        execution = execution_of(config, engine.options.python_execution)
        options = {
            **engine.options.backend_settings.get(config.backend, {}),
            "execution": execution,
            "runs_at_once": str(context.runs_at_once[config.backend]),
            "strict_outputs": str(engine.options.strict_outputs).lower(),
        }
        state = None
        inner = config
        if config.sequence is not None:
            adapter = IterativeAdapter if config.sequence.is_iterative else SequenceAdapter
            state = await self._in_thread(lambda: adapter(config, read.folder.path))
            inner = state.inner
        wing = engine.options.wing_of(config.name)
        if wing is not None:
            load = WingLoad(
                config,
                inner,
                files,
                options,
                engine.clock,
                state,
                engine.streams if config.decoupled else None,
                is_limited=engine.limiter is not None,
            )
            made = await self._in_thread(lambda: wing.load(load))
            return await self._open_all(read, version, Loaded(made.model), made.instances, lambda: made.make_worker)
        backend = registry.find(config.backend)
        loaded = Loaded(await self._in_thread(lambda: backend.load(inner, files, options)), environment=environment)
        pool = engine.loaded.processes
        if pool is not None and environment is not None:
            pool = pool.within(environment)
        maker = partial(worker_maker, inner, loaded.model, execution, pool, engine.streams, engine.clock, state)
        return await self._open_all(read, version, loaded, instances_of(config), maker)

    async def _open_all(
        self,
        read: ReadModel,
        version: int,
        loaded: Loaded,
        instances: Sequence[tuple[str, InstanceGroup]],
        maker: Callable[[], MakeWorker],
    ) -> Loaded:
        """Open the instances, one after the other, and warm them up. If one fails, closes all."""
        config = read.config
        try:
            make_worker = maker()
            samples = await self._in_thread(lambda: read_samples(config, read.folder.path))
            for name, group in instances:
                worker = make_worker(name, group)
                await self._open(config.name, worker)
                (loaded.passive if group.passive else loaded.workers).append(worker)
            timeout_ns = loaded.execution_timeout_ns = execution_timeout_ns(config, loaded.workers)
            warm = partial(
                warm_up, self._engine, config=config, version=version, samples=samples, execution_timeout_ns=timeout_ns
            )
            for worker in loaded.workers:
                await warm(worker)
            loaded.warm_up = warm if samples else None
        except FlowserveError:
            await self._in_thread(loaded.close, self._closing)
            raise
        return loaded

    async def _open(self, name: str, worker: Worker) -> None:
        coming = self._coming.setdefault(name, set())
        coming.add(worker)
        try:
            await self._in_thread(partial(worker.open, self._engine.context))
        finally:
            coming.discard(worker)

    def give_up(self, name: str, why: str) -> None:
        """Kill the processes that are being opened for a name: its load fails with this reason."""
        self._complete.give_up(name, why)
        if self._engine.loaded.processes is not None:
            self._engine.loaded.processes.environments.give_up(name, why)
        for worker in self._coming.get(name, ()):
            if isinstance(worker, RunsElsewhere):
                worker.give_up(why)

    async def _in_thread(self, work: Callable[[], T], threads: LoadThreads | None = None) -> T:
        """Run blocking work of other packages. Any error that is no FlowserveError becomes Internal."""
        try:
            return await (threads or self._opening).run(work)
        except FlowserveError:
            raise
        except Exception as error:
            log.exception("loading failed")
            raise Internal(f"{type(error).__name__}: {error}") from error


class LoadContext(NamedTuple):
    """The facts about other models that a load depends on, computed once for all models that are loaded together.

    `runs_at_once`: the number of instances of each backend, which share the cores. `claiming`: the configurations that
    use resources of the rate limiter.
    """

    runs_at_once: Counter[str]
    claiming: Sequence[ModelConfig]


class PendingReads:
    """The models of one operation while they are read. Loading a model needs the load context of all; but no model
    waits for a read that hangs.
    """

    def __init__(self, others: Iterable[ReadModel], names: Iterable[str]) -> None:
        self._read = {read.config.name: read for read in others}
        self._reading = set(names)
        self._is_over = trio.Event()  # when `_reading` is empty
        self._context: LoadContext | None = None

    def done(self, name: str, read: ReadModel | None) -> None:
        """A model was read. `read` None: the read failed, and the model's previous configuration counts."""
        if read is not None:
            self._read[name] = read
            self._context = None
        self._reading.discard(name)
        if not self._reading:
            self._is_over.set()

    async def context(self) -> LoadContext:
        """The context of all models, or, after HANG_AFTER_S seconds without progress, of those read so far."""
        left = -1
        while self._reading and len(self._reading) != left:
            left = len(self._reading)
            with trio.move_on_after(HANG_AFTER_S):
                await self._is_over.wait()
        if self._context is None:
            self._context = LoadContext(
                Counter(), [one.config for one in self._read.values() if policies.asks_for_resources(one.config)]
            )
            for read in self._read.values():
                self._context.runs_at_once[read.config.backend] += len(instances_of(read.config)) * len(read.versions)
        return self._context


@dataclass(slots=True)
class Loaded:
    """One version of a model and its open instances, until the engine owns them. `passive` instances never get work.
    `warm_up` is for restarted instances; None without samples. `environment` is held as long as they live.
    """

    model: LoadedModel
    workers: list[Worker] = field(default_factory=list)
    passive: list[Worker] = field(default_factory=list)
    execution_timeout_ns: int = 0
    warm_up: Callable[[Any], Awaitable[None]] | None = None
    environment: Environment | None = None

    def close(self) -> None:
        """Blocks."""
        for worker in (*self.workers, *self.passive):
            worker.close()
        self.model.close()
