"""Custom metrics of models: families, aggregation, and their Prometheus text.

Decides: families with one name are one family for all models; a metric with several holders is the sum of their counts,
or for a gauge the value set last; a family is removed with its last holder; which names are reserved for the server.
The values of a holder are in cells of its own that are only read here, so that counting needs no message:

* counter: the count
* gauge: the time it was last set (by one clock for all, 0 for never), the value, the sum added since
* histogram: the sum of observations, then the count for each bucket, the last one without an upper bound

All methods may be called from any thread. Does not know models or processes. Callers: `runtime/model_calls`, `machine`.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, pairwise
from math import isfinite, nan
from typing import Final

from flowserve.errors import Invalid
from flowserve.observe.exposition import COUNTER, GAUGE, HISTOGRAM, head, label_text, number

KINDS: Final = (COUNTER, GAUGE, HISTOGRAM)
BUCKETS_MAX: Final = 1000

Labels = tuple[tuple[str, str], ...]
Cells = Collection[float]  # read in order

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_OURS: Final = ("nv_", "flowserve_")
_PARTS: Final = ("_bucket", "_count", "_sum")  # suffixes of a histogram's lines


def cells_of(kind: str, buckets: Sequence[float]) -> int:
    """The number of cells of a metric."""
    return {COUNTER: 1, GAUGE: 3}.get(kind, 2 + len(buckets))


class _Metric:
    """One combination of labels. `gone` are the counts of former holders."""

    def __init__(self, kind: str, buckets: tuple[float, ...]) -> None:
        self.kind = kind
        self.buckets = buckets
        self.held: dict[int, Cells] = {}  # by holder
        self.gone = [0.0] * cells_of(kind, buckets)

    def value(self) -> float:
        """Of a counter or a gauge."""
        if self.kind == COUNTER:
            return self.totals()[0]
        cells = [[*one] for one in self.held.values()]
        _, last = max(((one[0], one[1]) for one in cells), default=(0.0, 0.0))
        return last + sum(one[2] for one in cells)

    def totals(self) -> list[float]:
        """Of a counter or a histogram."""
        return [sum(column) for column in zip(self.gone, *self.held.values(), strict=True)]

    def leave(self, holder: int) -> None:
        cells = self.held.pop(holder, None)
        if cells is not None and self.kind != GAUGE:
            # A sum that decreases would look like a restarted server. A gauge's value ends with its holder.
            self.gone = [kept + one for kept, one in zip(self.gone, cells, strict=True)]


class _Family:
    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.holders: set[int] = set()
        self.metrics: dict[Labels, _Metric] = {}

    def lines(self) -> Iterator[str]:
        if not self.metrics:
            return
        yield head(self.name, self.description, self.kind)
        for labels, metric in sorted(self.metrics.items()):
            if self.kind != HISTOGRAM:
                yield f"{self.name}{label_text(labels)} {number(metric.value())}\n"
                continue
            total, *counts = metric.totals()
            edges = [*map(number, metric.buckets), "+Inf"]
            for edge, below in zip(edges, accumulate(counts), strict=True):
                yield f"{self.name}_bucket{label_text((*labels, ('le', edge)))} {number(below)}\n"
            yield f"{self.name}_sum{label_text(labels)} {number(total)}\n"
            yield f"{self.name}_count{label_text(labels)} {number(sum(counts))}\n"


class ModelMetrics:
    """The custom metrics of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._held: dict[int, _Family] = {}  # by holder
        self._numbers = count(1)
        # A holder may end inside the garbage collector, even with the lock taken, so it is only noted here.
        self._dropped: deque[int] = deque()

    def open(self, name: str, description: str, kind: str) -> int:
        """Open a family; returns the holder's number. The first description is kept. Raises `Invalid`."""
        _check_name(name, kind)
        with self._settled():
            family = self._families.get(name)
            if family is None:
                self._check_free(name, kind)
                family = self._families[name] = _Family(name, description, kind)
            elif family.kind != kind:
                raise Invalid(f"the metric family '{name}' exists already, as a {family.kind} and not as a {kind}")
            holder = next(self._numbers)
            family.holders.add(holder)
            self._held[holder] = family
            return holder

    def add(self, holder: int, labels: Labels, buckets: tuple[float, ...], cells: Cells) -> None:
        """Add the holder's `cells` to this metric of its family. Raises `Invalid`."""
        with self._settled():
            family = self._family(holder)
            metric = family.metrics.get(labels)
            if metric is None:
                metric = family.metrics[labels] = _Metric(family.kind, buckets)
            elif metric.buckets != buckets:
                name = f"{family.name}{label_text(labels)}"
                raise Invalid(f"the metric '{name}' exists already with the buckets {[*metric.buckets]}")
            metric.held[holder] = cells

    def value(self, holder: int, labels: Labels) -> float:
        """The value of a counter or a gauge over all its holders. Raises `Invalid` if it was removed."""
        with self._settled():
            metric = self._family(holder).metrics.get(labels)
            if metric is None:
                raise Invalid("there is no such metric")
            return float(metric.value())

    def drop(self, holder: int) -> None:
        """Remove a holder. On any thread, at any time; idempotent."""
        self._dropped.append(holder)

    def text(self) -> bytes:
        """All families in Prometheus' text format."""
        with self._settled():
            lines = [line for family in self._families.values() for line in family.lines()]
        return "".join(lines).encode(errors="replace")

    def kind_of(self, holder: int) -> str:
        """The kind of the holder's family. Raises `Invalid` if it was removed."""
        with self._settled():
            return self._family(holder).kind

    # ------------------------------------------------------------------ with the lock

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """The lock, after removing all dropped holders."""
        with self._lock:
            while self._dropped:
                holder = self._dropped.popleft()
                family = self._held.pop(holder, None)
                if family is None:
                    continue
                family.holders.discard(holder)
                for labels, metric in [*family.metrics.items()]:
                    metric.leave(holder)
                    if not metric.held:
                        del family.metrics[labels]
                if not family.holders:
                    del self._families[family.name]
            yield

    def _family(self, holder: int) -> _Family:
        family = self._held.get(holder)
        if family is None:
            raise Invalid("the metric family is gone")
        return family

    def _check_free(self, name: str, kind: str) -> None:
        lines = _lines_of(name, kind)
        for other in self._families.values():
            if lines & _lines_of(other.name, other.kind):
                raise Invalid(f"the metric family '{name}' would have lines of the {other.kind} '{other.name}'")


