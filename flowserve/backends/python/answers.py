"""Checks of the responses of a Python model, and ownership of their arrays.

Decides which outputs are passed on although their data type or shape is not the configuration's (any that a client
could read: a data type of the protocol, and elements for its `reshape`), what is noted about them and about missing
outputs, and which outputs fail their own request (the others, states of sequences, and in strict mode all that differ
or are missing). A response belongs to one request and is never divided, so the first dimension of an output need not be
the number of rows.

Decides also when an array may be taken without a copy. A model may continue to use an array of its response: a table
that it keeps, a buffer that it fills again. So small outputs are placed contiguously in one block, which the next batch
reads without a copy; large ones are taken as they are if reference counts show that only the response holds them, and
copied otherwise. In a process that runs this model only, outputs are written to shared memory before the model
continues, so all are taken as they are.

It does not know how the model was called.

Callers: instance.py and device.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from sys import getrefcount
from typing import Any, Final

import numpy as np

from flowserve.backends.base import OutputNotes, Results, Work
from flowserve.backends.python.pb_utils.inference import InferenceResponse, OnGpu, as_bytes, error_of, on_host
from flowserve.backends.python.pb_utils.inference import Tensor as Answer
from flowserve.config.suggest import meant
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.types import outer_shape
from flowserve.memory.column import Column, scatter
from flowserve.memory.pool import HOST, POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor, with_rows
from flowserve.values import BY_NUMPY, Array, TensorSpec, fits, shape_text

log = logging.getLogger("flowserve.python")

NAMES_MAX: Final = 100  # limit of unknown outputs that are logged: some models generate names

Errors = dict[int, FlowserveError]
# The parameters of most responses. Results are never written to.
_NONE: Final[Mapping[int, Any]] = {}
# The position of an output tensor: the member whose response has it, and its index there.
Place = tuple[int, int]
# How an output differs from the configuration, "" if it does not, and whether it cannot be passed on.
Mismatch = tuple[str, bool]
_AGREES: Final[Mismatch] = "", False


class _Output:
    """One output of the configuration. `inner`: the shape that the model returns, without batch dimension; `one`: the
    shape of one row, with batch dimension. `is_state`: the next request of a sequence gets it, so it never differs.
    `facts`: `j`, the data type, the rank, and the axes whose size is fixed, for the checks of most batches.
    """

    __slots__ = ("facts", "inner", "is_state", "j", "numpy", "one", "spec")

    def __init__(self, j: int, spec: TensorSpec, *, batches: bool, is_state: bool) -> None:
        self.j = j
        self.is_state = is_state
        self.spec = spec
        self.numpy = spec.dtype.numpy
        self.inner = spec.dims if spec.reshape is None else spec.reshape
        self.one = (1, *self.inner) if batches else self.inner
        fixed = [(axis, size) for axis, size in enumerate(self.one) if size >= 0 and (axis or not batches)]
        self.facts = j, self.numpy, len(self.one), fixed


class AnswerReader:
    """Converts the responses to each batch to columns of output tensors."""

    def __init__(self, config: ModelConfig, instance: str = "", *, copies: bool = True, strict: bool = False) -> None:
        """`instance`: its name in errors. `copies`: False if outputs are written elsewhere before the model continues.
        `strict`: an output that differs from the configuration, or is missing, is an error.
        """
        self._model = config.name
        self._instance = instance
        self._copies = copies
        self._specs = config.outputs
        self._batches = config.max_batch_size > 0
        states = {state.output for state in config.sequence.states} if config.sequence is not None else ()
        self._outputs = {
            spec.name: _Output(j, spec, batches=self._batches, is_state=spec.name in states)
            for j, spec in enumerate(config.outputs)
        }
        # Numeric outputs whose shape in a response is that of the configuration.
        self._numbers = {
            name: one for name, one in self._outputs.items() if one.spec.reshape is None and not one.numpy.hasobject
        }
        self._order = [*range(len(self._specs))]
        self._no_bytes = [0] * len(self._specs)
        self._is_strict = strict
        self._logged_unknown: set[str] = set()  # outputs that are not in the configuration, each logged once
        # Each response of a decoupled model may have other outputs, so that an absent one is not noted.
        self._answers_once = not config.decoupled

    def read(self, responses: list[InferenceResponse], work: Work) -> Results:
        """The results of a batch, from one response for each member. Only the caller may reference the list."""
        uniform = self._read_uniform(responses, work)
        if uniform is not None:
            return uniform
        try:
            outputs: list[list[Tensor | None]] = [[None] * len(responses) for _ in self._specs]
            placed = [0] * len(outputs)
            errors: Errors = {}
            notes = OutputNotes()
            for j, column in enumerate(self._sort(responses, work, errors, notes)):
                if column:
                    placed[j] = self._take(responses, column, self._outputs[self._specs[j].name], outputs[j])
        except OnGpu:
            for response in responses:
                if isinstance(response, InferenceResponse):
                    response._outputs[:] = map(self._on_host, response._outputs)
            return self.read(responses, work)
        # An object that is no response has become an error.
        said = {m: found for m, response in enumerate(responses) if (found := getattr(response, "_parameters", None))}
        return Results(outputs, errors, placed=placed, parameters=said, notes=notes.or_none())

    def _read_uniform(self, responses: list[InferenceResponse], work: Work) -> Results | None:
        """The results of a batch whose responses are valid, small, and all of the same outputs in the same order, alike
        but for their rows, without errors or parameters. None for any other batch. Nearly every batch is of this kind,
        and its loops run for each of its requests. An array that no request wants is ignored. For 1, 4 and 16 requests
        with one output of 256 bytes it takes 1.2, 2.0 and 3.5 us on Debian's Python 3.11.2; the general way takes 3.3,
        7.5 and 23.

        It only recognises batches in which `_sort` finds no error and `_take` one kind of array for each output, so it
        omits checks of theirs:
        * Only the first response is compared with the configuration. The others have the same number of outputs, and at
          each place the name, the data type and the shape of the first one's, but for the rows, which are compared with
          those of the request. So their unknown, second and missing outputs need no check of their own.
        * Nothing is converted: `_numbers` has only outputs that are numeric and not reshaped.
        * A decoupled model, whose responses may leave out outputs, has no such batch: its responses have any rows.
        * The bytes of a column are those of its first array, in proportion to the rows.
        """
        rows = work.rows
        # A response of a decoupled model (`rows` below 0) has any number of rows.
        if rows[0] < 0 or (len(rows) > 1 and not self._batches) or not _are_plain(responses):
            return None
        try:
            columns = self._uniform_columns(responses, work)
        except AttributeError:  # an object that is no tensor: `_sort` reports it
            return None
        if not columns:
            return None
        notes = None if [*columns] == self._order else self._uniform_notes(columns, work)
        if self._is_strict and notes is not None and notes.left_out:
            return None
        outputs: list[Sequence[Tensor | None]] = []
        placed = [*self._no_bytes]
        for j in range(len(placed)):
            arrays = columns.get(j)
            if arrays is None:
                outputs.append([None] * len(rows))
                continue
            if self._copies:
                block = np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy()
                placed[j] = block.nbytes
            elif len(arrays) == 1:
                block = arrays[0]
            else:
                outputs.append(Column(rows, None, arrays))
                continue
            outputs.append(Column(rows, block) if self._batches else [Tensor(block)])
        return Results(outputs, _NONE, placed=placed, parameters=_NONE, notes=notes)

    def _uniform_columns(self, responses: list[InferenceResponse], work: Work) -> dict[int, list[Array]] | None:
        """The arrays of each wanted output, by its index, in the order of the first response. None if the responses are
        not uniform.
        """
        rows, wanted = work.rows, work.wanted[0]
        is_alone = len(rows) == 1
        columns: dict[int, list[Array]] = {}
        for k, answer in enumerate(responses[0]._outputs):
            name, array = answer._name, answer._array
            output = self._numbers.get(name)
            if output is None or array is None:
                return None
            if name in wanted:
                if output.j in columns or not self._is_promised(array, output, rows):
                    return None
                arrays = columns[output.j] = [array]
                if not (is_alone or _add_alike(arrays, k, responses, work)):
                    return None
            elif not (is_alone or _are_unwanted(k, responses, work)):
                return None
        return columns

    def _is_promised(self, array: Array, output: _Output, rows: Sequence[int]) -> bool:
        """Whether an array of the first response is that of the configuration, and its column is small."""
        _, dtype, rank, fixed = output.facts
        shape = array.shape
        if array.dtype is not dtype or len(shape) != rank or (self._batches and shape[0] != rows[0]):
            return False
        for axis, size in fixed:
            if shape[axis] != size:
                return False
        return not self._copies or array.nbytes * sum(rows) < POOLED_BYTES_MIN * rows[0]

    def _uniform_notes(self, columns: dict[int, list[Array]], work: Work) -> OutputNotes | None:
        """The order of the outputs if it is not the configuration's, and those that are missing."""
        found = [*columns]
        notes = OutputNotes()
        if any(one > following for one, following in pairwise(found)):
            order = tuple(self._specs[j].name for j in found)
            notes.orders.update(dict.fromkeys(range(len(work.rows)), order))
        for name, output in self._outputs.items():
            if output.j not in columns and not output.is_state:
                missing = sum([name in names for names in work.wanted])
                if missing:
                    notes.left_out[name] = missing
        return notes.or_none()

    def _sort(self, responses: list[Any], work: Work, errors: Errors, notes: OutputNotes) -> list[list[Place]]:
        """The positions of the tensors of each output. Tensors that the request does not want are ignored, and so are
        outputs that the configuration does not have, which are logged. Adds to `errors` and `notes`.
        """
        columns: list[list[Place]] = [[] for _ in self._specs]
        for m, response in enumerate(responses):
            order = self._sort_one(m, response, work, columns, notes)
            if isinstance(order, FlowserveError):
                errors[m] = order
            elif any(one.j > following.j for one, following in pairwise(order)):
                notes.orders[m] = tuple(one.spec.name for one in order)
        if self._answers_once:
            self._note_left_out(columns, work, errors, notes)
        return [[place for place in column if place[0] not in errors] for column in columns] if errors else columns

    def _sort_one(
        self, m: int, response: Any, work: Work, columns: list[list[Place]], notes: OutputNotes
    ) -> list[_Output] | FlowserveError:
        """Add the positions of the tensors of one response. Its outputs, in its order, or its error."""
        # If the error were raised, its traceback would hold the arrays, and `_take` would copy them.
        if not isinstance(response, InferenceResponse):
            text = "Expected an 'InferenceResponse' object in the execute function return list, found type "
            text += f"'{type(response)}'."
            remedy = "execute returns [pb_utils.InferenceResponse([pb_utils.Tensor(NAME, ARRAY)]), ...]"
            return ModelFailed(failure(self._instance, text, self._model, remedy))
        if response._error is not None:
            return error_of(response._error)
        wanted, rows = work.wanted[m], work.rows[m]
        order: list[_Output] = []
        for k, tensor in enumerate(response._outputs):
            if not isinstance(tensor, Answer):
                found = type(tensor).__name__
                return ModelFailed(f"model '{self._model}' answered {found} where pb_utils.Tensor was expected")
            output = self._outputs.get(tensor._name)
            if output is None:
                self._log_unknown(tensor._name)
                continue
            if tensor._name not in wanted:
                continue
            failed = self._compare(tensor, output, rows, notes)
            if failed is not None:
                return failed
            column = columns[output.j]
            if column and column[-1][0] == m:
                return ModelFailed(f"model '{self._model}' answered output '{tensor._name}' twice")
            column.append((m, k))
            order.append(output)
        return order

    def _compare(self, tensor: Answer, output: _Output, rows: int, notes: OutputNotes) -> ModelFailed | None:
        """Note how the tensor differs from the configuration. An error if it cannot be passed on."""
        array = tensor._array
        is_usual = array is not None and array.dtype is output.numpy and array.shape == output.one and rows == 1
        # This comparison suffices for nearly all outputs; `_mismatch` handles the others.
        if is_usual and not output.numpy.hasobject:
            return None
        wrong, is_refused = self._mismatch(tensor, output, rows)
        if wrong and (is_refused or self._is_strict or output.is_state):
            return ModelFailed(f"model '{self._model}', output '{tensor._name}': {wrong}")
        if wrong:
            passed_on = "it is passed on as it is (--strict-outputs refuses it)"
            notes.unlike.setdefault(tensor._name, f"{wrong}; {passed_on}")
        return None

    def _note_left_out(
        self, columns: Sequence[Sequence[Place]], work: Work, errors: Errors, notes: OutputNotes
    ) -> None:
        """Note the outputs that requests want and the model did not return. A model may leave out a state."""
        for output, column in zip(self._outputs.values(), columns, strict=True):
            if output.is_state or len(column) == len(work.wanted):
                continue
            name, there = output.spec.name, {m for m, _ in column}
            lacking = [m for m, names in enumerate(work.wanted) if name in names and m not in there and m not in errors]
            if self._is_strict:
                text = f"model '{self._model}' returned no output '{name}', which its configuration has"
                errors.update((m, ModelFailed(text)) for m in lacking)
            elif lacking:
                notes.left_out[name] = len(lacking)

    def _mismatch(self, tensor: Answer, output: _Output, rows: int) -> Mismatch:
        """How the tensor differs from the configuration. Converts strings to `bytes`."""
        array = tensor.as_numpy()
        if array.dtype.kind in "OSU":
            try:
                array = tensor._array = as_bytes(array)
            except UnicodeEncodeError as error:
                return f"a string is no Unicode text: {error}", True
        return self._difference(array.dtype, array.shape, output, rows)

    def _difference(self, dtype: np.dtype[Any], shape: tuple[int, ...], output: _Output, rows: int) -> Mismatch:
        # A response of a decoupled model (`rows` below 0) has any number of rows.
        promised = (rows, *output.inner) if self._batches else output.inner
        has_shape = fits(shape, (*shape[:1], *output.inner) if self._batches and rows < 0 else promised)
        is_refused = False
        if not has_shape and output.spec.reshape is not None:
            try:
                outer_shape(shape, output.spec, batches=self._batches)
            except ValueError:
                is_refused = True
        if dtype != output.numpy:
            theirs = "BYTES" if dtype.hasobject else str(dtype)
            text = f"the configuration promises {output.spec.dtype}, the model answered {theirs}; "
            remedy = "array.astype converts it" if _is_convertible(dtype, output.numpy) else "return another array"
            return f"{text}{remedy}, or change data_type", is_refused or dtype not in BY_NUMPY
        if has_shape:
            return _AGREES
        text = f"the configuration promises shape {shape_text(promised)}, the model answered {shape_text(shape)}; "
        if self._batches and fits(shape, output.inner):
            return f"{text}the first dimension is that of the rows: array[numpy.newaxis] adds it", is_refused
        if self._batches and rows >= 0 and shape[:1] != (rows,):
            return f"{text}the first dimension is that of the rows: return one for each row of the request", is_refused
        return f"{text}return that shape, or change dims", is_refused

    def _on_host(self, tensor: Answer) -> Answer:
        return on_host(tensor)

    def _outer(self, array: Array, output: _Output) -> Tensor:
        """An output's tensor, in the shape that requests see. It has one, or `_mismatch` has refused it."""
        spec = output.spec
        own = array if spec.reshape is None else array.reshape(outer_shape(array.shape, spec, batches=self._batches))
        return with_rows(own) if self._batches else Tensor(own)

    def _take(
        self, responses: list[InferenceResponse], column: list[Place], output: _Output, outputs: list[Tensor | None]
    ) -> int:
        """Set one output of all members that have it. Returns the bytes that were copied."""
        spec = output.spec
        arrays = [responses[m]._outputs[k].as_numpy() for m, k in column]
        if not self._copies:
            for (m, _), array in zip(column, arrays, strict=True):
                outputs[m] = self._outer(array, output)
            return 0
        kinds = {(array.dtype, array.shape[1:]) for array in arrays}
        have_rows = self._batches and all(array.ndim for array in arrays)
        is_one_block = len(kinds) == 1 and (have_rows or len(arrays) == 1)
        if is_one_block and (arrays[0].dtype.hasobject or sum([a.nbytes for a in arrays]) < POOLED_BYTES_MIN):
            block = np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy()
            if not have_rows:
                shares = [self._outer(block, output)]
            else:
                if spec.reshape is not None:
                    block = block.reshape(outer_shape(block.shape, spec, batches=True))
                shares = scatter(block, [len(array) for array in arrays])
            for (m, _), share in zip(column, shares, strict=True):
                outputs[m] = share
            return block.nbytes
        del arrays  # otherwise these references count as the model's
        placed = 0
        for m, k in column:
            own, copied = _own(responses, m, k)
            placed += copied
            outputs[m] = self._outer(own, output)
        return placed

    def _log_unknown(self, name: str) -> None:
        """The model returned an output that the configuration does not have."""
        if name not in self._logged_unknown and len(self._logged_unknown) < NAMES_MAX:
            self._logged_unknown.add(name)
            text = "model '%s' answered output '%s', which its configuration does not have; it is left out%s"
            log.warning(text, self._model, name, meant(name, self._outputs))


