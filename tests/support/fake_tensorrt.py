"""A fake of TensorRT on a fake device (fake_device.py): it allows only documented use.

Decides the allowed order of calls. A context refuses shapes before its profile, addresses that are not on its device,
an execution before every shape and every address is set, and shapes that were changed and not inferred again; addresses
are cleared after each execution, so that none is used twice. The shape of an output that TensorRT allocates must not be
read before a synchronisation. It returns False if the real library does, and raises AssertionError if the real library
would fail silently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from flowserve.backends.tensorrt.library import MakeRoom
from flowserve.values import Array, gpu_memory
from tests.support.fake_device import FakeMachine, FakeStream

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
_NUMPY = {"FLOAT": "f4", "HALF": "f2", "INT32": "i4", "INT64": "i8", "INT8": "i1", "UINT8": "u1", "BOOL": "?"}


@dataclass(frozen=True)
class FakeWord:
    name: str


@dataclass(frozen=True)
class FakePlan:
    """`inputs` and `outputs`: (type, shape) by name, -1 where it varies. `profiles`: the smallest, best and largest
    shape of every input. `compute`: arrays in, arrays out, by name. `shapes`: computes the outputs' shapes from the
    inputs', with -1 where only the execution determines it. `gpus`: those that it was built for.
    """

    inputs: Mapping[str, tuple[str, Shape]]
    outputs: Mapping[str, tuple[str, Shape]]
    profiles: Sequence[Mapping[str, tuple[Shape, Shape, Shape]]]
    compute: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    shapes: Callable[[Shapes], Shapes]
    host_tensors: frozenset[str] = frozenset()
    gpus: Sequence[int] = (0, 1)


@dataclass
class FakeTensorRt:
    """`plans` by the contents of their files. `calls` are those of all contexts."""

    machine: FakeMachine
    plans: Mapping[bytes, FakePlan]
    version: str = "10.13"
    calls: list[str] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)

    def read(self, plan: bytes) -> FakeEngine | None:
        number = getattr(self.machine.current, "number", -1)
        assert number >= 0, "no device is current"
        found = self.plans.get(plan)
        if found is None or number not in found.gpus:
            return None
        self.engines.append(FakeEngine(self, found, number))
        return self.engines[-1]

    def allocator(self, make_room: MakeRoom) -> FakeAllocator:
        return FakeAllocator(self.machine, make_room)

    def on_device(self, number: int) -> AbstractContextManager[Any]:
        return self.machine.devices[number].current()


class FakeAllocator:
    def __init__(self, machine: FakeMachine, make_room: MakeRoom) -> None:
        self._machine = machine
        self.make_room = make_room
        self.told: tuple[Shape, FakeStream, int] | None = None

    @property
    def shape(self) -> Shape | None:
        if self.told is None:
            return None
        shape, stream, moment = self.told
        assert self._machine.host.get(stream.number, 0) >= moment, "its shape is not known before a synchronisation"
        return shape


class FakeEngine:
    def __init__(self, library: FakeTensorRt, plan: FakePlan, number: int) -> None:
        self.library = library
        self.plan = plan
        self.number = number
        self.num_io_tensors = len(plan.inputs) + len(plan.outputs)
        self.num_optimization_profiles = len(plan.profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self.plan.inputs, *self.plan.outputs][index]

    def get_tensor_mode(self, name: str) -> FakeWord:
        return FakeWord("INPUT" if name in self.plan.inputs else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> FakeWord:
        return FakeWord(self.tensor(name)[0])

    def get_tensor_shape(self, name: str) -> Shape:
        return self.tensor(name)[1]

    def get_tensor_location(self, name: str) -> FakeWord:
        return FakeWord("HOST" if name in self.plan.host_tensors else "DEVICE")

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Shape]:
        return self.plan.profiles[profile_index][name]

    def create_execution_context(self) -> FakeContext:
        assert self.library.machine.current.number == self.number, "another device is current"
        return FakeContext(self)

    def tensor(self, name: str) -> tuple[str, Shape]:
        return {**self.plan.inputs, **self.plan.outputs}[name]


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._machine = engine.library.machine
        self._calls = engine.library.calls
        self._profile = -1
        self._shapes: dict[str, Shape] = {}
        self._inferred: dict[str, Shape] | None = None
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, FakeAllocator] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._calls.append(f"profile {profile_index}")
        self._stream(stream_handle)
        self._profile = profile_index
        self._shapes, self._inferred = {}, None
        return profile_index < len(self._engine.plan.profiles)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        assert self._profile >= 0, "a shape before the profile"
        low, _, high = self._engine.plan.profiles[self._profile][name]
        self._shapes[name] = shape
        self._inferred = None
        return len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def infer_shapes(self) -> list[str]:
        missing = [name for name in self._engine.plan.inputs if name not in self._shapes]
        self._inferred = None if missing else {**self._engine.plan.shapes(self._shapes)}
        return missing

    def get_tensor_shape(self, name: str) -> Shape:
        assert self._inferred is not None, "shapes were changed and not inferred"
        return self._inferred[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        found = self._machine.find(memory, 1)
        place = None if found is None else found.place
        assert place == gpu_memory(self._engine.number), f"'{name}' is not on the device"
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: FakeAllocator) -> bool:
        self._allocators[name] = output_allocator
        return name in self._engine.plan.outputs

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._calls.append("execute")
        plan, machine = self._engine.plan, self._machine
        assert machine.current.number == self._engine.number, "another device is current"
        assert self._inferred is not None, "shapes were changed and not inferred"
        unbound = {*plan.inputs, *plan.outputs} - {*self._addresses, *self._allocators}
        assert not unbound, f"nothing is bound to {unbound}"
        stream = self._stream(stream_handle)
        with machine.lock:
            arrays = {name: self._array(name, self._shapes[name]) for name in plan.inputs}
            reads = [machine.find(self._addresses[name], array.nbytes) for name, array in arrays.items()]
            answers = plan.compute(arrays)
            for name, allocator in self._allocators.items():
                address = allocator.make_room(max(answers[name].nbytes, 1))
                if not address:
                    return False
                self._addresses[name] = address
            writes = [machine.find(self._addresses[name], answer.nbytes) for name, answer in answers.items()]
            machine.enqueue(stream, reads, writes)
            for name, answer in answers.items():
                self._array(name, answer.shape)[...] = answer
            for name, allocator in self._allocators.items():
                allocator.told = (answers[name].shape, stream, stream.clock[stream.number])
        self._addresses, self._allocators = {}, {}
        return True

    def _array(self, name: str, shape: Shape) -> Array:
        dtype = np.dtype(_NUMPY[self._engine.tensor(name)[0]])
        raw = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(self._addresses[name])
        return np.ctypeslib.as_array(raw).view(dtype).reshape(shape)

    def _stream(self, handle: int) -> FakeStream:
        stream = self._machine.streams[handle - 1]
        assert stream.number == handle
        assert stream.device == self._engine.number, "a stream of another device"
        return stream
