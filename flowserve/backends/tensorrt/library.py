"""Protocols for the used part of TensorRT, their implementation by the real library, and the build of a plan.

Decides which TensorRT calls are needed to serve and to build a plan (the same in versions 10 and 11), the error if
TensorRT is not installed, and that TensorRT's log messages go to flowserve's log. `tensorrt_library` is the only
function that imports TensorRT. The protocols keep TensorRT's own names: the real objects satisfy them, and so does the
fake of the tests, which raises if calls are in a wrong order. The real library has not been run on hardware yet: it is
experimental.

Callers: the modules of this package, and `flowserve build-plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final, Protocol

from flowserve.errors import Invalid, Unsupported
from flowserve.memory.devices import devices
from flowserve.values import shape_text

log = logging.getLogger("flowserve.tensorrt")

HOW: Final = "pip install 'flowserve[tensorrt]', where NVIDIA's own package index can be reached"

Shape = tuple[int, ...]
# The smallest, best and largest shape of each input that varies.
Ranges = Mapping[str, tuple[Shape, Shape, Shape]]
# Allocates memory for an output whose size TensorRT learns during the execution: size in bytes -> device address.
MakeRoom = Callable[[int], int]


class ExecutionContext(Protocol):
    """An execution context: one execution at a time. Methods that return a bool return False on failure; TensorRT's log
    has the reason.
    """

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def infer_shapes(self) -> list[str]:
        """The inputs that have no shape yet. Empty: every shape that can be known before the execution is known."""

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        """With -1 for dimensions that only the execution determines."""

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Enqueue the execution. Every tensor must have an address or an allocator; all memory must stay valid until
        the execution has ended.
        """


class CudaEngine(Protocol):
    """A plan that was opened on one GPU. Its contexts share it."""

    num_io_tensors: int
    num_optimization_profiles: int

    def get_tensor_name(self, index: int) -> str: ...

    # These return members of TensorRT's enumerations, which have a name.

    def get_tensor_mode(self, name: str) -> Any:
        """INPUT or OUTPUT."""

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_location(self, name: str) -> Any:
        """DEVICE, or HOST for shape tensors."""

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]:
        """The smallest, the best and the largest shape of an input."""

    def create_execution_context(self) -> ExecutionContext | None: ...


class Allocator(Protocol):
    """An output allocator, made by `TensorRt.allocator`. `shape` is known after the execution."""

    @property
    def shape(self) -> Shape | None: ...


class TensorRt(Protocol):
    """The library."""

    version: str

    def read(self, plan: bytes) -> CudaEngine | None:
        """Open a plan on the current device. None if this version or this GPU cannot run it."""

    def allocator(self, make_room: MakeRoom) -> Allocator:
        """An output allocator that takes its memory from `make_room`."""

    def on_device(self, number: int) -> AbstractContextManager[Any]:
        """Makes the device the thread's current one, which is the device that TensorRT uses."""


class PlanBuilding(Protocol):
    """The part of the library that `build_plan` uses: TensorRT's module, its version and its logger."""

    trt: Any
    version: str
    logger: Any


class TensorRtLibrary:
    """The real `TensorRt` and `PlanBuilding`."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.version: str = trt.__version__
        self.logger = _logger(trt)
        self._runtime = trt.Runtime(self.logger)
        trt.init_libnvinfer_plugins(self.logger, "")

    def read(self, plan: bytes) -> CudaEngine | None:
        engine: CudaEngine | None = self._runtime.deserialize_cuda_engine(plan)
        return engine

    def allocator(self, make_room: MakeRoom) -> Allocator:
        class OutputAllocator(self.trt.IOutputAllocator):  # type: ignore[misc, name-defined]  # known when it runs
            shape: tuple[int, ...] | None = None

            def reallocate_output_async(
                self, tensor_name: str, memory: int, size: int, alignment: int, stream: int
            ) -> int:
                return make_room(max(size, 1))

            def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
                return make_room(max(size, 1))

            def notify_shape(self, tensor_name: str, shape: Any) -> None:
                self.shape = tuple(shape)

        made: Allocator = OutputAllocator()
        return made

    def on_device(self, number: int) -> AbstractContextManager[Any]:
        return devices()[number].device.current()


@cache
def tensorrt_library() -> TensorRtLibrary:
    """Raises Unsupported, with the command that installs TensorRT, if it cannot be imported."""
    try:
        import tensorrt
    except ImportError as error:  # also if its bindings are installed, but not its libraries
        raise Unsupported(f"TensorRT cannot be used here ({error}): {HOW}") from error
    return TensorRtLibrary(tensorrt)


def _logger(trt: Any) -> Any:
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Logger(trt.ILogger):  # type: ignore[misc]  # known when it runs
        def log(self, severity: Any, message: str) -> None:
            log.log(levels.get(severity.name, logging.DEBUG), "%s", message)

    return Logger()


def build_plan(
    library: PlanBuilding, onnx: bytes, profiles: Sequence[Ranges], *, half: bool = False, workspace_bytes: int = 0
) -> bytes:
    """Build a plan from an ONNX file, for the GPU it is built on, with these optimisation profiles. `half` allows FP16
    where it is faster; `workspace_bytes` limits the workspace, 0 for no limit. May take minutes. Raises Invalid with
    TensorRT's error, or with the input whose shapes no profile gives.
    """
    trt = library.trt
    builder = trt.Builder(library.logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, library.logger)
    if not parser.parse(onnx):
        said = "; ".join(str(parser.get_error(index).desc()) for index in range(parser.num_errors))
        raise Invalid(f"TensorRT {library.version} cannot read the ONNX file: {said}")
    _check(network, profiles)
    config = builder.create_builder_config()
    if workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    if half:
        if not hasattr(trt.BuilderFlag, "FP16"):
            raise Unsupported(
                f"TensorRT {library.version} takes types as the ONNX file has them: export it in FP16 instead"
            )
        config.set_flag(trt.BuilderFlag.FP16)
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for name, (smallest, best, largest) in ranges.items():
            profile.set_shape(name, smallest, best, largest)
        if config.add_optimization_profile(profile) < 0:
            raise Invalid(f"TensorRT {library.version} does not take the profile {_written(ranges)}; the log says why")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise Invalid(f"TensorRT {library.version} could not build a plan; the log says why")
    return bytes(plan)


def _check(network: Any, profiles: Sequence[Ranges]) -> None:
    inputs = {one.name: tuple(one.shape) for one in (network.get_input(i) for i in range(network.num_inputs))}
    varying = [name for name, shape in inputs.items() if -1 in shape]
    for ranges in profiles or [{}]:
        for name in varying:
            if name not in ranges:
                shape = shape_text(inputs[name])
                raise Invalid(
                    f"input '{name}' has shape {shape}: say between which shapes with --profile {name}:MIN:OPT:MAX"
                )
        for name in ranges:
            if name not in inputs:
                raise Invalid(f"the ONNX file has no input '{name}', it has {', '.join(inputs)}")


def _written(ranges: Ranges) -> str:
    return ", ".join(f"'{name}' {' '.join(map(shape_text, shapes))}" for name, shapes in ranges.items())
