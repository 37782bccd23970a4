"""Runs batches on a session whose tensors are in host memory; the session computes on the CPU or on a GPU.

Decides how the inputs of a batch are fed and its outputs split among the members, and whether large members that are
not contiguous are copied together for one run, or run separately. It does not know how sessions are opened
(session.py), what files declare (signature.py), or how outputs get into shared memory (shared_outputs.py). Instances
whose tensors stay on a GPU are in device.py.

Callers: backend.py makes the instances, the runtime runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.onnx.ragged import WRONG_RAGGED_ROWS, RaggedPorts
from flowserve.backends.onnx.session import Execute, Feed
from flowserve.backends.onnx.shared_outputs import OutputBlock, SharedOutputs, can_be_shared
from flowserve.backends.onnx.signature import Port
from flowserve.backends.onnx.tensors import WRONG_ROWS, ModelTensors, checked, cleaned, member_rows, prepared, promised
from flowserve.errors import ModelFailed
from flowserve.memory.assemble import gather, pieces
from flowserve.memory.column import Column, scatter
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, TensorSpec

# Below this size a copy costs less than the fixed cost of one more run.
MEMBER_BYTES_MIN: Final = 64 * 1024
_TRIAL_BATCHES: Final = 4  # consecutive batches of a trial
_RECENT_BATCHES: Final = 8  # measured times that count, of each kind
_TOLERANCE: Final = 1.1  # separate runs may take this much longer: they save a copy, and with it memory and cores
_RETRY_MIN: Final = 32  # batches until the other kind is tried again; doubled each time it loses ...
_RETRY_MAX: Final = 4096  # ... up to this, since on some devices it is slower by far


class RunPolicy:
    """Whether the next batch of non-contiguous members is merged by a copy, or its members run separately.

    One run for many rows gains much if a row is little work, and nothing if one row keeps all cores busy: then the copy
    is a loss, for images a large one. The policy measures both kinds and compares their fastest recent batches, since
    other load on the machine only ever adds time. It tries the other kind again for ever, less often while that loses.
    """

    __slots__ = ("_batches", "_is_trial", "_prefers_separate", "_recent_ns", "_retry")

    def __init__(self) -> None:
        self._prefers_separate = False
        self._is_trial = False  # the other kind is being tried
        self._batches = 0  # since the trial began or ended
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
        """A batch of `rows` rows ran as `is_separate` said; it took `duration_ns`, copies included."""
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
    """Runs the model's session for one batch at a time. `share_outputs` makes what runs the session so that outputs are
    written to shared memory; None if they cannot be.
    """

    wrong_rows = WRONG_ROWS

    def __init__(
        self,
        model: ModelTensors,
        open_execute: Callable[[], Any],
        share_outputs: Callable[[], SharedOutputs] | None = None,
    ) -> None:
        self._model = model
        self._open_execute = open_execute
        self._run_session: Execute
        self._execute: Execute  # the session's own run, or SharedOutputs
        self._share_outputs = share_outputs
        self._shared: SharedOutputs | None = None  # once other processes read an output
        self._check: Callable[..., Array] = checked
        self._promised = [*map(promised, model.outputs)]
        # None where members must run together, since inputs are prepared for the whole batch.
        self._policy = RunPolicy() if model.is_batching and not model.prepared and model.inputs else None

    def open(self) -> None:
        self._run_session = self._execute = self._open_execute()

    def close(self) -> None:
        """The session is freed with its last reference."""
        del self._run_session, self._execute
        self._shared = None

    def share(self, output: int) -> None:
        """From the next run on. A run in progress is not changed."""
        make = self._share_outputs
        if make is None or not can_be_shared(self._model, output):
            return
        shared = self._shared or make()
        shared.add(output)
        self._shared = self._execute = shared

    def run(self, work: Work, clock: ClockNs) -> Results:
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
            made, copied = self._executed_separately(work, names, shared, blocks)
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
                array = self._check(block.array, model.outputs[j], sum(work.rows), model.name, self.wrong_rows)
                outputs[j] = [*scatter(array, work.rows)]
                continue
            arrays = [
                self._check(arrays[k], model.outputs[j], total, model.name, self.wrong_rows)
                for arrays, total in zip(made, work.rows, strict=True)
            ]
            is_small = sum([array.nbytes for array in arrays]) < POOLED_BYTES_MIN
            if is_small and len({array.shape[1:] for array in arrays}) == 1:  # a shape may depend on values
                outputs[j] = [*scatter(np.concatenate(arrays), work.rows)]
            else:
                outputs[j] = [Tensor(array, 0, len(array)) for array in arrays]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _executed_separately(
        self, work: Work, names: list[str], shared: SharedOutputs | None, blocks: Mapping[str, OutputBlock]
    ) -> tuple[list[Sequence[Any]], list[int]]:
        """The outputs of each member's run (None for those in `blocks`), and the bytes copied for each input."""
        made = []
        copied = [0] * len(self._model.inputs)
        start = 0
        for m, rows in enumerate(work.rows):
            feed: Feed = {}
            for i, spec in enumerate(self._model.inputs):
                feed[spec.name], nbytes = gather([work.inputs[i][m]], HOST)  # type: ignore[list-item]  # none lacks it
                copied[i] += nbytes
            if shared is None or not blocks:
                made.append(self._executed(self._run_session, names, feed))
            else:
                made.append(self._executed(shared.filling(blocks, start, start + rows), names, feed))
            start += rows
        return made, copied

    def _run_merged(self, work: Work, clock: ClockNs) -> Results:
        model = self._model
        rows = work.rows
        feed, copied, total = self._feed(work)
        if model.is_batching and total != sum(rows):
            rows = member_rows(work, total)
        names, indices = model.selected(work.wanted)
        gathered_ns = clock()
        arrays = self._executed(self._execute, names, feed)
        computed_ns = clock()
        outputs: list[Sequence[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                expected = self._promised[j]
                # This comparison suffices for nearly all outputs; `checked` handles the others.
                if expected is None or array.dtype is not expected[0] or array.shape != (total, *expected[1]):
                    array = self._check(array, model.outputs[j], total, model.name, self.wrong_rows)
                outputs[j] = Column.whole(array, rows)
            else:
                outputs[j] = [Tensor(self._check(array, model.outputs[j], -1, model.name, self.wrong_rows))]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _executed(self, execute: Execute, names: list[str], feed: Feed) -> Sequence[Any]:
        try:
            return execute(names, feed)
        except Exception as error:
            raise ModelFailed(f"model '{self._model.name}' failed: onnxruntime: {cleaned(str(error))}") from error

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        """The inputs by name, the bytes copied for each input, and the rows of the batch."""
        model = self._model
        feed: Feed = {}
        copied = [0] * len(model.inputs)
        array: Array | None = None
        for i, (spec, column) in enumerate(zip(model.inputs, work.inputs, strict=True)):
            if column[0] is None:
                continue  # an omitted optional input of a model without batching
            array, copied[i] = gather(column, HOST)  # type: ignore[arg-type]  # no member of a batch lacks it
            feed[spec.name] = array
        total = len(array) if array is not None and array.ndim else 0
        for i in model.prepared:
            self._prepare(feed, model.inputs[i], model.ports[i])
        return feed, copied, total

    def _prepare(self, feed: Feed, spec: TensorSpec, port: Port) -> None:
        array = feed.get(spec.name)
        if array is not None:
            feed[spec.name] = prepared(array, spec, port, self._model.name, is_batching=self._model.is_batching)


class RaggedInstance(OnnxInstance):
    """An instance for models with ragged inputs, batch inputs or batch outputs."""

    wrong_rows = WRONG_RAGGED_ROWS

    def __init__(self, model: ModelTensors, open_execute: Callable[[], Any], ragged: RaggedPorts) -> None:
        super().__init__(model, open_execute)
        self._policy = None
        self._ragged = ragged
        self._check = self._check_flat
        self._promised = [None] * len(model.outputs)

    def run(self, work: Work, clock: ClockNs) -> Results:
        results = self._ragged.run_nonempty(self.run, work, clock)
        if results is None:
            results = super().run(work, clock)
            results.outputs = self._ragged.cut(results.outputs, work)
        return results

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        feed, copied, total = self._ragged.feed(work)
        for i in self._model.prepared:
            self._prepare(feed, self._model.inputs[i], self._model.ports[i])
        return feed, copied, total

    def _check_flat(self, array: Array, spec: TensorSpec, total: int, model: str, wrong_rows: str) -> Array:
        flat = self._ragged.flat_outputs.get(spec.name)
        if flat is not None:
            array, spec, total = array.reshape(-1), flat, -1
        result: Array = checked(array, spec, total, model, wrong_rows)
        return result


def _is_scattered(work: Work) -> bool:
    """Whether the members are large and not contiguous, so that one run for all of them takes a copy."""
    if any(column[0] is None for column in work.inputs):
        return False
    if sum([column[0].nbytes for column in work.inputs if column[0] is not None]) < MEMBER_BYTES_MIN:
        return False
    if not all(tensor.shape[0] for tensor in work.inputs[0]):  # type: ignore[union-attr]  # no member lacks it
        return False  # an empty member, which `work.rows` counts as one row
    return any(len(pieces(column)) > 1 for column in work.inputs)  # type: ignore[arg-type]  # nor any other input
