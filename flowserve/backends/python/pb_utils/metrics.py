"""Metrics that a model makes: Triton's MetricFamily and Metric.

Decides which operations each kind of metric allows, with Triton's error texts, and how long a metric is shown: as long
as its family exists, whether or not the model keeps the metric. Counting writes to memory that the server reads when
metrics are requested (`Cells` of base.py), and sends no message. How the metrics of several instances are summed, and
which names are allowed, is decided by the server.

Callers: models.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final

from flowserve.backends.base import METRIC_VALUE, OPEN_FAMILY, BlsClient, Cells
from flowserve.backends.python.pb_utils.context import TritonModelException, caller_for
from flowserve.errors import FlowserveError

# Triton's texts, which its tests match.
_DELETED: Final = "Invalid metric operation as the corresponding 'MetricFamily' has been deleted."
_NEGATIVE: Final = "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class _State:
    """A metric of a family. `cells`: the memory it counts in, None once the family is deleted."""

    __slots__ = ("buckets", "cells", "labels", "lock")

    def __init__(self, labels: Mapping[str, str], buckets: Sequence[float] | None, cells: Cells) -> None:
        self.labels = labels
        self.buckets = buckets
        self.cells: Cells | None = cells
        self.lock = threading.Lock()  # an addition is a read and a write


class Metric:
    """One combination of labels of a family. Made by `MetricFamily.Metric`. Used on any thread."""

    def __init__(self, family: int, kind: MetricKind, caller: BlsClient, state: _State) -> None:
        self._family = family
        self._kind = kind
        self._caller = caller
        self._state = state

    def increment(self, value: float) -> None:
        """Add to a counter (no negative values) or to a gauge."""
        cells = self._cells("increment", "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        is_counter = self._kind is MetricKind.COUNTER
        if is_counter and value < 0:
            raise TritonModelException(f"Failed to increment metric value: {_NEGATIVE}")
        with self._state.lock:
            cells[0 if is_counter else 2] += float(value)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        cells = self._cells("set", "Set", MetricKind.GAUGE)
        with self._state.lock:
            cells[1] = float(value)
            cells[2] = 0.0
            cells[0] = float(self._caller.clock())

    def observe(self, value: float) -> None:
        """Count a value in its bucket of a histogram."""
        cells = self._cells("observe", "Observe", MetricKind.HISTOGRAM)
        state = self._state
        with state.lock:
            cells[1 + bisect_left(state.buckets or (), float(value))] += 1
            cells[0] += float(value)

    def value(self) -> float:
        """The value of a counter or a gauge as the server shows it, other instances included."""
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


_Metric = Metric  # the method MetricFamily.Metric hides the name in its class


class MetricFamily:
    """Metrics of one name and kind. Several families of one name are shown as one."""

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
        caller = caller_for(failed)
        try:
            self._number: int = caller.ask(OPEN_FAMILY, (name, description, kind.value))
        except FlowserveError as error:
            raise TritonModelException(f"{failed}: {error}") from None
        self._caller = caller

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> _Metric:
        """The metric with these labels. `buckets`: upper bounds of a histogram's buckets, ascending."""
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
            return  # its constructor raised
        for state in self._states.values():
            state.cells = None
        caller.drop(self._number)


def _count(kind: MetricKind, buckets: Sequence[float] | None) -> int:
    return {MetricKind.COUNTER: 1, MetricKind.GAUGE: 3}.get(kind, 2 + len(buckets or ()))
