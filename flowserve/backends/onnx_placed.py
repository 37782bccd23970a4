"""Outputs of an ONNX model on the host that are written where other processes read them.

Decided here: which outputs can be, and that onnxruntime itself writes them there: each run gets memory out of an arena
of the instance's own and is told its address, so that a step in a process reads it as it lies. The shape of such an
output must be known before the run, and onnxruntime must compute it: one that is an input at the same time it hands out
as the input lies, and writes nothing where it was told to. A run that does not come off this way is made the usual way,
which succeeds, or says in the usual words why not.

Each run has a binding of its own, since one that is kept holds on to its last inputs. Small outputs keep their memory,
and what they are bound to there, for the next run: to ask the arena and to make that anew would cost more than the copy
which it is to save. This file does not import onnxruntime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, Protocol

import numpy as np

from flowserve.backends.onnx_signature import Port
from flowserve.backends.onnx_values import made_shape
from flowserve.memory.arena import Arena
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.values import Array, DType, TensorSpec

Feed = dict[str, Array]
MakeValue = Callable[[Array], Any]
KEPT_BYTES_MAX: Final = 32 * PAGE  # of an output's rows in one run; in sizes that double, from a page on
KEPT_MAX: Final = 16  # of each size, while nobody reads them: more than that, many answers were slow to leave at once


class Facts(Protocol):
    """What is asked of a model. `handed_through`: the outputs that are inputs at the same time."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    output_ports: list[Port]
    handed_through: frozenset[str]
    is_batching: bool


class Placing:
    """How a session is run whose outputs, once they are added, go into an arena. `make_value` makes what an output is
    bound to, over the memory of an array. Runs are made one after the other, on any thread.
    """

    def __init__(self, session: Any, make_value: MakeValue, model: Facts) -> None:
        self.arena = Arena()
        self._session = session
        self._make_value = make_value
        self._model = model
        self._is_batching = model.is_batching
        self._outputs: Mapping[str, _Output] = {}

    def add(self, j: int) -> None:
        """From the next run on output j, which `can_be_placed`, is. Also during a run."""
        name = self._model.outputs[j].name
        if name not in self._outputs:
            self._outputs = {**self._outputs, name: _Output(self._model, j, self.arena, self._make_value)}

    def __call__(self, names: list[str], feed: Feed) -> list[Any]:
        """As the session's own `run`."""
        try:
            rows = len(next(iter(feed.values()))) if self._is_batching else 1
            arrays: dict[str, Array] = {}
            values = {}
            for name, output in self._outputs.items() if rows else ():
                if name in names:
                    arrays[name], values[name] = output.room(rows)
            if values:
                return self._run(names, feed, values, arrays)
        except Exception:  # whatever it is: what was asked for is asked for again
            pass
        usual: list[Any] = self._session.run(names, feed)
        return usual

    def blocks(self, names: Sequence[str], rows: int) -> dict[str, Block]:
        """Memory for so many rows of each of these outputs that is placed. Of a model that batches."""
        return {name: output.block(rows) for name, output in self._outputs.items() if name in names}

    def filling(self, blocks: Mapping[str, Block], start: int, stop: int) -> Callable[[list[str], Feed], list[Any]]:
        """The session's `run` for some rows of a batch: it fills rows `start` to `stop` of the blocks, and answers None
        for what lies there.
        """
        values = {name: block.output.part(block, start, stop) for name, block in blocks.items()}
        return partial(self._run, values=values, arrays=dict.fromkeys(blocks))

    def _run(self, names: list[str], feed: Feed, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[Any]:
        """Each output's array: for those that are bound to `values`, what `arrays` has."""
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


class Block:
    """Memory for an output's rows of a batch. `array` is what is read, in the file's shape; nobody writes to it."""

    __slots__ = ("array", "lease", "output")

    def __init__(self, output: _Output, lease: Lease, array: Array) -> None:
        self.output = output
        self.lease = lease
        self.array = array


class _Kept:
    """Pages that stay one output's. `values`: what it is bound to there, by the number of its rows."""

    __slots__ = ("offset", "segment", "values")

    def __init__(self, segment: Segment, offset: int) -> None:
        self.segment = segment
        self.offset = offset
        self.values: dict[int, Any] = {}


class _Output:
    """One output that is placed. What it keeps comes back on whatever thread."""

    def __init__(self, model: Facts, j: int, arena: Arena, make_value: MakeValue) -> None:
        dims = _dims_of_rows(model, j)
        assert dims is not None, "asked before"
        self._dims = dims
        self._dtype = model.outputs[j].dtype.numpy
        self._row_bytes = prod(dims) * self._dtype.itemsize
        self._is_batching = model.is_batching
        self._arena = arena
        self._make_value = make_value
        sizes = (KEPT_BYTES_MAX // PAGE).bit_length()
        self._kept: Sequence[deque[_Kept]] = [deque() for _ in range(sizes)]  # of 2**i pages, which nobody reads

    def room(self, rows: int) -> tuple[Array, Any]:
        """The array that readers get, and what the output is bound to, over the same memory."""
        nbytes = rows * self._row_bytes
        if nbytes > KEPT_BYTES_MAX:
            lease = self._arena.lease(nbytes)
            return self._read(lease, rows), self._value(lease.segment, lease.offset, rows)
        size = ((nbytes - 1) // PAGE).bit_length()
        free = self._kept[size]
        if len(free) > KEPT_MAX:
            cold = free.popleft()
            self._arena.give_back((cold.segment.number, cold.offset))
        kept = free.pop() if free else _Kept(*self._arena.take(PAGE << size))
        lease = Lease(kept.segment, kept.offset, nbytes, free.append, kept)
        value = kept.values.get(rows)
        if value is None:
            value = kept.values[rows] = self._value(kept.segment, kept.offset, rows)
        return self._read(lease, rows), value

    def block(self, rows: int) -> Block:
        lease = self._arena.lease(rows * self._row_bytes)
        return Block(self, lease, self._read(lease, rows))

    def part(self, block: Block, start: int, stop: int) -> Any:
        """What some rows of a block are bound to."""
        return self._value(block.lease.segment, block.lease.offset + start * self._row_bytes, stop - start)

    def _read(self, lease: Lease, rows: int) -> Array:
        array = lease.piece((rows, *self._dims) if self._is_batching else self._dims, self._dtype, 0)
        array.setflags(write=False)
        return array

    def _value(self, segment: Segment, offset: int, rows: int) -> Any:
        shape = (rows, *self._dims) if self._is_batching else self._dims
        # Not on the lease: what is bound does not keep the memory from coming home.
        return self._make_value(np.ndarray(shape, self._dtype, segment.map, offset))


def can_be_placed(model: Facts, j: int) -> bool:
    """Whether it is known before a run how large output j will be, and onnxruntime takes the model's tensors bound."""
    specs = (*model.inputs, *model.outputs)
    if any(spec.dtype is DType.BF16 for spec in specs) or any(spec.dtype is DType.BYTES for spec in model.inputs):
        return False
    spec = model.outputs[j]
    if spec.dtype is DType.BYTES or spec.name in model.handed_through or (model.is_batching and not model.inputs):
        return False
    dims = _dims_of_rows(model, j)
    return dims is not None and prod(dims) > 0


def _dims_of_rows(model: Facts, j: int) -> tuple[int, ...] | None:
    port = model.output_ports[j]
    return made_shape(model.outputs[j], port, -1) if port.shape else None
