"""Counters of one deployment: counts and summed durations, as Triton's statistics extension defines them.

Decides what is counted, the reasons of failures, the counters of a decoupled model's responses by position
(`response_stats`), the edges of histograms, and the JSON rows. Written only on the event loop's thread, once per batch.
The common case is only recorded, and added up when many records exist or before reading (`add_up`): adding many at once
costs half of adding one by one.

Readers compute percentiles from histograms, which can be summed over servers. Durations are counted log-linearly:
between the edges 1, 2, 5, 10, ... from a microsecond to 50 seconds in equal parts, none of which is wider than 3.2
percent of its value, so that a percentile is within 3.2 percent of an observed value. Metrics show the edges from 100
microseconds on without the parts, which include every edge of Triton's own histogram; rows go in powers of two. An
observation is a search in a sorted sequence and one addition, and a batch is one observation for all its requests with
equal waits.

Quantiles of durations over the last minute are kept if the operator asks for them (`SummarisedStatistics`), for
Prometheus summaries. Values are counted in logarithmic steps of two percent, so every quantile is within one percent of
an observed value, and a minute of any traffic needs a few hundred counts. The window has parts, and the oldest is
dropped as a whole. Another thread may read.

Does not know its readers or a clock: times come in as nanoseconds. Callers: `runtime` (writes), metrics, the statistics
endpoints, the live page (read).
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from flowserve.observe.traffic import NodeTraffic, SpaceTraffic
from flowserve.values import Array

# Triton's reasons of failures. REJECTED: a queue was full, a timeout passed, or the server was stopping. CANCELED: the
# caller left. BACKEND: the model failed. OTHER: the request did not fit the deployment, or a step of its ensemble
# failed.
REJECTED: Final = "REJECTED"
CANCELED: Final = "CANCELED"
BACKEND: Final = "BACKEND"
OTHER: Final = "OTHER"
# Outcomes of requests that are no failures: answered from the response cache, and computed.
HIT: Final = "HIT"
RAN: Final = "RAN"
REASONS: Final = (REJECTED, CANCELED, BACKEND, OTHER)
ERROR_CHARS: Final = 1000  # the kept length of an error's text
_FIGURES: Final = 8  # of a record
_RECORD: Final = struct.Struct(f"{_FIGURES}q")
_pack: Final = _RECORD.pack
# After how many records a deployment adds them up, which takes 50 to 70 us. The models of a graph record together, so
# each deployment has another number than the one before it, and not all of them add up during the same request.
_record_limits: Final = cycle(range(512, 1024, 64))
_TOTALS_MAX: Final = 256
# Later responses are not counted, because each position is kept forever.
RESPONSES_MAX: Final = 1024
_MICROSECOND_NS: Final = 1000
# An observation belongs to the first edge that is not below it; values above the last edge have their own count.
DURATION_EDGES_NS: Final = tuple(step * 10**power * _MICROSECOND_NS for power in range(2, 8) for step in (1, 2, 5))
_PARTS: Final = (32, 48, 32)  # from 1 to 2, from 2 to 5, from 5 to 10


def _fine(edges: Sequence[int]) -> Iterator[int]:
    for (low, high), parts in zip(pairwise(edges), cycle(_PARTS), strict=False):
        yield from (low + (high - low) * part // parts for part in range(parts))
    yield edges[-1]


# An array, because numpy reads it without a copy.
FINE_DURATION_EDGES_NS: Final[Sequence[int]] = array(
    "q", _fine([step * 10**power * _MICROSECOND_NS for power in range(8) for step in (1, 2, 5)])
)
ROW_EDGES: Final = tuple(2**power for power in range(11))
WINDOW_NS: Final = 60_000_000_000
PARTS: Final = 5
WINDOWS: Final = ("request", "queue", "input", "infer", "output", "hit", "miss")
_PART_NS: Final = WINDOW_NS // PARTS
_STEP: Final = math.log(1.02)
_NONE: Final = -1  # the step of the value 0


class Histogram:
    """`counts[i]` is the number of observations up to `edges[i]`; the last count is for values above all edges."""

    __slots__ = ("counts", "edges")

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.counts = array("q", bytes(8 * (len(edges) + 1)))

    def observe(self, value: int, count: int = 1) -> None:
        """`count` observations of the same value."""
        self.counts[bisect_left(self.edges, value)] += count

    def observe_all(self, values: Array, counts: Array) -> None:
        """`counts[i]` observations of `values[i]`, all at once."""
        found = np.bincount(np.searchsorted(self.edges, values), counts, len(self.counts))
        np.add(self._view, found, out=self._view, casting="unsafe")

    def cumulated(self, edges: Sequence[int]) -> list[int]:
        """The number of observations up to each of `edges`, which are among its own, and last the total."""
        below = np.cumsum(self._view)
        return [*below[np.searchsorted(self.edges, edges)].tolist(), int(below[-1])]

    @property
    def _view(self) -> Array:
        return np.frombuffer(self.counts, np.int64)


# The counters of all responses at one position, by their names in JSON: each a count and a sum of durations in ns. The
# duration of a response begins at the end of the one before it.
_RESPONSE_COUNTERS: Final = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


class ResponseStatistics:
    """The responses of one deployment, by position (`place`) in their request, from 0."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: list[dict[str, list[int]]] = []

    def answered(self, place: int, infer_ns: int, output_ns: int) -> None:
        """Count a response that took `infer_ns` to compute and `output_ns` to receive."""
        self._add(place, compute_infer=infer_ns, compute_output=output_ns, success=infer_ns + output_ns)

    def failed(self, place: int, infer_ns: int) -> None:
        """Count an error response."""
        self._add(place, compute_infer=infer_ns, compute_output=0, fail=infer_ns)

    def was_empty(self, place: int, infer_ns: int) -> None:
        """Count an empty final response."""
        self._add(place, compute_infer=infer_ns, empty_response=infer_ns)

    def cancelled(self, place: int, infer_ns: int) -> None:
        """Count a cancelled response after `infer_ns` of computation."""
        self._add(place, cancel=infer_ns)

    def as_json(self) -> dict[str, Any]:
        return {
            str(place): {name: _sum(*pair) for name, pair in counters.items()}
            for place, counters in enumerate(self._places)
        }

    def _add(self, place: int, **durations_ns: int) -> None:
        if place >= RESPONSES_MAX:
            return
        while len(self._places) <= place:
            self._places.append({name: [0, 0] for name in _RESPONSE_COUNTERS})
        counters = self._places[place]
        for name, ns in durations_ns.items():
            pair = counters[name]
            pair[0] += 1
            pair[1] += ns


