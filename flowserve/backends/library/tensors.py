"""Conversion between the tensors of a batch and the tensors of a model file, and checks of the model's outputs.

Decides reshapes and scalars of inputs, shapes and data types of outputs, and the encoding of strings. Outputs may be
numpy arrays or device arrays: only shape and dtype are read. It imports no library, and knows batches only for ragged
models.

Ragged inputs, batch inputs and batch outputs (`RaggedPorts`): decides which inputs are concatenated flat, which tensors
are computed from the shapes of a batch, and by which shapes flat outputs are split. All of it is prepared once per
model; models without these features never use it. The computations are in memory/assemble.py; signature.py compares the
model's file with the configuration.

Callers: the modules of this package, and the onnx and tensorrt backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.base import ClockNs, DeviceWork, Results, Work
from flowserve.backends.library.signature import NO_BATCH_DIMENSION, Signature
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, ModelFailed
from flowserve.graph.types import inner_shape, outer_shape
from flowserve.memory.assemble import BATCH_INPUTS, Shape, flatten, gather, resolved_dims, unflatten
from flowserve.memory.column import Column, scatter
from flowserve.memory.device_tensor import DeviceArray
from flowserve.memory.pool import HOST
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec, fits, shape_text

AnyArray = Any  # a numpy array, or a DeviceArray
Outputs = Sequence[Sequence[Tensor | None]]

WRONG_ROWS: Final = f"its first dimension is no batch dimension: {NO_BATCH_DIMENSION}"
WRONG_RAGGED_ROWS: Final = (
    "its outputs need one row for each row of the batch: element counts are one for each request, and only "
    "BATCH_ITEM_SHAPE tells the rows of a request apart"
)

# The number of combinations of requested outputs that are remembered. Clients choose outputs in any order and number.
_SELECTIONS_MAX: Final = 100


class ModelTensors:
    """The inputs and outputs of one model: the configuration's specs beside the ports of the file, in the same order.

    `prepared`: indices of the inputs that are converted after they are gathered. `made`: all outputs of the file by
    name, whether or not the configuration has them. `passed_through`: names of the outputs that are inputs of the file
    at the same time. `ragged`: None for a model without ragged inputs, batch inputs and batch outputs.
    `strings_are_text`: BYTES go in and come out as arrays of `str`, else of `bytes`.
    """

    def __init__(self, config: ModelConfig, signature: Signature, *, strings_are_text: bool = True) -> None:
        self.name = config.name
        self._strings_are_text = strings_are_text
        self.inputs = config.inputs
        self.outputs = config.outputs
        self.is_batching = config.max_batch_size > 0
        by_name = {port.name: port for port in signature.inputs}
        self.ports = [by_name[spec.name] for spec in config.inputs]
        self.prepared = [
            i
            for i, (spec, port) in enumerate(zip(config.inputs, self.ports, strict=True))
            if spec.dtype is DType.BYTES or spec.reshape is not None or not port.shape
        ]
        self.made = {port.name: port for port in signature.outputs}
        self.output_ports = [self.made[spec.name] for spec in config.outputs]
        self.passed_through = frozenset(self.made.keys() & by_name.keys())
        is_ragged = config.batch_inputs or config.batch_outputs or any(spec.ragged for spec in config.inputs)
        self.ragged = RaggedPorts(config) if is_ragged else None
        self._selections: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}

    def selected(self, wanted: Sequence[tuple[str, ...]]) -> tuple[list[str], list[int]]:
        """Names and indices of the outputs to compute for a batch whose members request the outputs `wanted`: those
        that all members request if they request the same, else all outputs.
        """
        names = wanted[0]
        for other in wanted:
            if other != names:
                names = tuple(spec.name for spec in self.outputs)
                break
        found = self._selections.get(names)
        if found is None:
            if len(self._selections) > _SELECTIONS_MAX:
                self._selections.clear()
            indices = [j for j, spec in enumerate(self.outputs) if spec.name in names]
            found = self._selections[names] = ([self.outputs[j].name for j in indices], indices)
        return found

    def prepare(self, i: int, array: Array) -> Array:
        """Gathered input i, converted to the file's shape, and to text for BYTES where strings are text. Raises Invalid
        for text that is not UTF-8.
        """
        if self.inputs[i].dtype is DType.BYTES:
            # Large ones are decoded here.
            array = _to_text(array, self.inputs[i].name, self.name) if self._strings_are_text else np.asarray(array)
        return array.reshape(self.fed_shape(i, array.shape))

    def fed_shape(self, i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the file expects for input i of this shape."""
        if not self.ports[i].shape:
            return ()
        return shape if self.inputs[i].ragged else inner_shape(shape, self.inputs[i])

    def made_shape(self, j: int, total: int) -> tuple[int, ...] | None:
        """The shape of output j in the file, if it is known before the run, else None. `total` as in `checked`."""
        if not self.output_ports[j].shape:
            return ()
        spec = self.outputs[j]
        inner = spec.dims if spec.reshape is None else spec.reshape
        if any(dim < 0 for dim in inner):
            return None
        return (total, *inner) if total >= 0 else inner

    def checked(self, j: int, array: AnyArray, total: int) -> AnyArray:
        """Output j in the configuration's shape. `total` is the batch's row count, -1 for a model without batching.
        Raises ModelFailed for another row count, shape or data type.
        """
        spec, ragged = self.outputs[j], self.ragged
        if ragged is not None and spec.name in ragged.flat_outputs:
            array, spec, total = array.reshape((prod(array.shape),)), ragged.flat_outputs[spec.name], -1
        if spec.dtype is DType.BYTES and self._strings_are_text:
            array = _objects([element.encode() for element in array.ravel().tolist()], array.shape)
        if array.dtype != spec.dtype.numpy:
            raise self._other(spec, f"the configuration promises {spec.dtype}, the model answered {array.dtype}")
        shape = array.shape
        batch = shape[:1] if total >= 0 else ()
        inner = spec.dims if spec.reshape is None else spec.reshape
        if total >= 0 and batch != (total,):
            hint = WRONG_ROWS if ragged is None else WRONG_RAGGED_ROWS
            raise self._other(spec, f"the batch has {total} rows, the model answered shape {shape_text(shape)}; {hint}")
        tail = shape[len(batch) :]
        if not shape and inner == (1,):
            return array.reshape((1,))
        if tail != inner and not fits(tail, inner):
            promised = shape_text((*batch, *inner))
            what = f"the configuration promises shape {promised}, the model answered {shape_text(shape)}"
            raise self._other(spec, what)
        return array if spec.reshape is None else array.reshape(outer_shape(shape, spec, batches=total >= 0))

    def gather_on(self, stream: DeviceStream, work: Work) -> tuple[dict[str, DeviceArray], list[int], int]:
        """The inputs by name, in memory that the device reads and in the file's shape; the bytes copied for each input;
        and the rows of the batch, -1 without a batch dimension.
        """
        feed: dict[str, DeviceArray] = {}
        if self.ragged is not None:
            arrays, copied, total = self.ragged.feed(work)
            feed = {name: stream.gather([Tensor(array)])[0] for name, array in arrays.items()}
            return feed, copied, total if self.is_batching else -1
        copied = [0] * len(self.inputs)
        total = 0 if self.is_batching else -1
        for i, spec in enumerate(self.inputs):
            present = [tensor for tensor in work.inputs[i] if tensor is not None]
            if not present:
                continue  # an omitted optional input of a model without batching
            array, copied[i] = stream.gather(present)
            if self.is_batching:
                total = len(array)
            feed[spec.name] = array.reshape(self.fed_shape(i, array.shape))
        return feed, copied, total

    def deliver(
        self, stream: DeviceStream, work: Work, indices: Sequence[int], arrays: Sequence[DeviceArray], total: int
    ) -> Outputs:
        """The members' outputs. `arrays` are the outputs with these indices, for the whole batch; a flat one is given
        whole to every member. `total` as in `checked`.
        """
        results = [self.checked(j, array, total) for j, array in zip(indices, arrays, strict=True)]
        rows = member_rows(work, total) if total >= 0 else None
        outputs: list[Sequence[Tensor | None]] = [[None] * len(work.rows)] * len(self.outputs)
        if self.ragged is None:
            read_at = work.read_at if isinstance(work, DeviceWork) else None
            chosen = None if read_at is None else [read_at[j] for j in indices]
            for j, tensors in zip(indices, stream.deliver(results, rows, chosen), strict=True):
                outputs[j] = tensors
            return outputs
        for j, (whole,) in zip(indices, stream.deliver(results, None), strict=True):
            is_flat = rows is None or self.outputs[j].name in self.ragged.flat_outputs
            outputs[j] = [whole] * len(work.rows) if is_flat or rows is None else [*scatter(whole.array, rows)]
        return outputs

    def _other(self, spec: TensorSpec, what: str) -> ModelFailed:
        return ModelFailed(f"model '{self.name}', output '{spec.name}': {what}")


