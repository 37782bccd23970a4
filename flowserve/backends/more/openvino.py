"""Backend `openvino`: OpenVINO's `model.xml` with its `model.bin`, and ONNX files, computed on the CPU.

Decides how Triton's parameters become properties of a compiled model, that the instances of a version share one
compiled model with an infer request each, by which names tensors are known, and that outputs are copied out of the
request, whose next run overwrites them.

The only module that imports openvino. It does not know batches or requests. Callers: the registry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flowserve.backends.library.backend import LibraryBackend
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import Port, Signature
from flowserve.config.types import ModelConfig, instances_of
from flowserve.values import Array, DType

HINTS: Final = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT", "UNDEFINED")
_DTYPES: Final = {
    "boolean": DType.BOOL,
    "u8": DType.UINT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "f64": DType.FP64,
}


class OpenVino:
    """The library behind the backend."""

    name = "openvino"
    title = "OpenVINO"
    requirement = "flowserve[openvino]"
    default_filename = "model.xml"
    default_execution = "auto"
    strings_are_text = True
    instances = 1
    ignored: Mapping[str, str] = MappingProxyType(
        {
            "ENABLE_BATCH_PADDING": "batches are run in the size that they have",
            "SKIP_OV_DYNAMIC_BATCHSIZE": "it is a name of older versions of OpenVINO",
            "RESHAPE_IO_LAYOUTS": "shapes are those of the file",
        }
    )

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        return ["model.xml", "model.onnx"]

    def modules(self, path: Path) -> Sequence[str]:
        return ["openvino"]

    def shares(self, source: ModelSource) -> int:
        return 1

    def signature(self, source: ModelSource) -> Signature:
        _properties(source)
        return _signature(_core(source).read_model(source.path))

    def open(self, source: ModelSource) -> Compiled:
        return Compiled(source)

    def explain(self, error: Exception) -> str:
        """Its last line that is not a position in the source code."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kept = [line for line in lines if not line.startswith(("Exception from src", "Check '"))] or lines
        return " ".join(kept)[:500] or type(error).__name__


class Compiled:
    """One file, compiled for its device."""

    def __init__(self, source: ModelSource) -> None:
        core = _core(source)
        model = core.read_model(source.path)
        self.signature = _signature(model)
        self._compiled = core.compile_model(model, source.text("TARGET_DEVICE", "CPU"), _properties(source))

    def session(self) -> Execute:
        import openvino

        request = self._compiled.create_infer_request()
        inputs = {port.name: i for i, port in enumerate(self.signature.inputs)}
        outputs = {port.name: j for j, port in enumerate(self.signature.outputs)}
        tensor = openvino.Tensor

        def run(names: list[str], feed: Feed) -> Sequence[Any]:
            # The infer request keeps its inputs until its next run.
            for name, array in feed.items():
                request.set_input_tensor(inputs[name], tensor(_writeable(array), shared_memory=True))
            request.infer()
            return [request.get_output_tensor(outputs[name]).data.copy() for name in names]

        return run


def make_backend() -> LibraryBackend:
    return LibraryBackend(OpenVino())


def _core(source: ModelSource) -> Any:
    import openvino

    core = openvino.Core()
    extension = source.text("CPU_EXTENSION_PATH")
    if extension:
        core.add_extension(extension)
    return core


def _properties(source: ModelSource) -> dict[str, str]:
    """Properties of the compiled model. By default each instance has a stream with its share of the cores. Raises
    Problems.
    """
    instances = max(1, len(instances_of(source.config)))
    made = {
        "NUM_STREAMS": str(source.integer("NUM_STREAMS", instances, 1)),
        "INFERENCE_NUM_THREADS": str(
            source.integer("INFERENCE_NUM_THREADS", source.integer("CPU_THREADS_NUM", source.threads * instances, 1), 1)
        ),
    }
    if source.text("PERFORMANCE_HINT"):
        made["PERFORMANCE_HINT"] = source.choice("PERFORMANCE_HINT", HINTS, "LATENCY")
    return made


class _SameMemory:
    """The memory of an array for numpy."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _writeable(array: Array) -> Array:
    """A view that may be written to. OpenVINO takes no other array without a copy, and only reads its inputs."""
    if array.flags.writeable or not array.size:
        return array
    return np.asarray(_SameMemory(array))


def _signature(model: Any) -> Signature:
    return Signature(tuple(map(_port, model.inputs)), tuple(map(_port, model.outputs)))


def _port(tensor: Any) -> Port:
    names = sorted(tensor.names)
    # The converter names an output's tensor; a file without such a name has its node's.
    name = tensor.any_name if names else tensor.node.friendly_name
    shape = tensor.partial_shape
    dims = tuple(-1 if dim.is_dynamic else dim.get_length() for dim in shape) if shape.rank.is_static else (-1,)
    kind = tensor.element_type.get_type_name()
    return Port(name, _DTYPES.get(kind), dims, type=kind)
