"""What a model's own files say about it, asked of its backend: the bridge between repository/ and backends/.

Decided here: a model that will run in a process of its own is asked in one, too, so that code which breaks there
cannot take the server with it. The two rooms stand on one floor and do not import each other; whoever reads a
repository is handed one of these functions.
"""

from __future__ import annotations

import pickle
import select
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flowserve.backends import registry
from flowserve.backends.base import Backend, CompletesInProcess, ModelFiles, Remote, UsesGpus
from flowserve.backends.child import task
from flowserve.backends.child.protocol import MESSAGE_BYTES_MAX
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import ModelFailed, Problem, Problems, Unsupported
from flowserve.repository.layout import ModelFolder
from flowserve.runtime.children import Child, Children
from flowserve.runtime.hosts import PROCESS, Processes, execution_of

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
    ) -> None:
        self._python_execution = python_execution
        self._processes = processes
        self._settings = settings
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
        completion = backend.complete_by(
            config, _files(folder, version), lambda remote: self._ask(processes.children, config.name, remote)
        )
        return _with_counts(backend, completion)

    def give_up(self, name: str, why: str) -> None:
        """End what is being asked of a model, as far as that is done in processes. On any thread."""
        for child, model in self._asked.copy().items():
            if model == name:
                child.kill(why=f"its process was killed: {why}")

    def _ask(self, children: Children, model: str, remote: Remote) -> Any:
        """Do what `remote` says in a process made for it. Blocks. Raises what it raised, or how the process ended."""
        child = children.spawn("auto_complete_config", task.ENTRY, pickle.dumps(remote), log_name=model)
        self._asked[child] = model
        try:
            with child.socket:
                message = _all_of(child)
        finally:
            del self._asked[child]
        try:
            return task.answered(message)
        except ValueError:
            raise ModelFailed(child.how_it_ended()) from None

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


def _with_counts(backend: Backend, completion: Completion) -> Completion:
    on_gpus = backend.gpu_instance_count if isinstance(backend, UsesGpus) else 0
    return replace(completion, instance_count=backend.default_instance_count, gpu_instance_count=on_gpus)


def _files(folder: ModelFolder, version: int) -> ModelFiles:
    return ModelFiles(folder.repository, folder.path, version)


def _all_of(child: Child) -> bytes:
    """Everything it says until its end."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    parts: list[bytes] = []
    while True:
        is_over = any(number == child.pidfd for number, _ in poll.poll())
        try:
            part = child.socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            if is_over:
                return b"".join(parts)
            continue
        except ConnectionError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
