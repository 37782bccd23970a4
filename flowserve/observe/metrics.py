"""Counters as Prometheus text, under the names Triton's dashboards know.

Decided here: metric names, labels and units. What is counted is decided in statistics.py; this file only reads it,
when somebody asks, so that counting stays cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flowserve.observe.statistics import Statistics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_LABELS: Final = ("model", "version")
_NS_PER_US: Final = 1000
_TOTAL: Final = re.compile(rb"^(# (?:HELP|TYPE) )?(nv_\w+?)_total\b", re.MULTILINE)

Reading = Callable[[Statistics], int]

_COUNTERS: Final[tuple[tuple[str, str, Reading], ...]] = (
    ("nv_inference_request_success", "Number of successful inference requests", lambda s: s.success_count),
    ("nv_inference_count", "Number of inferences performed, batch rows counted each", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Number of batches executed", lambda s: s.execution_count),
    (
        "nv_inference_request_duration_us",
        "Cumulative time of successful requests, from arrival to answer",
        lambda s: s.success_ns // _NS_PER_US,
    ),
    ("nv_inference_queue_duration_us", "Cumulative time requests waited", lambda s: s.queue_ns // _NS_PER_US),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative time spent gathering inputs",
        lambda s: s.compute_input_ns // _NS_PER_US,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative time spent computing",
        lambda s: s.compute_infer_ns // _NS_PER_US,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative time spent handing out outputs",
        lambda s: s.compute_output_ns // _NS_PER_US,
    ),
)
# Every reason is there from the start, at 0: an alert on a series that does not exist yet never fires.
_FAILURES: Final[tuple[tuple[str, Reading], ...]] = (
    ("REJECTED", lambda s: 0),  # refused at the door, before anything was counted
    ("CANCELED", lambda s: s.cancel_count),
    ("BACKEND", lambda s: s.fail_count),
    ("OTHER", lambda s: 0),
)


def metrics_text(counters: Iterable[tuple[Statistics, int]]) -> bytes:
    """The exposition of every deployment: its statistics, and how many requests wait in its queue now."""
    registry = CollectorRegistry()
    registry.register(_Deployments(sorted(counters, key=lambda pair: (pair[0].name, pair[0].version))))
    # The library insists on a counter's name ending in _total, Triton's end as they are.
    return _TOTAL.sub(rb"\1\2", generate_latest(registry))


class _Deployments(Collector):
    def __init__(self, counters: list[tuple[Statistics, int]]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for one, _ in self._counters:
                counter.add_metric(_labels(one), read(one))
            yield counter
        failures = CounterMetricFamily(
            "nv_inference_request_failure", "Number of failed inference requests", labels=(*_LABELS, "reason")
        )
        for one, _ in self._counters:
            for reason, read in _FAILURES:
                failures.add_metric([*_labels(one), reason], read(one))
        yield failures
        waiting = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Number of requests waiting to be executed", labels=_LABELS
        )
        for one, pending in self._counters:
            waiting.add_metric(_labels(one), pending)
        yield waiting


def _labels(one: Statistics) -> list[str]:
    return [one.name, str(one.version)]
