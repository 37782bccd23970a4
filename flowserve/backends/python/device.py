"""Instances of Python models whose tensors stay on a GPU (FORCE_CPU_ONLY_INPUT_TENSORS "no"); they run on threads.

Decides that such a model receives its inputs in their current memory (inputs from clients are in host memory), and that
outputs on its own GPU stay there for readers on that GPU. Models work on their own streams, which are unknown here: so
the instance waits for the work that produces an input before the model gets it, and for the whole device after the
model has answered. Everything else is as in instance.py.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowserve.backends.base import ClockNs, DeviceWork, Results, Work
from flowserve.backends.python.answers import AnswerReader, Mismatch, Place, _Output
from flowserve.backends.python.instance import PythonInstance
from flowserve.backends.python.pb_utils.context import shown_as
from flowserve.backends.python.pb_utils.inference import GpuTensor, InferenceResponse, Tensor, _Input
from flowserve.backends.python.requests import BatchMember, ReceivedRequest
from flowserve.backends.python.source import ModelSource
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.graph.types import inner_shape, outer_shape
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.dlpack import ForeignTensor
from flowserve.memory.stream import ON_HOST, DeviceStream
from flowserve.memory.tensor import Tensor as Rows


@shown_as("InferenceRequest")
class DeviceRequest(ReceivedRequest):
    """A member of a batch with input tensors on a GPU."""

    __slots__ = ()

    def inputs(self) -> list[Tensor]:
        """The input tensors in the configuration's order, each in its own memory."""
        if self._inputs is None:
            found = super().inputs()
            for i, tensor in enumerate(found):
                if isinstance(tensor, _Input) and isinstance(tensor._rows, DeviceTensor):
                    array, spec = tensor._rows.elements, tensor._spec
                    shape = inner_shape(array.shape, spec)
                    there = ForeignTensor(array.address, array.dtype, shape, array.place.number, tensor._rows)
                    found[i] = GpuTensor(spec.name, there)
        return super().inputs()


class DeviceAnswerReader(AnswerReader):
    """As AnswerReader; outputs on the instance's GPU may stay there. `read` is called within the stream's batch."""

    _work: Work

    def __init__(self, config: ModelConfig, instance: str, stream: DeviceStream, *, strict: bool) -> None:
        super().__init__(config, instance, strict=strict)
        self._stream = stream

    def read(self, responses: list[InferenceResponse], work: Work) -> Results:
        self._work = work
        try:
            return super().read(responses, work)
        finally:
            del self._work

    def _is_here(self, tensor: Tensor) -> bool:
        return isinstance(tensor, GpuTensor) and tensor._there.device == self._stream.place.number

    def _on_host(self, tensor: Tensor) -> Tensor:
        return tensor if self._is_here(tensor) else super()._on_host(tensor)

    def _mismatch(self, tensor: Tensor, output: _Output, rows: int) -> Mismatch:
        if not self._is_here(tensor):
            return super()._mismatch(tensor, output, rows)
        return self._difference(tensor.dtype(), tuple(tensor.shape()), output, rows)

    def _take(
        self, responses: list[InferenceResponse], column: list[Place], output: _Output, outputs: list[Rows | None]
    ) -> int:
        rest = []
        for m, k in column:
            tensor = responses[m]._outputs[k]
            if self._is_here(tensor):
                assert isinstance(tensor, GpuTensor)
                outputs[m] = self._kept(tensor, output, m)
            else:
                rest.append((m, k))
        return super()._take(responses, rest, output, outputs) if rest else 0

    def _kept(self, tensor: GpuTensor, output: _Output, m: int) -> Rows:
        there, work = tensor._there, self._work
        array = self._stream.adopt(tensor, there.address, there.dtype, there.shape)
        array = array.reshape(outer_shape(there.shape, output.spec, batches=self._batches))
        read_at = work.read_at[output.j][m] if isinstance(work, DeviceWork) and work.read_at is not None else ON_HOST
        rows = [len(array)] if self._batches and array.shape else None
        return self._stream.deliver([array], rows, [[read_at]])[0][0]


class DevicePythonInstance(PythonInstance):
    """One object of the model's class, with tensors on a GPU."""

    _received: type[ReceivedRequest] = DeviceRequest

    def __init__(self, source: ModelSource, name: str, group: InstanceGroup, memory: DeviceMemory) -> None:
        super().__init__(source, name, group)
        self.place = memory.place
        self.is_of_any_thread = False  # models may use thread-local state
        self._memory = memory

    def open(self) -> None:
        self._stream = DeviceStream(self._memory)
        self._answers = DeviceAnswerReader(
            self._source.config, self._name, self._stream, strict=self._source.strict_outputs
        )
        try:
            super().open()
        except BaseException:
            self._stream.close()
            raise

    def run(self, work: Work, clock: ClockNs) -> Results:
        device = self._memory.device
        for column in work.inputs:
            for tensor in column:
                if isinstance(tensor, DeviceTensor) and tensor.block.ready is not None:
                    device.synchronize(tensor.block.ready)
        with self._stream.batch():
            try:
                return super().run(work, clock)
            except BaseException:
                device.settle()  # work that the model has enqueued may still read its inputs
                raise

    def _results(
        self, requests: Sequence[BatchMember], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        self._memory.device.settle()
        return super()._results(requests, responses, work, gathered_ns, computed_ns)

    def close(self) -> None:
        super().close()
        self._stream.close()
