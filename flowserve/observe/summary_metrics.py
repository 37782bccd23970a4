"""Quantiles as Prometheus summaries: Triton's families, for servers that were told to summarise.

Decided here: names and units. How quantiles come about is decided in summary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from flowserve.observe.exposition import SUMMARY, number
from flowserve.observe.statistics import Statistics
from flowserve.observe.summary import SummarisedStatistics, Window
from flowserve.observe.templates import Family, Line

_NS_PER_US: Final = 1000

Reading = Callable[[SummarisedStatistics], tuple[Window, int, int]]

_SUMMARIES: Final[tuple[tuple[str, str, Reading], ...]] = (
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


def summaries(quantiles: Sequence[float]) -> Iterator[Family]:
    """The families; none where no quantiles are wanted."""
    for name, text, read in _SUMMARIES if quantiles else ():
        yield Family(name, SUMMARY, text, partial(_lines, quantiles), partial(_values, quantiles, read))


def _lines(quantiles: Sequence[float], one: Statistics) -> Iterator[Line]:
    if isinstance(one, SummarisedStatistics):
        labels = [("model", one.name), ("version", str(one.version))]
        yield from (("", [*labels, ("quantile", f"{share:g}")]) for share in quantiles)
        yield from (("_count", labels), ("_sum", labels))


def _values(quantiles: Sequence[float], read: Reading, one: Statistics, _: int) -> Iterator[int | str]:
    if isinstance(one, SummarisedStatistics):
        window, count, total_ns = read(one)
        yield from (number(value / _NS_PER_US) for value in window.quantiles(quantiles, one.clock()))
        yield from (count, number(total_ns / _NS_PER_US))
