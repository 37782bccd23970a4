"""Serves TensorRT plans (`platform: "tensorrt_plan"`): their description, their instances, and the factory of both.

Decides that a plan is opened once for each GPU that has instances, and shared by them; which of TensorRT's data types
are served and which tensors a plan may have; how many rows its profiles take, and that a batch runs with the profile
whose best shapes are nearest to its own among those that allow it (the first of equals). Tensors are described as ONNX
files describe theirs, so that library/signature.py compares both kinds of files with their configuration.

An instance has one execution context and one stream. Decides the order of TensorRT's calls: first the profile, then the
shape of every input, then an address for every tensor, then the execution. A call that reports a failure fails the
batch with the name of the call. Outputs of known shape are written into buffers allocated here. TensorRT allocates the
others while it runs; they are adopted after the host has waited to learn the shape. memory/stream.py keeps memory alive
until the stream is done with it.

It is given TensorRT (library.py) and does not import it. It does not know graphs.

Callers: the registry; the runtime runs the instances.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

from flowserve.backends.base import ClockNs, ModelFiles, Results, Work
from flowserve.backends.library.signature import Port, Signature, completion, file_disagreements, with_flat_controls
from flowserve.backends.library.tensors import ModelTensors
from flowserve.backends.tensorrt.library import (
    Allocator,
    CudaEngine,
    ExecutionContext,
    Shape,
    TensorRt,
    tensorrt_library,
)
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid, ModelFailed, Problems, Unsupported
from flowserve.graph.transfers import stays_on_device
from flowserve.memory.device_memory import Block, DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.devices import devices
from flowserve.memory.stream import DeviceStream
from flowserve.values import DType, MemoryPlace, shape_text

_TYPES: Final = {
    "BOOL": DType.BOOL,
    "UINT8": DType.UINT8,
    "INT8": DType.INT8,
    "INT32": DType.INT32,
    "INT64": DType.INT64,
    "HALF": DType.FP16,
    "BF16": DType.BF16,
    "FLOAT": DType.FP32,
}


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimisation profile. `ranges`: the smallest, best and largest shape of every input, with batch dimension."""

    index: int
    ranges: Mapping[str, tuple[Shape, Shape, Shape]]

    def allows(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            len(shapes[name]) == len(low) and all(a <= n <= b for a, n, b in zip(low, shapes[name], high, strict=True))
            for name, (low, _, high) in self.ranges.items()
            if name in shapes
        )

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        """Difference in elements between these inputs and the best shapes."""
        return sum(abs(prod(shapes[name]) - prod(best)) for name, (_, best, _) in self.ranges.items() if name in shapes)


def plan_signature(engine: CudaEngine, file: str) -> Signature:
    """Raises Unsupported for plans with shape tensors, which are in host memory."""
    ports: dict[str, list[Port]] = {"INPUT": [], "OUTPUT": []}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name).name != "DEVICE":
            raise Unsupported(f"{file}: tensor '{name}' is a shape tensor, which is not supported yet")
        word = engine.get_tensor_dtype(name).name
        shape = tuple(engine.get_tensor_shape(name))
        ports[engine.get_tensor_mode(name).name].append(Port(name, _TYPES.get(word), shape, type=word))
    return Signature(tuple(ports["INPUT"]), tuple(ports["OUTPUT"]))


def profiles_of(engine: CudaEngine, signature: Signature) -> tuple[Profile, ...]:
    def ranges(name: str, index: int) -> tuple[Shape, Shape, Shape]:
        smallest, best, largest = engine.get_tensor_profile_shape(name, index)
        return tuple(smallest), tuple(best), tuple(largest)

    return tuple(
        Profile(index, {port.name: ranges(port.name, index) for port in signature.inputs})
        for index in range(engine.num_optimization_profiles)
    )


def completion_of(config: ModelConfig, signature: Signature, profiles: Sequence[Profile], file: str) -> Completion:
    """The fields that the configuration lacks. max_batch_size becomes what the largest profile takes."""
    found = completion(config, signature, file)
    takes = (min((high[0] for _, _, high in one.ranges.values() if high), default=0) for one in profiles)
    return found if found.max_batch_size is None else replace(found, max_batch_size=max(takes, default=0))


