"""Metrics that models make: which there are, what they come to, and how they read.

Decided here: families of one name are one family, whoever made them; a metric that several hold is the sum of what they
counted, or for a gauge what was set last; a family goes with its last holder; which names are the server's own. What a
holder counts lies in cells of its own, which are only read here, so that counting costs nobody a message:

* counter: what was counted
* gauge: when it was last set (by one clock for all, 0 for never), to what, what was added since
* histogram: the sum of what was observed, then how often for each bucket, the last one without bound

Who holds what is told on any thread; text is written on any thread. This file does not know models or processes.
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
from flowserve.observe.exposition import COUNTER, GAUGE, HISTOGRAM, head, number, shown

KINDS: Final = (COUNTER, GAUGE, HISTOGRAM)
BUCKETS_MAX: Final = 1000

Labels = tuple[tuple[str, str], ...]
Cells = Collection[float]  # read in order

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_OURS: Final = ("nv_", "flowserve_")
_PARTS: Final = ("_bucket", "_count", "_sum")  # what a histogram's lines are called besides


def cells_of(kind: str, buckets: Sequence[float]) -> int:
    """How many cells a metric has."""
    return {COUNTER: 1, GAUGE: 3}.get(kind, 2 + len(buckets))


class _Metric:
    """One combination of labels. `gone` is what holders that are no more have left to those that go on."""

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
            # A sum that shrinks looks like a server that began anew. What a gauge's holder had is over with it.
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
                yield f"{self.name}{shown(labels)} {number(metric.value())}\n"
                continue
            total, *counts = metric.totals()
            edges = [*map(number, metric.buckets), "+Inf"]
            for edge, below in zip(edges, accumulate(counts), strict=True):
                yield f"{self.name}_bucket{shown((*labels, ('le', edge)))} {number(below)}\n"
            yield f"{self.name}_sum{shown(labels)} {number(total)}\n"
            yield f"{self.name}_count{shown(labels)} {number(sum(counts))}\n"


class ModelMetrics:
    """Those of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._held: dict[int, _Family] = {}  # by holder
        self._numbers = count(1)
        # A holder may end inside the garbage collector, even with the lock taken: it only lands here.
        self._dropped: deque[int] = deque()

    def open(self, name: str, description: str, kind: str) -> int:
        """Hold a family; returns the holder's number. The first description stands. Raises `Invalid`."""
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
        """From now on count what `cells` say for this metric of the holder's family. Raises `Invalid`."""
        with self._settled():
            family = self._family(holder)
            metric = family.metrics.get(labels)
            if metric is None:
                metric = family.metrics[labels] = _Metric(family.kind, buckets)
            elif metric.buckets != buckets:
                raise Invalid(
                    f"the metric '{family.name}{shown(labels)}' exists already with the buckets {[*metric.buckets]}"
                )
            metric.held[holder] = cells

    def value(self, holder: int, labels: Labels) -> float:
        """Of a counter or a gauge, all its holders together. Raises `Invalid` where it is gone."""
        with self._settled():
            metric = self._family(holder).metrics.get(labels)
            if metric is None:
                raise Invalid("there is no such metric")
            return float(metric.value())

    def drop(self, holder: int) -> None:
        """It is no more. On any thread, at any moment, and harmless when it is repeated."""
        self._dropped.append(holder)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        with self._settled():
            lines = [line for family in self._families.values() for line in family.lines()]
        return "".join(lines).encode(errors="replace")

    def kind_of(self, holder: int) -> str:
        """The kind of its family. Raises `Invalid` where it is gone."""
        with self._settled():
            return self._family(holder).kind

    # ------------------------------------------------------------------ with the lock

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """The lock, with everything dropped that was to be."""
        with self._lock:
            self._settle()
            yield

    def _settle(self) -> None:
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
