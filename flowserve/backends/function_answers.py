"""What a function answered, judged and made tensors.

Decided here: the ways in which a function may return its outputs, what is wrong with an answer and how that is said,
and whose an array is afterwards. When a function is called, and with what, is callable.py's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from flowserve.backends.shapes import fits, shown
from flowserve.config.types import ModelConfig
from flowserve.errors import ModelFailed
from flowserve.graph.functions import FunctionModel
from flowserve.memory.assemble import scatter
from flowserve.memory.columns import Together
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

ANY_ROWS: Final = -1


class FunctionAnswers:
    """Reads the answers of one function."""

    def __init__(self, config: ModelConfig, declared: FunctionModel) -> None:
        self._model = config.name
        self._is_pure = declared.is_pure
        self._ragged = declared.ragged_outputs
        self._outputs = config.outputs
        self._names = [spec.name for spec in config.outputs]
        self._batches = config.max_batch_size > 0
        self._is_one_list = len(self._names) == 1 and self._names[0] in self._ragged

    def of_batch(self, answer: list[Any], rows: Sequence[int], *, keeps_whole: bool = False) -> list[Sequence[Tensor]]:
        """One tensor per output and member, which have `rows` rows each. `answer` is a list that nobody else has, of
        the one thing that the function returned; it is emptied. `keeps_whole` is as in `Work`. Raises ModelFailed.
        """
        made = self._in_order(answer)
        taken: list[Array] = []
        columns: list[Sequence[Tensor]] = []
        for number, spec in enumerate(self._outputs):
            if self._ragged and spec.name in self._ragged:
                columns.append(self._one_by_one(made, number, spec, rows))
                continue
            array = self._own(made, number, spec)
            self._judge(array, spec, sum(rows))
            array = _apart(array, taken)
            if keeps_whole and self._batches:
                columns.append(Together(array, rows))
            else:
                columns.append(scatter(array, rows) if self._batches else [Tensor(array)])
        return columns

    def of_request(self, answer: list[Any]) -> list[Tensor]:
        """One tensor per output, of any number of rows as long as it is the same. As `of_batch`."""
        made = self._in_order(answer)
        taken: list[Array] = []
        tensors = []
        for number, spec in enumerate(self._outputs):
            array = _apart(self._own(made, number, spec), taken)
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

    def _in_order(self, answer: list[Any]) -> list[Any]:
        """One thing per output."""
        whole = answer.pop()
        if isinstance(whole, Mapping):
            missing = [name for name in self._names if name not in whole]
            if missing:
                raise self.broken(f"returned no {', '.join(missing)}; it has {', '.join(map(str, whole))}")
            return [whole[name] for name in self._names]
        is_several = isinstance(whole, tuple | list)
        if is_several and self._is_one_list:
            is_several = isinstance(whole, tuple) and len(whole) == 1 and isinstance(whole[0], tuple | list)
        made = list(whole) if is_several else [whole]
        if len(made) != len(self._names):
            raise self.broken(f"returned {len(made)} arrays; its outputs are {', '.join(self._names)}")
        return made

    def _one_by_one(self, made: list[Any], number: int, spec: TensorSpec, rows: Sequence[int]) -> list[Tensor]:
        """An output that is a list, with an array for each request."""
        if not isinstance(made[number], tuple | list) or len(made[number]) != len(rows):
            found = len(made[number]) if isinstance(made[number], tuple | list) else type(made[number]).__name__
            raise self.broken(f"returned {found} where a list of {len(rows)} arrays was expected, one a request", spec)
        arrays = list(made[number])
        made[number] = None  # who else holds the arrays is told from their reference counts
        tensors = []
        for m, count in enumerate(rows):
            array = self._own(arrays, m, spec)
            self._judge(array, spec, count)
            tensors.append(Tensor(array, 0, count))
        return tensors

    def _own(self, made: list[Any], number: int, spec: TensorSpec) -> Array:
        """The answer as an array that nobody writes to any more."""
        if not isinstance(made[number], np.ndarray):
            raise self.broken(f"returned {type(made[number]).__name__} where an array was expected", spec)
        if type(made[number]) is not np.ndarray:
            made[number] = np.asarray(made[number])  # its elements, whatever a masked array makes of them
        if spec.dtype is DType.BYTES:
            return self._as_bytes(made[number], spec)
        if self._is_pure or (made[number].flags.owndata and _holders(made, number) == _ALONE):
            return made[number]  # type: ignore[no-any-return]  # it is an array
        array: Array = made[number]
        return array.copy() if array.flags.writeable else array

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
            raise self.broken(f"promises shape {shown(dims)} and returned {shown(array.shape)}", spec)


def _apart(array: Array, taken: list[Array]) -> Array:
    """An array that shares no memory with those before it, which it joins: whoever reads one may write into it."""
    if any(np.may_share_memory(array, one) for one in taken):
        array = array.copy()
    taken.append(array)
    return array


def _holders(made: list[Any], number: int) -> int:
    return sys.getrefcount(made[number])


# What that counts when only the list holds an array; it differs between versions of Python.
_ALONE: Final = _holders([np.zeros(1)], 0)
