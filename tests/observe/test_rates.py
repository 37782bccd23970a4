"""Rates and percentiles of a recent period from counters and histograms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.http.page.sampler import (
    CounterSample,
    deployment_figures,
    edge_figures,
    model_figures,
    node_figures,
    quantile_ms,
    read,
)
from flowserve.observe.statistics import FINE_DURATION_EDGES_NS, Statistics

MS = 1_000_000


def after(*batches: tuple[int, int]) -> CounterSample:
    """A model that ran batches of (requests, compute nanoseconds), each after a wait of 3 ms."""
    one = Statistics("m", 1)
    for requests, compute_ns in batches:
        one.executed(requests, 0, compute_ns, 0, now_ns=0)
        one.succeeded([0] * requests, 3 * MS, 0, compute_ns, 0)
    return read(one)


def test_events_before_the_period_do_not_count() -> None:
    figures = model_figures(after((16, 90 * MS)), after((16, 90 * MS), *[(4, MS)] * 10), 5.0, FINE_DURATION_EDGES_NS)
    assert figures["rate"] == 8.0
    assert figures["mean_batch"] == 4.0
    assert 0.97 <= figures["compute_p50"] <= figures["compute_p99"] <= 1.03
    assert 2.9 <= figures["queue_p50"] <= figures["queue_p99"] <= 3.1


@given(st.lists(st.integers(1001, 40_000_000_000), min_size=1, max_size=50))
def test_property_percentiles_are_within_a_few_percent_of_an_observed_value(durations_ns: list[int]) -> None:
    one = Statistics("m", 1)
    before = read(one)
    for ns in durations_ns:
        one.ran(1, 1, ns, 0, 0, ns, 0, ns)
    one.add_up()
    figures = deployment_figures(before, read(one), 5.0, FINE_DURATION_EDGES_NS)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact = sorted(durations_ns)[max(math.ceil(share * len(durations_ns)) - 1, 0)]
        assert figures[name] * MS == pytest.approx(exact, rel=0.033)


def test_one_request_of_173_ms_has_percentiles_of_about_173_ms() -> None:
    figures = model_figures(after(), after((1, 173 * MS)), 5.0, FINE_DURATION_EDGES_NS)
    assert figures["compute_p50"] == pytest.approx(173, rel=0.02)
    assert figures["compute_p99"] == pytest.approx(173, rel=0.02)


def test_without_events_there_are_rates_and_no_times() -> None:
    one = after((1, MS))
    assert deployment_figures(one, one, 5.0, FINE_DURATION_EDGES_NS) == {
        "rate": 0,
        "failing": 0,
        "p50": None,
        "p99": None,
    }
    assert deployment_figures(one, one, 0.0, FINE_DURATION_EDGES_NS)["rate"] == 0


def test_a_decreased_counter_has_restarted() -> None:
    figures = deployment_figures(after(*[(1, MS)] * 50), after(*[(1, MS)] * 10), 5.0, FINE_DURATION_EDGES_NS)
    assert figures["rate"] == 2.0
    assert figures["p50"] is not None


def test_a_node_shows_its_batches_and_an_edge_its_bytes() -> None:
    none = after()
    old = replace(none, nodes=((10, 100),), edges=(((1000, 0), (0, 500)),))
    new = replace(none, nodes=((30, 180),), edges=(((6000, 0), (5000, 1500)),))
    assert node_figures(old, new, 0, 5.0) == {"batches": 4.0, "mean_batch": 4.0}
    assert edge_figures(old, new, 0, 5.0) == [{"bytes": 1000.0, "copied": 0.0}, {"bytes": 1200.0, "copied": 200.0}]


def test_a_graph_of_another_shape_is_counted_from_zero() -> None:
    none = after()
    new = replace(none, nodes=((5, 10), (5, 10)), edges=(((50, 0),), ((50, 10),)))
    assert node_figures(replace(none, nodes=((90, 90),), edges=(((9, 9),),)), new, 1, 5.0)["batches"] == 1.0
    assert edge_figures(none, new, 1, 5.0) == [{"bytes": 12.0, "copied": 2.0}]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 5.0),  # half way to the first edge
        ([10, 0, 0], 0.99, 9.9),
        ([5, 5, 0], 0.5, 10.0),
        ([5, 5, 0], 0.75, 15.0),
        ([0, 0, 3], 0.5, 20.0),  # above the last edge, by an unknown amount
    ],
)
def test_a_percentile_lies_between_its_edges(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile_ms([10 * MS, 20 * MS], np.array(counts), share) == expected


def test_unchanged_counters_are_not_sampled_again() -> None:
    one = Statistics("m", 1)
    first = read(one)
    assert read(one, first) is first
    one.failed(1, MS, "OTHER")
    second = read(one, first)
    assert (second is first, second.failures) == (False, 1)
    figures = {"rate": 0.0, "failing": 0.0, "p50": None, "p99": None}
    assert deployment_figures(second, read(one, second), 5.0, FINE_DURATION_EDGES_NS) == figures
