"""Factory for ONNX models: the sessions and instances of one version.

Decides that one session serves all instances of a model on the CPU, since several threads may run a session at the same
time and a second copy of the weights would gain nothing; that each instance on a GPU has a session and a stream of its
own; and which class of instance runs a model. It does not know how a batch runs.

Callers: the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowserve.backends.base import ModelFiles
from flowserve.backends.library.signature import Signature, completion, file_disagreements, with_flat_controls
from flowserve.backends.library.tensors import ModelTensors
from flowserve.backends.onnx import session as sessions
from flowserve.backends.onnx.device import OnnxDeviceInstance
from flowserve.backends.onnx.instance import OnnxInstance
from flowserve.config.complete import RULE
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Problems, Unsupported
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices
from flowserve.values import DType

log = logging.getLogger("flowserve.load")

KIND_GPU: Final = "KIND_GPU"


class OnnxRuntime:
    """The backend. A version is a file `model.onnx`, or a folder of that name with that file and its weights."""

    name = "onnxruntime"
    default_filename = "model.onnx"
    default_instance_count = 2  # as Triton's for this backend on the CPU
    gpu_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """As on Triton: no field for a configuration that names inputs and outputs, even if it lacks others."""
        if config.inputs and config.outputs:
            return Completion()
        path = self._path(config, files)
        session = sessions.open_session(config, path, files, sessions.metadata_settings)
        return completion(config, sessions.session_signature(session), files.shown(path))

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> OnnxModel:
        """Raises Invalid for a file that cannot be opened, Problems if file and configuration disagree."""
        path = self._path(config, files)
        opening = partial(sessions.open_session, config, path, files, partial(sessions.settings, config, options))
        groups = config.instance_groups
        on_cpu = not groups or any(group.kind != KIND_GPU for group in groups)
        if on_cpu:
            session = sessions.session_on_cpu(config, path, files, options)
        else:
            session = sessions.open_session(config, path, files, sessions.metadata_settings)
        config, signature = _checked(config, session, files.shown(path))
        if all(group.kind != KIND_GPU for group in groups) and sessions.accelerators(config):
            log.info("model '%s' has no instance on a GPU: gpu_execution_accelerator is not used", config.name)
        return OnnxModel(config, session if on_cpu else None, signature, opening)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises if onnxruntime cannot open the file, if the configuration disagrees with it, or if a parameter of the
        session or of a GPU provider is invalid.
        """
        path = self._path(config, files)
        sessions.settings(config, {})
        if any(group.kind == KIND_GPU for group in config.instance_groups):
            sessions.gpu_providers(config, 0)
        _checked(config, sessions.open_session(config, path, files, sessions.metadata_settings), files.shown(path))

    def _path(self, config: ModelConfig, files: ModelFiles) -> Path:
        path = files.model_file(config, self.default_filename)
        return path / self.default_filename if path.is_dir() else path


class OnnxModel:
    """One version of a model: its session on the CPU if it has instances there, and its tensors. `opening` opens
    another session, given its providers.
    """

    is_pure = True

    def __init__(self, config: ModelConfig, session: Any, signature: Signature, opening: Callable[..., Any]) -> None:
        # Waiting for a device would block the event loop.
        self.may_run_inline = all(group.kind != KIND_GPU for group in config.instance_groups)
        self.tensors = ModelTensors(config, signature)
        self._config = config
        self._session = session
        self.execute = None if session is None else sessions.executor(session, config)
        self._open_session = opening

    def instance(self, name: str, group: InstanceGroup) -> OnnxInstance | OnnxDeviceInstance:
        if group.kind != KIND_GPU:
            return OnnxInstance(self.tensors, lambda: self.execute, self._session)
        memory = devices()[group.gpus[0] if group.gpus else 0]

        def open_session_on(stream: int) -> Any:
            return self._open_session(sessions.gpu_providers(self._config, memory.place.number, stream))

        if not stays_on_device(self._config):
            return OnnxInstance(self.tensors, lambda: sessions.executor(open_session_on(0), self._config))
        sizes = sessions.graph_sizes(self._config)
        return OnnxDeviceInstance(self.tensors, memory, open_session_on, sessions.asynchronous_run_options, sizes)

    def close(self) -> None:
        """The session is freed with its last reference."""


def _checked(config: ModelConfig, session: Any, file: str) -> tuple[ModelConfig, Signature]:
    """The configuration that the session's inputs follow. Raises Problems or Unsupported if file and configuration
    disagree.
    """
    signature = sessions.session_signature(session)
    config = with_flat_controls(config, signature)
    strings = [spec.name for spec in config.inputs if spec.dtype is DType.BYTES]
    halves = [spec.name for spec in config.outputs if spec.dtype is DType.BF16]
    if strings and halves:
        raise Unsupported(
            f"model '{config.name}': onnxruntime's Python interface cannot take strings (input '{strings[0]}') where "
            f"it answers with BF16 (output '{halves[0]}'); cast that output to TYPE_FP32 or TYPE_FP16 in the model"
        )
    problems = [replace(problem, rule=RULE) for problem in file_disagreements(config, signature, file)]
    if problems:
        raise Problems(problems)
    return config, signature
