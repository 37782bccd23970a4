"""Runs batches on a session whose tensors are in host memory; the session computes on the CPU or on a GPU.

Decides whether large members that are not contiguous are copied together for one run (library/run.py), or run
separately. It does not import onnxruntime, and does not know how
sessions are opened (session.py) or what files declare (signature.py). Instances whose tensors stay on a GPU are in
device.py.

Outputs of a session on the CPU may be written to shared memory, so that worker processes read them without a copy
(`SharedOutputs`). Decides which outputs can be shared, and that onnxruntime itself writes them there: each run binds
them to memory from an arena of the instance. The shape of such an output must be known before the run, and onnxruntime
must compute it: for an output that is an input at the same time it returns the input, and writes nothing. A run that
fails this way is repeated without shared memory; that run succeeds, or reports the error. Each run has a binding of its
own, since a binding keeps references to its last inputs. Small outputs reuse their memory and the OrtValue over it:
requesting memory from the arena and creating a new value would cost more than the copy that it saves.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.library.run import BatchRun, Execute, Feed
from flowserve.backends.library.tensors import ModelTensors
from flowserve.backends.onnx.errors import cleaned
from flowserve.backends.onnx.session import host_value
from flowserve.errors import ModelFailed, told
from flowserve.memory.arena import Arena
from flowserve.memory.assemble import gather, pieces
from flowserve.memory.column import scatter
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType

REUSED_BYTES_MAX: Final = 32 * PAGE  # larger outputs take new memory for each run; sizes double from one page on
UNUSED_MAX: Final = 16  # buffers of each size that are kept unused; more exist only after many slow readers at once

# Below this size a copy costs less than the fixed cost of one more run.
MEMBER_BYTES_MIN: Final = 64 * 1024
_TRIAL_BATCHES: Final = 4  # consecutive batches of a trial
_RECENT_BATCHES: Final = 8  # measured times that are compared, of each kind
_TOLERANCE: Final = 1.1  # separate runs may take this much longer: they save a copy, and with it memory and cores
_RETRY_MIN: Final = 32  # batches until the other kind is tried again; doubled each time it loses ...
_RETRY_MAX: Final = 4096  # ... up to this, since on some devices it is slower by far


class SharedOutputs:
    """Runs a session whose outputs, once added, are written to an arena. Runs are sequential, on any thread."""

    def __init__(self, session: Any, model: ModelTensors) -> None:
        self.arena = Arena()
        self._session = session
        self._model = model
        self._is_batching = model.is_batching
        self._outputs: Mapping[str, _Output] = {}

    def add(self, j: int) -> None:
        """Share output j from the next run on; it must be one that `can_be_shared`. May be called during a run."""
        name = self._model.outputs[j].name
        if name not in self._outputs:
            self._outputs = {**self._outputs, name: _Output(self._model, j, self.arena)}

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


@dataclass(slots=True, eq=False)
class OutputBlock:
    """Shared memory for one output of a batch. `array` is a read-only view of it, in the file's shape."""

    output: _Output
    lease: Lease
    array: Array


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory that one output reuses. `values`: the OrtValues over it, by number of rows."""

    segment: Segment
    offset: int
    values: dict[int, Any] = field(default_factory=dict)


class _Output:
    """One shared output. Its buffers come back on any thread."""

    def __init__(self, model: ModelTensors, j: int, arena: Arena) -> None:
        dims = model.made_shape(j, -1)
        assert dims is not None, "can_be_shared was False"
        self._dims = dims
        self._dtype = model.outputs[j].dtype.numpy
        self._row_bytes = prod(dims) * self._dtype.itemsize
        self._is_batching = model.is_batching
        self._arena = arena
        sizes = (REUSED_BYTES_MAX // PAGE).bit_length()
        self._unused: Sequence[deque[_Buffer]] = [deque() for _ in range(sizes)]  # [i]: 2**i pages

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
            self._arena.give_back(((oldest.segment.number, oldest.offset),))
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
        # Over the segment, not the lease: a bound value must not prevent the return of the memory.
        return host_value(np.ndarray(shape, self._dtype, segment.map, offset))


def can_be_shared(model: ModelTensors, j: int) -> bool:
    """Whether the size of output j is known before a run, and onnxruntime can bind the model's tensors."""
    specs = (*model.inputs, *model.outputs)
    if model.ragged is not None:
        return False
    if any(spec.dtype is DType.BF16 for spec in specs) or any(spec.dtype is DType.BYTES for spec in model.inputs):
        return False
    spec = model.outputs[j]
    if spec.dtype is DType.BYTES or spec.name in model.passed_through or (model.is_batching and not model.inputs):
        return False
    dims = model.made_shape(j, -1) if model.output_ports[j].shape else None
    return dims is not None and prod(dims) > 0


