"""What a model's own files say about it, asked of its backend: the bridge between repository/ and backends/.

Decided here: a model that will run in a process of its own is asked in one, too, so that code which breaks there
cannot take the server with it. The two rooms stand on one floor and do not import each other; whoever reads a
repository is handed one of these functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flowserve.backends import registry
from flowserve.backends.base import Backend, CompletesInProcess, ModelFiles, Remote, UsesGpus, Verifies
from flowserve.backends.child import task
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import FlowserveError, Problem, Problems, Unsupported
from flowserve.repository.environment import environment_of
from flowserve.repository.layout import ModelFolder
from flowserve.repository.read import refusals
from flowserve.runtime.children import Child, Spawn
from flowserve.runtime.environments import Environment
from flowserve.runtime.hosts import PROCESS, Processes, execution_of
from flowserve.runtime.task_answers import answer_of

NO_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {}
DEFAULT_BATCH: Final = "default-max-batch-size"
UNKNOWN_BACKEND: Final = "M91"


def complete(config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
    """Blocks while files are read. Raises Invalid or Unsupported where the backend cannot make sense of them."""
    backend = _backend_of(config)
    return _with_counts(backend, backend.complete(config, _files(folder, version)))


class Completer:
    """`complete`, for a server."""

    def __init__(
        self,
        python_execution: str,
        processes: Processes | None,
        settings: Mapping[str, Mapping[str, str]] = NO_SETTINGS,
        keep: Callable[[str, Environment], object] = lambda name, environment: None,
    ) -> None:
        """`keep` is given the environment that a model was asked in, which goes unless it is kept."""
        self._python_execution = python_execution
        self._processes = processes
        self._settings = settings
        self._keep = keep
        self._asked: dict[Child, str] = {}  # processes that are being asked, and of which model's name

    def __call__(self, config: ModelConfig, folder: ModelFolder, version: int) -> Completion:
        """As `complete`. Where the model's code has to be run for it, that happens where the model will run."""
        backend = _backend_of(config)
        processes = self._processes
        if (
            processes is None
            or execution_of(config, self._python_execution) != PROCESS
            or not isinstance(backend, CompletesInProcess)
        ):
            return self._with_default_batch(config, complete(config, folder, version))
        files = _files(folder, version)
        try:
            environment_of(config, folder.path)  # what is wrong with it is said whether or not it is needed yet
        except Problems as wrong:
            raise Problems([*wrong.problems, *_besides(backend, config, folder, files)]) from None

        def ask(remote: Remote) -> Any:
            environment = processes.environments.enter(config, folder.path)
            if environment is None:
                return self._ask(processes.children.spawn, config.name, remote)
            self._keep(folder.name, environment)
            return self._ask(environment.spawn, config.name, remote)

        return _with_counts(backend, backend.complete_by(config, files, ask))

    def give_up(self, name: str, why: str) -> None:
        """End what is being asked of a model, as far as that is done in processes. On any thread."""
        for child, model in self._asked.copy().items():
            if model == name:
                child.kill(why=f"its process was killed: {why}")

    def _ask(self, spawn: Spawn, model: str, remote: Remote) -> Any:
        """Do what `remote` says in a process made for it. Blocks. Raises what it raised, or how the process ended."""
        child = spawn("auto_complete_config", task.ENTRY, pickle.dumps(remote), log_name=model)
        self._asked[child] = model
        try:
            return answer_of(child)
        finally:
            del self._asked[child]

    def _with_default_batch(self, config: ModelConfig, completion: Completion) -> Completion:
        """Where onnxruntime's backend chose a batch size for want of one, the operator's is taken."""
        chosen = self._settings.get(config.backend, {}).get(DEFAULT_BATCH)
        if chosen is None or config.backend != "onnxruntime" or completion.max_batch_size is None:
            return completion
        return replace(completion, max_batch_size=int(chosen))


def _backend_of(config: ModelConfig) -> Backend:
    try:
        return registry.find(config.backend)
    except Unsupported as error:
        hint = did_you_mean(config.backend, registry.default_files())
        raise Problems([Problem(str(error), config.source.place("backend"), UNKNOWN_BACKEND, hint)]) from error


def _besides(backend: Backend, config: ModelConfig, folder: ModelFolder, files: ModelFiles) -> Sequence[Problem]:
    """What else is wrong with a model that cannot be asked."""
    try:
        if isinstance(backend, Verifies):
            backend.verify(config, files)
    except FlowserveError as error:
        return refusals(error, folder, files.version, config, registry.default_files())
    return ()


def _with_counts(backend: Backend, completion: Completion) -> Completion:
    on_gpus = backend.gpu_instance_count if isinstance(backend, UsesGpus) else 0
    return replace(completion, instance_count=backend.default_instance_count, gpu_instance_count=on_gpus)


def _files(folder: ModelFolder, version: int) -> ModelFiles:
    return ModelFiles(folder.repository, folder.path, version)
