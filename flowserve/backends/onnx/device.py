"""Runs batches on a session whose tensors stay on a GPU, also as captured CUDA graphs.

Decides that every tensor is bound by its address: inputs where they are, outputs in buffers allocated here if their
shape is known before the run, else in memory that onnxruntime allocates and that is adopted. Each run has a binding of
its own: running a binding again would overwrite its last outputs, which may still be read. The session computes on the
instance's stream and does not wait for it. Strings and other tensors that must be in host memory use instance.py.

A captured CUDA graph launches a whole run at once. It reads and writes the addresses it was captured with. So each
batch size that is captured has fixed buffers: inputs are copied into them on the device, outputs out of them, since the
next run overwrites them. This costs one copy on the device per tensor and saves one launch per node of the model.
Batches of other sizes, and sizes for whose buffers the device has no memory, run without a graph. Which sizes are
captured is decided by providers.py, how they are captured by onnxruntime.

This module does not import onnxruntime: it is given functions that open a session and make the options of a run.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from flowserve.backends.base import ClockNs, DeviceWork, Results, Work
from flowserve.backends.onnx.tensors import (
    WRONG_ROWS,
    ModelTensors,
    checked,
    cleaned,
    fed_shape,
    made_shape,
    member_rows,
)
from flowserve.errors import ModelFailed
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, TensorSpec

NO_GRAPH: Final = -1  # onnxruntime's graph number of a run without a graph
_GPU: Final = "cuda"  # onnxruntime's device name
_ONNX_BFLOAT16: Final = 16  # TensorProto.DataType; the one type that numpy has no dtype for


class OnnxDeviceInstance:
    """A session and a stream on one GPU. `open_session` takes the address of that stream, `run_options` the number of a
    captured graph or NO_GRAPH.
    """

    def __init__(
        self,
        model: ModelTensors,
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
            _, indices = model.selected(work.wanted)
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
        """The members' outputs. `arrays` are the outputs with these indices, for the whole batch."""
        model = self._model
        results = [
            checked(array, model.outputs[j], total, model.name, WRONG_ROWS)
            for j, array in zip(indices, arrays, strict=True)
        ]
        read_at = work.read_at if isinstance(work, DeviceWork) else None
        chosen = None if read_at is None else [read_at[j] for j in indices]
        outputs: list[list[Tensor | None]] = [[None] * len(work.rows)] * len(model.outputs)
        rows = member_rows(work, total) if total >= 0 else None
        for j, tensors in zip(indices, self._stream.deliver(results, rows, chosen), strict=True):
            outputs[j] = [*tensors]
        return outputs

    def _bind_inputs(self, binding: Any, work: Work) -> tuple[list[int], int]:
        """The bytes copied for each input, and the batch's rows, -1 for a model without batching."""
        model = self._model
        copied = [0] * len(model.inputs)
        total = 0 if model.is_batching else -1
        for i, (spec, port) in enumerate(zip(model.inputs, model.ports, strict=True)):
            present = [tensor for tensor in work.inputs[i] if tensor is not None]
            if not present:
                continue  # an omitted optional input of a model without batching
            array, copied[i] = self._stream.gather(present)
            if model.is_batching:
                total = len(array)
            shape = fed_shape(array.shape, spec, port, is_batching=model.is_batching)
            self._bind_input(binding, spec, array, shape)
        return copied, total

    def _bind_input(self, binding: Any, spec: TensorSpec, array: DeviceArray, shape: tuple[int, ...]) -> None:
        binding.bind_input(spec.name, *self._where(array), _element_type(spec), shape, array.address)

    def _bind_buffer(self, binding: Any, spec: TensorSpec, array: DeviceArray) -> None:
        binding.bind_output(spec.name, *self._where(array), _element_type(spec), array.shape, array.address)

    def _bind_output(self, binding: Any, j: int, total: int) -> DeviceArray | None:
        spec, port = self._model.outputs[j], self._model.output_ports[j]
        shape = made_shape(spec, port, total)
        if shape is None:
            binding.bind_output(spec.name, _GPU, self.place.number)
            return None
        array = self._stream.empty(spec.dtype.numpy, shape)
        self._bind_buffer(binding, spec, array)
        return array

    def _adopted(self, value: Any, spec: TensorSpec) -> DeviceArray:
        return self._stream.adopt(value, value.data_ptr(), spec.dtype.numpy, tuple(value.shape()))

    def _where(self, array: DeviceArray) -> tuple[str, int]:
        """Device name and number for onnxruntime. Host memory, pinned or not, is the CPU's: onnxruntime copies it."""
        return (_GPU, self.place.number) if array.place.is_gpu else ("cpu", 0)