def check_labels(given: Mapping[object, object]) -> Labels:
    """Labels by their names, sorted. Raises `Invalid`."""
    for name, value in given.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name == "le":
            raise Invalid(f"a metric cannot have a label {str(name)[:100]!r}: letters, digits and underscores make one")
        if not isinstance(value, str):
            raise Invalid(f"the label '{name}' of a metric is a text, got {type(value).__name__}")
    return tuple(sorted((str(name), str(value)) for name, value in given.items()))


def check_buckets(kind: str, given: Sequence[object] | None) -> tuple[float, ...]:
    """The upper bounds of a histogram's buckets, () for the other kinds. Raises `Invalid`."""
    if kind != HISTOGRAM:
        if given is not None:
            raise Invalid(f"a {kind} has no buckets")
        return ()
    if given is None:
        raise Invalid("a histogram has buckets: give the upper bound of each")
    try:
        buckets = tuple(float(one) for one in given)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError, OverflowError):
        buckets = (nan,)
    if len(buckets) > BUCKETS_MAX or not all(map(isfinite, buckets)):
        raise Invalid(f"the buckets of a histogram are at most {BUCKETS_MAX} numbers")
    if any(one >= following for one, following in pairwise(buckets)):
        raise Invalid(f"the buckets of a histogram rise, got {[*buckets]}")
    return buckets


def _check_name(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise Invalid(f"the kind of a metric family is one of {', '.join(KINDS)}, got {kind[:100]!r}")
    if not _NAME.fullmatch(name):
        raise Invalid(f"{name[:100]!r} cannot be the name of a metric family: letters, digits, '_' and ':' make one")
    if name.startswith(_OURS):
        raise Invalid(f"metrics whose names begin with {' or '.join(_OURS)} are the server's own, got '{name}'")


def _lines_of(name: str, kind: str) -> set[str]:
    return {name, *(name + part for part in _PARTS)} if kind == HISTOGRAM else {name}
