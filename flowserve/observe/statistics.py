"""What one deployment has done so far: counts and summed durations, as Triton's statistics extension defines them.

Decided here: what is counted, why a request counts as failed, and the JSON rows. Written from the loop's thread only,
once per batch. The common case is only noted, and added up when many have been noted or somebody is about to read
(`add_up`): adding up many at once costs half of doing it one by one. It does not know who reads it, and no clock:
moments come in as nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from flowserve.observe.histogram import DURATION_EDGES_NS, ROW_EDGES, Histogram
from flowserve.observe.responses import Responses
from flowserve.observe.traffic import NodeTraffic

# Why a request failed, in Triton's words. REJECTED: no place or no time for it, or the server was ending. CANCELED: its
# caller left. BACKEND: the model failed. OTHER: it did not fit the deployment, or a step of its ensemble failed.
REJECTED: Final = "REJECTED"
CANCELED: Final = "CANCELED"
BACKEND: Final = "BACKEND"
OTHER: Final = "OTHER"
REASONS: Final = (REJECTED, CANCELED, BACKEND, OTHER)
ERROR_CHARS: Final = 1000  # of an error's text are remembered
_NOTED_MAX: Final = 256  # adding up so many keeps the loop for some 0.1 ms
_FIGURES: Final = 8  # noted of each


@dataclass(slots=True)
class BatchSizeStatistics:
    """Executions of one batch size: how many, and their summed durations in nanoseconds."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclass(slots=True)
