"""What a Python model answered, taken over.

Decided here: which answers are right (names, data types and shapes as the configuration promised; what is wrong fails
its own request only), and when an array may be taken as it is. A model may go on using what it answered with: a table
it keeps, a buffer it fills again next time. So small answers are laid side by side in one block, which the next step
then reads without copying; large ones are taken as they are when nobody else holds them, which their reference counts
tell, and copied otherwise. Where they are written elsewhere before the model goes on (a process of its own does), all
are taken as they are.

This file does not know how the model was called.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import getrefcount
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Results, Work
from flowserve.backends.python_strays import Strays
from flowserve.backends.shapes import fits, has_fixed_shapes, shown
from flowserve.backends.triton_objects import InferenceResponse, TritonError
from flowserve.backends.triton_tensors import OnGpu, on_host
from flowserve.backends.triton_tensors import Tensor as Answer
from flowserve.config.types import ModelConfig
from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    FlowserveError,
    Invalid,
    ModelFailed,
    NotFound,
    Unavailable,
    Unsupported,
)
from flowserve.graph.conversion import reshaped
from flowserve.memory.assemble import scatter
from flowserve.memory.bytes_codec import to_bytes
from flowserve.memory.columns import Apart, Together
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

_CLASSES = {
    TritonError.NOT_FOUND: NotFound,
    TritonError.INVALID_ARG: Invalid,
    TritonError.UNAVAILABLE: Unavailable,
    TritonError.UNSUPPORTED: Unsupported,
    TritonError.ALREADY_EXISTS: AlreadyExists,
    TritonError.CANCELLED: Cancelled,
    TritonError.INTERNAL: ModelFailed,
    TritonError.UNKNOWN: ModelFailed,
}

Errors = dict[int, FlowserveError]
# What most answers say besides their tensors. Nobody writes into results.
_NONE: Final[Mapping[int, Any]] = {}
# Where an answer stands: in whose response, and which of its tensors.
Place = tuple[int, int]


class _Output:
    """One output as the configuration has it. `inner` is the shape a model answers with, `one` that of a single row."""

    __slots__ = ("inner", "j", "numpy", "one", "spec")

    def __init__(self, j: int, spec: TensorSpec, *, batches: bool) -> None:
        self.j = j
        self.spec = spec
        self.numpy = spec.dtype.numpy
        self.inner = spec.dims if spec.reshape is None else spec.reshape
        self.one = (1, *self.inner) if batches else self.inner


class AnswerReader:
    """Turns the responses to one batch after another into columns of tensors."""

    def __init__(self, config: ModelConfig, *, copies: bool = True) -> None:
        """`copies`: False where what it returns is written elsewhere before the model goes on."""
        self._model = config.name
        self._copies = copies
        self._specs = config.outputs
        self._batches = config.max_batch_size > 0
        self._outputs = {spec.name: _Output(j, spec, batches=self._batches) for j, spec in enumerate(config.outputs)}
        self.are_fixed = has_fixed_shapes(config.outputs)
        self._strays = Strays(config.name, self._outputs)
        # Whether an output that is not there was left out: each of a decoupled model's answers may have others.
        self._answers_once = self._has_all = not config.decoupled

    def read(self, responses: list[InferenceResponse], work: Work) -> Results:
        """What one response for each member, in a list that nobody else holds, come to."""
        taken = self.at_first_glance(responses, work)
        if taken is not None:
            return self._alike(taken, work)
        try:
            outputs: list[list[Tensor | None]] = [[None] * len(responses) for _ in self._specs]
            placed = [0] * len(outputs)
            errors: Errors = {}
            for j, column in enumerate(self._sort(responses, work, errors)):
                if self._has_all and len(column) + len(errors) < len(responses):
                    there = {m for m, _ in column}
                    missing = (names for m, names in enumerate(work.wanted) if m not in there and m not in errors)
                    self._strays.left_out(self._specs[j].name, missing)
                if column:
                    placed[j] = self._take(responses, column, self._specs[j], outputs[j])
        except OnGpu:
            for response in responses:
                if isinstance(response, InferenceResponse):
                    response._outputs[:] = map(on_host, response._outputs)
            return self.read(responses, work)
        # What is no response has become an error, and says nothing.
        said = {m: found for m, response in enumerate(responses) if (found := getattr(response, "_parameters", None))}
        return Results(outputs, errors, placed=placed, parameters=said)

    def at_first_glance(self, responses: list[InferenceResponse], work: Work) -> list[list[Array] | None] | None:
        """For each output the members' arrays, None for one that none of them has, where everything is small and right
        at first glance: requests of one row each, answered with the same tensors in the same order and nothing besides.
        None where it is not so, with nothing done. This is nearly every batch, and every request pays for each of its
        steps.
        """
        count = len(responses)
        if work.rows.count(1) != count:
            return None
        for response in responses:
            if type(response) is not InferenceResponse or response._error is not None or response._parameters:
                return None
        first = responses[0]._outputs
        if not first:
            return None
        width, names = len(first), work.wanted
        taken: list[list[Array] | None] = [None] * len(self._specs)
        try:
            for k, answer in enumerate(first):
                name = answer._name
                output = self._outputs.get(name)
                array = answer._array
                if output is None or output.spec.reshape is not None or taken[output.j] is not None or array is None:
                    return None
                dtype, shape = output.numpy, array.shape
                if dtype.hasobject or (self._copies and array.nbytes * count >= POOLED_BYTES_MIN):
                    return None
                if shape != output.one and self._mismatch(answer, output, 1):
                    return None
                if array.dtype is not dtype or name not in names[0]:
                    return None
                arrays = taken[output.j] = [array]
                for m in range(1, count):
                    answers = responses[m]._outputs
                    if len(answers) != width:
                        return None
                    answer = answers[k]
                    array = answer._array
                    if array is None or array.dtype is not dtype or array.shape != shape:
                        return None
                    if answer._name != name or name not in names[m]:
                        return None
                    arrays.append(array)
        except AttributeError:  # of something that is no tensor, which whoever looks closely tells
            return None
        return taken

    def _alike(self, taken: list[list[Array] | None], work: Work) -> Results:
        outputs: list[Any] = []  # what is no list is read as one
        placed = []
        for spec, arrays in zip(self._specs, taken, strict=True):
            if arrays is None:
                if self._has_all:
                    self._strays.left_out(spec.name, work.wanted)
                outputs.append([None] * len(work.rows))
                placed.append(0)
            elif self._copies:
                block = np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy()
                if work.keeps_whole and self._batches:
                    outputs.append(Together(block, work.rows))
                else:
                    outputs.append([*scatter(block, work.rows)] if self._batches else [Tensor(block)])
                placed.append(block.nbytes)
            else:
                outputs.append(Apart(arrays) if self._batches else [Tensor(arrays[0])])
                placed.append(0)
        return Results(outputs, _NONE, placed=placed, parameters=_NONE)

    def _sort(self, responses: list[Any], work: Work, errors: Errors) -> list[list[Place]]:
        """Where the answers for each output stand. Tensors that nobody asked for are ignored, and so are those that
        nobody configured, which the log tells.
        """
        columns: list[list[Place]] = [[] for _ in self._specs]
        for m, response in enumerate(responses):
            if not isinstance(response, InferenceResponse) or response._error is not None:
                errors[m] = self._refusal(response)
                continue
            wanted = work.wanted[m]
            rows = work.rows[m]
            for k, tensor in enumerate(response._outputs):
                if not isinstance(tensor, Answer):
                    found = type(tensor).__name__
                    text = f"model '{self._model}' answered {found} where pb_utils.Tensor was expected"
                    errors[m] = ModelFailed(text)
                    self._strays.unlike(found, errors[m])
                    break
                output = self._outputs.get(tensor._name)
                if output is None:
                    self._strays.tell(tensor._name)
                    continue
                if tensor._name not in wanted:
                    continue
                array = tensor.as_numpy()
                # Right at first glance in nearly every case; all the others are looked at closely.
                if array.dtype is not output.numpy or array.shape != output.one or rows != 1 or array.dtype.hasobject:
                    wrong = self._mismatch(tensor, output, rows)
                    if wrong:
                        errors[m] = self._unlike(tensor._name, wrong)
                        break
                column = columns[output.j]
                if column and column[-1][0] == m:
                    errors[m] = ModelFailed(f"model '{self._model}' answered output '{tensor._name}' twice")
                    break
                column.append((m, k))
        return [[place for place in column if place[0] not in errors] for column in columns] if errors else columns

    def _unlike(self, name: str, wrong: str) -> ModelFailed:
        error = ModelFailed(f"model '{self._model}', output '{name}': {wrong}")
        if self._answers_once:  # of the others each is told where it is sent
            self._strays.unlike(name, error)
        return error

    def _refusal(self, response: object) -> FlowserveError:
        error = response._error if isinstance(response, InferenceResponse) else None
        if error is None:
            found = type(response).__name__
            return ModelFailed(f"model '{self._model}' answered {found} where InferenceResponse was expected")
        return _CLASSES.get(error.code(), ModelFailed)(error.message())

    def _mismatch(self, tensor: Answer, output: _Output, rows: int) -> str:
        """What the model promised otherwise, "" for nothing. Strings become `bytes` on the way."""
        array = tensor.as_numpy()
        if output.spec.dtype is DType.BYTES and array.dtype.kind in "OSU":
            try:
                array = tensor._array = as_bytes(array)
            except UnicodeEncodeError as error:
                return f"a string is no Unicode text: {error}"
        if array.dtype != output.numpy:
            return f"the configuration promises {output.spec.dtype}, the model answered {array.dtype}"
        shape = array.shape
        inner = output.inner
        if self._batches:
            if shape[:1] == (rows,) and fits(shape[1:], inner):
                return ""
            if rows < 0 < len(shape) and fits(shape[1:], inner):  # an answer of a decoupled model
                return ""
            inner = (rows, *inner)
        elif fits(shape, inner):
            return ""
        return f"the configuration promises shape {shown(inner)}, the model answered {shown(shape)}"

    def _take(
        self, responses: list[InferenceResponse], column: list[Place], spec: TensorSpec, outputs: list[Tensor | None]
    ) -> int:
        """One output of all members that have it, as tensors. Returns how many of its bytes were copied for that."""
        arrays = [responses[m]._outputs[k].as_numpy() for m, k in column]
        if not self._copies:
            for (m, _), array in zip(column, arrays, strict=True):
                own = self._outer(array, spec)
                outputs[m] = Tensor(own, 0, len(own)) if self._batches else Tensor(own)
            return 0
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) == 1 and (spec.dtype is DType.BYTES or sum([a.nbytes for a in arrays]) < POOLED_BYTES_MIN):
            block = self._outer(np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy(), spec)
            shares = scatter(block, [len(array) for array in arrays]) if self._batches else [Tensor(block)]
            for (m, _), share in zip(column, shares, strict=True):
                outputs[m] = share
            return block.nbytes
        del arrays  # who else holds an answer is told from its reference count
        placed = 0
        for m, k in column:
            own, copied = _own(responses, m, k)
            placed += copied
            block = self._outer(own, spec)
            outputs[m] = Tensor(block, 0, len(block)) if self._batches else Tensor(block)
        return placed

    def _outer(self, block: Array, spec: TensorSpec) -> Array:
        if spec.reshape is None:
            return block
        batch = block.shape[: 1 if self._batches else 0]
        return block.reshape(batch + reshaped(block.shape[len(batch) :], spec.reshape, spec.dims))


def _own(responses: list[InferenceResponse], m: int, k: int) -> tuple[Array, int]:
    """An answer's array where only its response holds it, else a copy; and how many bytes were copied."""
    if _holders(responses, m, k) == _ALONE:
        array = responses[m]._outputs[k].as_numpy()
        if array.flags.c_contiguous and array.flags.aligned and _owns_memory(array):
            return array, 0
    array = responses[m]._outputs[k].as_numpy()
    if array.dtype.hasobject:
        return array.copy(), array.nbytes
    copy = HOST.take(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy, array.nbytes


def _owns_memory(array: Array) -> bool:
    """Whether no other array can show this one's memory: it is its own, or that of an array that only it holds."""
    if array.flags.owndata:
        return True
    return isinstance(array.base, np.ndarray) and array.base.flags.owndata and _base_holders(array) == _BASE_ALONE


def _holders(responses: list[InferenceResponse], m: int, k: int) -> tuple[int, int, int]:
    response = responses[m]
    answer = response._outputs[k]
    array = answer.as_numpy()
    return getrefcount(response), getrefcount(answer), getrefcount(array)


def _base_holders(array: Array) -> int:
    return getrefcount(array.base)


# What those two count when nobody else holds anything. Measured here rather than written down: how many references a
# call itself makes differs between versions of Python.
_ALONE = _holders([InferenceResponse([Answer("", np.zeros(1))])], 0, 0)
_BASE_ALONE = _base_holders(np.zeros(2)[:1])


def as_bytes(array: Array) -> Array:
    """An array of strings of any kind as an object array of `bytes`; itself where it is one."""
    elements = array.ravel().tolist()
    if array.dtype.kind == "O" and set(map(type, elements)) <= {bytes}:
        return array
    converted = np.empty(len(elements), np.object_)
    converted[:] = [to_bytes(element) for element in elements]
    return converted.reshape(array.shape)
