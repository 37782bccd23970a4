"""One instance of an ONNX model on the host: a batch becomes a run of its session, or a few.

Decided here: how a batch's inputs are fed and its outputs cut, and that members which lie apart may run one by one
where that was measured to be quicker (onnx_apart.py). How a session is opened and what its file says is decided
elsewhere; instances whose tensors lie on a device are in onnx_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.onnx_apart import MEMBER_BYTES_MIN, Ways
from flowserve.backends.onnx_ragged import WRONG_ROWS, RaggedPorts, part_of
from flowserve.backends.onnx_session import Execute, Feed
from flowserve.backends.onnx_signature import Port
from flowserve.backends.onnx_values import checked, cleaned, prepared, promised
from flowserve.errors import ModelFailed
from flowserve.memory.assemble import gather, pieces, scatter
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, TensorSpec

if TYPE_CHECKING:
    from flowserve.backends.onnxruntime import OnnxModel


class OnnxInstance:
    """The right to run the model's session once at a time."""

    wrong_rows = "its first dimension is no batch dimension, so set max_batch_size to 0"

    def __init__(self, model: OnnxModel, open_execute: Callable[[], Any]) -> None:
        self._model = model
        self._open_execute = open_execute
        self._judge: Callable[..., Array] = checked
        self._promised = [*map(promised, model.outputs)]
        # Where members may also run one by one; what is made of a whole batch needs them together.
        self._ways = Ways() if model.is_batching and not model.prepared and model.inputs else None

    def open(self) -> None:
        self._execute: Execute = self._open_execute()

    def close(self) -> None:
        """The session goes with its last reference."""
        del self._execute

    def run(self, work: Work, clock: ClockNs) -> Results:
        ways = self._ways
        if ways is None or len(work.rows) == 1 or not _is_apart(work):
            return self._run_together(work, clock)
        began_ns = clock()
        results = self._run_apart(work, clock) if ways.is_apart() else self._run_together(work, clock)
        ways.measured(sum(work.rows), results.computed_ns - began_ns)
        return results

    def _run_apart(self, work: Work, clock: ClockNs) -> Results:
        """Each member by itself, as it lies; small outputs are laid side by side for whoever reads them together."""
        model = self._model
        names, indices = model.asked(work.wanted)
        gathered_ns = clock()
        made: list[Sequence[Array]] = []
        copied = [0] * len(model.inputs)
        for m in range(len(work.rows)):
            feed: Feed = {}
            for i, spec in enumerate(model.inputs):
                feed[spec.name], nbytes = gather([work.inputs[i][m]], HOST)  # type: ignore[list-item]  # none lacks it
                copied[i] += nbytes
            made.append(self._executed(names, feed))
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(work.rows)] * len(model.outputs)
        for k, j in enumerate(indices):
            arrays = [
                self._judge(arrays[k], model.outputs[j], total, model.name, self.wrong_rows)
                for arrays, total in zip(made, work.rows, strict=True)
            ]
            is_small = sum([array.nbytes for array in arrays]) < POOLED_BYTES_MIN
            if is_small and len({array.shape[1:] for array in arrays}) == 1:  # values may say how
                outputs[j] = [*scatter(np.concatenate(arrays), work.rows)]
            else:
                outputs[j] = [Tensor(array, 0, len(array)) for array in arrays]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _run_together(self, work: Work, clock: ClockNs) -> Results:
        model = self._model
        rows = work.rows
        feed, copied, total = self._feed(work)
        if model.is_batching and total != sum(rows):
            # A member of no rows counts as one to the batcher.
            rows = [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]
        names, indices = model.asked(work.wanted)
        gathered_ns = clock()
        arrays = self._executed(names, feed)
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                usual = self._promised[j]
                # Right at first glance in nearly every case; all the others are looked at closely.
                if usual is None or array.dtype is not usual[0] or array.shape != (total, *usual[1]):
                    array = self._judge(array, model.outputs[j], total, model.name, self.wrong_rows)
                outputs[j] = scatter(array, rows)  # type: ignore[assignment]  # nobody puts None among them
            else:
                outputs[j] = [Tensor(self._judge(array, model.outputs[j], -1, model.name, self.wrong_rows))]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _executed(self, names: list[str], feed: Feed) -> Sequence[Array]:
        try:
            return self._execute(names, feed)
        except Exception as error:
            raise ModelFailed(f"model '{self._model.name}' failed: onnxruntime: {cleaned(str(error))}") from error

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        """The arrays by name, the bytes of each input that had to be copied, and the rows of the batch."""
        model = self._model
        feed: Feed = {}
        copied = [0] * len(model.inputs)
        array: Array | None = None
        for i, (spec, column) in enumerate(zip(model.inputs, work.inputs, strict=True)):
            if column[0] is None:
                continue  # an input of a model without batching, left to its default
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
    """For models with ragged inputs, batch inputs or batch outputs."""

    wrong_rows = WRONG_ROWS

    def __init__(self, model: OnnxModel, open_execute: Callable[[], Any], ragged: RaggedPorts) -> None:
        super().__init__(model, open_execute)
        self._ways = None
        self._ragged = ragged
        self._judge = self._judge_flat
        self._promised = [None] * len(model.outputs)

    def run(self, work: Work, clock: ClockNs) -> Results:
        blank = self._ragged.blank_members(work)
        if blank:
            return self._run_others(work, blank, clock)
        results = super().run(work, clock)
        self._ragged.cut(results.outputs, work)
        return results

    def _run_others(self, work: Work, blank: Collection[int], clock: ClockNs) -> Results:
        """Requests without rows are not shown to the model: a count for each request would be one row too many."""
        shown = [m for m in range(len(work.rows)) if m not in blank]
        if shown:
            results = self.run(part_of(work, shown), clock)
        else:
            results = Results([[]] * len(self._model.outputs), gathered_ns=clock(), computed_ns=clock())
        results.outputs = self._ragged.with_blank(results.outputs, shown, work)
        return results

    def _feed(self, work: Work) -> tuple[Feed, list[int], int]:
        feed, copied, total = self._ragged.feed(work)
        for i in self._model.prepared:
            self._prepare(feed, self._model.inputs[i], self._model.ports[i])
        return feed, copied, total

    def _judge_flat(self, array: Array, spec: TensorSpec, total: int, model: str, wrong_rows: str) -> Array:
        flat = self._ragged.flat_outputs.get(spec.name)
        if flat is not None:
            array, spec, total = array.reshape(-1), flat, -1
        judged: Array = checked(array, spec, total, model, wrong_rows)
        return judged


def _is_apart(work: Work) -> bool:
    """Whether members of many bytes lie so that one run would take a copy of them."""
    if any(column[0] is None for column in work.inputs):
        return False
    if sum([column[0].nbytes for column in work.inputs if column[0] is not None]) < MEMBER_BYTES_MIN:
        return False
    if not all(tensor.shape[0] for tensor in work.inputs[0]):  # type: ignore[union-attr]  # nobody lacks one
        return False  # one without rows, which `work.rows` counts as one
    return any(len(pieces(column)) > 1 for column in work.inputs)  # type: ignore[arg-type]  # nor here