@dataclass(slots=True)
class BatchSizeStatistics:
    """Executions of one batch size: their count, and the sums of their durations in nanoseconds."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


class Queued(NamedTuple):
    """The queue of a deployment's model: how many requests wait, and the load of its instances. 1: all run a batch and
    none waits.
    """

    requests: int
    load: float


@dataclass(slots=True)
class Statistics:
    """One deployment's counters. Durations are nanoseconds, summed over requests (a batch's whole time counts for
    each of its requests).

    `inference_count` counts rows (at least 1 per request), `execution_count` counts batches. `failures` counts requests
    by reason, `last_error` is the last error's text. The histograms contain successful requests; `nodes` has
    the traffic of each node of the deployment's graph, by index. `load_s` is the load time of the current generation in
    seconds; 0 for an ensemble. `missing_outputs` counts requested outputs that the model left out of its responses. A
    reader calls `add_up` first, on the event loop.
    """

    name: str
    version: int
    success_count: int = 0
    success_ns: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    fail_ns: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ns: int | None = None  # on the server's clock
    cache_hits: int = 0
    cache_hit_ns: int = 0
    cache_misses: int = 0
    cache_miss_ns: int = 0
    batches: dict[int, BatchSizeStatistics] = field(default_factory=dict)
    request_duration: Histogram = field(default_factory=partial(Histogram, FINE_DURATION_EDGES_NS))
    queue_duration: Histogram = field(default_factory=partial(Histogram, FINE_DURATION_EDGES_NS))
    compute_duration: Histogram = field(default_factory=partial(Histogram, FINE_DURATION_EDGES_NS))
    responses: ResponseStatistics = field(default_factory=ResponseStatistics)
    first_response: tuple[Histogram, list[int]] | None = None
    nodes: tuple[NodeTraffic, ...] = ()
    spaces: tuple[SpaceTraffic, ...] = ()
    last_error: str = ""
    last_error_ms: int = 0
    load_s: float = 0.0
    missing_outputs: int = 0
    _told: set[str] = field(default_factory=set)
    _noted: bytearray = field(default_factory=bytearray)  # records: the arguments of `ran`
    _noted_max: int = field(default_factory=lambda: next(_record_limits) * _RECORD.size)  # bytes
    _totals: list[int] = field(default_factory=list)  # durations of successful requests whose counts are added already

    @property
    def fail_count(self) -> int:
        return sum(self.failures.values())

    def ran(
        self,
        rows: int,
        count: int,
        total_ns: int,
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        now_ns: int,
        /,
    ) -> None:
        """Count a batch of `count` requests with `rows` rows together, answered at `now_ns`, each after `total_ns`; or
        one request of an ensemble, for which all but the total are sums over its steps.
        """
        noted = self._noted
        noted += _pack(rows, count, total_ns, queue_ns, input_ns, infer_ns, output_ns, now_ns)
        if len(noted) >= self._noted_max:
            self.add_up()

    def ran_apart(
        self,
        rows: int,
        totals: Sequence[int],
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        now_ns: int,
        /,
    ) -> None:
        """Count requests of `rows` rows each that passed an ensemble together, answered at `now_ns`, each after its own
        one of `totals`. The other arguments are those of `ran`, per request.
        """
        count = len(totals)
        self.execution_count += count
        self.inference_count += rows * count
        self.last_inference_ns = max(now_ns, self.last_inference_ns or 0)
        self._add_batches(rows, count, input_ns * count, infer_ns * count, output_ns * count)
        took = queue_ns * count, input_ns * count, infer_ns * count, output_ns * count
        self._add_requests(count, sum(totals), *took)
        self.queue_duration.observe(queue_ns, count)
        self.compute_duration.observe(input_ns + infer_ns + output_ns, count)
        self._totals += totals
        if len(self._totals) >= _TOTALS_MAX:
            self.add_up()

    def add_up(self) -> None:
        """Add up the records. Called on the event loop's thread before any reading."""
        if self._totals:
            totals = np.array(self._totals)
            self.request_duration.observe_all(totals, np.ones_like(totals))
            self._totals.clear()
        if not self._noted:
            return
        noted, self._noted = np.frombuffer(self._noted, np.int64), bytearray()
        rows, counts, totals, queues, inputs, infers, outputs, moments = noted.reshape(-1, _FIGURES).T
        # Other requests were counted directly, and the records need not be in order.
        self.last_inference_ns = max(int(moments.max()), self.last_inference_ns or 0)
        self.execution_count += len(rows)
        self.inference_count += int(rows.sum())
        for size in set(rows.tolist()):
            which = rows == size
            took = [int(one.sum(where=which)) for one in (inputs, infers, outputs)]
            self._add_batches(size, int(which.sum()), *took)
        sums = (int(one @ counts) for one in (totals, queues, inputs, infers, outputs))
        self._add_requests(int(counts.sum()), *sums)
        self.request_duration.observe_all(totals, counts)
        self.queue_duration.observe_all(queues, counts)
        self.compute_duration.observe_all(inputs + infers + outputs, counts)

    def executed(self, rows: int, input_ns: int, infer_ns: int, output_ns: int, now_ns: int) -> None:
        """Count one batch of `rows` rows, regardless of the outcome of its requests."""
        self.execution_count += 1
        self.inference_count += rows
        self.last_inference_ns = now_ns
        self._add_batches(rows, 1, input_ns, infer_ns, output_ns)

    def succeeded(self, queued: Sequence[int], started_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count requests, queued at these times, that ran in one batch with the given start and durations."""
        count = len(queued)
        compute_ns = input_ns + infer_ns + output_ns
        queue_ns = count * started_ns - sum(queued)
        for moment in queued:
            self.queue_duration.observe(started_ns - moment)
            self.request_duration.observe(started_ns - moment + compute_ns)
        self.compute_duration.observe(compute_ns, count)
        took = queue_ns, count * input_ns, count * infer_ns, count * output_ns
        self._add_requests(count, queue_ns + count * compute_ns, *took)

    def _add_requests(
        self, count: int, total_ns: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Add successful requests, with the sums of their durations."""
        self.success_count += count
        self.success_ns += total_ns
        self.queue_ns += queue_ns
        self.compute_input_ns += input_ns
        self.compute_infer_ns += infer_ns
        self.compute_output_ns += output_ns

    def _add_batches(self, rows: int, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        size = self.batches.get(rows)
        if size is None:
            size = self.batches[rows] = BatchSizeStatistics()
        size.count += count
        size.compute_input_ns += input_ns
        size.compute_infer_ns += infer_ns
        size.compute_output_ns += output_ns

    def first_answered(self, ns: int) -> None:
        """Count the first response of a decoupled request, `ns` after its arrival."""
        if self.first_response is None:
            self.first_response = Histogram(FINE_DURATION_EDGES_NS), [0]
        histogram, total = self.first_response
        histogram.observe(ns)
        total[0] += ns

    def until_first_response(self) -> tuple[Histogram, int]:
        """The histogram of times to the first response, and their sum in nanoseconds."""
        if self.first_response is None:
            return self.request_duration, self.success_ns
        histogram, (total_ns,) = self.first_response
        return histogram, total_ns

    def hit(self, total_ns: int, cache_ns: int) -> None:
        """Count one request answered from the cache without an execution. `cache_ns` of the total went into the lookup,
        or into waiting for an identical request.
        """
        self.success_count += 1
        self.success_ns += total_ns
        self.request_duration.observe(total_ns)
        self.queue_duration.observe(0)
        self.compute_duration.observe(0)
        self.cache_hits += 1
        self.cache_hit_ns += cache_ns

    def missed(self, cache_ns: int) -> None:
        """Count one executed request that was not in the cache; lookup and insertion took `cache_ns`."""
        self.cache_misses += 1
        self.cache_miss_ns += cache_ns

    def failed(self, count: int, total_ns: int, reason: str) -> None:
        """Count `count` failed requests, for one of REASONS, after `total_ns` in total."""
        self.failures[reason] += count
        self.fail_ns += total_ns

    def note_error(self, error: str, now_ms: int) -> None:
        """Record the text of a request's error."""
        self.last_error = error[:ERROR_CHARS]
        self.last_error_ms = now_ms

    def is_first(self, what: str) -> bool:
        """Whether this is the first call with `what` for the current generation: it is to be logged once."""
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def was_loaded(self, load_s: float) -> None:
        """A new generation serves from now on."""
        self.load_s = load_s
        self._told.clear()

    def batch_rows(self) -> Histogram:
        """Executions by their rows."""
        histogram = Histogram(ROW_EDGES)
        for rows, size in [*self.batches.items()]:  # the event loop may count while another thread reads
            histogram.observe(rows, size.count)
        return histogram

    def as_json(self, epoch_ns: int) -> dict[str, Any]:
        """One row of `model_stats`, with the fields of Triton's message only. `epoch_ns` is the time since the epoch
        minus the server's clock.
        """
        self.add_up()
        last_ns = self.last_inference_ns
        done = self.success_count
        computed = done - self.cache_hits  # cache hits have no computation
        return {
            "name": self.name,
            "version": str(self.version),
            "last_inference": 0 if last_ns is None else (last_ns + epoch_ns) // 1_000_000,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _sum(done, self.success_ns),
                "fail": _sum(self.fail_count, self.fail_ns),
                "queue": _sum(done, self.queue_ns),
                "compute_input": _sum(computed, self.compute_input_ns),
                "compute_infer": _sum(computed, self.compute_infer_ns),
                "compute_output": _sum(computed, self.compute_output_ns),
                "cache_hit": _sum(self.cache_hits, self.cache_hit_ns),
                "cache_miss": _sum(self.cache_misses, self.cache_miss_ns),
            },
            "response_stats": self.responses.as_json(),
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _sum(size.count, size.compute_input_ns),
                    "compute_infer": _sum(size.count, size.compute_infer_ns),
                    "compute_output": _sum(size.count, size.compute_output_ns),
                }
                for rows, size in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }

    def graph_json(self) -> dict[str, Any]:
        """What flowserve counts besides: failures by reason, and the nodes, edges and spaces of the graph."""
        self.add_up()
        return {
            "name": self.name,
            "version": str(self.version),
            "failures": dict(self.failures),
            "nodes": [node.as_json() for node in self.nodes],
            **({"spaces": [space.as_json() for space in self.spaces]} if self.spaces else {}),
        }


