"""The operator's options for sockets, keys, shared memory and metrics, and two repositories served as one."""

from __future__ import annotations

import json
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import Served
from flowserve.values import DType
from flowserve.version import __version__
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

SCORES = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" }
"""
PASSES = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step { model_name: "scores" model_version: -1
  input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } }
"""
TELLS = """
max_batch_size: 0
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
LINE = re.compile(r"[DIWE]\d{4} \d\d:\d\d:\d\d\.\d{6} [\w.]+\] ")


@dataclass(frozen=True, slots=True)
class Front:
    served: Served
    metrics: str  # host:port

    def metrics_place(self) -> tuple[str, int]:
        host, _, port = self.metrics.rpartition(":")
        return host, int(port)


@pytest.fixture(scope="module")
def front(
    tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path], make_python: Callable[..., Any]
) -> Iterator[Front]:
    """Two repositories, and every option of this page."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    model = onnx_identity(DType.FP32, ("N", "M"))
    add_model(first, "scores", SCORES, {"1/model.onnx": model, "labels.txt": "cat\ndog\nbird\n"})
    add_model(second, "passes", PASSES)
    tell = """
        pb_utils.Logger.log_verbose("asked to tell")
        if "aloud" in request.parameters():
            pb_utils.Logger.log_info("said aloud")
        return answer(OUT=np.array([request.parameters().encode()], np.object_))
    """
    add_model(second, "tells", TELLS, make_python(tell))
    options = [
        str(second),
        "--http-restricted-api=model-repository,logging:admin-key=secret",
        "--http-header-forward-pattern=(?-i)^X-.*",
        "--id=farm",
        "--metrics-port=0",
        "--metrics-address=127.0.0.2",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05",
        "--allow-client-shm=true",
    ]
    with serving(first, *options) as served:
        (metrics,) = [line.removeprefix("metrics on http://") for line in served.lines if line.startswith("metrics on")]
        yield Front(served, metrics.removesuffix("/metrics"))


@pytest.fixture
def client(front: Front) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(front.served.address) as made:
        yield made


def numbers(*row: float) -> triton.InferInput:
    array = np.array([row], np.float32)
    return triton.InferInput("IN", list(array.shape), "FP32").set_data_from_numpy(array)


def test_two_repositories_are_served_as_one(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index(headers={"Admin-Key": "secret"})
    assert [row["name"] for row in index] == ["passes", "scores", "tells"]
    assert client.infer("passes", [numbers(1, 2)]).as_numpy("OUT").tolist() == [[1, 2]]


def test_an_output_of_an_ensemble_is_classified_with_the_labels_of_its_model(
    client: triton.InferenceServerClient,
) -> None:
    for binary in (True, False):
        outputs = [triton.InferRequestedOutput("OUT", binary_data=binary, class_count=2)]
        answer = client.infer("passes", [numbers(0.5, 3, 1, 2)], outputs=outputs)
        got = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("OUT").ravel()]
        assert got == ["3.000000:1:dog", "2.000000:3"]


def test_requests_to_restricted_groups_need_their_key(client: triton.InferenceServerClient) -> None:
    for call in (client.get_model_repository_index, client.get_log_settings):
        with pytest.raises(InferenceServerException, match="This API is restricted, expecting header 'admin-key'"):
            call()
        assert call(headers={"admin-key": "secret"})


@pytest.mark.fault("Z6")
def test_errors_name_no_model_without_access_to_the_index(client: triton.InferenceServerClient) -> None:
    for call in (client.get_model_metadata, client.get_model_config, lambda name: client.infer(name, [numbers(1)])):
        with pytest.raises(InferenceServerException) as unknown:
            call("score")
        assert unknown.value.message() == "Request for unknown model: 'score' is not found"


