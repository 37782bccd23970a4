"""Runs a whole batch in one call of a library, with tensors in host memory.

Decides how the inputs of a batch are fed, in which order they are converted, how outputs are taken over, checked and
divided among the members. It does not know which library runs, nor ragged batches' empty members (tensors.py).

Callers: instance.py of this package and of the onnx backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.library.tensors import ModelTensors, member_rows
from flowserve.errors import ModelFailed
from flowserve.memory import dlpack
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType

Feed = dict[str, Array]
# The outputs of these names, in that order, of a run with these inputs: arrays, or objects that export their memory by
# DLPack. The library does not write to them again.
Execute = Callable[[list[str], Feed], Sequence[Any]]


class BatchRun:
    """`execute` may be replaced between two runs; a run in progress is not changed. `failed` makes the error of a run
    that raised, from the exception and the number of members.
    """

    def __init__(self, model: ModelTensors, execute: Execute, failed: Callable[[Exception, int], ModelFailed]) -> None:
        self.execute = execute
        self._model = model
        self._failed = failed
        # The dtype and the shape of a row of each output that needs no conversion, None for the others.
        self._promised = [
            None
            if spec.dtype is DType.BYTES or spec.reshape is not None or spec.is_variable or model.ragged is not None
            else (spec.dtype.numpy, spec.dims)
            for spec in model.outputs
        ]

    def run(self, work: Work, clock: ClockNs) -> Results:
        """One call for all members. Raises ModelFailed, or Invalid for an input that cannot be converted."""
        model = self._model
        rows = work.rows
        if model.ragged is not None:
            feed, copied, total = model.ragged.feed(work)
        else:
            feed = {}
            copied = [0] * len(model.inputs)
            array: Array | None = None
            for i, (spec, column) in enumerate(zip(model.inputs, work.inputs, strict=True)):
                # A column's block is used first, because reading its elements creates an object for each member.
                if column.block is None and column[0] is None:
                    continue  # an omitted optional input of a model without batching
                array, copied[i] = gather(column, HOST)
                feed[spec.name] = array
            total = len(array) if array is not None and array.ndim else 0
        for i in model.prepared:
            name = model.inputs[i].name
            if name in feed:
                feed[name] = model.prepare(i, feed[name])
        if model.is_batching and total != sum(rows):
            rows = member_rows(work, total)
        names, indices = model.selected(work.wanted)
        gathered_ns = clock()
        try:
            arrays = self.execute(names, feed)
            for one in arrays:
                if type(one) is not np.ndarray:
                    arrays = [*map(as_array, arrays)]
                    break
        except Exception as error:
            raise self._failed(error, len(rows)) from error
        computed_ns = clock()
        outputs: list[Sequence[Tensor | None]] = [[None] * len(rows)] * len(model.outputs)
        for j, array in zip(indices, arrays, strict=True):
            if model.is_batching:
                expected = self._promised[j]
                # This comparison suffices for nearly all outputs; `checked` handles the others.
                if expected is None or array.dtype is not expected[0] or array.shape != (total, *expected[1]):
                    array = model.checked(j, array, total)
                outputs[j] = Column.whole(array, rows)
            else:
                outputs[j] = [Tensor(model.checked(j, array, -1))]
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)


def as_array(made: Any) -> Array:
    """An output of a library: an array as it is; a tensor that exports its memory by DLPack without a copy, from a GPU
    with one. Raises TypeError, Invalid or Unsupported for other objects.
    """
    if isinstance(made, np.ndarray):
        return made
    if not hasattr(made, "__dlpack__"):
        raise TypeError(f"it returned {type(made).__name__} where an array was expected")
    if made.__dlpack_device__()[0] == dlpack.CPU:
        try:
            return np.ascontiguousarray(np.from_dlpack(made))
        except (BufferError, RuntimeError):
            pass  # a data type that numpy does not import, such as BF16
    return dlpack.import_capsule(made.__dlpack__()).on_host()
