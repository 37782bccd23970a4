"""Model folders, instances and batches for tests of backends.

Decides how a test writes a model, opens it as the runtime would and runs a batch on it. No part is faked. Does not know
queues or graphs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.backends import registry
from flowserve.backends.base import Instance, LoadedModel, ModelFiles, Results, Work
from flowserve.config.types import InstanceGroup, ModelConfig, SourceMap
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, Request, TensorSpec


@dataclass
class Opened:
    """An open instance, with the objects that a test needs to run it."""

    config: ModelConfig
    model: LoadedModel
    instance: Instance

    def run(
        self,
        *requests: Mapping[str, Array],
        wanted: tuple[str, ...] | None = None,
        may_write: bool = False,
        about: Sequence[Request] = (),
    ) -> Results:
        """One batch of `requests`, each a mapping of input arrays by name."""
        batches = self.config.max_batch_size > 0
        names = wanted or tuple(spec.name for spec in self.config.outputs)
        rows = [len(next(iter(request.values()))) if batches else 1 for request in requests]
        inputs: list[Column] = []
        for spec in self.config.inputs:
            arrays = [request.get(spec.name) for request in requests]
            tensors = [None if a is None else Tensor(a, 0, len(a)) if batches else Tensor(a) for a in arrays]
            inputs.append(Column.of(tensors, rows))
        return self.instance.run(
            Work(
                inputs,
                rows,
                list(about) or [Request(dict(request)) for request in requests],
                [names] * len(requests),
                [[may_write] * len(requests) for _ in inputs],
            ),
            time.perf_counter_ns,
        )

    def whole(self, array: Array) -> Results:
        """A batch of single rows of `array`, for a model with one input."""
        names = tuple(spec.name for spec in self.config.outputs)
        members = len(array)
        work = Work(
            [Column.whole(array, [1] * members)],
            [1] * members,
            [Request({})] * members,
            [names] * members,
            [[True] * members],
        )
        return self.instance.run(work, time.perf_counter_ns)


@dataclass
class Repository:
    """A folder of models. Instances that it opened are closed at the end of the test."""

    path: Path

    def files(self, name: str = "m") -> ModelFiles:
        return ModelFiles(self.path, self.path / name, 1)

    def write(self, name: str, file: str, content: str | bytes) -> Path:
        path = self.path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


def values(results: Results, output: int = 0) -> list[Any]:
    """One output of all members, as lists, None where a member has none."""
    return [None if tensor is None else tensor.array.tolist() for tensor in results.outputs[output]]


def tensors(column: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors of a column in which every member has one."""
    found = [tensor for tensor in column if tensor is not None]
    assert len(found) == len(column), "a member has no tensor"
    return found


def config_of(
    backend: str = "python",
    *,
    name: str = "m",
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    max_batch_size: int = 0,
    **fields: Any,
) -> ModelConfig:
    json = fields.pop("json", None) or {
        "name": name,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "input": [
            {"name": s.name, "data_type": s.dtype.config_name, "dims": list(s.dims), "optional": s.optional}
            for s in inputs
        ],
        "output": [{"name": s.name, "data_type": s.dtype.config_name, "dims": list(s.dims)} for s in outputs],
    }
    return ModelConfig(
        name=name,
        backend=backend,
        platform="onnxruntime_onnx" if backend == "onnxruntime" else "",
        max_batch_size=max_batch_size,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        source=SourceMap(f"{name}/config.pbtxt"),
        json=json,
        **fields,
    )


def onnx_config(max_batch_size: int = 8, **fields: Any) -> ModelConfig:
    """A model of onnxruntime with input "x" and output "y", unless others are given."""
    fields.setdefault("inputs", [spec("x")])
    fields.setdefault("outputs", [spec("y")])
    return config_of("onnxruntime", max_batch_size=max_batch_size, **fields)


def spec(name: str, dims: Sequence[int] = (4,), dtype: DType = DType.FP32, **fields: Any) -> TensorSpec:
    return TensorSpec(name, dtype, tuple(dims), **fields)


def open_instance(repository: Repository, config: ModelConfig, instance: str = "", **options: str) -> Opened:
    """Load version 1 of the model and open an instance of it; the caller closes both."""
    model = registry.find(config.backend).load(config, repository.files(config.name), options)
    group = config.instance_groups[0] if config.instance_groups else InstanceGroup(config.name, "KIND_CPU")
    opened = Opened(config, model, model.instance(instance or f"{config.name}_0", group))
    opened.instance.open()
    return opened


SAMPLES: Final = {
    DType.BOOL: [True, False, True, True],
    DType.BYTES: [b"", b"a\0b", "ü".encode(), b"plain"],
}


def sample(dtype: DType, rows: int = 1) -> Array:
    """`rows` rows of four values that the type can hold exactly."""
    return np.array([SAMPLES.get(dtype, [0, 1, 2, 100])] * rows, dtype.numpy)
