"""Counters as Prometheus text: Triton's under the names its dashboards know, ours beside them as `flowserve_*`.

Decided here: metric names, labels and units. What is counted is decided in statistics.py and traffic.py; this file only
reads it, when somebody asks, so that counting stays cheap. docs/metrics.md lists every family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from flowserve.memory.devices import devices
from flowserve.observe.device_metrics import DeviceMetrics
from flowserve.observe.gpus import GpuMeter, GpuReadings
from flowserve.observe.histogram import Histogram
from flowserve.observe.machine import Machine, Readings
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice
from flowserve.observe.model_metrics import ModelMetrics
from flowserve.observe.statistics import REASONS, Statistics
from flowserve.observe.summary_metrics import summaries
from flowserve.observe.traffic import EdgeTraffic, NodeTraffic

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_LABELS: Final = ("model", "version")
_NODE_LABELS: Final = ("graph", "version", "node")
_EDGE_LABELS: Final = ("graph", "version", "producer", "tensor", "consumer")
_TENSOR_LABELS: Final = ("graph", "version", "producer", "tensor")
_NS_PER_US: Final = 1000
_NS_PER_MS: Final = 1_000_000
_NS_PER_SECOND: Final = 1_000_000_000
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
    ("nv_cache_num_hits_per_model", "Number of requests answered from the response cache", lambda s: s.cache_hits),
    ("nv_cache_num_misses_per_model", "Number of requests whose answer was not there", lambda s: s.cache_misses),
    (
        "nv_cache_hit_duration_per_model",
        "Cumulative time spent looking up answers that were there, in microseconds",
        lambda s: s.cache_hit_ns // _NS_PER_US,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Cumulative time spent looking up and keeping answers that were not there, in microseconds",
        lambda s: s.cache_miss_ns // _NS_PER_US,
    ),
)
_DURATIONS: Final[tuple[tuple[str, str, Callable[[Statistics], tuple[Histogram, int]]], ...]] = (
    (
        "flowserve_request_duration_seconds",
        "Successful requests by the time from arrival to answer",
        lambda s: (s.request_duration, s.success_ns),
    ),
    (
        "flowserve_queue_duration_seconds",
        "Successful requests by the time they waited",
        lambda s: (s.queue_duration, s.queue_ns),
    ),
    (
        "flowserve_compute_duration_seconds",
        "Successful requests by the time their batch took, inputs and outputs included",
        lambda s: (s.compute_duration, s.compute_input_ns + s.compute_infer_ns + s.compute_output_ns),
    ),
)
# Triton's own edges for this one.
_FIRST_RESPONSE_EDGES_MS: Final = (100, 500, 2000, 5000)
_EDGES: Final[tuple[tuple[str, str, Callable[[NodeTraffic, EdgeTraffic], int]], ...]] = (
    ("flowserve_edge_handed_on_bytes", "Bytes read where their producer left them", NodeTraffic.handed_on),
    ("flowserve_edge_copied_bytes", "Bytes gathered together before they were read", lambda _, edge: edge.copied),
)


_GPUS: Final[tuple[tuple[str, str, Callable[[GpuReadings], float | None]], ...]] = (
    ("nv_gpu_utilization", "Share of the time in which the GPU computed, 0 to 1", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", "Memory of the GPU", lambda gpu: gpu.memory_total),
    ("nv_gpu_memory_used_bytes", "What of it is in use", lambda gpu: gpu.memory_used),
    ("nv_gpu_power_usage", "Watts that the GPU draws", lambda gpu: gpu.power),
    ("nv_gpu_power_limit", "Watts that it may draw", lambda gpu: gpu.power_limit),
    ("nv_energy_consumption", "Joules that it has drawn since the server started", lambda gpu: gpu.energy),
)


def metrics_text(
    counters: Iterable[tuple[Statistics, int]],
    machine: Machine | None = None,
    choice: MetricsChoice = EVERYTHING,
    gpus: GpuMeter | None = None,
    models: ModelMetrics | None = None,
) -> bytes:
    """The exposition of every deployment: its statistics, and how many requests wait in its queue now; how busy the
    machine is; what the process's GPUs hold; and what models show of their own.
    """
    registry = CollectorRegistry()
    readings = machine.read() if machine is not None else None
    if readings is not None:
        registry.register(_Processors(readings))
    registry.register(_Deployments(sorted(counters, key=lambda pair: (pair[0].name, pair[0].version)), choice))
    if (found := devices()).count:
        registry.register(DeviceMetrics(found))
    if gpus is not None and (now := gpus.read()):
        registry.register(_Gpus(now))
    # The library insists on a counter's name ending in _total, Triton's end as they are.
    ours = _TOTAL.sub(rb"\1\2", generate_latest(registry))
    return ours if models is None else ours + models.text()


class _Processors(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        now = self._readings
        yield GaugeMetricFamily("nv_cpu_utilization", "Share of the processors' time in use, 0 to 1", now.utilization)
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "Memory of the machine", now.memory_total)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "Memory that nobody else could have", now.memory_used)


class _Gpus(Collector):
    def __init__(self, readings: Sequence[GpuReadings]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for name, text, read in _GPUS:
            kind = CounterMetricFamily if name == "nv_energy_consumption" else GaugeMetricFamily
            family = kind(name, text, labels=("gpu_uuid",))
            for one in self._readings:
                value = read(one)
                if value is not None:
                    family.add_metric([one.uuid], value)
            yield family


class _Deployments(Collector):
    def __init__(self, counters: list[tuple[Statistics, int]], choice: MetricsChoice) -> None:
        self._counters = counters
        self._choice = choice
        self._statistics = [one for one, _ in counters]

    def collect(self) -> Iterator[Metric]:
        for name, text, read in _COUNTERS:
            if "_duration_" in name and not self._choice.has_latency_counters:
                continue
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for one in self._statistics:
                counter.add_metric(_labels(one), read(one))
            yield counter
        yield self._failures()
        waiting = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Number of requests waiting to be executed", labels=_LABELS
        )
        for one, pending in self._counters:
            waiting.add_metric(_labels(one), pending)
        yield waiting
        if self._choice.has_first_response:
            yield self._first_response()
        yield from self._histograms()
        yield from summaries(self._statistics, self._choice.quantiles)
        yield from self._nodes()
        yield from self._edges()

    def _failures(self) -> Metric:
        """Every reason is there from the start, at 0: an alert on a series that does not exist yet never fires."""
        failures = CounterMetricFamily(
            "nv_inference_request_failure", "Number of failed inference requests", labels=(*_LABELS, "reason")
        )
        for one in self._statistics:
            for reason in REASONS:
                failures.add_metric([*_labels(one), reason], one.failures[reason])
        return failures

    def _first_response(self) -> Metric:
        first = HistogramMetricFamily(
            "nv_inference_first_response_histogram_ms",
            "Answered requests by the time from arrival to their first response",
            labels=_LABELS,
        )
        for one in self._statistics:
            first.add_metric(_labels(one), *_coarse(*one.until_first_response()))
        return first

    def _histograms(self) -> Iterator[Metric]:
        for name, text, read in _DURATIONS:
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for one in self._statistics:
                histogram, total_ns = read(one)
                edges = [f"{edge / _NS_PER_SECOND:g}" for edge in histogram.edges]
                family.add_metric(_labels(one), _buckets(histogram, edges), total_ns / _NS_PER_SECOND)
            yield family
        rows = HistogramMetricFamily("flowserve_batch_rows", "Executed batches by their rows", labels=_LABELS)
        for one in self._statistics:
            histogram = one.batch_rows()
            edges = [str(edge) for edge in histogram.edges]
            rows.add_metric(_labels(one), _buckets(histogram, edges), one.inference_count)
        yield rows

    def _nodes(self) -> Iterator[Metric]:
        batches = CounterMetricFamily(
            "flowserve_node_batches", "Batches that steps of the node ran in", labels=_NODE_LABELS
        )
        rows = CounterMetricFamily(
            "flowserve_node_batch_rows", "Rows of the batches that steps of the node ran in", labels=_NODE_LABELS
        )
        placed = CounterMetricFamily(
            "flowserve_tensor_placed_bytes",
            "Bytes laid side by side when a model's answers, one for each request, were taken",
            labels=_TENSOR_LABELS,
        )
        most = GaugeMetricFamily(
            "flowserve_node_inflight_most",
            "The most steps of the node that were under way at once where max_inflight_requests limits them",
            labels=_NODE_LABELS,
        )
        for one in self._statistics:
            for node in one.nodes:
                if node.most_inflight:
                    most.add_metric([*_labels(one), node.name], node.most_inflight)
                batches.add_metric([*_labels(one), node.name], node.batches)
                rows.add_metric([*_labels(one), node.name], node.rows)
                for tensor, nbytes in zip(node.tensors, node.placed, strict=True):
                    if tensor:
                        placed.add_metric([*_labels(one), node.name, tensor], nbytes)
        yield batches
        yield rows
        yield placed
        yield most

    def _edges(self) -> Iterator[Metric]:
        for name, text, read in _EDGES:
            family = CounterMetricFamily(name, text, labels=_EDGE_LABELS)
            for one in self._statistics:
                for node in one.nodes:
                    for edge in node.edges:
                        family.add_metric([*_labels(one), edge.producer, edge.tensor, node.name], read(node, edge))
            yield family


def _labels(one: Statistics) -> list[str]:
    return [one.name, str(one.version)]


def _buckets(histogram: Histogram, edges: Sequence[str]) -> list[tuple[str, float]]:
    return list(zip((*edges, "+Inf"), histogram.cumulated(), strict=True))


def _coarse(histogram: Histogram, total_ns: int) -> tuple[list[tuple[str, float]], float]:
    """Triton's histogram in milliseconds out of ours, which has all its edges."""
    counts = histogram.cumulated()
    buckets: list[tuple[str, float]] = [
        (str(edge), counts[histogram.edges.index(edge * _NS_PER_MS)]) for edge in _FIRST_RESPONSE_EDGES_MS
    ]
    return [*buckets, ("+Inf", counts[-1])], total_ns / _NS_PER_MS