class SlidingWindow:
    """Durations of the last minute, counted by size."""

    __slots__ = ("_end_ns", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{}]  # newest last
        self._end_ns = 0  # the end of the newest part

    def observe(self, value_ns: int, now_ns: int, count: int = 1) -> None:
        """Count `count` observations of one value at `now_ns`, which may be in an earlier part."""
        if now_ns >= self._end_ns:
            self._turn(now_ns)
        part = self._parts[-1] if self._end_ns - now_ns <= _PART_NS else self._earlier_part(now_ns)
        place = round(math.log(value_ns) / _STEP) if value_ns > 0 else _NONE
        part[place] = part.get(place, 0) + count

    def quantiles(self, wanted: Sequence[float], now_ns: int) -> list[float]:
        """The quantiles in nanoseconds; nan without observations."""
        counts: dict[int, int] = {}
        late = max(now_ns - self._end_ns, -_PART_NS) // _PART_NS + 1  # parts that have elapsed since
        for part in self._parts[max(len(self._parts) + late - PARTS, 0) :]:
            for place, count in [*part.items()]:
                counts[place] = counts.get(place, 0) + count
        return [_quantile(sorted(counts.items()), share) for share in wanted]

    def _earlier_part(self, then_ns: int) -> dict[int, int]:
        """The part of a time before the newest one; an unused dict if that part was dropped."""
        newer = (self._end_ns - 1 - then_ns) // _PART_NS  # parts
        if newer >= PARTS:
            return {}
        missing = newer + 1 - len(self._parts)
        if missing > 0:
            self._parts = [*({} for _ in range(missing)), *self._parts]
        return self._parts[-1 - newer]

    def _turn(self, now_ns: int) -> None:
        late = (now_ns - self._end_ns) // _PART_NS + 1
        empty: list[dict[int, int]] = [{} for _ in range(min(late, PARTS))]
        self._parts = [*self._parts, *empty][-PARTS:]
        self._end_ns = self._end_ns + late * _PART_NS if self._end_ns else now_ns + _PART_NS


