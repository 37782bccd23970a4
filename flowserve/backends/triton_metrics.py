"""Metrics that a model makes: Triton's MetricFamily and Metric.

Decided here: what a model may do with a metric of each kind, in Triton's words where it may not, and how long it is
shown: as long as its family, which keeps its metrics whether or not the model does. Counting writes into memory that
the server reads when somebody looks (`Cells` of base.py), and costs no message. What the metrics of several instances
come to, and which names there may be, is decided where they are shown.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final

from flowserve.backends.base import METRIC_VALUE, OPEN_FAMILY, Caller, Cells
from flowserve.backends.python_import import scope
from flowserve.backends.triton_tensors import TritonModelException
from flowserve.errors import FlowserveError

# Triton's words, which its own tests look for.
_DELETED: Final = "Invalid metric operation as the corresponding 'MetricFamily' has been deleted."
_NEGATIVE: Final = "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def caller_of(what: str) -> Caller:
    """How the model of this thread reaches the server, to do `what`."""
    owner = scope.owner
    if owner is None or owner.caller is None:
        raise TritonModelException(
            f"{what}: this is possible in initialize, execute and finalize, on the model's own thread, and, in a model "
            "with a process of its own, on threads that it has started"
        )
    return owner.caller


class _State:
    """A metric of a family: what it is counted in, None once the family is deleted."""

    __slots__ = ("buckets", "cells", "labels", "lock")

    def __init__(self, labels: Mapping[str, str], buckets: Sequence[float] | None, cells: Cells) -> None:
        self.labels = labels
        self.buckets = buckets
        self.cells: Cells | None = cells
        self.lock = threading.Lock()  # adding to a number reads it first


class Metric:
    """One combination of labels of a family. Made by `MetricFamily.Metric`. On any thread."""

    def __init__(self, family: int, kind: MetricKind, caller: Caller, state: _State) -> None:
        self._family = family
        self._kind = kind
        self._caller = caller
        self._state = state

    def increment(self, value: float) -> None:
        """Add to a counter (nothing negative) or to a gauge."""
        cells = self._cells("increment", "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        is_counter = self._kind is MetricKind.COUNTER
        if is_counter and value < 0:
            raise TritonModelException(f"Failed to increment metric value: {_NEGATIVE}")
        with self._state.lock:
            cells[0 if is_counter else 2] += float(value)

    def set(self, value: float) -> None:
        """Give a gauge its value."""
        cells = self._cells("set", "Set", MetricKind.GAUGE)
        with self._state.lock:
            cells[1] = float(value)
            cells[2] = 0.0
            cells[0] = float(self._caller.clock())

    def observe(self, value: float) -> None:
        """Count a value in the histogram's bucket for it."""
        cells = self._cells("observe", "Observe", MetricKind.HISTOGRAM)
        state = self._state
        with state.lock:
            cells[1 + bisect_left(state.buckets or (), float(value))] += 1
            cells[0] += float(value)

    def value(self) -> float:
        """Of a counter or a gauge: what the server shows, other instances' share included."""
        self._cells("get", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        try:
            found: float = self._caller.ask(METRIC_VALUE, (self._family, dict(self._state.labels)))
        except FlowserveError as error:
            raise TritonModelException(f"Failed to get metric value: {error}") from None
        return found

    def _cells(self, verb: str, name: str, *kinds: MetricKind) -> Cells:
        failed = f"Failed to {verb} metric value"
        if self._kind not in kinds:
            raise TritonModelException(f"{failed}: TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {name}")
        cells = self._state.cells
        if cells is None:
            raise TritonModelException(f"{failed}: {_DELETED}")
        return cells


_Metric = Metric  # whose name the family's method has, too


class MetricFamily:
    """Metrics of one name and kind. Families of one name are the same to whoever reads metrics."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        failed = "Error when creating MetricFamily"
        self._states: dict[tuple[tuple[str, str], ...], _State] = {}
        self._lock = threading.Lock()
        self._kind = kind
        if [*map(type, (name, description, kind))] != [str, str, MetricKind]:
            raise TritonModelException(f"{failed}: it has a name, a description, and a kind such as MetricFamily.GAUGE")
        caller = caller_of(failed)
        try:
            self._number: int = caller.ask(OPEN_FAMILY, (name, description, kind.value))
        except FlowserveError as error:
            raise TritonModelException(f"{failed}: {error}") from None
        self._caller = caller

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> _Metric:
        """The metric with these labels. `buckets`, of a histogram: their upper bounds, rising."""
        failed = "Error when creating Metric"
        given: Any = {} if labels is None else labels
        if not isinstance(given, Mapping) or not all(isinstance(part, str) for pair in given.items() for part in pair):
            raise TritonModelException(f"{failed}: labels are a dictionary of texts, got {given!r}")
        key = tuple(sorted(given.items()))
        try:
            edges = None if buckets is None else [float(one) for one in buckets]
        except (TypeError, ValueError):
            raise TritonModelException(f"{failed}: buckets are a list of numbers, got {buckets!r}") from None
        with self._lock:
            state = self._states.get(key)
            if state is None or edges != state.buckets:
                try:
                    cells = self._caller.metric(self._number, dict(key), edges, _count(self._kind, edges))
                except FlowserveError as error:
                    raise TritonModelException(f"{failed}: {error}") from None
                state = self._states[key] = _State(dict(key), edges, cells)
        return Metric(self._number, self._kind, self._caller, state)

    def __del__(self) -> None:
        caller: Any = getattr(self, "_caller", None)
        if caller is None:
            return  # it never came to be
        for state in self._states.values():
            state.cells = None
        caller.drop(self._number)


def _count(kind: MetricKind, buckets: Sequence[float] | None) -> int:
    return {MetricKind.COUNTER: 1, MetricKind.GAUGE: 3}.get(kind, 2 + len(buckets or ()))
