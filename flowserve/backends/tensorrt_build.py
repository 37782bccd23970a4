"""A TensorRT plan out of an ONNX file, for the GPU it is built on.

Decided here: which of TensorRT's calls that takes, the same in versions 10 and 11, and what is asked of whoever builds
one: a range of shapes for every input that varies. It is given the library's module, and knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowserve.backends.shapes import shown
from flowserve.errors import Invalid, Unsupported

Shape = tuple[int, ...]
# The smallest, best and largest shape of each input that varies.
Ranges = Mapping[str, tuple[Shape, Shape, Shape]]


class Library(Protocol):
    """TensorRT's module, and what it logs through."""

    trt: Any
    logger: Any
    version: str


def build_plan(
    library: Library, onnx: bytes, profiles: Sequence[Ranges], *, half: bool = False, workspace_bytes: int = 0
) -> bytes:
    """The plan, with these optimisation profiles. `half` allows FP16 where it is faster; `workspace_bytes` 0 is as much
    as there is. May take minutes. Raises Invalid with what TensorRT says of the file, or what no profile says.
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
                shape = shown(inputs[name])
                raise Invalid(
                    f"input '{name}' has shape {shape}: say between which shapes with --profile {name}:MIN:OPT:MAX"
                )
        for name in ranges:
            if name not in inputs:
                raise Invalid(f"the ONNX file has no input '{name}', it has {', '.join(inputs)}")


def _written(ranges: Ranges) -> str:
    return ", ".join(f"'{name}' {' '.join(map(shown, shapes))}" for name, shapes in ranges.items())
