"""The Prometheus text, and the numbers in it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from flowserve.observe.metrics import metrics_text
from flowserve.observe.statistics import Statistics


def samples(one: Statistics, pending: int = 0) -> dict[tuple[str, ...], float]:
    text = metrics_text([(one, pending)]).decode()
    # The parser, too, insists on _total.
    return {
        (sample.name.removesuffix("_total"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_are_the_statistics_in_microseconds() -> None:
    one = Statistics("m", 2)
    one.executed(3, 10_000, 20_000, 30_000, now_ms=1)
    one.succeeded(2, total_ns=100_999, queue_ns=5_000, input_ns=10_000, infer_ns=20_000, output_ns=30_000)
    one.failed(4, total_ns=1)
    one.cancel_count = 5
    found = samples(one, pending=7)
    assert found == {
        ("nv_inference_request_success", "m", "2"): 2,
        ("nv_inference_request_failure", "m", "REJECTED", "2"): 0,
        ("nv_inference_request_failure", "m", "CANCELED", "2"): 5,
        ("nv_inference_request_failure", "m", "BACKEND", "2"): 4,
        ("nv_inference_request_failure", "m", "OTHER", "2"): 0,
        ("nv_inference_count", "m", "2"): 3,
        ("nv_inference_exec_count", "m", "2"): 1,
        ("nv_inference_request_duration_us", "m", "2"): 100,
        ("nv_inference_queue_duration_us", "m", "2"): 5,
        ("nv_inference_compute_input_duration_us", "m", "2"): 10,
        ("nv_inference_compute_infer_duration_us", "m", "2"): 20,
        ("nv_inference_compute_output_duration_us", "m", "2"): 30,
        ("nv_inference_pending_request_count", "m", "2"): 7,
    }


def test_names_that_need_quoting_are_quoted() -> None:
    found = samples(Statistics('nv_x_total"\n', 1))
    assert found["nv_inference_count", 'nv_x_total"\n', "1"] == 0


def test_counters_keep_tritons_names() -> None:
    text = metrics_text([(Statistics("m", 1), 0)]).decode()
    assert "# TYPE nv_inference_request_success counter\n" in text
    assert "_total" not in text