def _are_plain(responses: list[InferenceResponse]) -> bool:
    """Whether all are responses without errors and parameters."""
    for response in responses:
        if type(response) is not InferenceResponse or response._error is not None or response._parameters:
            return False
    return True


def _add_alike(arrays: list[Array], k: int, responses: list[InferenceResponse], work: Work) -> bool:
    """Add output k of all responses but the first. False if one differs from the first's in more than its rows, or its
    rows are not those of its request.
    """
    first = responses[0]._outputs
    width, name = len(first), first[k]._name
    dtype, shape = arrays[0].dtype, arrays[0].shape
    inner = shape[1:]
    rows, wanted = work.rows, work.wanted
    for m in range(1, len(responses)):
        answers = responses[m]._outputs
        if len(answers) != width:
            return False
        answer = answers[k]
        array = answer._array
        if array is None or array.dtype is not dtype:
            return False
        found = array.shape
        if found != shape and found[1:] != inner:
            return False
        if not found or found[0] != rows[m]:
            return False
        if answer._name != name or name not in wanted[m]:
            return False
        arrays.append(array)
    return True


def _are_unwanted(k: int, responses: list[InferenceResponse], work: Work) -> bool:
    """Whether output k of all responses but the first is the first's, and no request wants it."""
    first = responses[0]._outputs
    name = first[k]._name
    for m in range(1, len(responses)):
        answers = responses[m]._outputs
        if len(answers) != len(first) or answers[k]._name != name or name in work.wanted[m]:
            return False
    return True


