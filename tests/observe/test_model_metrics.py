"""Custom metrics of models: shared families, removed holders, text format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from flowserve.errors import Invalid
from flowserve.observe.exposition import COUNTER, GAUGE, HISTOGRAM
from flowserve.observe.model_metrics import (
    ModelMetrics,
    cells_of,
    check_buckets,
    check_labels,
)


def hold(
    metrics: ModelMetrics,
    name: str,
    kind: str,
    labels: Mapping[str, str] | None = None,
    buckets: Sequence[float] | None = None,
) -> tuple[int, list[float]]:
    """A holder of one metric, and its cells."""
    holder = metrics.open(name, "what it is", kind)
    edges = check_buckets(kind, buckets)
    cells = [0.0] * cells_of(kind, edges)
    given: dict[object, object] = dict((labels or {}).items())
    metrics.add(holder, check_labels(given), edges, cells)
    return holder, cells


def lines(metrics: ModelMetrics) -> list[str]:
    return metrics.text().decode().splitlines()


def test_a_counter_is_the_sum_over_holders_and_does_not_decrease_when_one_ends() -> None:
    metrics = ModelMetrics()
    first, a = hold(metrics, "seen", COUNTER)
    second, b = hold(metrics, "seen", COUNTER)
    a[0], b[0] = 3.0, 4.5
    assert lines(metrics) == ["# HELP seen what it is", "# TYPE seen counter", "seen 7.5"]
    metrics.drop(first)
    assert lines(metrics)[-1] == "seen 7.5"
    assert metrics.value(second, ()) == 7.5
    metrics.drop(second)
    metrics.drop(second)
    assert lines(metrics) == []
    with pytest.raises(Invalid, match="the metric family is gone"):
        metrics.value(second, ())
    _, again = hold(metrics, "seen", COUNTER)
    again[0] = 1.0
    assert lines(metrics)[-1] == "seen 1"


def test_a_gauge_is_the_last_set_value_plus_later_additions() -> None:
    metrics = ModelMetrics()
    _, a = hold(metrics, "busy", GAUGE)
    second, b = hold(metrics, "busy", GAUGE)
    a[2], b[2] = 2.0, -0.5  # never set: both additions count
    assert lines(metrics)[-1] == "busy 1.5"
    a[:] = [10.0, 100.0, 0.0]
    b[:] = [20.0, 7.0, 1.0]
    assert lines(metrics)[-1] == "busy 8"
    metrics.drop(second)  # its value ends with it
    assert lines(metrics)[-1] == "busy 100"


def test_a_histogram_is_summed_and_formatted_for_prometheus() -> None:
    metrics = ModelMetrics()
    first, a = hold(metrics, "sizes", HISTOGRAM, {"b": "2", "a": "1"}, [0.1, 1, 2.5])
    _, b = hold(metrics, "sizes", HISTOGRAM, {"a": "1", "b": "2"}, [0.1, 1, 2.5])
    a[:] = [4.05, 1, 0, 1, 1]
    b[:] = [1.0, 0, 1, 0, 0]
    metrics.drop(first)
    assert lines(metrics)[2:] == [
        'sizes_bucket{a="1",b="2",le="0.1"} 1',
        'sizes_bucket{a="1",b="2",le="1"} 2',
        'sizes_bucket{a="1",b="2",le="2.5"} 3',
        'sizes_bucket{a="1",b="2",le="+Inf"} 4',
        'sizes_sum{a="1",b="2"} 5.05',
        'sizes_count{a="1",b="2"} 4',
    ]
    with pytest.raises(Invalid, match=r"exists already with the buckets \[0.1, 1.0, 2.5\]"):
        hold(metrics, "sizes", HISTOGRAM, {"a": "1", "b": "2"}, [1])


@given(st.text(), st.dictionaries(st.from_regex("[a-z]{1,3}", fullmatch=True).filter("le".__ne__), st.text()))
def test_property_any_labels_and_descriptions_round_trip(description: str, labels: dict[str, str]) -> None:
    metrics = ModelMetrics()
    holder = metrics.open("m", description, GAUGE)
    given: dict[object, object] = dict(labels.items())
    metrics.add(holder, check_labels(given), (), [1.0, 2.0, 0.5])
    (family,) = text_string_to_metric_families(metrics.text().decode())
    (sample,) = family.samples
    assert sample.labels == labels
    assert sample.value == 2.5
    assert len(metrics.text().decode().split("\n")) == 4


def test_nan_and_infinities_are_written_for_prometheus() -> None:
    metrics = ModelMetrics()
    for name, value in (("a", math.nan), ("b", math.inf), ("c", -math.inf), ("d", 1e30)):
        hold(metrics, name, COUNTER)[1][0] = value
    assert [line for line in lines(metrics) if line[0] != "#"] == ["a NaN", "b +Inf", "c -Inf", "d 1e+30"]


def test_the_first_description_is_kept_and_another_kind_is_refused() -> None:
    metrics = ModelMetrics()
    first = metrics.open("m", "first", COUNTER)
    hold(metrics, "m", COUNTER)
    metrics.drop(first)
    assert lines(metrics)[0] == "# HELP m first"
    with pytest.raises(Invalid, match="'m' exists already, as a counter and not as a gauge"):
        metrics.open("m", "", GAUGE)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("nv_mine", COUNTER, "are the server's own"),
        ("flowserve_mine", COUNTER, "are the server's own"),
        ("1st", COUNTER, "cannot be the name of a metric family"),
        ("a b", COUNTER, "cannot be the name of a metric family"),
        ("seen\n", COUNTER, "cannot be the name of a metric family"),
        ("m", "summary", "the kind of a metric family is one of counter, gauge, histogram"),
        ("sizes_sum", COUNTER, "would have lines of the histogram 'sizes'"),
        ("sizes", GAUGE, "exists already, as a histogram"),
    ],
)
def test_an_invalid_family_is_refused(name: str, kind: str, reason: str) -> None:
    metrics = ModelMetrics()
    metrics.open("sizes", "", HISTOGRAM)
    with pytest.raises(Invalid, match=reason):
        metrics.open(name, "", kind)


@pytest.mark.parametrize("labels", [{"le": "1"}, {"__a": "1"}, {"a-b": "1"}, {"": "1"}, {"a": 1}])
def test_invalid_labels_are_refused(labels: dict[object, object]) -> None:
    with pytest.raises(Invalid, match="label"):
        check_labels(dict[object, object](labels))


def test_only_histograms_have_buckets_which_increase() -> None:
    assert check_buckets(HISTOGRAM, []) == ()
    for wrong in (None, [1, 1], [2, 1], ["x"], [math.inf], [10**400], [*range(2000)]):
        with pytest.raises(Invalid, match="bucket"):
            check_buckets(HISTOGRAM, wrong)
    with pytest.raises(Invalid, match="a counter has no buckets"):
        check_buckets(COUNTER, [])


@given(st.lists(st.tuples(st.sampled_from(["open", "drop", "count"]), st.integers(0, 5), st.integers(1, 9))))
def test_property_no_count_is_lost_while_a_holder_exists(happens: list[tuple[str, int, int]]) -> None:
    metrics = ModelMetrics()
    stays, _ = hold(metrics, "m", COUNTER)
    held: dict[int, tuple[int, list[float]]] = {}
    counted = 0
    for what, which, amount in happens:
        if what == "open" and which not in held:
            held[which] = hold(metrics, "m", COUNTER)
        elif what == "drop" and which in held:
            metrics.drop(held.pop(which)[0])
        elif what == "count" and which in held:
            held[which][1][0] += amount
            counted += amount
        assert metrics.value(stays, ()) == counted