class Statistics:
    """One deployment's counters. Durations are nanoseconds, summed over requests (a batch's whole time counts for
    each of its requests).

    `inference_count` counts rows (at least 1 a request), `execution_count` counts batches. `failures` counts requests
    by reason, `last_error` is what the last of them was told. `left` are requests in batches that run whose callers
    have left; they are counted, and their batch counts rows of theirs only. The histograms hold successful requests;
    `nodes` is what each node of the deployment's graph has carried, by index. `load_s` is how long it took to load what
    runs now; 0 for an ensemble, which loads nothing of its own. Whoever reads calls `add_up` first, on the loop.
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
    request_duration: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_NS))
    queue_duration: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_NS))
    compute_duration: Histogram = field(default_factory=partial(Histogram, DURATION_EDGES_NS))
    responses: Responses = field(default_factory=Responses)
    first_response: tuple[Histogram, list[int]] | None = None
    nodes: tuple[NodeTraffic, ...] = ()
    last_error: str = ""
    last_error_ms: int = 0
    left: set[object] = field(default_factory=set)
    load_s: float = 0.0
    _noted: list[tuple[int, ...]] = field(default_factory=list)
    _totals: list[int] = field(default_factory=list)  # of successful requests that are counted otherwise

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
    ) -> None:
        """`count` requests, of `rows` rows together, ran in one batch and are answered at `now_ns`, each after
        `total_ns`. Or one request went through an ensemble; then all but the total are sums over its steps.
        """
        noted = self._noted
        noted.append((rows, count, total_ns, queue_ns, input_ns, infer_ns, output_ns, now_ns))
        if len(noted) >= _NOTED_MAX:
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
    ) -> None:
        """Requests of `rows` rows each went through an ensemble together, and are answered at `now_ns`, each after one
        of `totals`. All the rest is as in `ran`, of each.
        """
        count = len(totals)
        self.execution_count += count
        self.inference_count += rows * count
        self.last_inference_ns = max(now_ns, self.last_inference_ns or 0)
        self._add_batches(rows, count, input_ns * count, infer_ns * count, output_ns * count)
        self.success_count += count
        self.success_ns += sum(totals)
        self.queue_ns += queue_ns * count
        self.compute_input_ns += input_ns * count
        self.compute_infer_ns += infer_ns * count
        self.compute_output_ns += output_ns * count
        self.queue_duration.observe(queue_ns, count)
        self.compute_duration.observe(input_ns + infer_ns + output_ns, count)
        self._totals += totals
        if len(self._totals) >= _NOTED_MAX:
            self.add_up()

    def add_up(self) -> None:
        """Count what was noted. Called on the loop's thread before anything is read."""
        if self._totals:
            totals = np.array(self._totals)
            self.request_duration.observe_all(totals, np.ones_like(totals))
            self._totals.clear()
        if not self._noted:
            return
        noted = np.fromiter(chain.from_iterable(self._noted), np.int64, len(self._noted) * _FIGURES)
        self._noted.clear()
        rows, counts, totals, queues, inputs, infers, outputs, moments = noted.reshape(-1, _FIGURES).T
        # Others were counted at once, and what is noted need not be in order.
        self.last_inference_ns = max(int(moments.max()), self.last_inference_ns or 0)
        self.execution_count += len(rows)
        self.inference_count += int(rows.sum())
        for size in set(rows.tolist()):
            which = rows == size
            took = [int(one.sum(where=which)) for one in (inputs, infers, outputs)]
            self._add_batches(size, int(which.sum()), *took)
        self.success_count += int(counts.sum())
        self.success_ns += int(totals @ counts)
        self.queue_ns += int(queues @ counts)
        self.compute_input_ns += int(inputs @ counts)
        self.compute_infer_ns += int(infers @ counts)
        self.compute_output_ns += int(outputs @ counts)
        self.request_duration.observe_all(totals, counts)
        self.queue_duration.observe_all(queues, counts)
        self.compute_duration.observe_all(inputs + infers + outputs, counts)

    def executed(self, rows: int, input_ns: int, infer_ns: int, output_ns: int, now_ns: int) -> None:
        """One batch of `rows` rows ran, whatever came of its requests."""
        self.execution_count += 1
        self.inference_count += rows
        self.last_inference_ns = now_ns
        self._add_batches(rows, 1, input_ns, infer_ns, output_ns)

    def succeeded(self, queued: Sequence[int], started_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Requests that were queued at these moments ran in one batch, which began at `started_ns` and took so long."""
        count = len(queued)
        compute_ns = input_ns + infer_ns + output_ns
        queue_ns = count * started_ns - sum(queued)
        for moment in queued:
            self.queue_duration.observe(started_ns - moment)
            self.request_duration.observe(started_ns - moment + compute_ns)
        self.compute_duration.observe(compute_ns, count)
        self.success_count += count
        self.success_ns += queue_ns + count * compute_ns
        self.queue_ns += queue_ns
        self.compute_input_ns += count * input_ns
        self.compute_infer_ns += count * infer_ns
        self.compute_output_ns += count * output_ns

    def _add_batches(self, rows: int, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        size = self.batches.get(rows)
        if size is None:
            size = self.batches[rows] = BatchSizeStatistics()
        size.count += count
        size.compute_input_ns += input_ns
        size.compute_infer_ns += infer_ns
        size.compute_output_ns += output_ns

    def first_answered(self, ns: int) -> None:
        """One request that may be answered many times has its first response, so long after it came."""
        if self.first_response is None:
            self.first_response = Histogram(DURATION_EDGES_NS), [0]
        histogram, total = self.first_response
        histogram.observe(ns)
        total[0] += ns

    def until_first_response(self) -> tuple[Histogram, int]:
        """The requests that were answered by how long that took, and all of it in nanoseconds."""
        if self.first_response is None:
            return self.request_duration, self.success_ns
        histogram, (total_ns,) = self.first_response
        return histogram, total_ns

    def hit(self, total_ns: int, cache_ns: int) -> None:
        """One request was answered with an answer that was there; nothing was executed for it. `cache_ns` of the total
        went into looking it up, or waiting for it.
        """
        self.success_count += 1
        self.success_ns += total_ns
        self.request_duration.observe(total_ns)
        self.queue_duration.observe(0)
        self.compute_duration.observe(0)
        self.cache_hits += 1
        self.cache_hit_ns += cache_ns

    def missed(self, cache_ns: int) -> None:
        """One request was executed whose answer was not there; looking it up and keeping it took so long."""
        self.cache_misses += 1
        self.cache_miss_ns += cache_ns

    def failed(self, count: int, total_ns: int, reason: str) -> None:
        """`count` requests failed, for one of REASONS, after `total_ns` all together."""
        self.failures[reason] += count
        self.fail_ns += total_ns

    def told(self, error: str, now_ms: int) -> None:
        """A request failed with this text."""
        self.last_error = error[:ERROR_CHARS]
        self.last_error_ms = now_ms

    def batch_rows(self) -> Histogram:
        """Executions by their rows."""
        histogram = Histogram(ROW_EDGES)
        for rows, size in [*self.batches.items()]:  # the loop may go on counting while another thread reads
            histogram.observe(rows, size.count)
        return histogram

    def as_json(self, epoch_ns: int) -> dict[str, Any]:
        """One row of `model_stats`. `flowserve` is ours; clients written for Triton read past it. `epoch_ns` is what
        the server's clock is behind the time since the epoch.
        """
        self.add_up()
        last_ns = self.last_inference_ns
        done = self.success_count
        computed = done - self.cache_hits  # nothing was computed for the others
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
            "flowserve": {
                "failures": dict(self.failures),
                "nodes": [node.as_json() for node in self.nodes],
            },
        }


def rows_as_json(statistics: Sequence[Statistics], epoch_ns: int) -> list[dict[str, Any]]:
    """Rows sorted by name and version, as the endpoint answers them. `epoch_ns` is as in `Statistics.as_json`."""
    return [one.as_json(epoch_ns) for one in sorted(statistics, key=lambda one: (one.name, one.version))]


def _sum(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
