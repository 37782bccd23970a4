"""Runs of an ONNX model on tensors that stay on a GPU.

Decided here: every tensor is bound by its address, inputs where they lie and outputs in room of ours wherever their
shape is known before; where it is not, onnxruntime makes the room and it is adopted. Each run has a binding of its own,
because a binding that is run again writes its outputs where the last ones are, which somebody may still read. The
session computes on the instance's stream and does not wait for it. Strings and what else must lie on the host go
another way (onnx_instance.py).

It does not import onnxruntime: it is given what opens a session, and what makes a run's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.device import DeviceWork
from flowserve.backends.onnx_signature import Port
from flowserve.backends.onnx_values import checked, cleaned, fed_shape, made_shape
from flowserve.errors import ModelFailed
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, TensorSpec

WRONG_ROWS: Final = "its first dimension is no batch dimension, so set max_batch_size to 0"
NO_GRAPH: Final = -1  # onnxruntime's word for a run that is none
_GPU: Final = "cuda"  # its word, too
_ONNX_BFLOAT16: Final = 16  # TensorProto.DataType; the one type that numpy has no name for


class Facts(Protocol):
    """What a run asks of its model."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ports: list[Port]
    output_ports: list[Port]
    is_batching: bool

    def asked(self, wanted: Sequence[tuple[str, ...]]) -> tuple[list[str], list[int]]: ...


class OnnxDeviceInstance:
    """A session and a stream on one GPU. `open_session` gets the address of that stream, `run_options` the number of
    the captured graph that runs are, or NO_GRAPH.
    """

    def __init__(
        self,
        model: Facts,
        memory: DeviceMemory,
        open_session: Callable[[int], Any],
        run_options: Callable[[int], Any],
    ) -> None:
        self.place = memory.place
        self.is_of_any_thread = True
        self._model = model
        self._memory = memory
        self._open_session = open_session
        self._options = run_options(NO_GRAPH)

    def open(self) -> None:
        self._stream = DeviceStream(self._memory)
        try:
            self._session: Any = self._open_session(self._stream.handle.address)
        except Exception:
            self._stream.close()
            raise

    def close(self) -> None:
        self._stream.wait()
        del self._session  # it computes on the stream until then
        self._stream.close()

    def run(self, work: Work, clock: ClockNs) -> Results:
        model, stream = self._model, self._stream
        binding = self._session.io_binding()
        with stream.batch():
            copied, total = self._bind_inputs(binding, work)
            _, indices = model.asked(work.wanted)
            made = [self._bind_output(binding, j, total) for j in indices]
            gathered_ns = clock()
            self._compute(binding, self._options)
            values = binding.get_outputs() if None in made else ()
            arrays = [
                self._adopted(values[k], model.outputs[j]) if array is None else array
                for k, (j, array) in enumerate(zip(indices, made, strict=True))
            ]
            outputs = self._delivered(work, indices, arrays, total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _compute(self, binding: Any, options: Any) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            text = cleaned(str(error))
            raise ModelFailed(f"model '{self._model.name}' failed: onnxruntime: {text}") from error

    def _delivered(
        self, work: Work, indices: Sequence[int], arrays: Sequence[DeviceArray], total: int
    ) -> list[list[Tensor | None]]:
        """The members' outputs, of which the asked ones are `arrays`."""
        model = self._model
        judged = [
            checked(array, model.outputs[j], total, model.name, WRONG_ROWS)
            for j, array in zip(indices, arrays, strict=True)
        ]
        read_at = work.read_at if isinstance(work, DeviceWork) else None
        chosen = None if read_at is None else [read_at[j] for j in indices]
        outputs: list[list[Tensor | None]] = [[None] * len(work.rows)] * len(model.outputs)
        for j, tensors in zip(indices, self._stream.deliver(judged, self._rows(work, total), chosen), strict=True):
            outputs[j] = [*tensors]
        return outputs

    def _bind_inputs(self, binding: Any, work: Work) -> tuple[list[int], int]:
        """The bytes of each input that were copied, and the batch's rows, -1 for a model without batching."""
        model = self._model
        copied = [0] * len(model.inputs)
        total = 0 if model.is_batching else -1
        for i, (spec, port) in enumerate(zip(model.inputs, model.ports, strict=True)):
            present = [tensor for tensor in work.inputs[i] if tensor is not None]
            if not present:
                continue  # an input of a model without batching, left to its default
            array, copied[i] = self._stream.gather(present)
            if model.is_batching:
                total = len(array)
            shape = fed_shape(array.shape, spec, port, is_batching=model.is_batching)
            self._bind_input(binding, spec, array, shape)
        return copied, total

    def _bind_input(self, binding: Any, spec: TensorSpec, array: DeviceArray, shape: tuple[int, ...]) -> None:
        binding.bind_input(spec.name, *self._where(array), _element_type(spec), shape, array.address)

    def _bind_room(self, binding: Any, spec: TensorSpec, array: DeviceArray) -> None:
        binding.bind_output(spec.name, *self._where(array), _element_type(spec), array.shape, array.address)

    def _rows(self, work: Work, total: int) -> list[int] | None:
        if total < 0:
            return None
        if total == sum(work.rows):
            return work.rows
        # A member of no rows counts as one to the batcher.
        return [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]

    def _bind_output(self, binding: Any, j: int, total: int) -> DeviceArray | None:
        spec, port = self._model.outputs[j], self._model.output_ports[j]
        shape = made_shape(spec, port, total)
        if shape is None:
            binding.bind_output(spec.name, _GPU, self.place.number)
            return None
        array = self._stream.empty(spec.dtype.numpy, shape)
        self._bind_room(binding, spec, array)
        return array

    def _adopted(self, value: Any, spec: TensorSpec) -> DeviceArray:
        return self._stream.adopt(value, value.data_ptr(), spec.dtype.numpy, tuple(value.shape()))

    def _where(self, array: DeviceArray) -> tuple[str, int]:
        """Memory of the host is pinned or not: to onnxruntime it is the CPU's, and it copies."""
        return (_GPU, self.place.number) if array.place.is_gpu else ("cpu", 0)


def _element_type(spec: TensorSpec) -> Any:
    return _ONNX_BFLOAT16 if spec.dtype is DType.BF16 else spec.dtype.numpy.type
