"""Ragged inputs, batch inputs and batch outputs of a model: what the model is fed, and how its flat outputs are split.

Decides which inputs are concatenated flat, which tensors are computed from the shapes of a batch, and by which shapes
outputs are split. All of it is prepared once per model; models without these features never use this module. The
computations are in memory/ragged.py; signature.py compares the model's file with the configuration.

Callers: onnx/instance.py and the tensorrt backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.config.types import ModelConfig
from flowserve.errors import ModelFailed
from flowserve.graph.conversion import reshaped
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column
from flowserve.memory.pool import HOST
from flowserve.memory.ragged import BATCH_INPUTS, Shape, flatten, resolved_dims, unflatten
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, TensorSpec

WRONG_RAGGED_ROWS: Final = (
    "its outputs need one row for each row of the batch: element counts are one for each request, and only "
    "BATCH_ITEM_SHAPE tells the rows of a request apart"
)


Outputs = Sequence[Sequence[Tensor | None]]


def part_of(work: Work, members: Sequence[int]) -> Work:
    """The batch with some of its members only."""
    rows = [work.rows[m] for m in members]
    return Work(
        [Column.of([column[m] for m in members], rows) for column in work.inputs],
        rows,
        [work.requests[m] for m in members],
        [work.wanted[m] for m in members],
    )


class RaggedPorts:
    """The ragged inputs and outputs of one model. `flat_outputs`: the outputs that the model returns flat, by name,
    with the spec to check them against.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._inputs = config.inputs
        self._outputs = config.outputs
        self._is_batching = config.max_batch_size > 0
        index = {spec.name: i for i, spec in enumerate(config.inputs)}
        outputs = {spec.name: j for j, spec in enumerate(config.outputs)}
        self._made = [
            (made.targets, index[made.source], BATCH_INPUTS[made.kind], made.dtype.numpy)
            for made in config.batch_inputs
        ]
        self._cut = [
            (outputs[target], index[made.source], self._full(config.outputs[outputs[target]].dims))
            for made in config.batch_outputs
            for target in made.targets
        ]
        flat = [config.outputs[j] for j, _, _ in self._cut]
        self.flat_outputs = {spec.name: TensorSpec(spec.name, spec.dtype, (-1,)) for spec in flat}

    @staticmethod
    def are_in(config: ModelConfig) -> bool:
        return bool(config.batch_inputs or config.batch_outputs) or any(spec.ragged for spec in config.inputs)

    def feed(self, work: Work) -> tuple[dict[str, Array], list[int], int]:
        """The arrays by name, the bytes of each input that had to be copied, and the rows of the batch."""
        feed: dict[str, Array] = {}
        copied = [0] * len(self._inputs)
        for i, (spec, column) in enumerate(zip(self._inputs, work.inputs, strict=True)):
            if column[0] is None:
                continue  # an omitted optional input of a model without batching
            assemble = flatten if spec.ragged else gather
            feed[spec.name], copied[i] = assemble(column, HOST)  # type: ignore[arg-type]  # no member lacks it
        for targets, source, make, dtype in self._made:
            array = make(self._shapes(work, source), dtype)
            feed.update(dict.fromkeys(targets, array))
        rows = sum(tensor.shape[0] for tensor in work.inputs[0] if tensor is not None) if self._is_batching else 0
        return feed, copied, rows

    def cut(self, outputs: Outputs, work: Work) -> Outputs:
        """The outputs, with the flat ones split among the members. In `outputs` each member has the whole array of a
        flat output as its block.

        Raises ModelFailed if the model returned more or fewer elements than the members' shapes have.
        """
        made = [*outputs]
        for j, source, dims in self._cut:
            whole = outputs[j][0]
            if whole is None:
                continue  # no member requested it
            shapes = [resolved_dims(dims, shape) for shape in self._shapes(work, source)]
            elements = sum(map(prod, shapes))
            if elements != len(whole.block):
                name = self._inputs[source].name
                raise ModelFailed(
                    f"model '{self._model}', output '{self._outputs[j].name}': by the shapes of input '{name}' it has "
                    f"{elements} elements in this batch, the model answered {len(whole.block)}"
                )
            made[j] = unflatten(whole.block, shapes, has_rows=self._is_batching)
        return made

    def _empty_members(self, work: Work) -> list[int]:
        """The members without rows, for which there is nothing to compute."""
        if not self._is_batching:
            return []
        return [m for m, tensor in enumerate(work.inputs[0]) if tensor is not None and not tensor.shape[0]]

    def run_nonempty(self, run: Callable[[Work, ClockNs], Results], work: Work, clock: ClockNs) -> Results | None:
        """Run a batch without its empty members: an element count per request would have a row too many for them. None
        if there are none.
        """
        empty = self._empty_members(work)
        if not empty:
            return None
        members = [m for m in range(len(work.rows)) if m not in empty]
        if members:
            results = run(part_of(work, members), clock)
        else:
            results = Results([[]] * len(self._outputs), gathered_ns=clock(), computed_ns=clock())
        results.outputs = self._with_empty_members(results.outputs, members, work)
        return results

    def _with_empty_members(self, outputs: Outputs, members: Sequence[int], work: Work) -> Outputs:
        """The outputs of the whole batch: `outputs` are those of `members`, the others get outputs without rows."""
        place = {m: k for k, m in enumerate(members)}
        sources = {j: (source, dims) for j, source, dims in self._cut}
        made: list[list[Tensor | None]] = []
        for j, spec in enumerate(self._outputs):
            column: list[Tensor | None] = []
            for m, wanted in enumerate(work.wanted):
                if m in place:
                    column.append(outputs[j][place[m]])
                elif spec.name not in wanted:
                    column.append(None)
                else:
                    shape = (0, *(max(dim, 0) for dim in spec.dims))
                    if j in sources:
                        source, dims = sources[j]
                        shape = resolved_dims(dims, self._shapes(part_of(work, [m]), source)[0])
                    column.append(Tensor(np.empty(shape, spec.dtype.numpy), 0, 0))
            made.append(column)
        return made

    def _full(self, dims: Shape) -> Shape:
        return (-1, *dims) if self._is_batching else dims

    def _shapes(self, work: Work, source: int) -> list[Shape]:
        """The members' shapes of an input as the model sees them: batch dimension included, reshaped if configured."""
        shapes = [tensor.shape for tensor in work.inputs[source] if tensor is not None]
        spec = self._inputs[source]
        if spec.reshape is None:
            return shapes
        batch = 1 if self._is_batching else 0
        return [shape[:batch] + reshaped(shape[batch:], spec.dims, spec.reshape) for shape in shapes]