class RunPolicy:
    """Whether the next batch of non-contiguous members is merged by a copy, or its members run separately.

    One run for many rows is faster if a row is little work, but not if one row keeps all cores busy: then the copy
    costs time, for images much. The policy measures both kinds and compares their fastest recent batches, because other
    load on the machine only adds time. It keeps trying the other kind, less often while that is slower.
    """

    __slots__ = ("_batches", "_is_trial", "_prefers_separate", "_recent_ns", "_retry")

    def __init__(self) -> None:
        self._prefers_separate = False
        self._is_trial = False  # the other kind is being tried
        self._batches = 0  # batches since the trial began or ended
        self._retry = _TRIAL_BATCHES
        # Nanoseconds per row, of each kind: merged, separate.
        self._recent_ns: tuple[deque[float], deque[float]] = (
            deque(maxlen=_RECENT_BATCHES),
            deque(maxlen=_RECENT_BATCHES),
        )

    def is_separate(self) -> bool:
        """Whether the members of the next batch run separately."""
        return self._prefers_separate != self._is_trial

    def measured(self, rows: int, duration_ns: int) -> None:
        """Record a batch of `rows` rows that ran as `is_separate` decided; it took `duration_ns`, copies included."""
        self._recent_ns[self.is_separate()].append(duration_ns / rows)
        self._batches += 1
        if self._is_trial:
            if self._batches == _TRIAL_BATCHES:
                self._decide()
        elif self._batches == self._retry:
            self._is_trial = True
            self._batches = 0
            self._recent_ns[self.is_separate()].clear()

    def _decide(self) -> None:
        merged, separate = self._recent_ns
        before, self._prefers_separate = self._prefers_separate, min(separate) < _TOLERANCE * min(merged)
        is_again = before == self._prefers_separate and self._retry >= _RETRY_MIN
        self._retry = min(2 * self._retry, _RETRY_MAX) if is_again else _RETRY_MIN
        self._is_trial = False
        self._batches = 0


class OnnxInstance:
    """Runs the model's session for one batch at a time. `session`: the session on the CPU, whose outputs may be written
    to shared memory; None if they cannot be.
    """

    def __init__(self, model: ModelTensors, open_execute: Callable[[], Any], session: Any = None) -> None:
        self._model = model
        self._open_execute = open_execute
        self._run_session: Execute
        self._merged: BatchRun  # executes the session's own run, or SharedOutputs
        self._session = session
        self._shared: SharedOutputs | None = None  # set once other processes read an output
        # None if members must run together, because inputs are prepared for the whole batch.
        self._policy = RunPolicy() if model.is_batching and not model.prepared and model.inputs else None

    def open(self) -> None:
        self._run_session = self._open_execute()
        self._merged = BatchRun(self._model, self._run_session, self._failed)
        self._run_merged = self._merged.run

    def close(self) -> None:
        """The session is freed with its last reference."""
        del self._run_session, self._merged, self._run_merged
        self._shared = None

    def share(self, output: int) -> None:
        """Takes effect with the next run. A run in progress is not changed."""
        if self._session is not None and can_be_shared(self._model, output):
            shared = self._shared or SharedOutputs(self._session, self._model)
            shared.add(output)
            self._shared = self._merged.execute = shared

    def run(self, work: Work, clock: ClockNs) -> Results:
        if self._model.ragged is not None:
            return self._model.ragged.run(self._run_merged, work, clock)
        policy = self._policy
        if policy is None or len(work.rows) == 1 or not _is_scattered(work):
            return self._run_merged(work, clock)
        began_ns = clock()
        results = self._run_separately(work, clock) if policy.is_separate() else self._run_merged(work, clock)
        policy.measured(sum(work.rows), results.computed_ns - began_ns)
        return results

    def _run_separately(self, work: Work, clock: ClockNs) -> Results:
        """One run for each member. Outputs that are small, or in shared memory, are contiguous for the next batch."""
        model, shared = self._model, self._shared
        names, indices = model.selected(work.wanted)
        gathered_ns = clock()
        blocks = {} if shared is None else shared.blocks(names, sum(work.rows))
        try:
            made, copied = self._executed_separately(work, names, shared if blocks else None, blocks)
        except ModelFailed:
            if not blocks:
                raise
            blocks = {}
            made, copied = self._executed_separately(work, names, None, blocks)
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(work.rows)] * len(model.outputs)
        for k, j in enumerate(indices):
            block = blocks.get(names[k])
            if block is not None:
                array = model.checked(j, block.array, sum(work.rows))
                outputs[j] = [*scatter(array, work.rows)]
                continue
            arrays = [model.checked(j, arrays[k], total) for arrays, total in zip(made, work.rows, strict=True)]
            is_small = sum([array.nbytes for array in arrays]) < POOLED_BYTES_MIN
            if is_small and len({array.shape[1:] for array in arrays}) == 1:  # shapes may depend on values
                outputs[j] = [*scatter(np.concatenate(arrays), work.rows)]
            else:
                outputs[j] = [Tensor(array, 0, len(array)) for array in arrays]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _executed_separately(
        self, work: Work, names: list[str], shared: SharedOutputs | None, blocks: Mapping[str, OutputBlock]
    ) -> tuple[list[Sequence[Any]], list[int]]:
        """The outputs of each member's run (None for those in `blocks`), and the bytes copied for each input."""
        made: list[Sequence[Any]] = []
        copied = [0] * len(self._model.inputs)
        start = 0
        for m, rows in enumerate(work.rows):
            feed: Feed = {}
            for i, spec in enumerate(self._model.inputs):
                feed[spec.name], nbytes = gather([work.inputs[i][m]], HOST)
                copied[i] += nbytes
            try:
                execute = self._run_session if shared is None else shared.filling(blocks, start, start + rows)
                made.append(execute(names, feed))
            except Exception as error:
                raise self._failed(error, len(work.rows)) from error
            start += rows
        return made, copied

    def _failed(self, error: Exception, members: int) -> ModelFailed:
        what = told(error, cleaned(str(error)), members)
        return ModelFailed(f"model '{self._model.name}' failed: onnxruntime: {what}")


def _is_scattered(work: Work) -> bool:
    """Whether the members are large and not contiguous, so that one run for all of them needs a copy."""
    if any(column[0] is None for column in work.inputs):
        return False
    if sum([column[0].nbytes for column in work.inputs if column[0] is not None]) < MEMBER_BYTES_MIN:
        return False
    if not all(tensor.shape[0] for tensor in work.inputs[0]):  # type: ignore[union-attr]  # no member lacks it
        return False  # an empty member, which `work.rows` counts as one row
    return any(len(pieces(column)) > 1 for column in work.inputs)
