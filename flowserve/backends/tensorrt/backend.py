"""Factory for TensorRT plans (`platform: "tensorrt_plan"`).

Decides that a plan is opened once for each GPU that has instances, and shared by them; what prevents a plan from being
served; and which kind of instance runs it. It does not know how a batch runs (instance.py) or how a plan describes
itself (plan.py).

Callers: the registry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from flowserve.backends.base import ModelFiles
from flowserve.backends.onnx.ragged import RaggedPorts
from flowserve.backends.onnx.signature import Signature, file_disagreements, with_flat_controls
from flowserve.backends.onnx.tensors import ModelTensors
from flowserve.backends.tensorrt.instance import TensorRtDeviceInstance, TensorRtInstance
from flowserve.backends.tensorrt.library import CudaEngine, TensorRt, tensorrt_library
from flowserve.backends.tensorrt.plan import (
    Profile,
    completion_of,
    plan_signature,
    profiles_of,
    profiles_of_group,
)
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid, Problems
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.devices import devices


class TensorRtBackend:
    """The backend. A version is a file `model.plan`."""

    name = "tensorrt"
    default_filename = "model.plan"
    default_instance_count = 1
    gpu_instance_count = 1

    def __init__(self, library: Callable[[], TensorRt] = tensorrt_library) -> None:
        self._library = library

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """As for ONNX files: nothing for a configuration that names inputs and outputs. Otherwise the plan is opened,
        which takes a GPU that it was built for.
        """
        if config.inputs and config.outputs:
            return Completion()
        file = _File(self._library, config, files)
        engine = file.open(0)
        signature = plan_signature(engine, file.shown)
        return completion_of(config, signature, profiles_of(engine, signature), file.shown)

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> TensorRtModel:
        """Raises Unsupported without TensorRT or without a GPU, Invalid for a plan that was built for another GPU."""
        file = _File(self._library, config, files)
        gpus = {gpu for group in config.instance_groups for gpu in group.gpus}
        if not gpus or any(not group.gpus for group in config.instance_groups):
            reason = devices().why_none or "write kind: KIND_GPU, or leave `kind` out, and start without --gpu=off"
            raise Invalid(f"failed to load '{config.name}': TensorRT plans run on GPUs only: {reason}")
        engine = file.open(min(gpus))
        signature = plan_signature(engine, file.shown)
        config = with_flat_controls(config, signature)
        problems = list(file_disagreements(config, signature, file.shown))
        if problems:
            raise Problems(problems)
        profiles = profiles_of(engine, signature)
        for group in config.instance_groups:
            profiles_of_group(profiles, group.profiles, config.name, file.shown)
        return TensorRtModel(config, file, signature, profiles)


class TensorRtModel:
    """One version of a model: its plan, opened on every GPU that has an instance."""

    is_pure = True
    may_run_inline = False  # waiting for a device would block the event loop

    def __init__(self, config: ModelConfig, file: _File, signature: Signature, profiles: tuple[Profile, ...]) -> None:
        self._config = config
        self._file = file
        self._profiles = profiles
        self._tensors = ModelTensors(config, signature)
        self._ragged = RaggedPorts(config) if RaggedPorts.are_in(config) else None

    def instance(self, name: str, group: InstanceGroup) -> TensorRtInstance:
        gpu = group.gpus[0]
        kind = TensorRtDeviceInstance if stays_on_device(self._config) else TensorRtInstance
        profiles = profiles_of_group(self._profiles, group.profiles, self._config.name, self._file.shown)
        open_engine = partial(self._file.open, gpu)
        return kind(self._file.library, self._tensors, self._ragged, devices()[gpu], open_engine, profiles)

    def close(self) -> None:
        """After the last context is gone. The engines are freed with their last reference."""
        self._file.close()


class _File:
    """A plan's file, and the engines that were opened from it: one for each GPU."""

    def __init__(self, library: Callable[[], TensorRt], config: ModelConfig, files: ModelFiles) -> None:
        self._find_library = library
        self._path = files.model_file(config, TensorRtBackend.default_filename)
        self.shown = files.shown(self._path)
        self._model = config.name
        self._lock = threading.Lock()
        self._engines: dict[int, CudaEngine] = {}

    @property
    def library(self) -> TensorRt:
        """TensorRT. Raises Unsupported where it is not installed."""
        return self._find_library()

    def open(self, gpu: int) -> CudaEngine:
        """The engine on that GPU. Raises Invalid, naming plan and GPU, where the plan was built for another GPU."""
        device = devices()[gpu].place  # raises with the list of devices for an unknown number
        with self._lock:
            if gpu not in self._engines:
                with self.library.on_device(gpu):
                    engine = self.library.read(self._path.read_bytes())
                if engine is None:
                    raise Invalid(
                        f"failed to load '{self._model}': {self.shown} cannot be opened by TensorRT "
                        f"{self.library.version} on {device}: a plan is for the version and the kind of GPU that it "
                        "was built with (the log says what TensorRT says); build it here with: flowserve build-plan"
                    )
                self._engines[gpu] = engine
            return self._engines[gpu]

    def close(self) -> None:
        self._engines.clear()
