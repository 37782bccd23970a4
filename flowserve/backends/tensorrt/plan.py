"""The description of a TensorRT plan: its inputs and outputs, and its optimisation profiles.

Decides which of TensorRT's data types are served, which tensors a plan may have, how many rows its profiles take, and
that a batch runs with the profile whose best shapes are nearest to its own among those that allow it (the first of
equals). Tensors are described as ONNX files describe theirs, so that onnx/signature.py compares both kinds of files
with their configuration. It does not execute anything.

Callers: backend.py and instance.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from flowserve.backends.onnx.signature import Port, Signature, completion
from flowserve.backends.shapes import shape_text
from flowserve.backends.tensorrt.library import CudaEngine, Shape
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Invalid, Unsupported

_TYPES: Final = {
    "BOOL": "tensor(bool)",
    "UINT8": "tensor(uint8)",
    "INT8": "tensor(int8)",
    "INT32": "tensor(int32)",
    "INT64": "tensor(int64)",
    "HALF": "tensor(float16)",
    "BF16": "tensor(bfloat16)",
    "FLOAT": "tensor(float)",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimisation profile. `ranges`: the smallest, best and largest shape of every input, with batch dimension."""

    index: int
    ranges: Mapping[str, tuple[Shape, Shape, Shape]]

    def allows(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            name not in shapes or _within(smallest, shapes[name], largest)
            for name, (smallest, _, largest) in self.ranges.items()
        )

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        """Difference in elements between these inputs and the best shapes."""
        return sum(abs(prod(shapes[name]) - prod(best)) for name, (_, best, _) in self.ranges.items() if name in shapes)

    @property
    def rows_max(self) -> int:
        """The largest number of rows that it takes."""
        return min((largest[0] for _, _, largest in self.ranges.values() if largest), default=0)


def plan_signature(engine: CudaEngine, file: str) -> Signature:
    """Raises Unsupported for plans with shape tensors, which are in host memory."""
    ports: dict[str, list[Port]] = {"INPUT": [], "OUTPUT": []}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name).name != "DEVICE":
            raise Unsupported(f"{file}: tensor '{name}' is a shape tensor, which is not supported yet")
        word = engine.get_tensor_dtype(name).name
        shape = tuple(engine.get_tensor_shape(name))
        ports[engine.get_tensor_mode(name).name].append(Port(name, _TYPES.get(word, word), shape))
    return Signature(tuple(ports["INPUT"]), tuple(ports["OUTPUT"]))


def profiles_of(engine: CudaEngine, signature: Signature) -> tuple[Profile, ...]:
    return tuple(
        Profile(index, {port.name: _range(engine, port.name, index) for port in signature.inputs})
        for index in range(engine.num_optimization_profiles)
    )


def completion_of(config: ModelConfig, signature: Signature, profiles: Sequence[Profile], file: str) -> Completion:
    """The fields that the configuration lacks. max_batch_size becomes what the largest profile takes."""
    found = completion(config, signature, file)
    rows = max((profile.rows_max for profile in profiles), default=0)
    return found if found.max_batch_size is None else replace(found, max_batch_size=rows)


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


def _range(engine: CudaEngine, name: str, index: int) -> tuple[Shape, Shape, Shape]:
    smallest, best, largest = engine.get_tensor_profile_shape(name, index)
    return tuple(smallest), tuple(best), tuple(largest)


def _within(smallest: Shape, shape: Shape, largest: Shape) -> bool:
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )
