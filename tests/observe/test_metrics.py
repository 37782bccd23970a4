"""The Prometheus text and its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.devices import Devices, using
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.observe.deployment_metrics import deployment_metrics
from flowserve.observe.exposition import SLICE
from flowserve.observe.machine import machine_text
from flowserve.observe.statistics import BACKEND, CANCELED, OTHER, REJECTED, Queued, Statistics
from flowserve.observe.traffic import node_traffics
from flowserve.values import DType, TensorSpec
from tests.support.fake_device import FakeInstance, FakeMachine, add_one

MS = 1_000_000
PORT = (TensorSpec("X", DType.FP32, (4,)),)
ALONE = Graph(
    "m",
    2,
    PORT,
    PORT,
    16,
    (Node(0, "m", ModelKey("m", 2), PORT, PORT, 16),),
    (Edge("X", GRAPH, 0, 0, 0), Edge("Y", 0, 0, GRAPH, 0)),
)


@pytest.fixture(autouse=True)
def without_gpus() -> Iterator[None]:
    """Hides the GPUs of the machine that runs the tests."""
    with using(Devices((), "none here")):
        yield


def metrics_text(*counters: tuple[Statistics, int]) -> str:
    """The complete page of these deployments, with so many waiting requests."""
    own = b"".join(deployment_metrics().pieces((one, Queued(waiting, 0.0)) for one, waiting in counters))
    return (own + machine_text(None, None, None)).decode()


def samples(one: Statistics, pending: int = 0) -> dict[tuple[str, ...], float]:
    text = metrics_text((one, pending))
    # The parser requires _total.
    return {
        (sample.name.removesuffix("_total"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def busy() -> Statistics:
    """Two requests of one batch succeeded, after 1 ms and 151 ms in the queue and 60 ms on an instance."""
    one = Statistics("m", 2, nodes=node_traffics(ALONE))
    one.executed(3, 10 * MS, 20 * MS, 30 * MS, now_ns=1)
    one.succeeded([0, 150 * MS], 151 * MS, 10 * MS, 20 * MS, 30 * MS)
    one.nodes[0].ran(3, placed=[48])
    one.nodes[0].edges[0].carried(48, 48, out_of_one=False)
    one.nodes[0].ran(1, placed=())
    one.nodes[0].whole_rows += 1
    return one


def test_counters_are_the_statistics_in_microseconds() -> None:
    one = busy()
    one.load_s = 1.25
    one.failed(4, 1, BACKEND)
    one.failed(5, 1, CANCELED)
    one.failed(6, 1, REJECTED)
    one.failed(7, 1, OTHER)
    one.hit(5_000, 3_000)
    one.missed(4_000)
    one.missed(5_000)
    found = samples(one, pending=7)
    counters = {name: value for name, value in found.items() if name[0].startswith("nv_") and "hist" not in name[0]}
    assert counters == {
        ("nv_inference_request_success", "m", "2"): 3,
        ("nv_inference_request_failure", "m", "REJECTED", "2"): 6,
        ("nv_inference_request_failure", "m", "CANCELED", "2"): 5,
        ("nv_inference_request_failure", "m", "BACKEND", "2"): 4,
        ("nv_inference_request_failure", "m", "OTHER", "2"): 7,
        ("nv_inference_count", "m", "2"): 3,
        ("nv_inference_exec_count", "m", "2"): 1,
        ("nv_inference_request_duration_us", "m", "2"): 272_005,
        ("nv_inference_queue_duration_us", "m", "2"): 152_000,
        ("nv_inference_compute_input_duration_us", "m", "2"): 20_000,
        ("nv_inference_compute_infer_duration_us", "m", "2"): 40_000,
        ("nv_inference_compute_output_duration_us", "m", "2"): 60_000,
        ("nv_cache_num_hits_per_model", "m", "2"): 1,
        ("nv_cache_num_misses_per_model", "m", "2"): 2,
        ("nv_cache_hit_duration_per_model", "m", "2"): 3,
        ("nv_cache_miss_duration_per_model", "m", "2"): 9,
        ("nv_inference_pending_request_count", "m", "2"): 7,
        ("nv_model_load_duration_secs", "m", "2"): 1.25,
    }


def test_histograms_count_each_request_at_its_own_duration() -> None:
    found = samples(busy())
    queue = {edge: found["flowserve_queue_duration_seconds_bucket", edge, "m", "2"] for edge in ("0.0005", "0.001")}
    assert queue == {"0.0005": 0, "0.001": 1}
    assert found["flowserve_queue_duration_seconds_bucket", "0.1", "m", "2"] == 1
    assert found["flowserve_queue_duration_seconds_bucket", "0.2", "m", "2"] == 2
    assert found["flowserve_request_duration_seconds_bucket", "0.1", "m", "2"] == 1  # 61 ms
    assert found["flowserve_request_duration_seconds_bucket", "0.5", "m", "2"] == 2  # 211 ms
    assert found["flowserve_request_duration_seconds_sum", "m", "2"] == 0.272
    assert found["flowserve_compute_duration_seconds_bucket", "0.05", "m", "2"] == 0
    assert found["flowserve_compute_duration_seconds_bucket", "0.1", "m", "2"] == 2
    assert found["flowserve_compute_duration_seconds_count", "m", "2"] == 2
    assert found["flowserve_batch_rows_bucket", "2", "m", "2"] == 0
    assert found["flowserve_batch_rows_bucket", "4", "m", "2"] == 1
    assert found["flowserve_batch_rows_sum", "m", "2"] == 3


def test_tritons_own_histogram_has_its_edges_in_milliseconds() -> None:
    found = samples(busy())
    name = "nv_inference_first_response_histogram_ms"
    buckets = {key[1]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert buckets == {"100": 1, "500": 2, "2000": 2, "5000": 2, "+Inf": 2}
    assert found[f"{name}_sum", "m", "2"] == 272


def test_nodes_and_edges_report_their_traffic() -> None:
    found = samples(busy())
    assert found["flowserve_node_batches", "m", "m", "2"] == 2
    assert found["flowserve_node_batch_rows", "m", "m", "2"] == 4
    assert found["flowserve_edge_handed_on_bytes", "m", "m", "", "X", "2"] == 16
    assert found["flowserve_edge_copied_bytes", "m", "m", "", "X", "2"] == 48
    assert found["flowserve_tensor_placed_bytes", "m", "m", "Y", "2"] == 48


def test_names_that_need_quoting_are_quoted() -> None:
    found = samples(Statistics('nv_x_total"%d\n', 1))
    assert found["nv_inference_count", 'nv_x_total"%d\n', "1"] == 0


def test_a_page_of_many_deployments_is_written_in_pieces() -> None:
    many = [(Statistics(f"m{number:03}", 1), Queued(number, 0.5)) for number in range(100)]
    page = deployment_metrics()
    first, again = ([*page.pieces(many)] for _ in range(2))
    assert first == again
    assert first[: 100 // SLICE] == [b""] * (100 // SLICE), "between any two pieces there are a few deployments"
    text = b"".join(first).decode()
    waiting = re.findall(r'^nv_inference_pending_request_count{model="m(\d+)",version="1"} (\d+)$', text, re.MULTILINE)
    assert waiting == [(f"{number:03}", str(number)) for number in range(100)]
    families = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    runs = [name for name, _ in groupby(re.findall(r"^(\w+?)(?:_bucket|_count|_sum)?{", text, re.MULTILINE))]
    assert [name for name in runs if runs.count(name) > 1] == [], "a family's lines stand together"
    assert [name for name in families if name in runs] == [name for name in runs if name in families]


def test_a_page_follows_replaced_graphs_and_drops_removed_deployments() -> None:
    page = deployment_metrics()
    one = Statistics("m", 2)

    def nodes(*counters: tuple[Statistics, int]) -> list[tuple[str, str]]:
        text = b"".join(page.pieces((one, Queued(waiting, 0.0)) for one, waiting in counters)).decode()
        return re.findall(r'^flowserve_node_\w+{graph="m",node="(\w+)",version="2"} (\d+)$', text, re.MULTILINE)

    assert nodes((one, 0)) == []
    one.nodes = node_traffics(ALONE)
    one.nodes[0].ran(3, placed=())
    assert nodes((one, 0)) == [("m", "1"), ("m", "3")]
    one.nodes[0].most_inflight = 2
    assert nodes((one, 0)) == [("m", "1"), ("m", "3"), ("m", "2")]
    assert nodes((one, 0)) == [("m", "1"), ("m", "3"), ("m", "2")]
    assert nodes() == []
    one.nodes = node_traffics(ALONE)
    assert nodes((one, 0)) == [("m", "0"), ("m", "0")]


def test_counters_keep_tritons_names() -> None:
    text = metrics_text((Statistics("m", 1), 0))
    assert "# TYPE nv_inference_request_success counter\n" in text
    assert not re.search(r"\bnv_\w+_total", text)


def test_every_family_is_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    with using(Devices(FakeMachine().devices)):
        text = metrics_text((Statistics("m", 1), 0))
    families = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    assert len(families) == 37
    assert [name for name in families if f"`{name}`" not in docs] == []


def test_copies_between_memories_and_pools_are_shown() -> None:
    with using(Devices(FakeMachine().devices, gpu_bytes=4096)) as devices:
        instance = FakeInstance(DeviceStream(devices[0]), add_one)
        answer = instance.run([Tensor(np.zeros((2, 4), np.float32), 0, 2)])
        found = samples(Statistics("m", 1))
    assert answer[0].array.all()
    assert found["flowserve_memory_copies", "host", "gpu0"] == found["flowserve_memory_copies", "gpu0", "pinned"] == 1
    assert found["flowserve_memory_copied_bytes", "host", "gpu0"] == 32
    assert found["flowserve_memory_pool_bytes", "pinned", "lent"] == 512  # the response
    assert (found["nv_pinned_memory_pool_used_bytes",], found["nv_pinned_memory_pool_total_bytes",]) == (512, 1 << 28)
    assert found["flowserve_memory_pool_bytes", "gpu0", "kept"] == 1024
    assert found["flowserve_memory_pool_bytes", "gpu0", "budget"] == 4096
    assert found["flowserve_memory_pool_refused", "gpu0"] == 0
