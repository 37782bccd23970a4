"""A batch as a `ModelInferRequest`, and a `ModelInferResponse` as the outputs of a batch.

Decides that tensors are raw bytes in the order of the configuration, which outputs are asked for, which parameters of
its requests a batch has, that responses with typed contents are read too, and what is wrong with a response. Does not
know connections or servers. Caller: `backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from flowserve.backends.base import Work
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.types import inner_shape, outer_shape
from flowserve.grpc.decode import CONTENTS, RAW_OUTPUT, split, with_blocks
from flowserve.grpc.service_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from flowserve.memory import raw
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import BY_WIRE, Array, DType, Request, TensorSpec


class Batches:
    """Packs the batches of one model. `name` and `version` are those on the other server."""

    def __init__(self, config: ModelConfig, name: str, version: str) -> None:
        self._config = config
        self._name = name
        self._version = version
        self._outputs = {spec.name: j for j, spec in enumerate(config.outputs)}

    def pack(self, work: Work) -> tuple[bytes, list[int]]:
        """The request for a batch as a message, and the bytes of each input that were copied to make it contiguous."""
        message = ModelInferRequest(model_name=self._name, model_version=self._version)
        copied = [0] * len(self._config.inputs)
        blocks: list[bytes | memoryview] = []
        for i, spec in enumerate(self._config.inputs):
            column = work.inputs[i]
            if column.lacks_some:  # then all do: the members of a batch are of one kind
                continue
            if self._config.max_batch_size:
                array, copied[i] = gather(column, HOST)
            else:
                array = column.arrays[0]
            shape = inner_shape(array.shape, spec)
            message.inputs.add(name=spec.name, datatype=spec.dtype.wire, shape=shape)
            blocks.append(
                raw.encode(np.ascontiguousarray(array) if spec.dtype is not DType.BYTES else array, spec.dtype)
            )
        for name in self._wanted(work):
            message.outputs.add(name=name)
        if len(work.requests) == 1:  # a batch of several has no id and no parameters of its own
            self._add_facts(message, work)
        _add_limits(message, work.requests)
        return with_blocks(message.SerializeToString(), blocks), copied

    def _wanted(self, work: Work) -> list[str]:
        names = {name for one in work.wanted for name in one}
        return sorted(names, key=self._outputs.__getitem__)

    def _add_facts(self, message: ModelInferRequest, work: Work) -> None:
        (request,) = work.requests
        message.id = request.id
        for name, value in request.parameters.items():
            message.parameters[name].CopyFrom(_parameter(value))

    def unpack(self, data: bytes, rows: Sequence[int]) -> list[Sequence[Tensor | None]]:
        """The outputs of a batch from a message, those left out as None: views of it. Raises ModelFailed if it does not
        fit the batch.
        """
        made: list[Sequence[Tensor | None]] = [[None] * len(rows) for _ in self._config.outputs]
        parts = split(data, RAW_OUTPUT)
        try:
            message = ModelInferResponse.FromString(data if parts is None else parts[0])
        except DecodeError:
            raise ModelFailed("the response is no ModelInferResponse message") from None
        blocks: Sequence[bytes | memoryview] = message.raw_output_contents if parts is None else parts[1]
        if blocks and len(blocks) != len(message.outputs):
            raise ModelFailed(f"the response has {len(message.outputs)} outputs and {len(blocks)} raw contents")
        for k, output in enumerate(message.outputs):
            j = self._outputs.get(output.name)
            if j is None:
                continue
            spec = self._config.outputs[j]
            array = self._read(output, spec, blocks[k] if blocks else None)
            if not self._config.max_batch_size:
                made[j] = [Tensor(array)]
            elif array.shape[:1] != (sum(rows),):
                raise ModelFailed(f"output '{spec.name}' has shape {[*array.shape]} for a batch of {sum(rows)} rows")
            else:
                made[j] = Column.whole(array, rows)
        return made

    def _read(self, output: Any, spec: TensorSpec, block: bytes | memoryview | None) -> Array:
        dtype = BY_WIRE.get(output.datatype)
        if dtype is not spec.dtype:
            raise ModelFailed(f"output '{spec.name}' is {output.datatype or 'of no type'}, not {spec.dtype}")
        shape = tuple(output.shape)
        try:
            count = raw.element_count(spec.name, shape, dtype)
            if block is not None:
                raw.check_size(spec.name, self._name, dtype, count, len(block))
                array = raw.decode(block, spec.name, self._name, dtype, shape, count)
            else:
                array = _typed(output.contents, dtype, count).reshape(shape)
            return array.reshape(outer_shape(shape, spec, batches=self._config.max_batch_size > 0))
        except (Invalid, ValueError) as error:
            raise ModelFailed(f"output '{spec.name}' cannot be read: {error}") from None


def _add_limits(message: ModelInferRequest, requests: Sequence[Request]) -> None:
    """Set the batch's timeout in the other server's queue: the longest of its requests' timeouts, if each has one.
    Priorities apply only to the queue here.
    """
    timeouts = [request.timeout_us for request in requests]
    if timeouts and all(timeouts):
        message.parameters["timeout"].int64_param = max(timeouts)


def _typed(contents: Any, dtype: DType, count: int) -> Array:
    values = getattr(contents, CONTENTS[dtype]) if dtype in CONTENTS else ()
    if len(values) != count:
        raise ValueError(f"{len(values)} elements, and the shape has {count}")
    if dtype is DType.BYTES:
        flat: Array = np.empty(count, np.object_)
        flat[:] = list(values)
        return flat
    return np.fromiter(values, dtype.numpy, count)


def _parameter(value: Any) -> InferParameter:
    if isinstance(value, bool):
        return InferParameter(bool_param=value)
    if isinstance(value, int):
        return InferParameter(int64_param=value)
    if isinstance(value, float):
        return InferParameter(double_param=value)
    return InferParameter(string_param=str(value))
