"""Large requests to models in processes: received into memory of the model."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served
from tests.support.forked import serving

ROWS, WIDTH = 4, 50_000
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            y = x[:, :2] * 2
            x[:] = -1  # a private copy
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
"""
CONFIG = f"""
backend: "python"
max_batch_size: 8
input {{ name: "X" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }}
"""
# One request for two readers: each sees its own tensor only, so the body is copied to each.
PAIR = f"""
platform: "ensemble"
max_batch_size: 8
input {{ name: "A" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
input {{ name: "B" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "P" data_type: TYPE_FP32 dims: [ 2 ] }}
output {{ name: "Q" data_type: TYPE_FP32 dims: [ 2 ] }}
ensemble_scheduling {{
  step {{
    model_name: "left" model_version: -1
    input_map {{ key: "X" value: "A" }} output_map {{ key: "Y" value: "P" }}
  }}
  step {{
    model_name: "right" model_version: -1
    input_map {{ key: "X" value: "B" }} output_map {{ key: "Y" value: "Q" }}
  }}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("large")
    for name in ("left", "right"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG)
    (repository / "pair" / "1").mkdir(parents=True)
    (repository / "pair" / "config.pbtxt").write_text(PAIR)
    with serving(repository) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.base_url.removeprefix("http://"))


def ask(client: triton.InferenceServerClient, model: str, **arrays: np.ndarray) -> triton.InferResult:
    inputs = []
    for name, array in arrays.items():
        one = triton.InferInput(name, array.shape, "FP32")
        one.set_data_from_numpy(array)
        inputs.append(one)
    return client.infer(model, inputs)


def carried(server: Served, model: str) -> list[tuple[int, int]]:
    """The bytes passed on without a copy and the copied bytes, for each input of each node."""
    url = f"{server.base_url}/flowserve/models/{model}/stats"
    nodes = httpx.get(url, verify=False).json()["graph_stats"][0]["nodes"]
    return [(one["handed_on_bytes"], one["copied_bytes"]) for node in nodes for one in node["inputs"]]


@pytest.mark.server
def test_a_large_request_is_received_into_memory_of_its_model(
    server: Served, client: triton.InferenceServerClient
) -> None:
    sent = 0
    for turn in range(5):
        x = np.random.default_rng(turn).standard_normal((ROWS, WIDTH), np.float32)
        np.testing.assert_array_equal(ask(client, "left", X=x).as_numpy("Y"), x[:, :2] * 2)
        sent += x.nbytes
    assert carried(server, "left") == [(sent, 0)]


@pytest.mark.server
def test_the_memory_of_incomplete_requests_is_returned(server: Served, client: triton.InferenceServerClient) -> None:
    before = carried(server, "left")
    head = b"POST /v2/models/left/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    for _ in range(300):  # more than fit into the memory for bodies
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(head + bytes(70_000))
    x = np.ones((ROWS, WIDTH), np.float32)
    np.testing.assert_array_equal(ask(client, "left", X=x).as_numpy("Y"), x[:, :2] * 2)
    assert carried(server, "left") == [(before[0][0] + x.nbytes, 0)]


@pytest.mark.server
def test_a_request_for_two_models_is_copied_for_each(server: Served, client: triton.InferenceServerClient) -> None:
    a, b = (np.random.default_rng(n).standard_normal((ROWS, WIDTH), np.float32) for n in (10, 11))
    result = ask(client, "pair", A=a, B=b)
    np.testing.assert_array_equal(result.as_numpy("P"), a[:, :2] * 2)
    np.testing.assert_array_equal(result.as_numpy("Q"), b[:, :2] * 2)
    assert carried(server, "pair") == [(0, a.nbytes), (0, b.nbytes)]
