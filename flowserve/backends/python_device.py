"""Python models whose tensors stay on a GPU: instances there, on threads, with FORCE_CPU_ONLY_INPUT_TENSORS "no".

Decided here: that such a model gets its inputs where they lie (those from clients lie on the host), and that what it
answers with on its own GPU stays there for who reads it there. Models work on streams of their own, of which nothing is
known: so whoever made an input is waited for before the model sees it, and the whole device after it has answered.
Everything else is as for other Python models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.device import DeviceWork
from flowserve.backends.python import PythonInstance
from flowserve.backends.python_answers import AnswerReader
from flowserve.backends.python_requests import GivenRequest
from flowserve.backends.python_sender import Executed
from flowserve.backends.python_source import Source
from flowserve.backends.shapes import fits, shown
from flowserve.backends.triton_objects import InferenceResponse
from flowserve.backends.triton_tensors import GpuTensor, Tensor, inner_shape
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import ModelFailed
from flowserve.graph.conversion import reshaped
from flowserve.memory.delivery import ON_HOST
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.dlpack import Foreign
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor as Rows
from flowserve.values import TensorSpec


class GivenOnDevice(GivenRequest):
    """A member of a batch, some of whose tensors lie on a GPU."""

    __slots__ = ()

    def inputs(self) -> list[Tensor]:
        """The tensors that were given, in the configuration's order, each where it lies."""
        is_first = self._inputs is None
        found = super().inputs()
        if is_first:
            rows = [column[self._member] for column in self._work.inputs if column[self._member] is not None]
            specs = [
                spec
                for spec, column in zip(self._model.inputs, self._work.inputs, strict=True)
                if column[self._member] is not None
            ]
            for i, (spec, tensor) in enumerate(zip(specs, rows, strict=True)):
                if isinstance(tensor, DeviceTensor):
                    found[i] = _given(spec, tensor)
        return found


class DeviceAnswerReader(AnswerReader):
    """Reads the answers to one batch after another, of which some lie on the instance's GPU and may stay there."""

    def __init__(self, config: ModelConfig, stream: DeviceStream) -> None:
        super().__init__(config)
        self._has_all = False  # what stays on the GPU is taken before the others are looked at
        self._stream = stream

    def read(self, responses: list[InferenceResponse], work: Work) -> Results:
        """As everywhere; within the stream's batch."""
        kept: list[tuple[int, int, Rows]] = []
        wrong: dict[int, ModelFailed] = {}
        for m, response in enumerate(responses):
            if type(response) is not InferenceResponse or response.has_error():
                continue
            there = [one for one in response._outputs if self._is_here(one)]
            names = {one._name for one in response._outputs}
            if not there or len(names) < len(response._outputs):  # one that is there twice is refused as everywhere
                continue
            rest = [one for one in response._outputs if not self._is_here(one)]
            responses[m] = InferenceResponse(rest, parameters=response._parameters)
            for one in there:
                output = self._outputs.get(one._name)
                if output is None:
                    self._strays.tell(one._name)
                    continue
                if one._name not in work.wanted[m]:
                    continue
                assert isinstance(one, GpuTensor)
                text = self._disagreement(one, output.spec, output.inner, work.rows[m])
                if text:
                    wrong[m] = self._unlike(one._name, text)
                    break
                kept.append((output.j, m, self._taken(one, output.spec, output.j, m, work)))
        results = super().read(responses, work)
        for j, m, tensor in kept:
            results.outputs[j][m] = tensor
        if wrong:
            results.errors = {**results.errors, **wrong}
        return results

    def _is_here(self, tensor: Tensor) -> bool:
        return isinstance(tensor, GpuTensor) and tensor._there.device == self._stream.place.number

    def _disagreement(self, tensor: GpuTensor, spec: TensorSpec, inner: tuple[int, ...], rows: int) -> str:
        if tensor.dtype() != spec.dtype.numpy:
            return f"the configuration promises {spec.dtype}, the model answered {tensor.dtype()}"
        shape = tuple(tensor.shape())
        lead = (rows,) if self._batches else ()
        if shape[: len(lead)] != lead or not fits(shape[len(lead) :], inner):
            return f"the configuration promises shape {shown((*lead, *inner))}, the model answered {shown(shape)}"
        return ""

    def _taken(self, tensor: GpuTensor, spec: TensorSpec, j: int, m: int, work: Work) -> Rows:
        there = tensor._there
        array = self._stream.adopt(tensor, there.address, there.dtype, there.shape)
        if spec.reshape is not None:
            lead = there.shape[: 1 if self._batches else 0]
            array = array.reshape(lead + reshaped(there.shape[len(lead) :], spec.reshape, spec.dims))
        read_at = work.read_at[j][m] if isinstance(work, DeviceWork) and work.read_at is not None else ON_HOST
        rows = [len(array)] if self._batches else None
        return self._stream.deliver([array], rows, [[read_at]])[0][0]


class DevicePythonInstance(PythonInstance):
    """One object of the model's class, on a GPU."""

    _given: type[GivenRequest] = GivenOnDevice

    def __init__(self, source: Source, name: str, group: InstanceGroup, memory: DeviceMemory) -> None:
        super().__init__(source, name, group)
        self.place = memory.place
        self.is_of_any_thread = False  # models keep things by thread
        self._memory = memory

    def open(self) -> None:
        self._stream = DeviceStream(self._memory)
        self._answers = DeviceAnswerReader(self._source.config, self._stream)
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
                device.settle()  # what it has begun may still read its inputs
                raise

    def _results(
        self, requests: Sequence[Executed], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        self._memory.device.settle()
        return super()._results(requests, responses, work, gathered_ns, computed_ns)

    def close(self) -> None:
        super().close()
        self._stream.close()


def _given(spec: TensorSpec, tensor: DeviceTensor) -> Tensor:
    array = tensor.elements
    shape = array.shape if spec.reshape is None else inner_shape(array.shape, spec)
    return GpuTensor(spec.name, Foreign(array.address, array.dtype, shape, array.place.number, tensor))