def test_headers_reach_the_model(client: triton.InferenceServerClient) -> None:
    one = triton.InferInput("IN", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    answer = client.infer("tells", [one], headers={"X-Tenant": "blue", "x-other": "red"}, parameters={"depth": 2})
    assert json.loads(answer.as_numpy("OUT")[0]) == {"X-Tenant": "blue", "depth": 2}


def test_the_server_has_the_name_of_its_option_and_says_what_it_is(
    front: Front, client: triton.InferenceServerClient
) -> None:
    assert client.get_server_metadata()["name"] == "farm"
    reply = httpx.get(f"{front.served.base_url}/v2/health/live", verify=False)
    assert reply.headers["server"] == f"flowserve/{__version__}"
    assert f"] flowserve {__version__}, process {front.served.pid}\n" in front.served.log


def test_a_verbose_level_takes_effect_in_processes_that_run(front: Front, client: triton.InferenceServerClient) -> None:
    one = triton.InferInput("IN", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    key = {"Admin-Key": "secret"}

    def lines() -> int:
        """After a line that is always logged, and later than those."""
        before = front.served.log.count("said aloud")
        client.infer("tells", [one], parameters={"aloud": True})
        deadline = time.monotonic() + 30
        while front.served.log.count("said aloud") == before:
            assert time.monotonic() < deadline, "the line is not there"
            time.sleep(0.01)
        return front.served.log.count("asked to tell")

    before = lines()
    client.update_log_settings({"log_verbose_level": 1}, headers=key)
    assert lines() == before + 1
    client.update_log_settings({"log_verbose_level": 0}, headers=key)
    assert lines() == before + 1


def test_the_metrics_port_serves_only_metrics(front: Front, client: triton.InferenceServerClient) -> None:
    def ask(place: tuple[str, int], path: str) -> tuple[int, str]:
        with socket.create_connection(place, timeout=30) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        return int(received.split()[1]), received.decode()

    client.infer("passes", [numbers(1, 2)])
    assert front.metrics_place()[0] == "127.0.0.2"
    status, text = ask(front.metrics_place(), "/metrics")
    assert status == 200
    for family in (
        "nv_inference_count{",
        "nv_cpu_utilization ",
        "nv_cpu_memory_total_bytes ",
        "nv_cpu_memory_used_bytes ",
    ):
        assert f"\n{family}" in text
    for model in ("passes", "scores"):
        (median,) = re.findall(
            rf'nv_inference_request_summary_us{{model="{model}",quantile="0.5",version="1"}} (\S+)', text
        )
        assert 0 < float(median) < 30e6
    assert ask(("127.0.0.1", front.served.port), "/metrics")[0] == 200
    assert ask(front.metrics_place(), "/v2/health/live")[0] == 404


@pytest.mark.fault("Z4")
def test_client_input_in_the_log_is_escaped_to_one_line(front: Front) -> None:
    body = json.dumps({"id": "a\nI0101 forged", "inputs": []}).encode()
    with socket.create_connection(("127.0.0.1", front.served.port), timeout=30) as connection:
        for path in ("/v2/models/a%0aI0101%20forged/infer", "/v2/models/tells/infer%0d%0aforged", "/%0a"):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-A: a\tb\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    lines = front.served.log.splitlines()
    assert all(LINE.match(line) for line in lines), lines


def test_a_unix_socket_serves_the_same_responses(tmp_path: Path, add_model: Callable[..., Path]) -> None:
    repository = tmp_path / "models"
    add_model(repository, "scores", "", {"1/model.onnx": onnx_identity(DType.FP32, ("N", "M"))})
    path = tmp_path / "socket"
    with serving(repository, f"--http-address=unix:{path}") as served:
        assert served.lines[-1] == f"listening on unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /v2/models/scores/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert served.stop() == 0
    assert not path.exists()


def test_backend_settings_are_defaults_and_a_named_configuration_replaces_the_models(
    tmp_path: Path, add_model: Callable[..., Path]
) -> None:
    model = {"1/model.onnx": onnx_identity(DType.FP32, ("N", "M"))}
    add_model(tmp_path / "models", "free", "", model)
    add_model(tmp_path / "models", "says", SCORES.replace('label_filename: "labels.txt"', ""), model)
    named = {"configs/big.pbtxt": SCORES.replace("max_batch_size: 4", "max_batch_size: 64"), "labels.txt": "cat\n"}
    add_model(tmp_path / "models", "varies", SCORES, {**model, **named})
    options = ["--backend-config=default-max-batch-size=32", "--backend-config=onnxruntime,intra_op_thread_count=1"]
    options.append("--model-config-name=big")
    with serving(tmp_path / "models", *options) as served, triton.InferenceServerClient(served.address) as client:
        assert client.get_model_config("free")["max_batch_size"] == 32
        assert client.get_model_config("says")["max_batch_size"] == 4
        assert client.get_model_config("varies")["max_batch_size"] == 64
        one = triton.InferInput("x", [32, 2], "FP32").set_data_from_numpy(np.ones((32, 2), np.float32))
        assert client.infer("free", [one]).as_numpy("y").shape == (32, 2)