class _GraphBuffers:
    """The fixed buffers of the graph of one batch size, bound once, and the options of its runs."""

    __slots__ = ("binding", "inputs", "options", "outputs")

    def __init__(self, binding: Any, options: Any, inputs: list[DeviceArray], outputs: list[DeviceArray]) -> None:
        self.binding = binding
        self.options = options
        self.inputs = inputs
        self.outputs = outputs


class OnnxGraphInstance(OnnxDeviceInstance):
    """A session that captures its runs for some batch `sizes` (1 for a model without batching) as CUDA graphs. The
    number of a graph is its batch size.
    """

    def __init__(
        self,
        model: ModelTensors,
        memory: DeviceMemory,
        open_session: Callable[[int], Any],
        run_options: Callable[[int], Any],
        sizes: Collection[int],
    ) -> None:
        super().__init__(model, memory, open_session, run_options)
        self.is_of_any_thread = False  # onnxruntime captures a graph again for each thread that runs it
        self._graph_options = run_options
        self._sizes = frozenset(sizes)
        self._buffers: dict[int, _GraphBuffers | None] = {}

    def close(self) -> None:
        self._buffers.clear()
        super().close()

    def run(self, work: Work, clock: ClockNs) -> Results:
        size = sum(work.rows) if self._model.is_batching else 1
        _, indices = self._model.selected(work.wanted)
        is_whole = len(indices) == len(self._model.outputs) and None not in [column[0] for column in work.inputs]
        if size not in self._sizes or not is_whole or self._has_empty_members(work):
            return super().run(work, clock)
        buffers = self._buffers_of(size)
        return super().run(work, clock) if buffers is None else self._replay(buffers, size, work, clock)

    def _replay(self, buffers: _GraphBuffers, size: int, work: Work, clock: ClockNs) -> Results:
        stream = self._stream
        with stream.batch():
            copied = []
            for column, place in zip(work.inputs, buffers.inputs, strict=True):
                array, nbytes = stream.gather([tensor for tensor in column if tensor is not None])
                stream.copy(array, place)
                copied.append(nbytes)
            gathered_ns = clock()
            self._compute(buffers.binding, buffers.options)
            made = []
            for output in buffers.outputs:
                made.append(stream.empty(output.dtype, output.shape))
                stream.copy(output, made[-1])
            total = size if self._model.is_batching else -1
            outputs = self._delivered(work, range(len(made)), made, total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _buffers_of(self, size: int) -> _GraphBuffers | None:
        """None if the device has no memory for them."""
        if size not in self._buffers:
            self._buffers[size] = self._make_buffers(size)
        return self._buffers[size]

    def _make_buffers(self, size: int) -> _GraphBuffers | None:
        model, total = self._model, size if self._model.is_batching else -1
        batch = (size,) if model.is_batching else ()
        shapes = [(spec, (*batch, *spec.dims)) for spec in model.inputs]
        inputs = [self._stream.keep(spec.dtype.numpy, shape) for spec, shape in shapes]
        made = [made_shape(spec, port, total) for spec, port in zip(model.outputs, model.output_ports, strict=True)]
        outputs = [
            None if shape is None else self._stream.keep(spec.dtype.numpy, shape)
            for spec, shape in zip(model.outputs, made, strict=True)
        ]
        if None in inputs or None in outputs:
            return None
        options = self._graph_options(size)
        buffers = _GraphBuffers(self._session.io_binding(), options, _present(inputs), _present(outputs))
        for spec, port, array in zip(model.inputs, model.ports, buffers.inputs, strict=True):
            shape = fed_shape(array.shape, spec, port, is_batching=model.is_batching)
            self._bind_input(buffers.binding, spec, array, shape)
        for spec, array in zip(model.outputs, buffers.outputs, strict=True):
            self._bind_buffer(buffers.binding, spec, array)
        return buffers

    def _has_empty_members(self, work: Work) -> bool:
        """Whether a member has no rows. work.rows counts it as one, so that its sum is not the number of rows."""
        return self._model.is_batching and any(
            tensor is not None and tensor.start == tensor.stop for tensor in work.inputs[0]
        )


def _present(arrays: Sequence[DeviceArray | None]) -> list[DeviceArray]:
    return [array for array in arrays if array is not None]


def _element_type(spec: TensorSpec) -> Any:
    return _ONNX_BFLOAT16 if spec.dtype is DType.BF16 else spec.dtype.numpy.type
