"""Runs batches on a session whose tensors stay on a GPU, also as captured CUDA graphs.

Decides that every tensor is bound by its address: inputs in their current memory, outputs in buffers allocated here if
their shape is known before the run, else in memory that onnxruntime allocates and that is adopted. Each run has a
binding of its own: running a binding again would overwrite its last outputs, which may still be read. The session
computes on the instance's stream and does not wait for it. Strings and other tensors that must be in host memory use
instance.py.

A captured CUDA graph launches a whole run at once. It reads and writes the addresses it was captured with. So each
batch size that is captured has fixed buffers: inputs are copied into them on the device, outputs out of them, since the
next run overwrites them. This costs one copy on the device per tensor and saves one launch per node of the model.
Batches of other sizes, and sizes for whose buffers the device has no memory, run without a graph. Which sizes are
captured is decided by session.py, how they are captured by onnxruntime.

This module does not import onnxruntime: it is given functions that open a session and make the options of a run.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.library.tensors import ModelTensors
from flowserve.backends.onnx.errors import cleaned
from flowserve.errors import ModelFailed, told
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import DeviceStream
from flowserve.values import DType

NO_GRAPH: Final = -1  # onnxruntime's graph number of a run without a graph
_GPU: Final = "cuda"  # onnxruntime's device name
_ONNX_BFLOAT16: Final = 16  # TensorProto.DataType; the one type that numpy has no dtype for


@dataclass(slots=True, eq=False)
class _GraphBuffers:
    """The fixed buffers of the graph of one batch size, bound once, and the options of its runs."""

    binding: Any
    options: Any
    inputs: list[DeviceArray]
    outputs: list[DeviceArray]


class OnnxDeviceInstance:
    """A session and a stream on one GPU. `open_session` takes the address of that stream, `run_options` the number of a
    captured graph or NO_GRAPH. The session captures its runs for some batch `sizes` (1 for a model without batching) as
    CUDA graphs. The number of a graph is its batch size.
    """

    def __init__(
        self,
        model: ModelTensors,
        memory: DeviceMemory,
        open_session: Callable[[int], Any],
        run_options: Callable[[int], Any],
        sizes: Collection[int] = (),
    ) -> None:
        self.place = memory.place
        self.is_of_any_thread = not sizes  # onnxruntime captures a graph again for each thread that runs it
        self._model = model
        self._memory = memory
        self._open_session = open_session
        self._options = run_options(NO_GRAPH)
        self._graph_options = run_options
        self._sizes = frozenset(sizes)
        self._buffers: dict[int, _GraphBuffers | None] = {}

    def open(self) -> None:
        self._stream = DeviceStream(self._memory)
        try:
            self._session: Any = self._open_session(self._stream.handle.address)
        except Exception:
            self._stream.close()
            raise

    def close(self) -> None:
        self._buffers.clear()
        self._stream.wait()
        del self._session  # the session may compute on the stream until it is deleted
        self._stream.close()

    def run(self, work: Work, clock: ClockNs) -> Results:
        buffers = self._graph_of(work) if self._sizes else None
        return self._run_once(work, clock) if buffers is None else self._replay(buffers, work, clock)

    def _run_once(self, work: Work, clock: ClockNs) -> Results:
        model, stream = self._model, self._stream
        binding = self._session.io_binding()
        with stream.batch():
            feed, copied, total = model.gather_on(stream, work)
            for name, array in feed.items():
                self._bind(binding.bind_input, name, array)
            _, indices = model.selected(work.wanted)
            made = [self._bind_output(binding, j, total) for j in indices]
            gathered_ns = clock()
            self._compute(binding, self._options, len(work.rows))
            values = binding.get_outputs() if None in made else ()
            for k, j in enumerate(indices):
                if made[k] is None:
                    address, shape = values[k].data_ptr(), tuple(values[k].shape())
                    made[k] = stream.adopt(values[k], address, model.outputs[j].dtype.numpy, shape)
            outputs = model.deliver(stream, work, indices, _present(made), total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _compute(self, binding: Any, options: Any, members: int) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            what = told(error, cleaned(str(error)), members)
            raise ModelFailed(f"model '{self._model.name}' failed: onnxruntime: {what}") from error

    def _bind(self, bind: Callable[..., None], name: str, array: DeviceArray) -> None:
        """Bind an input or an output by its address. For onnxruntime, host memory, pinned or not, is the CPU's: it
        copies it.
        """
        where = (_GPU, self.place.number) if array.place.is_gpu else ("cpu", 0)
        element_type = _ONNX_BFLOAT16 if array.dtype == DType.BF16.numpy else array.dtype.type
        bind(name, *where, element_type, array.shape, array.address)

    def _bind_output(self, binding: Any, j: int, total: int) -> DeviceArray | None:
        spec = self._model.outputs[j]
        shape = self._model.made_shape(j, total)
        if shape is None:
            binding.bind_output(spec.name, _GPU, self.place.number)
            return None
        array = self._stream.empty(spec.dtype.numpy, shape)
        self._bind(binding.bind_output, spec.name, array)
        return array

    # ------------------------------------------------------------------ captured graphs

    def _graph_of(self, work: Work) -> _GraphBuffers | None:
        """The buffers of the graph that runs this batch, None if no graph does."""
        size = sum(work.rows) if self._model.is_batching else 1
        _, indices = self._model.selected(work.wanted)
        is_whole = len(indices) == len(self._model.outputs) and None not in [column[0] for column in work.inputs]
        # `work.rows` counts a member without rows as one, so that its sum is not the number of rows.
        is_exact = not self._model.is_batching or all(
            tensor is None or tensor.start != tensor.stop for tensor in work.inputs[0]
        )
        if size not in self._sizes or not is_whole or not is_exact:
            return None
        if size not in self._buffers:
            self._buffers[size] = self._make_buffers(size)
        return self._buffers[size]

    def _replay(self, buffers: _GraphBuffers, work: Work, clock: ClockNs) -> Results:
        stream = self._stream
        with stream.batch():
            copied = []
            for column, place in zip(work.inputs, buffers.inputs, strict=True):
                array, nbytes = stream.gather([tensor for tensor in column if tensor is not None])
                stream.copy(array, place)
                copied.append(nbytes)
            gathered_ns = clock()
            self._compute(buffers.binding, buffers.options, len(work.rows))
            made = []
            for output in buffers.outputs:
                made.append(stream.empty(output.dtype, output.shape))
                stream.copy(output, made[-1])
            total = sum(work.rows) if self._model.is_batching else -1
            outputs = self._model.deliver(stream, work, range(len(made)), made, total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _make_buffers(self, size: int) -> _GraphBuffers | None:
        """None if the device has no memory for them."""
        model, total = self._model, size if self._model.is_batching else -1
        batch = (size,) if model.is_batching else ()
        shapes = [(spec, (*batch, *spec.dims)) for spec in model.inputs]
        inputs = [self._stream.keep(spec.dtype.numpy, shape) for spec, shape in shapes]
        outputs = [
            None if (shape := model.made_shape(j, total)) is None else self._stream.keep(spec.dtype.numpy, shape)
            for j, spec in enumerate(model.outputs)
        ]
        if None in inputs or None in outputs:
            return None
        options = self._graph_options(size)
        buffers = _GraphBuffers(self._session.io_binding(), options, _present(inputs), _present(outputs))
        for i, (spec, array) in enumerate(zip(model.inputs, buffers.inputs, strict=True)):
            self._bind(buffers.binding.bind_input, spec.name, array.reshape(model.fed_shape(i, array.shape)))
        for spec, array in zip(model.outputs, buffers.outputs, strict=True):
            self._bind(buffers.binding.bind_output, spec.name, array)
        return buffers


def _present(arrays: Sequence[DeviceArray | None]) -> list[DeviceArray]:
    return [array for array in arrays if array is not None]
