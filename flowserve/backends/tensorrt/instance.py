"""Runs batches on a TensorRT plan: one execution context and one stream for each instance.

Decides the order of TensorRT's calls: first the profile, then the shape of every input, then an address for every
tensor, then the execution. A call that reports a failure fails the batch with the name of the call. Outputs of known
shape are written into buffers allocated here. TensorRT allocates the others while it runs; they are adopted after the
host has waited to learn the shape. memory/stream.py keeps memory alive until the stream is done with it.

It is given TensorRT and does not import it. It does not know files or graphs.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowserve.backends.base import ClockNs, DeviceWork, Results, Work
from flowserve.backends.onnx.ragged import WRONG_RAGGED_ROWS, RaggedPorts
from flowserve.backends.onnx.tensors import WRONG_ROWS, ModelTensors, checked, fed_shape, member_rows
from flowserve.backends.tensorrt.library import Allocator, CudaEngine, ExecutionContext, TensorRt
from flowserve.backends.tensorrt.plan import Profile, choose
from flowserve.errors import ModelFailed
from flowserve.memory.column import scatter
from flowserve.memory.device_memory import Block, DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, MemoryPlace, TensorSpec


class TensorRtInstance:
    """An instance for models whose tensors cannot stay on a device (graph/transfers.py): it reads its inputs from host
    memory and leaves its outputs there.
    """

    def __init__(
        self,
        library: TensorRt,
        model: ModelTensors,
        ragged: RaggedPorts | None,
        memory: DeviceMemory,
        open_engine: Callable[[], CudaEngine],
        profiles: Sequence[Profile],
    ) -> None:
        self._library = library
        self._model = model
        self._ragged = ragged
        self._memory = memory
        self._open_engine = open_engine
        self._profiles = profiles
        self._profile = -1

    def open(self) -> None:
        with self._library.on_device(self._memory.place.number):
            context = self._open_engine().create_execution_context()
        if context is None:
            raise ModelFailed(f"model '{self._model.name}': {self._memory.place} has no room for its execution context")
        self._context: ExecutionContext = context
        self._stream = DeviceStream(self._memory)

    def close(self) -> None:
        self._stream.close()
        del self._context

    def run(self, work: Work, clock: ClockNs) -> Results:
        model, ragged, stream = self._model, self._ragged, self._stream
        results = None if ragged is None else ragged.run_nonempty(self.run, work, clock)
        if results is not None:
            return results
        with self._library.on_device(self._memory.place.number), stream.batch():
            feed, copied, total = self._feed(work)
            rows = member_rows(work, total) if total >= 0 else None
            gathered_ns = clock()
            made = self._execute(feed)
            names, indices = model.selected(work.wanted)
            arrays = [
                self._checked(made[name], model.outputs[j], total) for name, j in zip(names, indices, strict=True)
            ]
            outputs: list[list[Tensor | None]] = [[None] * len(work.rows) for _ in model.outputs]
            for j, tensors in zip(indices, self._delivered(arrays, rows, work, indices), strict=True):
                outputs[j] = [*tensors]
        cut = outputs if ragged is None else ragged.cut(outputs, work)
        return Results(cut, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _delivered(
        self, arrays: Sequence[DeviceArray], rows: list[int] | None, work: Work, indices: Sequence[int]
    ) -> Iterator[Sequence[Tensor]]:
        """Each output, split by member. An output that is split by shape later is given whole to every member."""
        ragged = self._ragged
        if ragged is None:
            read_at = work.read_at if isinstance(work, DeviceWork) else None
            yield from self._stream.deliver(arrays, rows, None if read_at is None else [read_at[j] for j in indices])
            return
        for j, (whole,) in zip(indices, self._stream.deliver(arrays, None), strict=True):
            is_flat = rows is None or self._model.outputs[j].name in ragged.flat_outputs
            yield [whole] * len(work.rows) if is_flat or rows is None else scatter(whole.array, rows)

    def _feed(self, work: Work) -> tuple[dict[str, DeviceArray], list[int], int]:
        """The inputs by name, in memory that the device reads; the bytes copied for each input; and the rows of the
        batch, -1 without a batch dimension.
        """
        model = self._model
        if self._ragged is not None:
            arrays, copied, total = self._ragged.feed(work)
            feed = {name: self._stream.gather([Tensor(array)])[0] for name, array in arrays.items()}
            return feed, copied, total if model.is_batching else -1
        feed = {}
        copied = [0] * len(model.inputs)
        total = 0 if model.is_batching else -1
        for i, (spec, port, column) in enumerate(zip(model.inputs, model.ports, work.inputs, strict=True)):
            present = [tensor for tensor in column if tensor is not None]
            array, copied[i] = self._stream.gather(present)
            total = len(array) if model.is_batching else -1
            shape = fed_shape(array.shape, spec, port, is_batching=model.is_batching)
            feed[spec.name] = array.reshape(shape)
        return feed, copied, total

    def _execute(self, feed: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
        """Enqueue one execution on the stream. Returns every output by name."""
        context, stream = self._context, self._stream.handle.address
        shapes = {name: array.shape for name, array in feed.items()}
        profile = choose(self._profiles, shapes, self._model.name)
        if profile.index != self._profile:
            self._check(context.set_optimization_profile_async(profile.index, stream), "set_optimization_profile_async")
            self._profile = profile.index
        for name, array in feed.items():
            self._check(array.place.is_gpu, f"room for input '{name}' on {self._memory.place}")
            self._check(context.set_input_shape(name, array.shape), f"set_input_shape of '{name}'")
        missing = context.infer_shapes()
        self._check(not missing, f"infer_shapes, which misses {', '.join(missing)}")
        for name, array in feed.items():
            self._check(context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        made, asking = self._bind_outputs()
        self._check(context.execute_async_v3(stream), "execute_async_v3")
        if asking:
            self._memory.device.synchronize(self._memory.device.record(self._stream.handle))
        for name, (allocator, blocks, spec) in asking.items():
            self._check(allocator.shape is not None and bool(blocks), f"the output allocator of '{name}'")
            made[name] = self._stream.adopt(blocks[-1], blocks[-1].address, spec.numpy, allocator.shape or ())
        return made

    def _bind_outputs(self) -> tuple[dict[str, DeviceArray], dict[str, tuple[Allocator, list[Block], DType]]]:
        """The outputs in buffers allocated here; and those that TensorRT allocates, each with its allocator, the blocks
        it has taken so far, and its data type.
        """
        made: dict[str, DeviceArray] = {}
        asking: dict[str, tuple[Allocator, list[Block], DType]] = {}
        for name, port in self._model.made.items():
            assert port.dtype is not None  # other types were refused when the model was loaded
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                blocks: list[Block] = []
                allocator = self._library.allocator(self._block_taker(blocks))
                self._check(self._context.set_output_allocator(name, allocator), f"set_output_allocator of '{name}'")
                asking[name] = allocator, blocks, port.dtype
                continue
            array = made[name] = self._stream.empty(port.dtype.numpy, shape)
            self._check(array.place.is_gpu, f"room for output '{name}' on {self._memory.place}")
            self._check(self._context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        return made, asking

    def _block_taker(self, blocks: list[Block]) -> Callable[[int], int]:
        """An allocation function that appends each block it takes to `blocks`."""

        def take(nbytes: int) -> int:
            block = self._memory.pool.take(nbytes, self._stream.handle)
            if block is None:
                return 0  # tells TensorRT that the allocation failed
            blocks.append(block)
            return block.address

        return take

    def _checked(self, array: DeviceArray, spec: TensorSpec, total: int) -> DeviceArray:
        ragged = self._ragged
        flat = None if ragged is None else ragged.flat_outputs.get(spec.name)
        if flat is None:
            rows = WRONG_ROWS if ragged is None else WRONG_RAGGED_ROWS
            found: DeviceArray = checked(array, spec, total, self._model.name, rows)
            return found
        elements = array.nbytes // spec.dtype.itemsize
        flattened: DeviceArray = checked(array.reshape((elements,)), flat, -1, self._model.name, "")
        return flattened

    def _check(self, succeeded: bool, what: str) -> None:
        if not succeeded:
            raise ModelFailed(f"model '{self._model.name}' failed: TensorRT: {what} failed; the log says why")


class TensorRtDeviceInstance(TensorRtInstance):
    """An instance that reads its inputs where they are, and leaves its outputs where their readers are."""

    is_of_any_thread = False  # no test has run one context on several threads yet

    @property
    def place(self) -> MemoryPlace:
        """The memory it computes in."""
        return self._memory.place
