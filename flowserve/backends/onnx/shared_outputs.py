"""Outputs of a session on the CPU that are written to shared memory, so that worker processes read them without a copy.

Decides which outputs can be shared, and that onnxruntime itself writes them there: each run binds them to memory from
an arena of the instance. The shape of such an output must be known before the run, and onnxruntime must compute it: for
an output that is an input at the same time it returns the input, and writes nothing. A run that fails this way is
repeated without shared memory; that run succeeds, or reports the error.

Each run has a binding of its own, since a binding keeps references to its last inputs. Small outputs reuse their memory
and the OrtValue over it: requesting memory from the arena and creating a new value would cost more than the copy that
it saves. This module does not import onnxruntime.

Callers: instance.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.onnx.tensors import ModelTensors, made_shape
from flowserve.memory.arena import Arena
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.values import Array, DType

Feed = dict[str, Array]
MakeValue = Callable[[Array], Any]
REUSED_BYTES_MAX: Final = 32 * PAGE  # larger outputs take new memory for each run; sizes double from one page on
UNUSED_MAX: Final = 16  # buffers of each size that are kept unused; more exist only after many slow readers at once


class SharedOutputs:
    """Runs a session whose outputs, once added, are written to an arena. `make_value` makes the OrtValue over an
    array's memory. Runs are sequential, on any thread.
    """

    def __init__(self, session: Any, make_value: MakeValue, model: ModelTensors) -> None:
        self.arena = Arena()
        self._session = session
        self._make_value = make_value
        self._model = model
        self._is_batching = model.is_batching
        self._outputs: Mapping[str, _Output] = {}

    def add(self, j: int) -> None:
        """Share output j from the next run on; it must be one that `can_be_shared`. May be called during a run."""
        name = self._model.outputs[j].name
        if name not in self._outputs:
            self._outputs = {**self._outputs, name: _Output(self._model, j, self.arena, self._make_value)}

    def __call__(self, names: list[str], feed: Feed) -> list[Any]:
        """Run the session for these outputs. Returns their arrays, as the session's own `run` does."""
        try:
            rows = len(next(iter(feed.values()))) if self._is_batching else 1
            arrays: dict[str, Array] = {}
            values = {}
            for name, output in self._outputs.items() if rows else ():
                if name in names:
                    arrays[name], values[name] = output.buffer(rows)
            if values:
                return self._run(names, feed, values, arrays)
        except Exception:  # whatever the error is, the run below reports it or succeeds
            pass
        results: list[Any] = self._session.run(names, feed)
        return results

    def blocks(self, names: Sequence[str], rows: int) -> dict[str, OutputBlock]:
        """A block of `rows` rows for each of these outputs that is shared. For models with batching."""
        return {name: output.block(rows) for name, output in self._outputs.items() if name in names}

    def filling(
        self, blocks: Mapping[str, OutputBlock], start: int, stop: int
    ) -> Callable[[list[str], Feed], list[Any]]:
        """A `run` function for some rows of a batch: it fills rows `start` to `stop` of the blocks, and returns None
        for the outputs in them.
        """
        values = {name: block.output.part(block, start, stop) for name, block in blocks.items()}
        return partial(self._run, values=values, arrays=dict.fromkeys(blocks))

    def _run(self, names: list[str], feed: Feed, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[Any]:
        """The outputs' arrays; those of outputs that are bound to `values` are taken from `arrays`."""
        session = self._session
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for name in names:
            if name in values:
                binding.bind_ortvalue_output(name, values[name])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding)
        if len(values) == len(names):
            return [arrays[name] for name in names]
        made = binding.get_outputs_as_ortvaluevector()
        return [arrays[name] if name in arrays else made[k].numpy() for k, name in enumerate(names)]


class OutputBlock:
    """Shared memory for one output of a batch. `array` is a read-only view of it, in the file's shape."""

    __slots__ = ("array", "lease", "output")

    def __init__(self, output: _Output, lease: Lease, array: Array) -> None:
        self.output = output
        self.lease = lease
        self.array = array


class _Buffer:
    """Memory that one output reuses. `values`: the OrtValues over it, by number of rows."""

    __slots__ = ("offset", "segment", "values")

    def __init__(self, segment: Segment, offset: int) -> None:
        self.segment = segment
        self.offset = offset
        self.values: dict[int, Any] = {}


class _Output:
    """One shared output. Its buffers come back on any thread."""

    def __init__(self, model: ModelTensors, j: int, arena: Arena, make_value: MakeValue) -> None:
        dims = _dims_of_rows(model, j)
        assert dims is not None, "can_be_shared was False"
        self._dims = dims
        self._dtype = model.outputs[j].dtype.numpy
        self._row_bytes = prod(dims) * self._dtype.itemsize
        self._is_batching = model.is_batching
        self._arena = arena
        self._make_value = make_value
        sizes = (REUSED_BYTES_MAX // PAGE).bit_length()
        self._unused: Sequence[deque[_Buffer]] = [deque() for _ in range(sizes)]  # of 2**i pages, without readers

    def buffer(self, rows: int) -> tuple[Array, Any]:
        """The array for readers, and the OrtValue to bind the output to, over the same memory."""
        nbytes = rows * self._row_bytes
        if nbytes > REUSED_BYTES_MAX:
            lease = self._arena.lease(nbytes)
            return self._read(lease, rows), self._value(lease.segment, lease.offset, rows)
        size = ((nbytes - 1) // PAGE).bit_length()
        unused = self._unused[size]
        if len(unused) > UNUSED_MAX:
            oldest = unused.popleft()
            self._arena.give_back((oldest.segment.number, oldest.offset))
        buffer = unused.pop() if unused else _Buffer(*self._arena.take(PAGE << size))
        lease = Lease(buffer.segment, buffer.offset, nbytes, unused.append, buffer)
        value = buffer.values.get(rows)
        if value is None:
            value = buffer.values[rows] = self._value(buffer.segment, buffer.offset, rows)
        return self._read(lease, rows), value

    def block(self, rows: int) -> OutputBlock:
        lease = self._arena.lease(rows * self._row_bytes)
        return OutputBlock(self, lease, self._read(lease, rows))

    def part(self, block: OutputBlock, start: int, stop: int) -> Any:
        """The OrtValue over some rows of a block."""
        return self._value(block.lease.segment, block.lease.offset + start * self._row_bytes, stop - start)

    def _read(self, lease: Lease, rows: int) -> Array:
        array = lease.piece((rows, *self._dims) if self._is_batching else self._dims, self._dtype, 0)
        array.setflags(write=False)
        return array

    def _value(self, segment: Segment, offset: int, rows: int) -> Any:
        shape = (rows, *self._dims) if self._is_batching else self._dims
        # Over the segment and not the lease: a bound value does not prevent that the memory is returned.
        return self._make_value(np.ndarray(shape, self._dtype, segment.map, offset))


def can_be_shared(model: ModelTensors, j: int) -> bool:
    """Whether the size of output j is known before a run, and onnxruntime can bind the model's tensors."""
    specs = (*model.inputs, *model.outputs)
    if any(spec.dtype is DType.BF16 for spec in specs) or any(spec.dtype is DType.BYTES for spec in model.inputs):
        return False
    spec = model.outputs[j]
    if spec.dtype is DType.BYTES or spec.name in model.passed_through or (model.is_batching and not model.inputs):
        return False
    dims = _dims_of_rows(model, j)
    return dims is not None and prod(dims) > 0


def _dims_of_rows(model: ModelTensors, j: int) -> tuple[int, ...] | None:
    port = model.output_ports[j]
    return made_shape(model.outputs[j], port, -1) if port.shape else None
