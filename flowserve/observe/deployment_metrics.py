"""Prometheus families of deployments: Triton's names, and further ones as `flowserve_*`.

Decides metric names, labels and units of all counters, histograms and summaries of deployments. Does not count
(`statistics`, `traffic`); it only reads on request, so that counting stays cheap. `exposition` formats the
text. docs/metrics.md lists every family. Caller: `http`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Final

from flowserve.observe.exposition import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    SUMMARY,
    FamilyTemplate,
    MetricLine,
    MetricsPage,
    number,
)
from flowserve.observe.settings import EVERYTHING, MetricsChoice
from flowserve.observe.statistics import (
    DURATION_EDGES_NS,
    REASONS,
    ROW_EDGES,
    Histogram,
    Queued,
    SlidingWindow,
    Statistics,
    SummarisedStatistics,
)
from flowserve.observe.traffic import ITEM_EDGES, EdgeTraffic, NodeTraffic, SpaceTraffic

_NS_PER_US: Final = 1000
_NS_PER_MS: Final = 1_000_000
_NS_PER_SECOND: Final = 1_000_000_000

Labels = list[tuple[str, str]]
Values = Callable[[Statistics, Queued], Iterable[int | str]]
# The window, the number of observations, their sum in nanoseconds.
SummaryGetter = Callable[[SummarisedStatistics], tuple[SlidingWindow, int, int]]

# Name, description, counter of `Statistics`; durations in nanoseconds are shown in microseconds.
_COUNTERS: Final = (
    ("nv_inference_request_success", "Number of successful inference requests", "success_count"),
    ("nv_inference_count", "Number of inferences performed, batch rows counted each", "inference_count"),
    ("nv_inference_exec_count", "Number of batches executed", "execution_count"),
    (
        "nv_inference_request_duration_us",
        "Cumulative time of successful requests, from arrival to response",
        "success_ns",
    ),
    ("nv_inference_queue_duration_us", "Cumulative time requests waited", "queue_ns"),
    ("nv_inference_compute_input_duration_us", "Cumulative time spent gathering inputs", "compute_input_ns"),
    ("nv_inference_compute_infer_duration_us", "Cumulative time spent computing", "compute_infer_ns"),
    ("nv_inference_compute_output_duration_us", "Cumulative time spent handing out outputs", "compute_output_ns"),
    ("nv_cache_num_hits_per_model", "Number of requests answered from the response cache", "cache_hits"),
    ("nv_cache_num_misses_per_model", "Number of requests not found in the response cache", "cache_misses"),
    (
        "nv_cache_hit_duration_per_model",
        "Cumulative lookup time of response cache hits, in microseconds",
        "cache_hit_ns",
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Cumulative lookup and insertion time of response cache misses, in microseconds",
        "cache_miss_ns",
    ),
)
_DURATIONS: Final[tuple[tuple[str, str, Callable[[Statistics], tuple[Histogram, int]]], ...]] = (
    (
        "flowserve_request_duration_seconds",
        "Successful requests by the time from arrival to response",
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
_SUMMARIES: Final[tuple[tuple[str, str, SummaryGetter], ...]] = (
    (
        "nv_inference_request_summary_us",
        "Successful requests of the last minute, from arrival to response",
        lambda s: (s.windows["request"], s.success_count, s.success_ns),
    ),
    (
        "nv_inference_queue_summary_us",
        "Queue time of requests of the last minute",
        lambda s: (s.windows["queue"], s.success_count, s.queue_ns),
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Gathering inputs for requests of the last minute",
        lambda s: (s.windows["input"], s.success_count - s.cache_hits, s.compute_input_ns),
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Computing for requests of the last minute",
        lambda s: (s.windows["infer"], s.success_count - s.cache_hits, s.compute_infer_ns),
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Handing out outputs of requests of the last minute",
        lambda s: (s.windows["output"], s.success_count - s.cache_hits, s.compute_output_ns),
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Lookup time of response cache hits of the last minute, in microseconds",
        lambda s: (s.windows["hit"], s.cache_hits, s.cache_hit_ns),
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Lookup and insertion time of response cache misses of the last minute, in microseconds",
        lambda s: (s.windows["miss"], s.cache_misses, s.cache_miss_ns),
    ),
)
_FIRST_RESPONSE_EDGES_MS: Final = (100, 500, 2000, 5000)  # Triton's


def deployment_metrics(choice: MetricsChoice = EVERYTHING) -> MetricsPage:
    """The page with the families selected by `choice`."""
    return MetricsPage([*_families(choice)])


def _families(choice: MetricsChoice) -> Iterator[FamilyTemplate]:
    for name, text, counter in _COUNTERS:
        if "_duration_" not in name or choice.has_latency_counters:
            yield FamilyTemplate(name, COUNTER, text, _one_line, _counter(counter))
    # Every reason exists from the start with 0: an alert on a missing series never fires.
    yield FamilyTemplate(
        "nv_inference_request_failure",
        COUNTER,
        "Number of failed inference requests",
        lambda s: [("", [*_labels(s), ("reason", reason)]) for reason in REASONS],
        lambda s, _: [s.failures[reason] for reason in REASONS],
    )
    text = "Number of requests waiting to be executed"
    yield FamilyTemplate("nv_inference_pending_request_count", GAUGE, text, _one_line, lambda _, q: (q.requests,))
    text = (
        "Share of instances that run a batch, plus waiting requests over the rows that all could run; above 1: a queue"
    )
    yield FamilyTemplate("flowserve_load_ratio", GAUGE, text, _one_line, lambda _, q: (number(round(q.load, 4)),))
    yield FamilyTemplate(
        "flowserve_missing_outputs_total",
        COUNTER,
        "Number of requested outputs that the model left out of its responses",
        _one_line,
        _counter("missing_outputs"),
    )
    text = "Load time of the current model in seconds, 0 for an ensemble"
    yield FamilyTemplate("nv_model_load_duration_secs", GAUGE, text, _one_line, lambda s, _: (number(s.load_s),))
    if choice.has_first_response:
        yield _histogram(
            "nv_inference_first_response_histogram_ms",
            "Answered requests by the time from arrival to their first response",
            [str(edge) for edge in _FIRST_RESPONSE_EDGES_MS],
            _until_first_response,
        )
    edges = [f"{edge / _NS_PER_SECOND:g}" for edge in DURATION_EDGES_NS]
    for name, text, read in _DURATIONS:
        yield _histogram(name, text, edges, _in_seconds(read))
    text, edges = "Executed batches by their rows", [str(edge) for edge in ROW_EDGES]
    yield _histogram(
        "flowserve_batch_rows", text, edges, lambda s: (s.batch_rows().cumulated(ROW_EDGES), s.inference_count)
    )
    for name, text, summary in _SUMMARIES if choice.quantiles else ():
        lines, values = partial(_summary_lines, choice.quantiles), partial(_summary_values, choice.quantiles, summary)
        yield FamilyTemplate(name, SUMMARY, text, lines, values)
    yield from _nodes()
    yield from _edges()


def _nodes() -> Iterator[FamilyTemplate]:
    name, text = "flowserve_node_batches_total", "Batches that steps of the node ran in"
    yield FamilyTemplate(name, COUNTER, text, _node_lines, lambda s, _: [node.batches for node in s.nodes])
    name, text = "flowserve_node_batch_rows_total", "Rows of the batches that steps of the node ran in"
    yield FamilyTemplate(name, COUNTER, text, _node_lines, lambda s, _: [node.rows for node in s.nodes])
    yield FamilyTemplate(
        "flowserve_tensor_placed_bytes_total",
        COUNTER,
        "Bytes of a model's outputs, one per request, placed contiguously on receipt",
        _placed_lines,
        lambda s, _: [
            nbytes for node in s.nodes for tensor, nbytes in zip(node.tensors, node.placed, strict=True) if tensor
        ],
    )
    yield FamilyTemplate(
        "flowserve_node_skipped_total",
        COUNTER,
        "Requests of which no row was among those that the node runs for",
        lambda s: [("", _of_node(s, node)) for node in s.nodes] if s.spaces else [],
        lambda s, _: [node.skipped for node in s.nodes] if s.spaces else [],
    )
    yield FamilyTemplate(
        "flowserve_space_rows_total",
        COUNTER,
        "Rows offered to a condition by whether they were taken",
        _space_lines,
        lambda s, _: [
            number
            for space in s.spaces
            if not space.is_of_items
            for number in (space.taken, space.offered - space.taken)
        ],
    )
    yield FamilyTemplate(
        "flowserve_space_items",
        HISTOGRAM,
        "Requests by the number of items that they were taken apart into",
        _item_lines,
        _item_counts,
    )
    yield FamilyTemplate(
        "flowserve_node_inflight_most",
        GAUGE,
        "Maximum number of concurrent steps of the node, where max_inflight_requests limits them",
        lambda s: [("", _of_node(s, node)) for node in s.nodes if node.most_inflight],
        lambda s, _: [node.most_inflight for node in s.nodes if node.most_inflight],
    )


def _edges() -> Iterator[FamilyTemplate]:
    name, text = "flowserve_edge_handed_on_bytes_total", "Bytes passed on without a copy"
    yield FamilyTemplate(name, COUNTER, text, _edge_lines, _edge_values(NodeTraffic.handed_on))
    name, text = "flowserve_edge_copied_bytes_total", "Bytes gathered by a copy before they were read"
    yield FamilyTemplate(name, COUNTER, text, _edge_lines, _edge_values(lambda _, edge: edge.copied))


def _histogram(
    name: str, text: str, edges: Sequence[str], read: Callable[[Statistics], tuple[Sequence[int], float]]
) -> FamilyTemplate:
    """`read`: the number of observations up to each edge, and last the total; and their sum."""

    def lines(one: Statistics) -> Iterator[MetricLine]:
        labels = _labels(one)
        yield from (("_bucket", [*labels, ("le", edge)]) for edge in (*edges, "+Inf"))
        yield from (("_count", labels), ("_sum", labels))

    def values(one: Statistics, _: Queued) -> Iterable[int | str]:
        counts, total = read(one)
        return (*counts, counts[-1], number(total))

    return FamilyTemplate(name, HISTOGRAM, text, lines, values)


# ---------------------------------------------------------------------------------------------- lines


def _labels(one: Statistics) -> Labels:
    return [("model", one.name), ("version", str(one.version))]


def _of_graph(one: Statistics) -> Labels:
    return [("graph", one.name), ("version", str(one.version))]


def _of_node(one: Statistics, node: NodeTraffic) -> Labels:
    return [*_of_graph(one), ("node", node.name)]


def _one_line(one: Statistics) -> list[MetricLine]:
    return [("", _labels(one))]


def _node_lines(one: Statistics) -> list[MetricLine]:
    return [("", _of_node(one, node)) for node in one.nodes]


def _of_space(one: Statistics, space: SpaceTraffic) -> Labels:
    return [*_of_graph(one), ("space", space.name)]


def _space_lines(one: Statistics) -> Iterator[MetricLine]:
    for space in one.spaces:
        for taken in ("true", "false") if not space.is_of_items else ():
            yield "", [*_of_space(one, space), ("taken", taken)]


def _item_lines(one: Statistics) -> Iterator[MetricLine]:
    for space in one.spaces:
        if space.is_of_items:
            labels = _of_space(one, space)
            yield from (("_bucket", [*labels, ("le", str(edge))]) for edge in (*ITEM_EDGES, "+Inf"))
            yield from (("_count", labels), ("_sum", labels))


def _item_counts(one: Statistics, _: Queued) -> Iterator[int]:
    for space in one.spaces:
        if space.is_of_items:
            counts = [*accumulate(space.items)]
            yield from (*counts, counts[-1], space.taken)


def _placed_lines(one: Statistics) -> Iterator[MetricLine]:
    for node in one.nodes:
        for tensor in filter(None, node.tensors):
            yield "", [*_of_graph(one), ("producer", node.name), ("tensor", tensor)]


def _edge_lines(one: Statistics) -> Iterator[MetricLine]:
    for node in one.nodes:
        for edge in node.edges:
            ends = ("producer", edge.producer), ("tensor", edge.tensor), ("consumer", node.name)
            yield "", [*_of_graph(one), *ends]


def _summary_lines(quantiles: Sequence[float], one: Statistics) -> Iterator[MetricLine]:
    if isinstance(one, SummarisedStatistics):
        labels = _labels(one)
        yield from (("", [*labels, ("quantile", f"{share:g}")]) for share in quantiles)
        yield from (("_count", labels), ("_sum", labels))


# ---------------------------------------------------------------------------------------------- values


def _counter(name: str) -> Values:
    read = attrgetter(name)
    if name.endswith("_ns"):
        return lambda one, _: (read(one) // _NS_PER_US,)
    return lambda one, _: (read(one),)


def _edge_values(read: Callable[[NodeTraffic, EdgeTraffic], int]) -> Values:
    return lambda one, _: [read(node, edge) for node in one.nodes for edge in node.edges]


def _in_seconds(read: Callable[[Statistics], tuple[Histogram, int]]) -> Callable[[Statistics], tuple[list[int], float]]:
    def found(one: Statistics) -> tuple[list[int], float]:
        histogram, total_ns = read(one)
        return histogram.cumulated(DURATION_EDGES_NS), total_ns / _NS_PER_SECOND

    return found


def _until_first_response(one: Statistics) -> tuple[list[int], float]:
    """Triton's histogram in milliseconds, derived from flowserve's, which has all its edges."""
    histogram, total_ns = one.until_first_response()
    edges = [edge * _NS_PER_MS for edge in _FIRST_RESPONSE_EDGES_MS]
    return histogram.cumulated(edges), total_ns / _NS_PER_MS


def _summary_values(quantiles: Sequence[float], read: SummaryGetter, one: Statistics, _: Queued) -> Iterator[int | str]:
    if isinstance(one, SummarisedStatistics):
        window, count, total_ns = read(one)
        yield from (number(value / _NS_PER_US) for value in window.quantiles(quantiles, one.clock()))
        yield from (count, number(total_ns / _NS_PER_US))
