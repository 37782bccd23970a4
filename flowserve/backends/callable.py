"""Models that are functions over numpy arrays, declared by their decorator (graph/functions.py).

Decided here: where the function of a deployment is found, how it meets a batch, and how its answers are judged. A
deployment on disk has a model.py whose `function` is one; one that exists only in this process is found by a key that
`offer` gave it. What a function raises goes to the log with its traceback, and into the answer as one line.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, Final

import numpy as np

from flowserve.backends.base import ClockNs, ModelFiles, Results, Work
from flowserve.backends.files import model_file, relative
from flowserve.backends.shapes import fits, shown
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.graph.functions import BACKEND, Function, FunctionModel
from flowserve.memory.assemble import gather, scatter
from flowserve.memory.pool import HOST
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

log = logging.getLogger("flowserve.callable")

OBJECT: Final = "function_object"  # the parameter that holds the key of a function of this process
ATTRIBUTE: Final = "function"
_offered: weakref.WeakValueDictionary[str, FunctionModel] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


def offer(model: FunctionModel) -> str:
    """A key under which this process finds the model, as long as somebody holds it."""
    key = f"{model.name}-{next(_numbers)}"
    _offered[key] = model
    return key


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
            dynamic_batching=model.max_batch_size > 0,
        )

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LoadedFunction:
        """Instances may run on the loop only where the configuration says so: `options` cannot know the author."""
        return LoadedFunction(config, find_function(config, files))


def find_function(config: ModelConfig, files: ModelFiles) -> FunctionModel:
    """The model of a deployment. Raises Invalid where there is none."""
    if OBJECT in config.parameters:
        offered = _offered.get(config.parameters[OBJECT])
        if offered is None:
            raise Invalid(f"model '{config.name}': its function is gone; it lived in another process, or is collected")
        return offered
    path = model_file(config, files, CallableBackend.default_filename)
    where = relative(path, files)
    spec = spec_from_file_location(f"flowserve_function_{config.name}_{files.version}", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise Invalid(
            f"model '{config.name}': {where} needs the module '{error.name}', which cannot be found; put its folder on"
            " PYTHONPATH, or install it"
        ) from error
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


class LoadedFunction:
    """One version: the same function for every instance."""

    def __init__(self, config: ModelConfig, model: FunctionModel) -> None:
        self.is_pure = model.is_pure
        self.may_run_inline = config.parameters.get("execution", model.execution) in ("inline", "auto")
        self._config = config
        self._model = model

    def instance(self, name: str, group: InstanceGroup) -> FunctionInstance:
        return FunctionInstance(name, self._config, self._model)

    def close(self) -> None:
        """Nothing is held."""


class FunctionInstance:
    """Calls the function, one batch at a time."""

    def __init__(self, name: str, config: ModelConfig, model: FunctionModel) -> None:
        self._name = name
        self._model = config.name
        self._function: Function = model.function
        self._is_pure = model.is_pure
        self._outputs = config.outputs
        self._names = [spec.name for spec in config.outputs]
        self._batches = config.max_batch_size > 0

    def open(self) -> None:
        """A function is ready as it is."""

    def run(self, work: Work, clock: ClockNs) -> Results:
        arrays, copied = self._gather(work)
        gathered_ns = clock()
        try:
            answer = self._function(*arrays)
        except BaseException as error:  # its sys.exit() is its own failure too
            log.error("model '%s', instance '%s' failed", self._model, self._name, exc_info=error)
            raise ModelFailed(f"model '{self._model}' failed: {_text(error)}") from error
        computed_ns = clock()
        made = self._in_order(answer)
        del answer  # who else holds an array is told from its reference count
        # A member of no rows counts as one to the batcher.
        rows = [0 if tensor is None else tensor.shape[0] for tensor in work.inputs[0]] if self._batches else []
        total = sum(rows)
        outputs: list[list[Tensor | None]] = []
        for number, spec in enumerate(self._outputs):
            array = self._own(made, number, spec)
            self._judge(array, spec, total)
            tensors = scatter(array, rows) if self._batches else [Tensor(array)]
            outputs.append([one if spec.name in work.wanted[m] else None for m, one in enumerate(tensors)])
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def close(self) -> None:
        """Nothing is held."""

    def _gather(self, work: Work) -> tuple[list[Array], list[int]]:
        arrays, copied = [], []
        for column in work.inputs:
            array, nbytes = gather([tensor for tensor in column if tensor is not None], HOST)
            view = array.view()
            view.flags.writeable = False  # it may be the block that others read
            arrays.append(view)
            copied.append(nbytes)
        return arrays, copied

    def _in_order(self, answer: Any) -> list[Any]:
        """One array per output."""
        if isinstance(answer, Mapping):
            missing = [name for name in self._names if name not in answer]
            if missing:
                raise self._broken(f"returned no {', '.join(missing)}; it has {', '.join(map(str, answer))}")
            return [answer[name] for name in self._names]
        made = list(answer) if isinstance(answer, tuple | list) else [answer]
        if len(made) != len(self._names):
            raise self._broken(f"returned {len(made)} arrays; its outputs are {', '.join(self._names)}")
        return made

    def _own(self, made: list[Any], number: int, spec: TensorSpec) -> Array:
        """The answer as an array that nobody writes to any more."""
        if not isinstance(made[number], np.ndarray):
            raise self._broken(f"returned {type(made[number]).__name__} where an array was expected", spec)
        if spec.dtype is DType.BYTES:
            return self._as_bytes(made[number], spec)
        if self._is_pure or (made[number].flags.owndata and _holders(made, number) == _ALONE):
            return made[number]  # type: ignore[no-any-return]  # it is an array
        return made[number].copy() if made[number].flags.writeable else made[number]  # type: ignore[no-any-return]

    def _as_bytes(self, array: Array, spec: TensorSpec) -> Array:
        taken = np.empty(array.shape, np.object_)
        elements = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
        strange = next((one for one in elements if not isinstance(one, bytes)), None)
        if strange is not None:
            raise self._broken(f"returned {type(strange).__name__} in an array of BYTES", spec)
        taken.ravel()[:] = elements
        return taken

    def _judge(self, array: Array, spec: TensorSpec, rows: int) -> None:
        if array.dtype != spec.dtype.numpy:
            raise self._broken(f"promises {spec.dtype} and returned {array.dtype}", spec)
        dims = (rows, *spec.dims) if self._batches else spec.dims
        if not fits(array.shape, dims):
            raise self._broken(f"promises shape {shown(dims)} and returned {shown(array.shape)}", spec)

    def _broken(self, what: str, spec: TensorSpec | None = None) -> FlowserveError:
        return ModelFailed(f"model '{self._model}'{f', output {spec.name!r}' if spec else ''}: its function {what}")


def _holders(made: list[Any], number: int) -> int:
    return sys.getrefcount(made[number])


# What that counts when only the list holds an array; it differs between versions of Python.
_ALONE: Final = _holders([np.zeros(1)], 0)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
