"""Runs of an ONNX model as captured CUDA graphs: the launches of a whole run in one.

Decided here: a graph reads and writes the addresses that it was captured with, so for each size of batch that is to be
one there is room of its own: inputs are copied into it, on the device, and outputs out of it, since the next run
overwrites them. What that costs is a copy within the device for each tensor; what it saves is a launch for each node of
the model. Batches of other sizes, and those for whose room the device has no memory, run as any other.

Which sizes is the configuration's to say (`optimization.cuda`), in onnx_providers.py. Capturing is onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.onnx_device import Facts, OnnxDeviceInstance
from flowserve.backends.onnx_values import fed_shape, made_shape
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceArray


class _Room:
    """Where a graph of one size reads and writes, bound once, and what its runs are told."""

    __slots__ = ("binding", "inputs", "options", "outputs")

    def __init__(self, binding: Any, options: Any, inputs: list[DeviceArray], outputs: list[DeviceArray]) -> None:
        self.binding = binding
        self.options = options
        self.inputs = inputs
        self.outputs = outputs


class OnnxGraphInstance(OnnxDeviceInstance):
    """A session that captures runs of some `sizes` of batch (1 for a model without batching). A graph's number is its
    size.
    """

    def __init__(
        self,
        model: Facts,
        memory: DeviceMemory,
        open_session: Callable[[int], Any],
        run_options: Callable[[int], Any],
        sizes: Collection[int],
    ) -> None:
        super().__init__(model, memory, open_session, run_options)
        self.is_of_any_thread = False  # onnxruntime captures a graph anew for each thread that runs it
        self._graph_options = run_options
        self._sizes = frozenset(sizes)
        self._rooms: dict[int, _Room | None] = {}

    def close(self) -> None:
        self._rooms.clear()
        super().close()

    def run(self, work: Work, clock: ClockNs) -> Results:
        size = sum(work.rows) if self._model.is_batching else 1
        _, indices = self._model.asked(work.wanted)
        is_whole = len(indices) == len(self._model.outputs) and None not in [column[0] for column in work.inputs]
        if size not in self._sizes or not is_whole or self._has_empty_members(work):
            return super().run(work, clock)
        room = self._room(size)
        return super().run(work, clock) if room is None else self._replay(room, size, work, clock)

    def _replay(self, room: _Room, size: int, work: Work, clock: ClockNs) -> Results:
        stream = self._stream
        with stream.batch():
            copied = []
            for column, place in zip(work.inputs, room.inputs, strict=True):
                array, nbytes = stream.gather([tensor for tensor in column if tensor is not None])
                stream.copy(array, place)
                copied.append(nbytes)
            gathered_ns = clock()
            self._compute(room.binding, room.options)
            made = []
            for output in room.outputs:
                made.append(stream.empty(output.dtype, output.shape))
                stream.copy(output, made[-1])
            total = size if self._model.is_batching else -1
            outputs = self._delivered(work, range(len(made)), made, total)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _room(self, size: int) -> _Room | None:
        """None where the device has no memory for it."""
        if size not in self._rooms:
            self._rooms[size] = self._make_room(size)
        return self._rooms[size]

    def _make_room(self, size: int) -> _Room | None:
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
        room = _Room(self._session.io_binding(), self._graph_options(size), _present(inputs), _present(outputs))
        for spec, port, array in zip(model.inputs, model.ports, room.inputs, strict=True):
            shape = fed_shape(array.shape, spec, port, is_batching=model.is_batching)
            self._bind_input(room.binding, spec, array, shape)
        for spec, array in zip(model.outputs, room.outputs, strict=True):
            self._bind_room(room.binding, spec, array)
        return room

    def _has_empty_members(self, work: Work) -> bool:
        """A member of no rows counts as one to the batcher, so that the sum of the rows is not the batch's."""
        return self._model.is_batching and any(
            tensor is not None and tensor.start == tensor.stop for tensor in work.inputs[0]
        )


def _present(arrays: Sequence[DeviceArray | None]) -> list[DeviceArray]:
    return [array for array in arrays if array is not None]
