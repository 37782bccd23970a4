"""Histograms count each observation at the first edge that is not below it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flowserve.observe.statistics import (
    DURATION_EDGES_NS,
    FINE_DURATION_EDGES_NS,
    ROW_EDGES,
    Histogram,
    Statistics,
)

durations = st.integers(0, 100_000_000_000) | st.sampled_from(DURATION_EDGES_NS)


@given(st.lists(durations))
def test_a_bucket_counts_values_up_to_its_edge(values: list[int]) -> None:
    histogram = Histogram(FINE_DURATION_EDGES_NS)
    for value in values:
        histogram.observe(value)
    assert histogram.cumulated(DURATION_EDGES_NS) == [
        *(sum(value <= edge for value in values) for edge in DURATION_EDGES_NS),
        len(values),
    ]


@given(st.lists(durations, min_size=1, max_size=200), durations)
def test_a_batch_is_counted_as_its_requests_would_be_one_by_one(waits: list[int], ran: int) -> None:
    started = 200_000_000_000
    together, alone = Statistics("m", 1), Statistics("m", 1)
    together.succeeded([started - wait for wait in waits], started, 0, ran, 0)
    for wait in waits:
        alone.ran(1, 1, wait + ran, wait, 0, ran, 0, started + ran)
    alone.add_up()
    for one in ("queue_duration", "request_duration", "compute_duration"):
        assert getattr(together, one).counts == getattr(alone, one).counts
    assert (together.success_ns, together.queue_ns) == (alone.success_ns, alone.queue_ns)


counts = st.integers(1, 64)
took = st.integers(0, 10**9)


@given(st.lists(st.tuples(counts, counts, took, took, took, took), max_size=300))
def test_property_counters_do_not_depend_on_when_records_are_added_up(
    batches: list[tuple[int, int, int, int, int, int]],
) -> None:
    often, late = Statistics("m", 1), Statistics("m", 1)
    for at, (rows, count, waited, a, b, c) in enumerate(batches):
        for one in (often, late):
            one.ran(rows, count, waited + a + b + c, waited, a, b, c, at)
        often.add_up()
    assert late.as_json(0) == often.as_json(0)
    assert late.success_count == sum(count for _, count, *_ in batches)
    assert late.last_inference_ns == (len(batches) - 1 if batches else None)
    for name in ("queue_duration", "request_duration", "compute_duration"):
        assert getattr(late, name).counts == getattr(often, name).counts


def test_the_last_inference_is_the_latest_of_all_counters() -> None:
    one = Statistics("m", 1)
    one.ran(1, 1, 5, 0, 1, 1, 1, 10_000_000)
    one.executed(2, 1, 1, 1, now_ns=30_000_000)  # its members had different waits
    assert one.as_json(0)["last_inference"] == 30
    one.ran(1, 1, 5, 0, 1, 1, 1, 40_000_000)
    one.ran(1, 1, 5, 0, 1, 1, 1, 20_000_000)  # a record that is added later
    assert one.as_json(0)["last_inference"] == 40


def test_the_edges_include_tritons_and_every_common_batch_size() -> None:
    assert {100, 500, 2000, 5000} <= {edge // 1_000_000 for edge in DURATION_EDGES_NS}
    assert list(DURATION_EDGES_NS) == sorted(set(DURATION_EDGES_NS))
    assert (DURATION_EDGES_NS[0], DURATION_EDGES_NS[-1]) == (100_000, 50_000_000_000)
    assert set(DURATION_EDGES_NS) <= set(FINE_DURATION_EDGES_NS)
    assert (ROW_EDGES[0], ROW_EDGES[-1]) == (1, 1024)


def test_no_part_of_a_duration_histogram_is_wider_than_a_few_percent() -> None:
    assert list(FINE_DURATION_EDGES_NS) == sorted(set(FINE_DURATION_EDGES_NS))
    assert max(high / low for low, high in pairwise(FINE_DURATION_EDGES_NS)) < 1.032


def test_the_models_of_a_graph_do_not_add_up_their_records_during_the_same_request() -> None:
    models = [Statistics(f"step_{n}", 1) for n in range(4)]
    added_up = []
    for request in range(1, 1025):
        for one in models:
            before = one.success_count
            one.ran(1, 1, 5, 0, 1, 1, 1, request)
            if one.success_count > before:
                added_up.append(request)
    assert len(added_up) >= len(models)
    assert len(set(added_up)) == len(added_up)
    for one in models:
        one.add_up()
    assert [one.success_count for one in models] == [1024] * len(models)
