"""One instance of an ONNX model on the host: a batch becomes a run of its session, or a few.

Decided here: how a batch's inputs are fed and its outputs cut, and that members which lie apart may run one by one
where that was measured to be quicker (onnx_apart.py). How a session is opened and what its file says is decided
elsewhere, and where outputs go that other processes read (onnx_placed.py); instances whose tensors lie on a device are
in onnx_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.onnx_apart import MEMBER_BYTES_MIN, Ways
from flowserve.backends.onnx_placed import Block, Placing, can_be_placed
from flowserve.backends.onnx_ragged import WRONG_ROWS, RaggedPorts, part_of
from flowserve.backends.onnx_session import Execute, Feed
from flowserve.backends.onnx_signature import Port
from flowserve.backends.onnx_values import checked, cleaned, prepared, promised
from flowserve.errors import ModelFailed
from flowserve.memory.assemble import gather, pieces, scatter
from flowserve.memory.columns import Together
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, TensorSpec

if TYPE_CHECKING:
    from flowserve.backends.onnxruntime import OnnxModel


class OnnxInstance:
    """The right to run the model's session once at a time. `placing`, where outputs can be put where other processes
    read them: how.
    """

    wrong_rows = "its first dimension is no batch dimension, so set max_batch_size to 0"

    def __init__(
        self, model: OnnxModel, open_execute: Callable[[], Any], placing: Callable[[], Placing] | None = None
    ) -> None:
        self._model = model
        self._open_execute = open_execute
        self._usual: Execute
        self._execute: Execute  # the usual one, but for outputs that are placed
        self._make_placing = placing
        self._placing: Placing | None = None  # once there is an output that other processes read
        self._judge: Callable[..., Array] = checked
        self._promised = [*map(promised, model.outputs)]
        # Where members may also run one by one; what is made of a whole batch needs them together.
        self._ways = Ways() if model.is_batching and not model.prepared and model.inputs else None

    def open(self) -> None:
        self._usual = self._execute = self._open_execute()

    def close(self) -> None:
        """The session goes with its last reference."""
        del self._usual, self._execute
        self._placing = None

    def share(self, output: int) -> None:
        """Onto the next run; one that is under way goes on as it began."""
        make = self._make_placing
        if make is None or not can_be_placed(self._model, output):
            return
        placing = self._placing or make()
        placing.add(output)
        self._placing = self._execute = placing

    def run(self, work: Work, clock: ClockNs) -> Results:
        ways = self._ways
        if ways is None or len(work.rows) == 1 or not _is_apart(work):
            return self._run_together(work, clock)
        began_ns = clock()
        results = self._run_apart(work, clock) if ways.is_apart() else self._run_together(work, clock)
        ways.measured(sum(work.rows), results.computed_ns - began_ns)
        return results

    def _run_apart(self, work: Work, clock: ClockNs) -> Results:
        """Each member by itself, as it lies; outputs that are small, or placed, come to lie side by side for whoever
        reads them together.
        """
        model, placing = self._model, self._placing
        names, indices = model.asked(work.wanted)
        gathered_ns = clock()
        blocks = {} if placing is None else placing.blocks(names, sum(work.rows))
        try:
            made, copied = self._executed_apart(work, names, placing, blocks)
        except ModelFailed:
            if not blocks:
                raise
            blocks = {}
            made, copied = self._executed_apart(work, names, None, blocks)
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(work.rows)] * len(model.outputs)
        for k, j in enumerate(indices):
            block = blocks.get(names[k])
            if block is not None:
                array = self._judge(block.array, model.outputs[j], sum(work.rows), model.name, self.wrong_rows)
                outputs[j] = [*scatter(array, work.rows)]
                continue
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

    def _executed_apart(
        self, work: Work, names: list[str], placing: Placing | None, blocks: Mapping[str, Block]
    ) -> tuple[list[Sequence[Any]], list[int]]:
        """What each member's run made that is not in the blocks, and the bytes of each input that were copied."""
        made = []
        copied = [0] * len(self._model.inputs)
        start = 0
        for m, rows in enumerate(work.rows):
            feed: Feed = {}
            for i, spec in enumerate(self._model.inputs):
                feed[spec.name], nbytes = gather([work.inputs[i][m]], HOST)  # type: ignore[list-item]  # none lacks it
                copied[i] += nbytes
            if placing is None or not blocks:
                made.append(self._executed(self._usual, names, feed))
            else:
                made.append(self._executed(placing.filling(blocks, start, start + rows), names, feed))
            start += rows
        return made, copied

    def _run_together(self, work: Work, clock: ClockNs) -> Results:
        model = self._model
        rows = work.rows
        feed, copied, total = self._feed(work)
        if model.is_batching and total != sum(rows):
            # A member of no rows counts as one to the batcher.
            rows = [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]
        names, indices = model.asked(work.wanted)
        gathered_ns = clock()
        arrays = self._executed(self._execute, names, feed)
        computed_ns = clock()
        outputs: list[list[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                usual = self._promised[j]
                # Right at first glance in nearly every case; all the others are looked at closely.
                if usual is None or array.dtype is not usual[0] or array.shape != (total, *usual[1]):
                    array = self._judge(array, model.outputs[j], total, model.name, self.wrong_rows)
                column = Together(array, rows) if work.keeps_whole else scatter(array, rows)
                outputs[j] = column  # type: ignore[assignment]  # nobody puts None among them
            else:
                outputs[j] = [Tensor(self._judge(array, model.outputs[j], -1, model.name, self.wrong_rows))]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _executed(self, execute: Execute, names: list[str], feed: Feed) -> Sequence[Any]:
        try:
            return execute(names, feed)
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
