"""Quantiles of the last minute: accuracy and expiry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from flowserve.observe.deployment_metrics import deployment_metrics
from flowserve.observe.settings import MetricsChoice
from flowserve.observe.statistics import PARTS, WINDOW_NS, Queued, SlidingWindow, Statistics, summarising

SECOND = 1_000_000_000
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=200))
def test_a_quantile_is_within_a_percent_of_an_observed_value(values: list[int]) -> None:
    window = SlidingWindow()
    for value in values:
        window.observe(value, SECOND)
    exact = np.quantile(values, SHARES, method="inverted_cdf")
    for found, wanted in zip(window.quantiles(SHARES, 2 * SECOND), exact, strict=True):
        assert found == pytest.approx(float(wanted), rel=0.0101)


LATE = st.sampled_from([0, 0, 0, SECOND, 20 * SECOND, 90 * SECOND])


@given(st.lists(st.tuples(st.integers(0, 20 * SECOND), st.integers(1, 1000), LATE), min_size=1, max_size=60))
def test_observations_expire_after_a_minute_even_if_recorded_late(
    steps: list[tuple[int, int, int]],
) -> None:
    window, now, seen = SlidingWindow(), 100 * SECOND, []
    for wait, value, late in steps:
        now += wait
        window.observe(value, now - late)
        seen.append((now - late, value))
    now += steps[-1][0]
    (most,) = window.quantiles([1.0], now)
    kept = [value for moment, value in seen if now - moment < WINDOW_NS * (PARTS - 1) // PARTS]
    allowed = [value for moment, value in seen if now - moment <= WINDOW_NS]
    assert not kept or most >= max(kept) * 0.99
    assert math.isnan(most) if not allowed else math.isnan(most) or most <= max(allowed) * 1.01


def busy() -> Statistics:
    one = summarising(lambda: 10 * SECOND)("m", 1)
    one.executed(2, 1_000_000, 2_000_000, 3_000_000, 0)
    one.succeeded([9 * SECOND, 9 * SECOND + 500_000_000], 9_994_000_000, 1_000_000, 2_000_000, 3_000_000)
    one.ran(1, 1, 4 * SECOND, SECOND, 7_000_000, 0, 0, 10 * SECOND)
    one.add_up()
    one.hit(2_000_000, 1_000_000)
    one.missed(5_000_000)
    return one


def samples(choice: MetricsChoice) -> dict[tuple[str, ...], float]:
    text = b"".join(deployment_metrics(choice).pieces([(busy(), Queued(0, 0.0))])).decode()
    return {
        (sample.name.removesuffix("_total"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_summaries_have_tritons_names_and_unit() -> None:
    found = samples(MetricsChoice(quantiles=(0.5, 0.999)))
    name = "nv_inference_request_summary_us"
    assert found[name, "m", "0.5", "1"] == pytest.approx(500_000, rel=0.01)
    assert found[name, "m", "0.999", "1"] == pytest.approx(4_000_000, rel=0.01)
    assert found[f"{name}_count", "m", "1"] == 4
    assert found[f"{name}_sum", "m", "1"] == pytest.approx(1_000_000 + 500_000 + 4_000_000 + 2000)
    assert found["nv_inference_queue_summary_us", "m", "0.999", "1"] == pytest.approx(1_000_000, rel=0.01)
    assert found["nv_inference_compute_input_summary_us", "m", "0.999", "1"] == pytest.approx(7000, rel=0.01)
    assert found["nv_inference_compute_infer_summary_us", "m", "0.999", "1"] == pytest.approx(2000, rel=0.01)
    assert found["nv_inference_compute_output_summary_us", "m", "0.999", "1"] == pytest.approx(3000, rel=0.01)
    assert found["nv_inference_compute_infer_summary_us_count", "m", "1"] == 3
    assert found["nv_cache_hit_summary_per_model", "m", "0.5", "1"] == pytest.approx(1000, rel=0.01)
    assert found["nv_cache_miss_summary_per_model", "m", "0.5", "1"] == pytest.approx(5000, rel=0.01)


def test_disabled_metrics_are_omitted() -> None:
    everything = {key[0] for key in samples(MetricsChoice())}
    assert not any("summary" in name for name in everything)
    gone = everything - {key[0] for key in samples(MetricsChoice(has_latency_counters=False))}
    assert gone == {
        *(f"nv_inference_{what}_duration_us" for what in ("request", "queue")),
        *(f"nv_inference_compute_{what}_duration_us" for what in ("input", "infer", "output")),
        "nv_cache_hit_duration_per_model",
        "nv_cache_miss_duration_per_model",
    }
    gone = everything - {key[0] for key in samples(MetricsChoice(has_first_response=False))}
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in gone} == {
        "nv_inference_first_response_histogram_ms"
    }
