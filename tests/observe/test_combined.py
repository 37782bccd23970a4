"""The figures of several servers as those of one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from flowserve.observe.combined import FIGURES, METRICS, PRESENT, STATISTICS, Former, combined, combined_metrics
from flowserve.observe.exposition import COUNTER, GAUGE, HISTOGRAM, SUMMARY, family, head


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for one in text_string_to_metric_families(text.decode())
        for sample in one.samples
    }


def exposition(requests: dict[str, int], waiting: int, load: float = 0.0) -> bytes:
    """What one server says."""
    made = family("nv_requests_total", "Requests", COUNTER, [((("model", name),), n) for name, n in requests.items()])
    made += family("flowserve_waiting", "Waiting", GAUGE, [((), waiting)])
    made += family("flowserve_load_ratio", "Load", GAUGE, [((), load)])
    made += family("nv_cpu_utilization", "The machine's", GAUGE, [((), load)])
    made += head("took_seconds", "Durations", HISTOGRAM)
    total = sum(requests.values())
    made += f'took_seconds_bucket{{le="1"}} {total}\ntook_seconds_bucket{{le="+Inf"}} {total}\n'
    made += f"took_seconds_sum {total / 2}\ntook_seconds_count {total}\n"
    made += head("took_us", "Durations", SUMMARY)
    return (made + f'took_us{{quantile="0.9"}} {total or "NaN"}\ntook_us_count {total}\n').encode()


def test_counters_are_added_and_figures_of_the_machine_are_not() -> None:
    one, other = exposition({"a": 3, "b": 1}, 2, 0.5), exposition({"a": 4}, 5, 1.0)
    found = values(combined_metrics([one, other]))
    assert found["nv_requests_total", (("model", "a"),)] == 7
    assert found["nv_requests_total", (("model", "b"),)] == 1
    assert found["flowserve_waiting", ()] == 7
    assert found["flowserve_load_ratio", ()] == 0.75
    assert found["nv_cpu_utilization", ()] == 1.0
    assert found["took_seconds_bucket", (("le", "+Inf"),)] == 8
    assert found["took_us", (("quantile", "0.9"),)] == 4
    assert found["took_us_count", ()] == 8


def test_a_quantile_without_observations_in_one_server_is_that_of_the_other() -> None:
    found = values(combined_metrics([exposition({}, 0), exposition({"a": 4}, 0)]))
    assert found["took_us", (("quantile", "0.9"),)] == 4


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 10**12), min_size=1), min_size=1, max_size=5))
def test_the_sum_is_the_same_in_any_order_and_one_server_is_unchanged(servers: list[dict[str, int]]) -> None:
    texts = [exposition(requests, 1) for requests in servers]
    whole = values(combined_metrics(texts))
    assert whole == values(combined_metrics(texts[::-1]))
    for name in "abc":
        counts = [requests[name] for requests in servers if name in requests]
        assert whole.get(("nv_requests_total", (("model", name),))) == (sum(counts) if counts else None)
    assert values(combined_metrics(texts[:1])) == values(texts[0])


@given(st.data())
def test_no_counter_decreases_whichever_servers_end(data: st.DataObject) -> None:
    """Servers count, are read, end after a reading, and begin again at zero."""
    counts = [0] * data.draw(st.integers(1, 3))
    former = {kind: Former() for kind in (METRICS, STATISTICS)}
    before = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        one = data.draw(st.integers(0, len(counts) - 1))
        counts[one] += data.draw(st.integers(0, 9))
        texts = [exposition({"a": count}, 3) for count in counts]
        rows = [{"a/1": row(count)} for count in counts]
        whole = values(combined(METRICS, texts, former[METRICS]))
        now = whole["nv_requests_total", (("model", "a"),)]
        assert now >= before
        assert whole["flowserve_waiting", ()] == 3 * len(counts)
        assert whole["took_seconds_count", ()] == now
        total = combined(STATISTICS, rows, former[STATISTICS])
        assert total["a/1"]["inference_count"] == now
        assert total["a/1"]["batch_stats"][0]["compute_infer"]["count"] == now
        before = now
        if data.draw(st.booleans()):
            former[METRICS].add(METRICS, texts[one])
            former[STATISTICS].add(STATISTICS, rows[one])
            counts[one] = 0


def row(count: int, size: int = 4) -> dict[str, Any]:
    return {
        "name": "a",
        "version": "1",
        "last_inference": 1000 + count,
        "inference_count": count,
        "batch_stats": [{"batch_size": size, "compute_infer": {"count": count, "ns": 5 * count}}],
        "nodes": [{"name": "step", "batch_rows": count}],
    }


def test_rows_of_statistics_are_added_by_name_and_batch_size() -> None:
    total = combined(
        STATISTICS, [{"a/1": row(2)}, {"a/1": row(3, size=8)}, {"a/1": row(1, size=8), "b/1": row(1)}], None
    )
    assert total["a/1"] == {
        "name": "a",
        "version": "1",
        "last_inference": 1003,
        "inference_count": 6,
        "batch_stats": [
            {"batch_size": 4, "compute_infer": {"count": 2, "ns": 10}},
            {"batch_size": 8, "compute_infer": {"count": 4, "ns": 20}},
        ],
        "nodes": [{"name": "step", "batch_rows": 6}],
    }
    assert total["b/1"] == row(1)


def test_what_is_present_ends_with_its_server_and_the_last_error_is_the_latest() -> None:
    def live(count: int, waiting: int, error_ms: int) -> dict[str, Any]:
        shown = {"counts": [count, 0], "last_error": [error_ms, f"at {error_ms}"], PRESENT: {"waiting": waiting}}
        return {PRESENT: {"in_flight": waiting}, "deployments": {"a/1": shown}}

    former = Former()
    former.add(FIGURES, live(5, 9, 70))
    former.add(FIGURES, live(6, 9, 80))
    total = combined(FIGURES, [live(1, 2, 30), live(2, 3, 90)], former)
    assert total[PRESENT] == {"in_flight": 5}
    assert total["deployments"]["a/1"] == {
        "counts": [14, 0],
        "last_error": [90, "at 90"],
        PRESENT: {"waiting": 5},
    }
