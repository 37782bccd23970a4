"""Models that are functions over numpy arrays, declared by their decorator (graph/functions.py).

Decided here: where the function of a deployment is found, and how it meets a batch, or, where it answers many times,
each request. A deployment has a model.py whose `function` is one; that of a function which exists only in this process
fetches it by a key. What a function raises goes to the log with its traceback, and into the answer as one
line. What it answered is function_answers.py's.
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
from flowserve.backends.files import model_file, relative
from flowserve.backends.function_answers import FunctionAnswers
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed, ModelRaised
from flowserve.graph.functions import BACKEND, FunctionModel
from flowserve.memory.assemble import gather
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array

log = logging.getLogger("flowserve.callable")

ATTRIBUTE: Final = "function"
_offered: weakref.WeakValueDictionary[str, FunctionModel] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


def offer(model: FunctionModel) -> str:
    """The text of a model.py that gives this very function, in this process and as long as somebody holds it."""
    key = f"{model.name}-{next(_numbers)}"
    _offered[key] = model
    return f"from {__name__} import offered\n\n{ATTRIBUTE} = offered({key!r})\n"


def offered(key: str) -> FunctionModel:
    """What was offered. Raises Invalid where that is gone."""
    model = _offered.get(key)
    if model is None:
        raise Invalid("its function is gone; it lived in another process, or is collected")
    return model


class CallableBackend:
    """The backend. A version is a folder whose model.py has a decorated function called `function`."""

    name = BACKEND
    default_filename = "model.py"
    default_instance_count = 1

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """What the decorator says."""
        model = find_function(config, files)
        return Completion(
            inputs=model.inputs,
            outputs=model.outputs,
            max_batch_size=model.max_batch_size,
            dynamic_batching=model.max_batch_size > 0 and not model.decoupled,
            decoupled=model.decoupled or None,
        )

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Whether the function can do what the configuration says."""
        _check(config, find_function(config, files))

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LoadedFunction:
        """Instances may run on the loop only where the configuration says so: `options` cannot know the author."""
        model = find_function(config, files)
        _check(config, model)
        return LoadedFunction(config, model)


def find_function(config: ModelConfig, files: ModelFiles) -> FunctionModel:
    """The model of a deployment. Raises Invalid where there is none."""
    path = model_file(config, files, CallableBackend.default_filename)
    where = relative(path, files)
    module = ModuleType(f"flowserve_function_{config.name}_{files.version}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    try:
        # Not through Python's loaders: their cache tells an edited file by whole seconds and length only.
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


def _check(config: ModelConfig, model: FunctionModel) -> None:
    """Raises Invalid where the function could not do what the configuration says."""
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
        self.is_pure = model.is_pure
        self.may_run_inline = config.parameters.get("execution", model.execution) in ("inline", "auto")
        self._config = config
        self._model = model

    def instance(self, name: str, group: InstanceGroup) -> FunctionInstance:
        kind = FunctionInstance
        if self._config.decoupled:
            kind = DecoupledFunctionInstance
        elif any(spec.optional or spec.ragged for spec in (*self._config.inputs, *self._model.inputs)):
            kind = VariedFunctionInstance
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

    def open(self) -> None:
        """A function is ready as it is."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        arrays, copied = self._gather(work.inputs)
        gathered_ns = clock()
        try:
            answer = [self._function(*arrays)]  # who else holds an array is told from its reference count
        except BaseException as error:  # its sys.exit() is its own failure too
            raise ModelRaised(self._failure(error)) from error
        computed_ns = clock()
        outputs: list[Any] = []  # what is no list is read as one
        columns = self._answers.of_batch(answer, self._rows(work), keeps_whole=work.keeps_whole)
        for spec, tensors in zip(self._outputs, columns, strict=True):
            if all(spec.name in names for names in work.wanted):
                outputs.append(tensors)
            else:
                outputs.append([one if spec.name in work.wanted[m] else None for m, one in enumerate(tensors)])
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def close(self) -> None:
        """Nothing is held."""

    def _rows(self, work: Work) -> list[int]:
        """Of each member. One of no rows counts as one to the batcher."""
        if not self._batches or not work.inputs:
            return [*work.rows]
        return [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]]

    def _gather(self, columns: Sequence[Sequence[Tensor | None]]) -> tuple[list[Any], list[int]]:
        """What the function gets, and the bytes that were copied for it."""
        arrays: list[Any] = []
        copied = []
        for column in columns:
            array, nbytes = gather(cast("Sequence[Tensor]", column), HOST)
            arrays.append(_read_only(array))
            copied.append(nbytes)
        return arrays, copied

    def _failure(self, error: BaseException) -> str:
        return f"model '{self._model}' failed: {_text(error)}"


class VariedFunctionInstance(FunctionInstance):
    """One with inputs that may be missing, or differ in shape within a batch."""

    def __init__(self, name: str, config: ModelConfig, model: FunctionModel) -> None:
        super().__init__(name, config, model)
        ragged = {spec.name for spec in model.inputs if spec.ragged}
        self._is_ragged = [spec.name in ragged for spec in config.inputs]

    def _rows(self, work: Work) -> list[int]:
        for column in work.inputs if self._batches else ():
            if column[0] is not None:  # all members have the same inputs
                return [0 if tensor is None else tensor.shape[0] for tensor in column]
        return [*work.rows]

    def _gather(self, columns: Sequence[Sequence[Tensor | None]]) -> tuple[list[Any], list[int]]:
        """None for an optional input that is not there, a list for a ragged one."""
        arrays: list[Any] = []
        copied = []
        for column, is_ragged in zip(columns, self._is_ragged, strict=True):
            there = [tensor for tensor in column if tensor is not None]
            nbytes = 0
            if not there:
                arrays.append(None)
            elif is_ragged:
                arrays.append([_read_only(tensor.array) for tensor in there])
            else:
                array, nbytes = gather(there, HOST)
                arrays.append(_read_only(array))
            copied.append(nbytes)
        return arrays, copied


class DecoupledFunctionInstance(VariedFunctionInstance):
    """Takes from the function, for one request after the other, as many answers as it gives."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        gathered_ns = clock()
        for m, sender in enumerate(work.senders or ()):
            arrays, _ = self._gather([[column[m]] for column in work.inputs])
            try:
                self._send_all(arrays, sender, work.wanted[m], clock)
            except FlowserveError as error:
                sender.fail(error)
            except BaseException as error:
                log.error("model '%s', instance '%s' failed", self._model, self._name, exc_info=error)
                sender.fail(ModelFailed(self._failure(error)))
            else:
                sender.finish(is_empty=True)
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
                    answer = [next(iterator)]  # who else holds an array is told from its reference count
                except StopIteration:
                    return
                computed_ns = clock()
                tensors = self._answers.of_request(answer)
                outputs = [
                    one if spec.name in wanted else None for spec, one in zip(self._outputs, tensors, strict=True)
                ]
                sender.send(Sent(outputs, infer_ns=computed_ns - begun_ns, output_ns=clock() - computed_ns))
                begun_ns = clock()
        finally:
            if isinstance(iterator, Generator):
                iterator.close()  # what it has opened is closed here, and not wherever it is collected


def _read_only(array: Array) -> Array:
    """It may be the block that others read."""
    view = array.view()
    view.flags.writeable = False
    return view


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
