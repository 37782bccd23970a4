"""Whether a request fits a deployment.

Decides the order and the texts of the checks of a request (Triton's), and how named arrays become the first slots of a
request. A request is checked once, so that all later code relies on it. Valid requests are checked in one pass without
texts; one that fails is checked again, slowly, for the text of its error. Does not know how requests run. Called by the
engine for every request; the deployment holds the validator of its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from flowserve.config.suggest import meant
from flowserve.errors import Invalid
from flowserve.graph.types import Graph
from flowserve.memory.tensor import Tensor
from flowserve.values import BY_NUMPY, Array, Request, TensorSpec, fits, unexpected_shape

_UNKNOWN: Final = -2  # rows before the first input; -1 are those of an input without dimensions


class Validator:
    """Checks the requests of one graph. `outputs`: the names of all its outputs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._specs = graph.inputs
        self._index = {spec.name: i for i, spec in enumerate(graph.inputs)}
        self._max_rows = graph.max_batch_size
        self._required = sum(not spec.optional for spec in graph.inputs)
        self._output_names = frozenset(spec.name for spec in graph.outputs)
        self.outputs = tuple(spec.name for spec in graph.outputs)
        # For each input: numpy dtype, dims if all are fixed (else None), dims, whether all are -1.
        self._wanted: list[tuple[Any, tuple[int, ...] | None, tuple[int, ...], bool]] = [
            (spec.dtype.numpy, None if spec.is_variable else spec.dims, spec.dims, set(spec.dims) == {-1})
            for spec in graph.inputs
        ]

    def validate(self, request: Request) -> list[Tensor | None]:
        """The request's inputs in the graph's order, None for an optional one left out. Raises `Invalid` with
        Triton's text.
        """
        inputs = request.inputs
        index = self._index
        max_rows = self._max_rows
        if len(inputs) != len(index):
            self._check_presence(request)
        if request.outputs is not None and not self._output_names.issuperset(request.outputs):
            self._explain(request)
        tensors: list[Tensor | None] = [None] * len(index)
        rows = _UNKNOWN
        for name, array in inputs.items():
            i = index.get(name, -1)
            if i < 0:
                self._explain(request)
            dtype, fixed, dims, takes_any = self._wanted[i]
            shape = array.shape
            if max_rows:
                here = shape[0] if shape else -1
                if rows != here:
                    if rows != _UNKNOWN or not 0 <= here <= max_rows:
                        self._explain(request)
                    rows = here
                shape = shape[1:]
            found = array.dtype
            # Types are usually the same object; comparing two by value costs as much as all other checks here.
            if (found is not dtype and found != dtype) or (
                shape != fixed if fixed is not None else len(shape) != len(dims) or not (takes_any or fits(shape, dims))
            ):
                self._explain(request)
            tensors[i] = Tensor(array, 0, rows) if max_rows else Tensor(array)
        return tensors

    def _check_presence(self, request: Request) -> None:
        """Of a request that has not all inputs, or more."""
        inputs = request.inputs
        if len(inputs) < self._required or len(inputs) > len(self._index):
            self._explain(request)
        for spec in self._specs:
            if not spec.optional and spec.name not in inputs:
                self._explain(request)

    def _explain(self, request: Request) -> NoReturn:
        """Triton's order of checks: outputs, number of inputs, names, batch, type, shape."""
        name = self._graph.name
        for output in request.outputs or ():
            if output not in self._output_names:
                hint = meant(output, self.outputs) or f" (its outputs are [{_names(list(self.outputs))}])"
                _refuse(request, f"unexpected inference output '{output}' for model '{name}'{hint}")
        total, given = len(self._specs), len(request.inputs)
        if not self._required <= given <= total:
            if self._required == total:
                self._refuse_missing(request, f"expected {total} inputs")
            self._refuse_missing(request, f"expected number of inputs between {self._required} and {total}")
        for unknown in request.inputs:
            if unknown not in self._index:
                hint = meant(unknown, [one for one in self._index if one not in request.inputs])
                hint = hint or f" (its inputs are [{_names(list(self._index))}])"
                _refuse(request, f"unexpected inference input '{unknown}' for model '{name}'{hint}")
        if self._missing(request):
            # Triton only counts inputs, so that an optional one can hide a missing required one.
            self._refuse_missing(request, f"expected {self._required} required inputs")
        if self._graph.max_batch_size:
            self._check_batch(request)
        for one, array in request.inputs.items():
            self._check_tensor(request, self._specs[self._index[one]], array)
        raise AssertionError(f"a request for '{name}' was refused and nothing is wrong with it")

    def _missing(self, request: Request) -> list[str]:
        return [spec.name for spec in self._specs if not spec.optional and spec.name not in request.inputs]

    def _refuse_missing(self, request: Request, wanted: str) -> NoReturn:
        unknown = [name for name in request.inputs if name not in self._index]
        also = f" It has no input(s) [{_names(unknown)}]." if unknown else ""
        _refuse(
            request,
            f"{wanted} but got {len(request.inputs)} inputs for model '{self._graph.name}'. "
            f"Got input(s) [{_names(list(request.inputs))}], but missing required input(s) "
            f"[{_names(self._missing(request))}]. Please provide all required input(s).{also}",
        )

    def _check_batch(self, request: Request) -> None:
        name, limit = self._graph.name, self._graph.max_batch_size
        rows = -1
        for given, array in request.inputs.items():
            if array.ndim == 0:
                self._check_tensor(request, self._specs[self._index[given]], array)
            if rows not in (-1, array.shape[0]):
                _refuse(request, f"input '{given}' batch size does not match other inputs for '{name}'")
            rows = array.shape[0]
        if rows > limit:
            cause = f"input '{given}' has {rows} rows: send several requests, or raise its max_batch_size"
            _refuse(request, f"inference request batch-size must be <= {limit} for '{name}' ({cause})")

    def _check_tensor(self, request: Request, spec: TensorSpec, array: Array) -> None:
        name = self._graph.name
        dtype = BY_NUMPY.get(array.dtype)
        if dtype is not spec.dtype:
            _refuse(
                request,
                f"inference input '{spec.name}' data-type is '{dtype or array.dtype}', "
                f"but model '{name}' expects '{spec.dtype}'",
            )
        batching = self._graph.max_batch_size > 0
        shape = array.shape[1:] if batching else array.shape
        if (batching and array.ndim == 0) or not fits(shape, spec.dims):
            _refuse(request, unexpected_shape(spec.name, name, spec.dims, array.shape, batches=batching))


def _refuse(request: Request, text: str) -> NoReturn:
    raise Invalid(f"[request id: {request.id}] {text}" if request.id else text)


def _names(names: Sequence[str]) -> str:
    return ",".join(f"'{name}'" for name in names)