def failure(instance: str, message: str, model: str, where: str) -> str:
    """The text of a failure of `execute`, as Triton has it, and where its cause is."""
    what = f"Failed to process the request(s) for model instance '{instance}'"
    return f"{what}, message: {message} (model '{model}', {where})"


def _is_convertible(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether `astype` makes an array of the wanted type: between numbers."""
    return not (dtype.hasobject or wanted.hasobject)


def _own(responses: list[InferenceResponse], m: int, k: int) -> tuple[Array, int]:
    """The array of an output if only its response holds it, else a copy; and the bytes that were copied."""
    if _holders(responses, m, k) == _ALONE:
        array = responses[m]._outputs[k].as_numpy()
        if array.flags.c_contiguous and array.flags.aligned and _owns_memory(array):
            return array, 0
    array = responses[m]._outputs[k].as_numpy()
    return HOST.copy_of(array), array.nbytes


def _owns_memory(array: Array) -> bool:
    """Whether no other array uses this one's memory: it owns it, or its base is an array that only it references."""
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


# The reference counts of an object without other references. They are measured, because the references that a call
# creates differ between versions of Python.
_ALONE = _holders([InferenceResponse([Answer("", np.zeros(1))])], 0, 0)
_BASE_ALONE = _base_holders(np.zeros(2)[:1])