def _quantile(counts: Sequence[tuple[int, int]], share: float) -> float:
    left = share * sum(count for _, count in counts)
    for place, count in counts:
        left -= count
        if left <= 0:
            return 0.0 if place == _NONE else math.exp(place * _STEP)
    return math.nan


@dataclass(slots=True)
class SummarisedStatistics(Statistics):
    """Statistics that also keep quantiles of durations. `clock`: the server's, in nanoseconds."""

    clock: Callable[[], int] = field(kw_only=True)
    windows: dict[str, SlidingWindow] = field(default_factory=lambda: {name: SlidingWindow() for name in WINDOWS})

    def ran(self, *figures: int) -> None:
        Statistics.ran(self, *figures)
        _, count, total_ns, queue_ns, input_ns, infer_ns, output_ns, now_ns = figures
        self._observe(now_ns, count, request=total_ns, queue=queue_ns, input=input_ns, infer=infer_ns, output=output_ns)

    def ran_apart(self, rows: int, totals: Sequence[int], *figures: int) -> None:
        Statistics.ran_apart(self, rows, totals, *figures)
        queue_ns, input_ns, infer_ns, output_ns, now_ns = figures
        for total_ns in totals:
            self._observe(now_ns, request=total_ns)
        self._observe(now_ns, len(totals), queue=queue_ns, input=input_ns, infer=infer_ns, output=output_ns)

    def succeeded(self, queued: Sequence[int], started_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        Statistics.succeeded(self, queued, started_ns, input_ns, infer_ns, output_ns)
        now_ns = started_ns + input_ns + infer_ns + output_ns
        for moment in queued:
            self._observe(now_ns, request=now_ns - moment, queue=started_ns - moment)
        self._observe(now_ns, len(queued), input=input_ns, infer=infer_ns, output=output_ns)

    def hit(self, total_ns: int, cache_ns: int) -> None:
        Statistics.hit(self, total_ns, cache_ns)
        self._observe(self.clock(), request=total_ns, queue=0, hit=cache_ns)

    def missed(self, cache_ns: int) -> None:
        Statistics.missed(self, cache_ns)
        self._observe(self.clock(), miss=cache_ns)

    def _observe(self, now_ns: int, count: int = 1, **durations_ns: int) -> None:
        for name, ns in durations_ns.items():
            self.windows[name].observe(ns, now_ns, count)


def summarising(clock: Callable[[], int]) -> Callable[[str, int], Statistics]:
    """A factory of such statistics, in place of `Statistics`."""
    return partial(SummarisedStatistics, clock=clock)


def _sum(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
