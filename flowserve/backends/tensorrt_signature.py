"""What a TensorRT plan says about its inputs and outputs, in the words in which ONNX files say it.

Decided here: which of TensorRT's types tensors have here, which tensors a plan may have, and how many rows its profiles
take. How that meets a configuration is onnx_signature.py's, as for the ONNX files that plans are built from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flowserve.backends.onnx_signature import Port, Signature, completion
from flowserve.backends.tensorrt_api import Engine
from flowserve.backends.tensorrt_profiles import Profile
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


def signature_of(engine: Engine, file: str) -> Signature:
    """Raises Unsupported for what is not served: shape tensors, which lie on the host."""
    ports: dict[str, list[Port]] = {"INPUT": [], "OUTPUT": []}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name).name != "DEVICE":
            raise Unsupported(f"{file}: tensor '{name}' is a shape tensor, which is not supported yet")
        word = engine.get_tensor_dtype(name).name
        shape = tuple(engine.get_tensor_shape(name))
        ports[engine.get_tensor_mode(name).name].append(Port(name, _TYPES.get(word, word), shape))
    return Signature(tuple(ports["INPUT"]), tuple(ports["OUTPUT"]))


def profiles_of(engine: Engine, signature: Signature) -> tuple[Profile, ...]:
    return tuple(
        Profile(index, {port.name: _range(engine, port.name, index) for port in signature.inputs})
        for index in range(engine.num_optimization_profiles)
    )


def completion_of(config: ModelConfig, signature: Signature, profiles: Sequence[Profile], file: str) -> Completion:
    """What the configuration lacks; batches are as large as the largest profile takes."""
    found = completion(config, signature, file)
    rows = max((profile.rows_max for profile in profiles), default=0)
    return found if found.max_batch_size is None else replace(found, max_batch_size=rows)


def chosen(profiles: Sequence[Profile], wanted: Sequence[int], model: str, file: str) -> tuple[Profile, ...]:
    """The profiles that a group names, all where it names none. Raises Invalid for one that is not there."""
    for index in wanted:
        if index >= len(profiles):
            raise Invalid(f"model '{model}': {file} has no optimisation profile {index}; it has {len(profiles)}")
    return tuple(profiles[index] for index in wanted) or tuple(profiles)


def _range(engine: Engine, name: str, index: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    smallest, best, largest = engine.get_tensor_profile_shape(name, index)
    return tuple(smallest), tuple(best), tuple(largest)
