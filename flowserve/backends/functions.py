"""Backend `callable`: serves Python functions over numpy arrays, declared by their decorator (graph/function_model.py).

Decides where the function of a deployment is found, and how it is called: once for a batch, or, in decoupled mode, once
for each request. A deployment has a model.py with an attribute `function`; for a function that exists only in this
process, that file looks the function up by a key. Decides also in which forms a function may return its outputs, the
error for an invalid result, when an array of a result must be copied, and whether a failed batch may run again. An
exception of a function is logged with its traceback, and is one line in the response, except `Invalid`, by which a
function refuses a request. It does not know graphs, queues or processes: functions run in the server's process.

Callers: the registry; authoring/ calls `offer` for functions that exist only in this process; the runtime runs the
instances.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, cast

import numpy as np

from flowserve.backends.base import ClockNs, ModelFiles, Results, Sender, Sent, Work
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed, Problem, Problems, model_raised, told
from flowserve.graph.function_model import BACKEND, PURE, FunctionModel
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec, fits, shape_text

log = logging.getLogger("flowserve.callable")

ATTRIBUTE: Final = "function"
ANY_ROWS: Final = -1
_offered: weakref.WeakValueDictionary[str, FunctionModel] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


def offer(model: FunctionModel) -> str:
    """The text of a model.py with this `function`. It works in this process while the function is referenced."""
    key = f"{model.name}-{next(_numbers)}"
    _offered[key] = model
    return f"from {__name__} import offered\n\n{ATTRIBUTE} = offered({key!r})\n"


def offered(key: str) -> FunctionModel:
    """The function with that key. Raises Invalid if it is gone."""
    model = _offered.get(key)
    if model is None:
        raise Invalid("its function is gone; it lived in another process, or is collected")
    return model


class CallableBackend:
    """The backend. A version is a folder whose model.py has a decorated function named `function`."""

    name = BACKEND
    default_filename = "model.py"
    default_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """The fields that the decorator declares."""
        model = find_function(config, files)
        return Completion(
            inputs=model.inputs,
            outputs=model.outputs,
            max_batch_size=model.max_batch_size,
            dynamic_batching=model.max_batch_size > 0 and not model.decoupled,
            decoupled=model.decoupled or None,
        )

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises Invalid if the function cannot be served with this configuration."""
        _check(config, find_function(config, files))

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LoadedFunction:
        """Instances may run on the event loop only if the decorator or the configuration allows it; `options` are
        ignored.
        """
        model = find_function(config, files)
        _check(config, model)
        return LoadedFunction(config, model)