def member_rows(work: Work, total: int) -> list[int]:
    """The rows of each member of a batch of `total` rows. `work.rows` counts an empty member as one row."""
    if total == sum(work.rows):
        return work.rows
    return [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]


def _to_text(array: Array, name: str, model: str) -> Array:
    """ONNX strings are text: onnxruntime takes `str` objects, and would take the repr of any other object."""
    try:
        return _objects([element.decode() for element in array.ravel().tolist()], array.shape)
    except UnicodeDecodeError as error:
        raise Invalid(
            f"inference input '{name}' for model '{model}' must hold UTF-8 text, as ONNX strings do: {error}"
        ) from error


def _objects(elements: list[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


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
        batch = (-1,) if self._is_batching else ()
        index = {spec.name: i for i, spec in enumerate(config.inputs)}
        outputs = {spec.name: j for j, spec in enumerate(config.outputs)}
        self._made = [
            (made.targets, index[made.source], BATCH_INPUTS[made.kind], made.dtype.numpy)
            for made in config.batch_inputs
        ]
        self._split = [
            (outputs[target], index[made.source], (*batch, *config.outputs[outputs[target]].dims))
            for made in config.batch_outputs
            for target in made.targets
        ]
        flat = [config.outputs[j] for j, _, _ in self._split]
        self.flat_outputs = {spec.name: TensorSpec(spec.name, spec.dtype, (-1,)) for spec in flat}

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

    def run(self, run: Callable[[Work, ClockNs], Results], work: Work, clock: ClockNs) -> Results:
        """Run a batch without its empty members, for which there is nothing to compute: an element count per request
        would have a row too many for them. Flat outputs are split.
        """
        empty = [m for m, tensor in enumerate(work.inputs[0]) if tensor is not None and not tensor.shape[0]]
        if not empty or not self._is_batching:
            results = run(work, clock)
            results.outputs = self._split_flat(results.outputs, work)
            return results
        members = [m for m in range(len(work.rows)) if m not in empty]
        if members:
            results = self.run(run, part_of(work, members), clock)
        else:
            results = Results([[]] * len(self._outputs), gathered_ns=clock(), computed_ns=clock())
        results.outputs = self._with_empty_members(results.outputs, members, work)
        return results

    def _split_flat(self, outputs: Outputs, work: Work) -> Outputs:
        """The outputs, with the flat ones split among the members. In `outputs` each member has the whole array of a
        flat output as its block.

        Raises ModelFailed if the model returned more or fewer elements than the members' shapes have.
        """
        made = [*outputs]
        for j, source, dims in self._split:
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

    def _with_empty_members(self, outputs: Outputs, members: Sequence[int], work: Work) -> Outputs:
        """The outputs of the whole batch: `outputs` are those of `members`, the other members get outputs without
        rows.
        """
        place = {m: k for k, m in enumerate(members)}
        sources = {j: (source, dims) for j, source, dims in self._split}
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

    def _shapes(self, work: Work, source: int) -> list[Shape]:
        """The members' shapes of an input as the model sees them: batch dimension included, reshaped if configured."""
        spec = self._inputs[source]
        return [inner_shape(tensor.shape, spec) for tensor in work.inputs[source] if tensor is not None]
