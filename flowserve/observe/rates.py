"""Rates and percentiles of a recent period, from two samples of the counters.

Decides which counters are sampled, and how figures are computed from two samples. Nothing is counted additionally, so a
page without viewers costs nothing. A counter that decreased (its deployment was replaced) has restarted at zero.
Percentiles come from histograms, with linear interpolation between two edges. Caller: the sampler of the live page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flowserve.observe.statistics import Statistics

_NS_PER_MS: Final = 1_000_000
_DIGITS: Final = 4  # significant digits of a figure; further ones would be noise


@dataclass(frozen=True, slots=True)
class CounterSample:
    """One deployment's counters at one time. `nodes[i]` are (batches, rows) of node i, and `edges[i]` the (passed on,
    copied) bytes of each edge into it.
    """

    requests: int
    failures: int
    rows: int
    batches: int
    total: tuple[int, ...]
    queue: tuple[int, ...]
    compute: tuple[int, ...]
    nodes: tuple[tuple[int, int], ...]
    edges: tuple[tuple[tuple[int, int], ...], ...]


def read(one: Statistics, before: CounterSample | None = None) -> CounterSample:
    """The current counters; the object `before` itself if nothing ran and nothing failed since."""
    if before is not None and _is_still(one, before):
        return before
    return CounterSample(
        one.success_count,
        one.fail_count,
        one.inference_count,
        one.execution_count,
        tuple(one.request_duration.counts),
        tuple(one.queue_duration.counts),
        tuple(one.compute_duration.counts),
        tuple((node.batches, node.rows) for node in one.nodes),
        tuple(tuple((node.handed_on(edge), edge.copied) for edge in node.edges) for node in one.nodes),
    )


def _is_still(one: Statistics, before: CounterSample) -> bool:
    if one.success_count != before.requests or one.fail_count != before.failures:
        return False
    return one.execution_count == before.batches and [node.batches for node in one.nodes] == [
        batches for batches, _ in before.nodes
    ]


def deployment_figures(
    old: CounterSample, new: CounterSample, seconds: float, edges_ns: Sequence[int]
) -> dict[str, Any]:
    """Requests and failures per second, and latencies `p50` and `p99` in milliseconds, None without requests.
    `edges_ns` are the histograms' edges.
    """
    if old is new:
        return {"rate": 0.0, "failing": 0.0, "p50": None, "p99": None}
    return {
        "rate": _per_second(old.requests, new.requests, seconds),
        "failing": _per_second(old.failures, new.failures, seconds),
        **_latencies("", old.total, new.total, edges_ns),
    }


def model_figures(old: CounterSample, new: CounterSample, seconds: float, edges_ns: Sequence[int]) -> dict[str, Any]:
    """A model's figures over all its users: as `deployment_figures`, with queue and compute times separately."""
    return {
        **deployment_figures(old, new, seconds, edges_ns),
        "mean_batch": _mean(old.rows, new.rows, old.batches, new.batches),
        **_latencies("queue_", old.queue, new.queue, edges_ns),
        **_latencies("compute_", old.compute, new.compute, edges_ns),
    }


def node_figures(old: CounterSample, new: CounterSample, index: int, seconds: float) -> dict[str, Any]:
    """The batches per second of one node of a graph, and their mean number of rows."""
    was = old.nodes[index] if len(old.nodes) == len(new.nodes) else (0, 0)
    batches, rows = new.nodes[index]
    return {"batches": _per_second(was[0], batches, seconds), "mean_batch": _mean(was[1], rows, was[0], batches)}


def edge_figures(old: CounterSample, new: CounterSample, index: int, seconds: float) -> list[dict[str, Any]]:
    """For each edge into one node: its bytes per second, and the copied bytes per second."""
    here = new.edges[index]
    was = old.edges[index] if len(old.edges) == len(new.edges) else ()
    if len(was) != len(here):
        was = ((0, 0),) * len(here)
    figures = []
    for (old_whole, old_copied), (whole, copied) in zip(was, here, strict=True):
        moved = _per_second(old_whole, whole, seconds) + _per_second(old_copied, copied, seconds)
        figures.append({"bytes": rounded(moved), "copied": _per_second(old_copied, copied, seconds)})
    return figures


def quantile_ms(edges_ns: Sequence[int], counts: Sequence[int], share: float) -> float | None:
    """The quantile `share` in milliseconds. Observations above the last edge count as equal to it; None without
    observations.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for count, low, high in zip(counts, (0, *edges_ns), (*edges_ns, edges_ns[-1]), strict=True):
        if count and below + count >= wanted:
            return rounded((low + (high - low) * (wanted - below) / count) / _NS_PER_MS)
        below += count
    return rounded(edges_ns[-1] / _NS_PER_MS)


def rounded(value: float) -> float:
    """Rounded to _DIGITS significant digits."""
    return float(f"{value:.{_DIGITS}g}")


def _latencies(name: str, old: Sequence[int], new: Sequence[int], edges_ns: Sequence[int]) -> dict[str, float | None]:
    is_replaced = any(later < earlier for earlier, later in zip(old, new, strict=True))
    since = new if is_replaced else [later - earlier for earlier, later in zip(old, new, strict=True)]
    return {f"{name}p50": quantile_ms(edges_ns, since, 0.5), f"{name}p99": quantile_ms(edges_ns, since, 0.99)}


def _grown(old: int, new: int) -> int:
    return new - old if new >= old else new


def _per_second(old: int, new: int, seconds: float) -> float:
    return rounded(_grown(old, new) / seconds) if seconds > 0 else 0.0


def _mean(old_sum: int, new_sum: int, old_count: int, new_count: int) -> float | None:
    count = _grown(old_count, new_count)
    return rounded(_grown(old_sum, new_sum) / count) if count else None
