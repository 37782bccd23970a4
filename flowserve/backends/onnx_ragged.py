"""What ONNX models with ragged inputs, batch inputs or batch outputs get fed, and how their flat outputs come apart.

Decided here: which of a model's inputs are laid end to end, which tensors are made of a batch's shapes, and by which
shapes outputs are cut. Worked out once per model; models without any of it never come here. Computing is
memory/ragged.py, running is onnx_instance.py; whether the model's file agrees is in onnx_signature.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from flowserve.backends.base import Work
from flowserve.config.types import ModelConfig
from flowserve.errors import ModelFailed
from flowserve.graph.conversion import reshaped
from flowserve.memory.assemble import gather
from flowserve.memory.pool import HOST
from flowserve.memory.ragged import BATCH_INPUTS, Shape, cut, filled, flatten
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, TensorSpec

WRONG_ROWS: Final = (
    "its outputs need one row for each row of the batch: element counts are one for each request, and only "
    "BATCH_ITEM_SHAPE tells the rows of a request apart"
)


Columns = list[list[Tensor | None]]


def part_of(work: Work, members: Sequence[int]) -> Work:
    """The same for some of its members."""
    return Work(
        [[column[m] for m in members] for column in work.inputs],
        [work.rows[m] for m in members],
        [work.requests[m] for m in members],
        [work.wanted[m] for m in members],
    )


class RaggedPorts:
    """The ragged side of one model's inputs and outputs.

    `flat_outputs`: the outputs that come flat, by name, as the base class is to check them.
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
                continue  # an input of a model without batching, left to its default
            assemble = flatten if spec.ragged else gather
            feed[spec.name], copied[i] = assemble(column, HOST)  # type: ignore[arg-type]  # no member lacks it
        for targets, source, make, dtype in self._made:
            array = make(self._shapes(work, source), dtype)
            feed.update(dict.fromkeys(targets, array))
        rows = sum(tensor.shape[0] for tensor in work.inputs[0] if tensor is not None) if self._is_batching else 0
        return feed, copied, rows

    def cut(self, outputs: list[list[Tensor | None]], work: Work) -> None:
        """Give every member its share of the flat outputs, in place: until now each has the whole array as its block.

        Raises `ModelFailed` where the model answered more or fewer elements than the members' shapes hold.
        """
        for j, source, dims in self._cut:
            whole = outputs[j][0]
            if whole is None:
                continue  # nobody asked for it
            shapes = [filled(dims, shape) for shape in self._shapes(work, source)]
            elements = sum(map(prod, shapes))
            if elements != len(whole.block):
                name = self._inputs[source].name
                raise ModelFailed(
                    f"model '{self._model}', output '{self._outputs[j].name}': by the shapes of input '{name}' it has "
                    f"{elements} elements in this batch, the model answered {len(whole.block)}"
                )
            outputs[j] = [*cut(whole.block, shapes, has_rows=self._is_batching)]

    def blank_members(self, work: Work) -> list[int]:
        """The members that have no rows, of which there is nothing to compute."""
        if not self._is_batching:
            return []
        return [m for m, tensor in enumerate(work.inputs[0]) if tensor is not None and not tensor.shape[0]]

    def with_blank(self, outputs: list[list[Tensor | None]], shown: Sequence[int], work: Work) -> Columns:
        """The outputs of the members that were `shown` to the model; among them those of the others, without rows."""
        place = {m: k for k, m in enumerate(shown)}
        sources = {j: (source, dims) for j, source, dims in self._cut}
        made: Columns = []
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
                        shape = filled(dims, self._shapes(part_of(work, [m]), source)[0])
                    column.append(Tensor(np.empty(shape, spec.dtype.numpy), 0, 0))
            made.append(column)
        return made

    def _full(self, dims: Shape) -> Shape:
        return (-1, *dims) if self._is_batching else dims

    def _shapes(self, work: Work, source: int) -> list[Shape]:
        """The members' shapes of an input as the model means it: whole, reshaped where the configuration says so."""
        shapes = [tensor.shape for tensor in work.inputs[source] if tensor is not None]
        spec = self._inputs[source]
        if spec.reshape is None:
            return shapes
        batch = 1 if self._is_batching else 0
        return [shape[:batch] + reshaped(shape[batch:], spec.dims, spec.reshape) for shape in shapes]
