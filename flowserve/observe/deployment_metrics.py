"""Counters as Prometheus text: Triton's under the names its dashboards know, ours beside them as `flowserve_*`.

Decided here: metric names, labels and units of all that deployments count. What is counted is decided in statistics.py
and traffic.py; this file only reads it, when somebody asks, so that counting stays cheap. How it is written is decided
in templates.py. docs/metrics.md lists every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from flowserve.observe.exposition import COUNTER, GAUGE, HISTOGRAM, number
from flowserve.observe.histogram import DURATION_EDGES_NS, ROW_EDGES, Histogram
from flowserve.observe.metrics_choice import EVERYTHING, MetricsChoice
from flowserve.observe.statistics import REASONS, Statistics
from flowserve.observe.summary_metrics import summaries
from flowserve.observe.templates import Family, Line, Templates
from flowserve.observe.traffic import EdgeTraffic, NodeTraffic

_NS_PER_US: Final = 1000
_NS_PER_MS: Final = 1_000_000
_NS_PER_SECOND: Final = 1_000_000_000

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
_NODES: Final[tuple[tuple[str, str, Callable[[NodeTraffic], int]], ...]] = (
    ("flowserve_node_batches_total", "Batches that steps of the node ran in", lambda node: node.batches),
    (
        "flowserve_node_batch_rows_total",
        "Rows of the batches that steps of the node ran in",
        lambda node: node.rows,
    ),
)
_EDGES: Final[tuple[tuple[str, str, Callable[[NodeTraffic, EdgeTraffic], int]], ...]] = (
    ("flowserve_edge_handed_on_bytes_total", "Bytes read where their producer left them", NodeTraffic.handed_on),
    ("flowserve_edge_copied_bytes_total", "Bytes gathered together before they were read", lambda _, edge: edge.copied),
)


def deployment_metrics(choice: MetricsChoice = EVERYTHING) -> Templates:
    """The page of the families that `choice` has."""
    return Templates([*_families(choice)])


def _families(choice: MetricsChoice) -> Iterator[Family]:
    for name, text, read in _COUNTERS:
        if "_duration_" not in name or choice.has_latency_counters:
            yield Family(name, COUNTER, text, _one_line, _one_value(read))
    # Every reason is there from the start, at 0: an alert on a series that does not exist yet never fires.
    yield Family(
        "nv_inference_request_failure",
        COUNTER,
        "Number of failed inference requests",
        lambda s: [("", [*_labels(s), ("reason", reason)]) for reason in REASONS],
        lambda s, _: [s.failures[reason] for reason in REASONS],
    )
    text = "Number of requests waiting to be executed"
    yield Family("nv_inference_pending_request_count", GAUGE, text, _one_line, lambda _, pending: (pending,))
    text = "Seconds that loading what runs now took, 0 for an ensemble"
    yield Family("nv_model_load_duration_secs", GAUGE, text, _one_line, lambda s, _: (number(s.load_s),))
    if choice.has_first_response:
        yield _histogram(
            "nv_inference_first_response_histogram_ms",
            "Answered requests by the time from arrival to their first response",
            [str(edge) for edge in _FIRST_RESPONSE_EDGES_MS],
            _until_first_response,
        )
    yield from _histograms()
    yield from summaries(choice.quantiles)
    yield from _nodes()
    for name, text, of_edge in _EDGES:
        yield Family(name, COUNTER, text, _edge_lines, _edge_values(of_edge))


def _histograms() -> Iterator[Family]:
    edges = [f"{edge / _NS_PER_SECOND:g}" for edge in DURATION_EDGES_NS]
    for name, text, read in _DURATIONS:
        yield _histogram(name, text, edges, _in_seconds(read))
    yield _histogram(
        "flowserve_batch_rows",
        "Executed batches by their rows",
        [str(edge) for edge in ROW_EDGES],
        lambda s: (s.batch_rows().cumulated(), s.inference_count),
    )


def _nodes() -> Iterator[Family]:
    for name, text, read in _NODES:
        yield Family(name, COUNTER, text, lambda s: [("", _of_node(s, node)) for node in s.nodes], _node_values(read))
    yield Family(
        "flowserve_tensor_placed_bytes_total",
        COUNTER,
        "Bytes laid side by side when a model's answers, one for each request, were taken",
        _placed_lines,
        lambda s, _: [
            nbytes for node in s.nodes for tensor, nbytes in zip(node.tensors, node.placed, strict=True) if tensor
        ],
    )
    yield Family(
        "flowserve_node_inflight_most",
        GAUGE,
        "The most steps of the node that were under way at once where max_inflight_requests limits them",
        lambda s: [("", _of_node(s, node)) for node in s.nodes if node.most_inflight],
        lambda s, _: [node.most_inflight for node in s.nodes if node.most_inflight],
    )


# ---------------------------------------------------------------------------------------------- lines


def _labels(one: Statistics) -> list[tuple[str, str]]:
    return [("model", one.name), ("version", str(one.version))]


def _of_graph(one: Statistics) -> list[tuple[str, str]]:
    return [("graph", one.name), ("version", str(one.version))]


def _of_node(one: Statistics, node: NodeTraffic) -> list[tuple[str, str]]:
    return [*_of_graph(one), ("node", node.name)]


def _one_line(one: Statistics) -> list[Line]:
    return [("", _labels(one))]


def _placed_lines(one: Statistics) -> Iterator[Line]:
    for node in one.nodes:
        for tensor in filter(None, node.tensors):
            yield "", [*_of_graph(one), ("producer", node.name), ("tensor", tensor)]


def _edge_lines(one: Statistics) -> Iterator[Line]:
    for node in one.nodes:
        for edge in node.edges:
            ends = ("producer", edge.producer), ("tensor", edge.tensor), ("consumer", node.name)
            yield "", [*_of_graph(one), *ends]


# ---------------------------------------------------------------------------------------------- values


def _one_value(read: Reading) -> Callable[[Statistics, int], Iterable[int]]:
    return lambda one, _: (read(one),)


def _node_values(read: Callable[[NodeTraffic], int]) -> Callable[[Statistics, int], Iterable[int]]:
    return lambda one, _: [read(node) for node in one.nodes]


def _edge_values(read: Callable[[NodeTraffic, EdgeTraffic], int]) -> Callable[[Statistics, int], Iterable[int]]:
    return lambda one, _: [read(node, edge) for node in one.nodes for edge in node.edges]


def _histogram(
    name: str, text: str, edges: Sequence[str], read: Callable[[Statistics], tuple[Sequence[int], float]]
) -> Family:
    """`read`: how many were at most each edge, and last how many there were; and their sum."""

    def lines(one: Statistics) -> Iterator[Line]:
        labels = _labels(one)
        yield from (("_bucket", [*labels, ("le", edge)]) for edge in (*edges, "+Inf"))
        yield from (("_count", labels), ("_sum", labels))

    def values(one: Statistics, _: int) -> Iterable[int | str]:
        counts, total = read(one)
        return (*counts, counts[-1], number(total))

    return Family(name, HISTOGRAM, text, lines, values)


def _in_seconds(
    read: Callable[[Statistics], tuple[Histogram, int]],
) -> Callable[[Statistics], tuple[list[int], float]]:
    def found(one: Statistics) -> tuple[list[int], float]:
        histogram, total_ns = read(one)
        return histogram.cumulated(), total_ns / _NS_PER_SECOND

    return found


def _until_first_response(one: Statistics) -> tuple[list[int], float]:
    """Triton's histogram in milliseconds out of ours, which has all its edges."""
    histogram, total_ns = one.until_first_response()
    counts = histogram.cumulated()
    coarse = [counts[histogram.edges.index(edge * _NS_PER_MS)] for edge in _FIRST_RESPONSE_EDGES_MS]
    return [*coarse, counts[-1]], total_ns / _NS_PER_MS
