"""Quantiles as Prometheus summaries: Triton's families, for servers that were told to summarise.

Decided here: names and units. How quantiles come about is decided in summary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric

from flowserve.observe.statistics import Statistics
from flowserve.observe.summary import SummarisedStatistics, Window

_NS_PER_US: Final = 1000

_SUMMARIES: Final[tuple[tuple[str, str, Callable[[SummarisedStatistics], tuple[Window, int, int]]], ...]] = (
    (
        "nv_inference_request_summary_us",
        "Successful requests of the last minute, from arrival to answer",
        lambda s: (s.request_window, s.success_count, s.success_ns),
    ),
    (
        "nv_inference_queue_summary_us",
        "How long requests of the last minute waited",
        lambda s: (s.queue_window, s.success_count, s.queue_ns),
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Gathering inputs for requests of the last minute",
        lambda s: (s.input_window, s.success_count - s.cache_hits, s.compute_input_ns),
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Computing for requests of the last minute",
        lambda s: (s.infer_window, s.success_count - s.cache_hits, s.compute_infer_ns),
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Handing out outputs of requests of the last minute",
        lambda s: (s.output_window, s.success_count - s.cache_hits, s.compute_output_ns),
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Looking up answers that were there, in the last minute, in microseconds",
        lambda s: (s.hit_window, s.cache_hits, s.cache_hit_ns),
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Looking up and keeping answers that were not there, in the last minute, in microseconds",
        lambda s: (s.miss_window, s.cache_misses, s.cache_miss_ns),
    ),
)


def summaries(statistics: Sequence[Statistics], quantiles: Sequence[float]) -> Iterator[Metric]:
    """The families; none where no quantiles are wanted."""
    summarised = [one for one in statistics if isinstance(one, SummarisedStatistics)]
    for name, text, read in _SUMMARIES if quantiles else ():
        family = Metric(name, text, "summary")
        for one in summarised:
            labels = {"model": one.name, "version": str(one.version)}
            window, count, total_ns = read(one)
            for share, value in zip(quantiles, window.quantiles(quantiles, one.clock()), strict=True):
                family.add_sample(name, {**labels, "quantile": f"{share:g}"}, value / _NS_PER_US)
            family.add_sample(f"{name}_count", labels, count)
            family.add_sample(f"{name}_sum", labels, total_ns / _NS_PER_US)
        yield family
