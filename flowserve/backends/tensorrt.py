"""TensorRT plans: models compiled for one kind of GPU (`platform: "tensorrt_plan"`).

Decided here: how a plan is opened (once for each GPU that has instances, shared by them), what keeps one from being
served, and which instances keep tensors on the device. Whether it agrees with its configuration is judged as for ONNX
files (tensorrt_signature.py), how it runs is tensorrt_run.py's. TensorRT itself is behind tensorrt_library.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from flowserve.backends.base import ModelFiles
from flowserve.backends.files import model_file, relative
from flowserve.backends.onnx_signature import Signature, disagreements, with_flat_controls
from flowserve.backends.tensorrt_api import Engine, TensorRt
from flowserve.backends.tensorrt_library import tensorrt_library
from flowserve.backends.tensorrt_profiles import Profile
from flowserve.backends.tensorrt_run import Plan, TensorRtDeviceInstance, TensorRtInstance
from flowserve.backends.tensorrt_signature import chosen, completion_of, profiles_of, signature_of
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
        """As for ONNX files: nothing for a configuration that names inputs and outputs. Else the plan is opened, for
        which there must be a GPU that it was built for.
        """
        if config.inputs and config.outputs:
            return Completion()
        file = _File(self._library, config, files)
        engine = file.open(0)
        signature = signature_of(engine, file.shown)
        return completion_of(config, signature, profiles_of(engine, signature), file.shown)

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> TensorRtModel:
        """Raises Unsupported where there is no TensorRT or no GPU, Invalid for a plan that is not for this one."""
        file = _File(self._library, config, files)
        gpus = {gpu for group in config.instance_groups for gpu in group.gpus}
        if not gpus or any(not group.gpus for group in config.instance_groups):
            reason = devices().why_none or "write kind: KIND_GPU, or leave `kind` out, and start without --gpu=off"
            raise Invalid(f"failed to load '{config.name}': TensorRT plans run on GPUs only: {reason}")
        engine = file.open(min(gpus))
        signature = signature_of(engine, file.shown)
        config = with_flat_controls(config, signature)
        problems = list(disagreements(config, signature, file.shown))
        if problems:
            raise Problems(problems)
        profiles = profiles_of(engine, signature)
        for group in config.instance_groups:
            chosen(profiles, group.profiles, config.name, file.shown)
        return TensorRtModel(config, file, signature, profiles)


class TensorRtModel:
    """One version: its plan, open on every GPU that asked for it."""

    is_pure = True
    may_run_inline = False  # whoever waits for a device holds up the loop

    def __init__(self, config: ModelConfig, file: _File, signature: Signature, profiles: tuple[Profile, ...]) -> None:
        self._config = config
        self._file = file
        self._profiles = profiles
        inputs, outputs = ({port.name: port for port in ports} for ports in (signature.inputs, signature.outputs))
        self._plan = Plan(config, inputs, outputs)

    def instance(self, name: str, group: InstanceGroup) -> TensorRtInstance:
        gpu = group.gpus[0]
        kind = TensorRtDeviceInstance if stays_on_device(self._config) else TensorRtInstance
        profiles = chosen(self._profiles, group.profiles, self._config.name, self._file.shown)
        return kind(self._file.library, self._plan, devices()[gpu], partial(self._file.open, gpu), profiles)

    def close(self) -> None:
        """After the last context. The engines go with their last reference."""
        self._file.close()


class _File:
    """A plan's file, and what was opened of it."""

    def __init__(self, library: Callable[[], TensorRt], config: ModelConfig, files: ModelFiles) -> None:
        self._find_library = library
        self._path = model_file(config, files, TensorRtBackend.default_filename)
        self.shown = relative(self._path, files)
        self._model = config.name
        self._lock = threading.Lock()
        self._engines: dict[int, Engine] = {}

    @property
    def library(self) -> TensorRt:
        """Raises Unsupported where it is not installed."""
        return self._find_library()

    def open(self, gpu: int) -> Engine:
        """The plan on that GPU. Raises Invalid, naming both, where it was built for another."""
        device = devices()[gpu].place  # or it says which there are
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
