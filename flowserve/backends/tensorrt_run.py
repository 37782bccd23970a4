"""Runs of a TensorRT plan: one context and one stream for each instance.

Decided here: the order of TensorRT's calls. The profile first, then the shape of every input, then an address for every
tensor, then the execution; each call that says it failed fails the batch by name. Outputs whose shape is known lie in
room of ours; for the others TensorRT asks for room while it runs, and what it asked for is adopted once the host has
waited to learn the shape. Memory stays until the stream is past it, which is memory/stream.py's.

It does not import TensorRT: it is given it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.device import DeviceWork
from flowserve.backends.onnx_ragged import WRONG_ROWS as WRONG_RAGGED_ROWS
from flowserve.backends.onnx_ragged import RaggedPorts, part_of
from flowserve.backends.onnx_signature import Port
from flowserve.backends.onnx_values import checked, fed_shape
from flowserve.backends.tensorrt_api import Allocator, Context, Engine, TensorRt
from flowserve.backends.tensorrt_profiles import Profile, choose
from flowserve.config.types import ModelConfig
from flowserve.errors import ModelFailed
from flowserve.memory.assemble import scatter
from flowserve.memory.blocks import Block
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import DType, MemoryPlace, TensorSpec

WRONG_ROWS = "its first dimension is no batch dimension, so set max_batch_size to 0"


class Plan:
    """What all instances of one plan share: its configuration, and what the file said of itself."""

    def __init__(self, config: ModelConfig, inputs: Mapping[str, Port], outputs: Mapping[str, Port]) -> None:
        self.name = config.name
        self.inputs = config.inputs
        self.outputs = config.outputs
        self.is_batching = config.max_batch_size > 0
        self.input_ports = inputs
        self.output_ports = outputs  # everything that it makes, asked for or not
        self.ragged = RaggedPorts(config) if RaggedPorts.are_in(config) else None


class TensorRtInstance:
    """One that takes tensors on the host and leaves them there: what cannot stay on a device (graph/transfers.py)."""

    def __init__(
        self,
        library: TensorRt,
        plan: Plan,
        memory: DeviceMemory,
        open_engine: Callable[[], Engine],
        profiles: Sequence[Profile],
    ) -> None:
        self._library = library
        self._plan = plan
        self._memory = memory
        self._open_engine = open_engine
        self._profiles = profiles
        self._profile = -1

    def open(self) -> None:
        with self._library.on_device(self._memory.place.number):
            context = self._open_engine().create_execution_context()
        if context is None:
            raise ModelFailed(f"model '{self._plan.name}': {self._memory.place} has no room for its execution context")
        self._context: Context = context
        self._stream = DeviceStream(self._memory)

    def close(self) -> None:
        self._stream.close()
        del self._context

    def run(self, work: Work, clock: ClockNs) -> Results:
        plan, stream = self._plan, self._stream
        blank = [] if plan.ragged is None else plan.ragged.blank_members(work)
        if plan.ragged is not None and blank:
            return self._run_others(plan.ragged, work, blank, clock)
        with self._library.on_device(self._memory.place.number), stream.batch():
            feed, copied, total = self._feed(work)
            rows = self._rows(work, total)
            gathered_ns = clock()
            made = self._execute(feed)
            wanted = {name for names in work.wanted for name in names}
            indices = [j for j, spec in enumerate(plan.outputs) if spec.name in wanted]
            arrays = [self._checked(made[plan.outputs[j].name], plan.outputs[j], total) for j in indices]
            outputs: list[list[Tensor | None]] = [[None] * len(work.rows) for _ in plan.outputs]
            for j, tensors in zip(indices, self._delivered(arrays, rows, work, indices), strict=True):
                outputs[j] = [*tensors]
        if plan.ragged is not None:
            plan.ragged.cut(outputs, work)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=clock(), copied=copied)

    def _run_others(self, ragged: RaggedPorts, work: Work, blank: Sequence[int], clock: ClockNs) -> Results:
        """Requests without rows are not shown to the plan: a count for each request would be one row too many."""
        shown = [m for m in range(len(work.rows)) if m not in blank]
        results = self.run(part_of(work, shown), clock) if shown else Results([[]] * len(self._plan.outputs))
        results.outputs = ragged.with_blank(results.outputs, shown, work)
        return results

    def _delivered(
        self, arrays: Sequence[DeviceArray], rows: list[int] | None, work: Work, indices: Sequence[int]
    ) -> Iterator[Sequence[Tensor]]:
        """The members' shares of each of these outputs; of one that is cut later, the whole of it for each."""
        ragged = self._plan.ragged
        if ragged is None:
            read_at = work.read_at if isinstance(work, DeviceWork) else None
            yield from self._stream.deliver(arrays, rows, None if read_at is None else [read_at[j] for j in indices])
            return
        for j, (whole,) in zip(indices, self._stream.deliver(arrays, None), strict=True):
            is_flat = rows is None or self._plan.outputs[j].name in ragged.flat_outputs
            yield [whole] * len(work.rows) if is_flat or rows is None else scatter(whole.array, rows)

    def _feed(self, work: Work) -> tuple[dict[str, DeviceArray], list[int], int]:
        """Every input by name where the device reads it, the bytes of each that were copied, and the batch's rows, -1
        without a batch dimension.
        """
        plan = self._plan
        if plan.ragged is not None:
            arrays, copied, total = plan.ragged.feed(work)
            feed = {name: self._stream.gather([Tensor(array)])[0] for name, array in arrays.items()}
            return feed, copied, total if plan.is_batching else -1
        feed = {}
        copied = [0] * len(plan.inputs)
        total = 0 if plan.is_batching else -1
        for i, (spec, column) in enumerate(zip(plan.inputs, work.inputs, strict=True)):
            present = [tensor for tensor in column if tensor is not None]
            array, copied[i] = self._stream.gather(present)
            total = len(array) if plan.is_batching else -1
            shape = fed_shape(array.shape, spec, plan.input_ports[spec.name], is_batching=plan.is_batching)
            feed[spec.name] = array.reshape(shape)
        return feed, copied, total

    def _rows(self, work: Work, total: int) -> list[int] | None:
        if total < 0:
            return None
        # A member of no rows counts as one to the batcher.
        return work.rows if total == sum(work.rows) else [t.shape[0] for t in work.inputs[0] if t is not None]

    def _execute(self, feed: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
        """Put one execution on the stream; every output by name."""
        context, stream = self._context, self._stream.handle.address
        shapes = {name: array.shape for name, array in feed.items()}
        profile = choose(self._profiles, shapes, self._plan.name)
        if profile.index != self._profile:
            self._must(context.set_optimization_profile_async(profile.index, stream), "set_optimization_profile_async")
            self._profile = profile.index
        for name, array in feed.items():
            self._must(array.place.is_gpu, f"room for input '{name}' on {self._memory.place}")
            self._must(context.set_input_shape(name, array.shape), f"set_input_shape of '{name}'")
        missing = context.infer_shapes()
        self._must(not missing, f"infer_shapes, which misses {', '.join(missing)}")
        for name, array in feed.items():
            self._must(context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        made, asking = self._bind_outputs()
        self._must(context.execute_async_v3(stream), "execute_async_v3")
        if asking:
            self._memory.device.synchronize(self._memory.device.record(self._stream.handle))
        for name, (allocator, blocks, spec) in asking.items():
            self._must(allocator.shape is not None and bool(blocks), f"the output allocator of '{name}'")
            made[name] = self._stream.adopt(blocks[-1], blocks[-1].address, spec.numpy, allocator.shape or ())
        return made

    def _bind_outputs(self) -> tuple[dict[str, DeviceArray], dict[str, tuple[Allocator, list[Block], DType]]]:
        """Outputs in room of ours; and those for which TensorRT will ask, with the room that it has asked for."""
        made: dict[str, DeviceArray] = {}
        asking: dict[str, tuple[Allocator, list[Block], DType]] = {}
        for name, port in self._plan.output_ports.items():
            assert port.dtype is not None  # what it is else was refused when the model was loaded
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                blocks: list[Block] = []
                allocator = self._library.allocator(self._room(blocks))
                self._must(self._context.set_output_allocator(name, allocator), f"set_output_allocator of '{name}'")
                asking[name] = allocator, blocks, port.dtype
                continue
            array = made[name] = self._stream.empty(port.dtype.numpy, shape)
            self._must(array.place.is_gpu, f"room for output '{name}' on {self._memory.place}")
            self._must(self._context.set_tensor_address(name, array.address), f"set_tensor_address of '{name}'")
        return made, asking

    def _room(self, blocks: list[Block]) -> Callable[[int], int]:
        def make_room(nbytes: int) -> int:
            block = self._memory.pool.take(nbytes, self._stream.handle)
            if block is None:
                return 0  # which is how TensorRT is told that there is none
            blocks.append(block)
            return block.address

        return make_room

    def _checked(self, array: DeviceArray, spec: TensorSpec, total: int) -> DeviceArray:
        ragged = self._plan.ragged
        flat = None if ragged is None else ragged.flat_outputs.get(spec.name)
        if flat is None:
            rows = WRONG_ROWS if ragged is None else WRONG_RAGGED_ROWS
            found: DeviceArray = checked(array, spec, total, self._plan.name, rows)
            return found
        elements = array.nbytes // spec.dtype.itemsize
        flattened: DeviceArray = checked(array.reshape((elements,)), flat, -1, self._plan.name, "")
        return flattened

    def _must(self, went_well: bool, what: str) -> None:
        if not went_well:
            raise ModelFailed(f"model '{self._plan.name}' failed: TensorRT: {what} failed; the log says why")


class TensorRtDeviceInstance(TensorRtInstance):
    """One that takes tensors where they lie, and leaves them where they are read."""

    is_of_any_thread = False  # until somebody has seen a context run on one thread after the other

    @property
    def place(self) -> MemoryPlace:
        """Its memory."""
        return self._memory.place
