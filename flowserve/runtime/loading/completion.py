"""Completes a configuration from the model's own files, by its backend: connects `repository/` and `backends/`.

Decides that a model that will run in a process of its own is also completed in one, so that failing model code cannot
end the server. `repository/` and `backends/` do not import each other: the reader of a repository is passed one of
these functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flowserve.backends import registry
from flowserve.backends.base import Backend, CompletesInProcess, ModelFiles, Remote, UsesGpus, Verifies
from flowserve.backends.worker.messages import RUN_TASK
from flowserve.config.complete import AUTHORS
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import FlowserveError, Problem, Problems, Unsupported
from flowserve.repository.layout import ModelFolder
from flowserve.repository.read import backend_refusals, environment_of
from flowserve.runtime.factory import PROCESS, execution_of
from flowserve.runtime.processes.children import Child, SpawnChild, task_result
from flowserve.runtime.processes.environments import Environment
from flowserve.runtime.remote.shm import ProcessPool

NO_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {}
DEFAULT_BATCH: Final = "default-max-batch-size"
UNKNOWN_BACKEND: Final = "M91"


def complete(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    """Blocks while files are read. Raises Invalid or Unsupported if the backend cannot read them."""
    backend = _backend_of(config)
    return _with_counts(backend, backend.complete(config, _files(folder, version)))


class Completer:
    """`complete` for a server: runs the code of process models in a process."""

    def __init__(
        self,
        python_execution: str,
        processes: ProcessPool | None,
        settings: Mapping[str, Mapping[str, str]] = NO_SETTINGS,
        keep: Callable[[str, Environment], object] = lambda name, environment: None,
        *,
        is_strict: bool = False,
    ) -> None:
        """`keep` receives the environment in which a model was completed; otherwise the environment is released.
        `is_strict`: models that write their own configuration are not asked.
        """
        self._python_execution = python_execution
        self._processes = processes
        self._settings = settings
        self._keep = keep
        self._is_strict = is_strict
        self._running: dict[Child, str] = {}  # processes that complete a configuration, with the name of its model

    def __call__(self, config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
        """As `complete`. If this requires the model's code, the code runs where the model will run."""
        backend = _backend_of(config)
        if self._is_strict and config.backend in AUTHORS:
            return _with_counts(backend, Completion())
        processes = self._processes
        if (
            processes is None
            or execution_of(config, self._python_execution) != PROCESS
            or not isinstance(backend, CompletesInProcess)
        ):
            return self._with_default_batch(config, complete(config, folder, version))
        files = _files(folder, version)
        try:
            environment_of(config, folder.path)  # reports its problems, even if it is not needed yet
        except Problems as wrong:
            raise Problems([*wrong.problems, *problems_of_files(backend, config, folder, version)]) from None

        def complete_remotely(remote: Remote) -> Any:
            environment = processes.environments.enter(config, folder.path)
            if environment is None:
                return self._run(processes.children.spawn, config.name, remote)
            self._keep(folder.name, environment)
            return self._run(environment.spawn, config.name, remote)

        return _with_counts(backend, backend.complete_by(config, files, complete_remotely))

    @property
    def running(self) -> frozenset[str]:
        """The models whose code completes their configuration just now."""
        return frozenset(self._running.copy().values())

    def give_up(self, name: str, why: str) -> None:
        """Kill the processes that complete this model's configuration, for the reason `why`. On any thread."""
        for child, model in self._running.copy().items():
            if model == name:
                child.kill(why=f"its process was killed: {why}")

    def _run(self, spawn: SpawnChild, model: str, remote: Remote) -> Any:
        """Run `remote` in a new process. Blocks. Raises its error, or ModelFailed with how the process ended."""
        child = spawn("auto_complete_config", RUN_TASK, pickle.dumps(remote), log_name=model)
        self._running[child] = model
        try:
            return task_result(child)
        finally:
            del self._running[child]

    def _with_default_batch(self, config: ModelConfig, completion: Completion) -> Completion:
        """Replaces the default batch size of onnxruntime's backend with the operator's."""
        chosen = self._settings.get(config.backend, {}).get(DEFAULT_BATCH)
        if chosen is None or config.backend != "onnxruntime" or completion.max_batch_size is None:
            return completion
        return replace(completion, max_batch_size=int(chosen))


def _backend_of(config: ModelConfig) -> Backend:
    try:
        return registry.find(config.backend)
    except Unsupported as error:
        known = registry.default_files()
        hint = "" if config.backend in known else did_you_mean(config.backend, known)  # a known one cannot be opened
        raise Problems([Problem(str(error), config.source.place("backend"), UNKNOWN_BACKEND, hint)]) from error


def problems_of_files(backend: Backend, config: ModelConfig, folder: ModelFolder, version: int) -> Sequence[Problem]:
    """The problems that the backend finds in a version's files without loading them."""
    try:
        if isinstance(backend, Verifies):
            backend.verify(config, _files(folder, version))
    except FlowserveError as error:
        return backend_refusals(error, folder, version, config, registry.default_files())
    return ()


def _with_counts(backend: Backend, completion: Completion) -> Completion:
    on_gpus = backend.gpu_instance_count if isinstance(backend, UsesGpus) else 0
    return replace(completion, instance_count=backend.default_instance_count, gpu_instance_count=on_gpus)


def _files(folder: ModelFolder, version: int) -> ModelFiles:
    return ModelFiles(folder.repository, folder.path, version)