def profiles_of_group(profiles: Sequence[Profile], wanted: Sequence[int], model: str, file: str) -> tuple[Profile, ...]:
    """The profiles that an instance group names, all if it names none. Raises Invalid for an unknown index."""
    for index in wanted:
        if index >= len(profiles):
            raise Invalid(f"model '{model}': {file} has no optimisation profile {index}; it has {len(profiles)}")
    return tuple(profiles[index] for index in wanted) or tuple(profiles)


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape], model: str) -> Profile:
    """The profile for a batch of these shapes. Raises Invalid, with the shapes that the profiles allow."""
    fitting = [profile for profile in profiles if profile.allows(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    wanted = ", ".join(f"'{name}' {shape_text(shape)}" for name, shape in shapes.items())
    allowed = "; ".join(
        f"profile {profile.index}: "
        + ", ".join(
            f"'{name}' {shape_text(low)} to {shape_text(high)}" for name, (low, _, high) in profile.ranges.items()
        )
        for profile in profiles
    )
    raise Invalid(f"no optimisation profile of model '{model}' takes inputs {wanted}; it has {allowed}")


class TensorRtInstance:
    """An instance for models whose tensors cannot stay on a device (graph/transfers.py): it reads its inputs from host
    memory and leaves its outputs there.
    """

    def __init__(
        self,
        library: TensorRt,
        model: ModelTensors,
        memory: DeviceMemory,
        open_engine: Callable[[], CudaEngine],
        profiles: Sequence[Profile],
    ) -> None:
        self._library = library
        self._model = model
        self._memory = memory
        self._open_engine = open_engine
        self._profiles = profiles
        self._profile = -1

    def open(self) -> None:
        with self._library.on_device(self._memory.place.number):
            context = self._open_engine().create_execution_context()
        if context is None:
            raise ModelFailed(f"model '{self._model.name}': {self._memory.place} has no room for its execution context")
        self._context: ExecutionContext = context
        self._stream = DeviceStream(self._memory)

    def close(self) -> None:
        self._stream.close()
        del self._context

    def run(self, work: Work, clock: ClockNs) -> Results:
        ragged = self._model.ragged
        return self._run(work, clock) if ragged is None else ragged.run(self._run, work, clock)

    def _run(self, work: Work, clock: ClockNs) -> Results:
        model, stream = self._model, self._stream
        with self._library.on_device(self._memory.place.number), stream.batch():
            feed, copied, total = model.gather_on(stream, work)
            gathered_ns = clock()
            made = self._execute(feed)
            names, indices = model.selected(work.wanted)
            outputs = model.deliver(stream, work, indices, [made[name] for name in names], total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _execute(self, feed: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
        """Enqueue one execution on the stream. Returns every output by name."""
        context, stream = self._context, self._stream.handle.address
        shapes = {name: array.shape for name, array in feed.items()}
        profile = choose(self._profiles, shapes, self._model.name)
        if profile.index != self._profile:
            self._check(context.set_optimization_profile_async(profile.index, stream), "set_optimization_profile_async")
            self._profile = profile.index
        for name, array in feed.items():
            self._check(array.place.is_gpu, f"room for input '{name}' on {self._memory.place}")
            self._check(context.set_input_shape(name, array.shape), f"set_input_shape of '{name}'")
        missing = context.infer_shapes()
        self._check(not missing, f"infer_shapes, which misses {', '.join(missing)}")
        for name, array in feed.items():
            self._check(context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        made, asking = self._bind_outputs()
        self._check(context.execute_async_v3(stream), "execute_async_v3")
        if asking:
            self._memory.device.synchronize(self._memory.device.record(self._stream.handle))
        for name, (allocator, blocks, spec) in asking.items():
            self._check(allocator.shape is not None and bool(blocks), f"the output allocator of '{name}'")
            made[name] = self._stream.adopt(blocks[-1], blocks[-1].address, spec.numpy, allocator.shape or ())
        return made

    def _bind_outputs(self) -> tuple[dict[str, DeviceArray], dict[str, tuple[Allocator, list[Block], DType]]]:
        """The outputs in buffers allocated here; and those that TensorRT allocates, each with its allocator, the blocks
        it has taken so far, and its data type.
        """
        made: dict[str, DeviceArray] = {}
        asking: dict[str, tuple[Allocator, list[Block], DType]] = {}
        for name, port in self._model.made.items():
            assert port.dtype is not None  # other types were refused when the model was loaded
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                blocks: list[Block] = []
                allocator = self._library.allocator(partial(self._take, blocks))
                self._check(self._context.set_output_allocator(name, allocator), f"set_output_allocator of '{name}'")
                asking[name] = allocator, blocks, port.dtype
                continue
            array = made[name] = self._stream.empty(port.dtype.numpy, shape)
            self._check(array.place.is_gpu, f"room for output '{name}' on {self._memory.place}")
            self._check(self._context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        return made, asking

    def _take(self, blocks: list[Block], nbytes: int) -> int:
        """Take memory for an output, and append its block to `blocks`. Returns the address."""
        block = self._memory.pool.take(nbytes, self._stream.handle)
        if block is None:
            return 0  # tells TensorRT that the allocation failed
        blocks.append(block)
        return block.address

    def _check(self, succeeded: bool, what: str) -> None:
        if not succeeded:
            raise ModelFailed(f"model '{self._model.name}' failed: TensorRT: {what} failed; the log says why")


class TensorRtDeviceInstance(TensorRtInstance):
    """An instance that reads its inputs where they are, and leaves its outputs where their readers are."""

    is_of_any_thread = False  # no test has run one context on several threads yet

    @property
    def place(self) -> MemoryPlace:
        """The memory it computes in."""
        return self._memory.place


class TensorRtBackend:
    """The backend. A version is a file `model.plan`."""

    name = "tensorrt"
    default_filename = "model.plan"
    default_instance_count = 1
    gpu_instance_count = 1

    def __init__(self, library: Callable[[], TensorRt] = tensorrt_library) -> None:
        self._library = library

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """Nothing for a configuration that has the data type and the dims of its inputs and outputs. Otherwise the plan
        is opened, which takes a GPU that it was built for. As on Triton, it completes tensors that the configuration
        names, too.
        """
        if _is_whole(config):
            return Completion()
        file = _File(self._library, config, files)
        engine = file.open(0)
        signature = plan_signature(engine, file.shown)
        return completion_of(config, signature, profiles_of(engine, signature), file.shown)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises Invalid if there is no plan. What is in it can be read on its GPU only, when the model is loaded."""
        files.model_file(config, self.default_filename)

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


def _is_whole(config: ModelConfig) -> bool:
    """Whether the plan has nothing to add. A tensor without a data type is only in the JSON of the configuration."""
    listed = [*config.json.get("input", ()), *config.json.get("output", ())]
    return (
        bool(config.inputs and config.outputs)
        and all(spec.dims for spec in (*config.inputs, *config.outputs))
        and all(tensor["data_type"] != "TYPE_INVALID" for tensor in listed)
    )


class TensorRtModel:
    """One version of a model: its plan, opened on every GPU that has an instance."""

    is_pure = True
    may_run_inline = False  # waiting for a device would block the event loop

    def __init__(self, config: ModelConfig, file: _File, signature: Signature, profiles: tuple[Profile, ...]) -> None:
        self._config = config
        self._file = file
        self._profiles = profiles
        self._tensors = ModelTensors(config, signature)

    def instance(self, name: str, group: InstanceGroup) -> TensorRtInstance:
        gpu = group.gpus[0]
        kind = TensorRtDeviceInstance if stays_on_device(self._config) else TensorRtInstance
        profiles = profiles_of_group(self._profiles, group.profiles, self._config.name, self._file.shown)
        open_engine = partial(self._file.open, gpu)
        return kind(self._file.library, self._tensors, devices()[gpu], open_engine, profiles)

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