def find_function(config: ModelConfig, files: ModelFiles) -> FunctionModel:
    """The function of a deployment. Raises Invalid if there is none."""
    path = files.model_file(config, CallableBackend.default_filename)
    where = files.shown(path)
    module = ModuleType(f"flowserve_function_{config.name}_{files.version}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look the module up there
    try:
        # Not through Python's loaders: their cache compares files by whole seconds and length only.
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        raise Invalid(
            f"model '{config.name}': {where} needs the module '{error.name}', which cannot be found; put its folder on"
            " PYTHONPATH, or install it"
        ) from error
    except Invalid as error:
        raise Invalid(f"model '{config.name}': {error}") from None
    except Exception as error:
        raise Invalid(f"model '{config.name}': {where} cannot be imported: {_text(error)}") from error
    model = getattr(module, ATTRIBUTE, None)
    if not isinstance(model, FunctionModel):
        found = "nothing" if model is None else type(model).__name__
        raise Invalid(
            f"model '{config.name}': {where} has {found} called '{ATTRIBUTE}'; it has to be a function decorated with"
            " flowserve.model"
        )
    return model


def _is_pure(config: ModelConfig, model: FunctionModel) -> bool:
    """What the configuration says, else the decorator. Raises Problems for any other value."""
    text = config.parameters.get(PURE, str(model.is_pure)).lower()
    if text not in ("true", "false"):
        place = config.source.place(f"parameters[{PURE}]")
        raise Problems(
            [Problem(f"model '{config.name}': parameter '{PURE}' must be true or false, found '{text}'", place)]
        )
    return text == "true"


def _check(config: ModelConfig, model: FunctionModel) -> None:
    """Raises Invalid if the function cannot follow the configuration."""
    _is_pure(config, model)
    if config.decoupled and not model.decoupled:
        raise Invalid(
            f"model '{config.name}': the configuration says decoupled, and its function answers once; a function that"
            " yields its answers is declared with decoupled=True"
        )
    listed = [spec.name for spec in model.inputs if spec.ragged]
    for spec in config.inputs:
        if spec.ragged and spec.name not in listed:
            raise Invalid(
                f"model '{config.name}': input '{spec.name}' has allow_ragged_batch, and its function takes it as one"
                f" array; declare it with [*], and get a list of arrays"
            )


class LoadedFunction:
    """One version: the same function for every instance."""

    def __init__(self, config: ModelConfig, model: FunctionModel) -> None:
        self.is_pure = _is_pure(config, model)
        self.may_run_inline = config.parameters.get("execution", model.execution) in ("inline", "auto")
        self._config = config
        self._model = model

    def instance(self, name: str, group: InstanceGroup) -> FunctionInstance:
        kind = DecoupledFunctionInstance if self._config.decoupled else FunctionInstance
        return kind(name, self._config, self._model)

    def close(self) -> None:
        """Nothing is held."""


class FunctionInstance:
    """Calls the function, one batch at a time."""

    def __init__(self, name: str, config: ModelConfig, model: FunctionModel) -> None:
        self._name = name
        self._model = config.name
        self._function = model.function
        self._answers = FunctionAnswers(config, model)
        self._outputs = config.outputs
        self._batches = config.max_batch_size > 0
        ragged = {spec.name for spec in model.inputs if spec.ragged}
        self._inputs = [(spec.optional, spec.name in ragged) for spec in config.inputs]

    def open(self) -> None:
        """Nothing to open."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        arrays, copied = self._gather(work.inputs)
        gathered_ns = clock()
        try:
            answer = [self._function(*arrays)]  # in a list: reference counts tell whether the function keeps an array
        except BaseException as error:  # sys.exit() in a function is its own failure too
            raise self._failed(error, len(work.rows)) from None
        computed_ns = clock()
        outputs: list[Any] = []  # columns are sequences, read as lists
        columns = self._answers.of_batch(answer, self._rows(work), arrays)
        for spec, tensors in zip(self._outputs, columns, strict=True):
            if all(spec.name in names for names in work.wanted):
                outputs.append(tensors)
            else:
                outputs.append([one if spec.name in work.wanted[m] else None for m, one in enumerate(tensors)])
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def close(self) -> None:
        """Nothing is held."""

    def _rows(self, work: Work) -> list[int]:
        """The rows of each member. `work.rows` counts an empty member as one row."""
        for column in work.inputs if self._batches else ():
            if column[0] is not None:  # all members have the same inputs
                return [0 if tensor is None else tensor.shape[0] for tensor in column]
        return [*work.rows]

    def _gather(self, columns: Sequence[Sequence[Tensor | None]]) -> tuple[list[Any], list[int]]:
        """The arguments of the function, and the bytes that were copied for each. None for a missing optional input, a
        list of arrays for a ragged one.
        """
        arrays: list[Any] = []
        copied = []
        for column, (is_optional, is_ragged) in zip(
            cast("Sequence[Sequence[Tensor]]", columns), self._inputs, strict=True
        ):
            nbytes = 0
            if is_optional and column[0] is None:  # all members have the same inputs
                arrays.append(None)
            elif is_ragged:
                arrays.append([_read_only(tensor.array) for tensor in column])
            else:
                array, nbytes = gather(column, HOST)
                arrays.append(_read_only(array))
            copied.append(nbytes)
        return arrays, copied

    def _failed(self, error: BaseException, members: int) -> FlowserveError:
        if isinstance(error, Invalid):  # of a batch of several, the scheduler decides which requests get it
            return Invalid(str(error))
        return model_raised(f"model '{self._model}' failed: {told(error, _text(error), members)}", error)


class DecoupledFunctionInstance(FunctionInstance):
    """Calls the function for one request after the other, and sends every result that it yields."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        gathered_ns = clock()
        for m, sender in enumerate(work.senders or ()):
            arrays, _ = self._gather([[column[m]] for column in work.inputs])
            try:
                self._send_all(arrays, sender, work.wanted[m], clock)
            except Invalid as error:
                sender.fail(self._failed(error, 1))
            except FlowserveError as error:
                sender.fail(error)
            except BaseException as error:
                sender.fail(self._failed(error, 1))
            else:
                sender.finish()
        return Results([], gathered_ns=gathered_ns, computed_ns=clock())

    def _send_all(self, arrays: list[Any], sender: Sender, wanted: Sequence[str], clock: ClockNs) -> None:
        begun_ns = clock()
        answers = self._function(*arrays)
        if not isinstance(answers, Iterable) or isinstance(answers, np.ndarray | Mapping):
            raise self._answers.broken(f"returned {type(answers).__name__} where an iterator over answers was expected")
        iterator = iter(answers)
        try:
            while not sender.is_cancelled():
                try:
                    answer = [next(iterator)]  # in a list, as above
                except StopIteration:
                    return
                computed_ns = clock()
                tensors = self._answers.of_request(answer, arrays)
                outputs = [
                    one if spec.name in wanted else None for spec, one in zip(self._outputs, tensors, strict=True)
                ]
                sender.send(Sent(outputs, infer_ns=computed_ns - begun_ns, output_ns=clock() - computed_ns))
                begun_ns = clock()
        finally:
            if isinstance(iterator, Generator):
                iterator.close()  # runs its finally clauses here and not in the garbage collector


class FunctionAnswers:
    """Converts the results of one function to output tensors."""

    def __init__(self, config: ModelConfig, declared: FunctionModel) -> None:
        self._model = config.name
        self._ragged = declared.ragged_outputs
        self._outputs = config.outputs
        self._names = [spec.name for spec in config.outputs]
        self._batches = config.max_batch_size > 0
        self._is_one_list = len(self._names) == 1 and self._names[0] in self._ragged

    def of_batch(
        self, answer: list[Any], rows: Sequence[int], given: Sequence[Any] = ()
    ) -> list[Sequence[Tensor | None]]:
        """The tensors of each output, one for each member; member m has `rows[m]` rows. `answer` is a list with the
        object that the function returned, and is emptied, so that no other reference to it remains. `given`: the
        function's arguments. Raises ModelFailed.
        """
        made = self._in_order(answer, len(rows))
        taken: list[Array] = []
        columns: list[Sequence[Tensor | None]] = []
        for number, spec in enumerate(self._outputs):
            if self._ragged and spec.name in self._ragged:
                columns.append(self._one_by_one(made, number, spec, rows, given))
                continue
            array = self._own(made, number, spec, given)
            self._judge(array, spec, sum(rows))
            array = _apart(array, taken)
            columns.append(Column.whole(array, rows) if self._batches else [Tensor(array)])
        return columns

    def of_request(self, answer: list[Any], given: Sequence[Any] = ()) -> list[Tensor]:
        """One tensor for each output, all with the same number of rows, which may be any. Otherwise as `of_batch`."""
        made = self._in_order(answer, 1)
        taken: list[Array] = []
        tensors = []
        for number, spec in enumerate(self._outputs):
            array = _apart(self._own(made, number, spec, given), taken)
            self._judge(array, spec, ANY_ROWS)
            tensors.append(Tensor(array, 0, len(array)) if self._batches else Tensor(array))
        if self._batches and len({len(tensor.array) for tensor in tensors}) > 1:
            counts = ", ".join(
                f"{len(tensor.array)} of {name}" for name, tensor in zip(self._names, tensors, strict=True)
            )
            raise self.broken(f"gave outputs of different numbers of rows in one answer: {counts}")
        return tensors

    def broken(self, what: str, spec: TensorSpec | None = None) -> ModelFailed:
        return ModelFailed(f"model '{self._model}'{f', output {spec.name!r}' if spec else ''}: its function {what}")

    def _in_order(self, answer: list[Any], members: int) -> list[Any]:
        """The returned objects in the order of the outputs. Of a batch of several `members`, no error has the names
        that the function returned: they may be values of one of them.
        """
        whole = answer.pop()
        if isinstance(whole, Mapping):
            missing = [name for name in self._names if name not in whole]
            if missing:
                found = ", ".join(map(str, whole)) if members == 1 else f"{len(whole)} outputs"
                raise self.broken(f"returned no {', '.join(missing)}; it has {found}")
            return [whole[name] for name in self._names]
        is_several = isinstance(whole, tuple | list)
        if is_several and self._is_one_list:
            is_several = isinstance(whole, tuple) and len(whole) == 1 and isinstance(whole[0], tuple | list)
        made = list(whole) if is_several else [whole]
        if len(made) != len(self._names):
            raise self.broken(f"returned {len(made)} arrays; its outputs are {', '.join(self._names)}")
        return made

    def _one_by_one(
        self, made: list[Any], number: int, spec: TensorSpec, rows: Sequence[int], given: Sequence[Any]
    ) -> list[Tensor]:
        """A ragged output: a list with one array for each request."""
        if not isinstance(made[number], tuple | list) or len(made[number]) != len(rows):
            found = len(made[number]) if isinstance(made[number], tuple | list) else type(made[number]).__name__
            raise self.broken(f"returned {found} where a list of {len(rows)} arrays was expected, one a request", spec)
        arrays = list(made[number])
        made[number] = None  # otherwise this reference counts as the function's
        tensors = []
        for m, count in enumerate(rows):
            array = self._own(arrays, m, spec, given)
            self._judge(array, spec, count)
            tensors.append(Tensor(array, 0, count))
        return tensors

    def _own(self, made: list[Any], number: int, spec: TensorSpec, given: Sequence[Any]) -> Array:
        """An output as an array that the function does not write to any more."""
        if not isinstance(made[number], np.ndarray):
            raise self.broken(f"returned {type(made[number]).__name__} where an array was expected", spec)
        if type(made[number]) is not np.ndarray:
            made[number] = np.asarray(made[number])  # plain elements, also for masked arrays
        if spec.dtype is DType.BYTES:
            return self._as_bytes(made[number], spec)
        array: Array = made[number]
        if not array.flags.writeable:
            return array if _is_constant(array, given) else array.copy()
        del array  # otherwise this reference counts as the function's
        is_only = _holders(made, number) == _ALONE and _owns_memory(made[number])
        return made[number] if is_only else made[number].copy()  # type: ignore[no-any-return]  # it is an array

    def _as_bytes(self, array: Array, spec: TensorSpec) -> Array:
        taken = np.empty(array.shape, np.object_)
        elements = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
        strange = next((one for one in elements if not isinstance(one, bytes)), None)
        if strange is not None:
            raise self.broken(f"returned {type(strange).__name__} in an array of BYTES", spec)
        taken.ravel()[:] = elements
        return taken

    def _judge(self, array: Array, spec: TensorSpec, rows: int) -> None:
        if array.dtype != spec.dtype.numpy:
            raise self.broken(f"promises {spec.dtype} and returned {array.dtype}", spec)
        dims = (rows, *spec.dims) if self._batches else spec.dims
        if not fits(array.shape, dims):
            raise self.broken(f"promises shape {shape_text(dims)} and returned {shape_text(array.shape)}", spec)


def _apart(array: Array, taken: list[Array]) -> Array:
    """The array, copied if it shares memory with one in `taken`, since readers may write to it. Appended to `taken`."""
    if any(np.may_share_memory(array, one) for one in taken):
        array = array.copy()
    taken.append(array)
    return array


def _holders(made: list[Any], number: int) -> int:
    return sys.getrefcount(made[number])


def _is_constant(array: Array, given: Sequence[Any]) -> bool:
    """Whether nothing writes to the memory of a read-only array: it is that of an argument, or has no writeable array.
    A read-only view of a buffer that the function fills again is not constant.
    """
    base = array.base
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return any(isinstance(one, np.ndarray) and np.may_share_memory(array, one) for one in given)
        base = base.base
    return True


def _owns_memory(array: Array) -> bool:
    """Whether no other array uses this one's memory: it owns it, or it is the only view of the array that does."""
    if array.flags.owndata:
        return True
    base = array.base
    if not (isinstance(base, np.ndarray) and base.flags.owndata and array.flags.c_contiguous):
        return False
    del base  # otherwise this reference counts too
    return _base_holders(array) == _BASE_ALONE


def _base_holders(array: Array) -> int:
    return sys.getrefcount(array.base)


# The reference counts of an array that only the list references, and of one that only a view references. They differ
# between versions of Python.
_ALONE: Final = _holders([np.zeros(1)], 0)
_BASE_ALONE: Final = _base_holders(np.zeros(2)[:1])


def _read_only(array: Array) -> Array:
    """A read-only view: the array may be part of a block with other readers."""
    view = array.view()
    view.flags.writeable = False
    return view


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
