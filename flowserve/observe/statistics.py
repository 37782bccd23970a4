"""What one deployment has done so far: counts and summed durations, as Triton's statistics extension defines them.

Decided here: what is counted, and the JSON rows. Written from the loop's thread only, once per batch. It does not
know who reads it, and no clock: moments come in as nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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

    `inference_count` counts rows (at least 1 a request), `execution_count` counts batches.
    """

    name: str
    version: int
    success_count: int = 0
    success_ns: int = 0
    fail_count: int = 0
    fail_ns: int = 0
    cancel_count: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    batches: dict[int, BatchSizeStatistics] = field(default_factory=dict)

    def executed(self, rows: int, input_ns: int, infer_ns: int, output_ns: int, now_ms: int) -> None:
        """One batch of `rows` rows ran."""
        self.execution_count += 1
        self.inference_count += rows
        self.last_inference_ms = now_ms
        size = self.batches.get(rows)
        if size is None:
            size = self.batches[rows] = BatchSizeStatistics()
        size.count += 1
        size.compute_input_ns += input_ns
        size.compute_infer_ns += infer_ns
        size.compute_output_ns += output_ns

    def succeeded(self, count: int, total_ns: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """`count` requests were answered; the durations are summed over them."""
        self.success_count += count
        self.success_ns += total_ns
        self.queue_ns += queue_ns
        self.compute_input_ns += input_ns
        self.compute_infer_ns += infer_ns
        self.compute_output_ns += output_ns

    def failed(self, count: int, total_ns: int) -> None:
        self.fail_count += count
        self.fail_ns += total_ns

    def as_json(self) -> dict[str, Any]:
        """One row of `model_stats`."""
        done = self.success_count
        return {
            "name": self.name,
            "version": str(self.version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": _sum(done, self.success_ns),
                "fail": _sum(self.fail_count, self.fail_ns),
                "queue": _sum(done, self.queue_ns),
                "compute_input": _sum(done, self.compute_input_ns),
                "compute_infer": _sum(done, self.compute_infer_ns),
                "compute_output": _sum(done, self.compute_output_ns),
                "cache_hit": _sum(0, 0),
                "cache_miss": _sum(0, 0),
            },
            "response_stats": {},
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


def rows_as_json(statistics: Sequence[Statistics]) -> list[dict[str, Any]]:
    """Rows sorted by name and version, as the endpoint answers them."""
    return [one.as_json() for one in sorted(statistics, key=lambda one: (one.name, one.version))]


def _sum(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
