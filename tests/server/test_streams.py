"""Decoupled models over real HTTP: generate, generate_stream, and clients that disconnect or read slowly."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

REPEAT = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)
        count, fails_at, milliseconds, size = [*values, -1, 0, 1][: len(values)] + [-1, 0, 1][len(values) - 1 :]
        sender = request.get_response_sender()
        n = 0
        while n < count and not sender.is_cancelled():
            if n == fails_at:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")), FINAL)
                return
            time.sleep(milliseconds / 1000)
            out = pb_utils.Tensor("OUT", np.full((1, size), n, np.int32))
            text = pb_utils.Tensor("TEXT", np.full((1, 1), f"number {n}", object))
            sender.send(pb_utils.InferenceResponse([out, text]))
            n += 1
        with open("LOG", "a") as file:
            file.write(f"{n}\\n")
        sender.send(flags=FINAL)
"""
DECOUPLED = """
backend: "python" max_batch_size: 1
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensors = [pb_utils.Tensor(one.name() + "_OUT", one.as_numpy()) for one in request.inputs()]
            answers.append(pb_utils.InferenceResponse(tensors))
        return answers
"""
MANY = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "NUMBERS" data_type: TYPE_FP32 dims: [ -1, 2 ] optional: true }
input { name: "FLAG" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "TEXT_OUT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "NUMBERS_OUT" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "FLAG_OUT" data_type: TYPE_BOOL dims: [ 1 ] }
input { name: "SHORT" data_type: TYPE_BF16 dims: [ 1 ] optional: true }
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams") / "log"


@pytest.fixture(scope="module", params=["thread", "process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path], log: Path
) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "repeat", DECOUPLED, {"1/model.py": REPEAT.replace("LOG", str(log))})
    add_model(repository, "echo", MANY, {"1/model.py": ECHO})
    with serving(repository, f"--python-execution={request.param}") as served:
        yield served


connections: list[http.client.HTTPConnection] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while connections:
        connections.pop().close()


def post(server: Served, path: str, asked: Any) -> http.client.HTTPResponse:
    """The response, which the test reads before it ends."""
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connections.append(connection)
    body = asked if isinstance(asked, str) else json.dumps(asked)
    connection.request("POST", f"/v2/models/{path}", body)
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    for line in response:
        if line != b"\n":
            assert line.startswith(b"data: ")
            yield json.loads(line[6:])


@pytest.mark.fault("P1")
@pytest.mark.parametrize("count", [0, 1, 50])
def test_there_is_one_event_per_response_in_order(server: Served, count: int) -> None:
    got = [*events(post(server, "repeat/generate_stream", {"IN": [count], "id": "7", "temperature": 0.5}))]
    assert got == [
        {"id": "7", "model_name": "repeat", "model_version": "1", "OUT": n, "TEXT": f"number {n}"} for n in range(count)
    ]


@pytest.mark.fault("P1")
def test_events_are_sent_as_they_are_produced(server: Served) -> None:
    stream = events(post(server, "repeat/generate_stream", {"IN": [2, -1, 400]}))
    next(stream)
    begun = time.monotonic()
    assert next(stream)["OUT"] == 1
    assert time.monotonic() - begun > 0.2


@pytest.mark.fault("P2")
def test_an_error_after_three_responses_is_the_fourth_and_last_event(server: Served) -> None:
    got = [*events(post(server, "repeat/generate_stream", {"IN": [9, 3]}))]
    assert [event.get("OUT") for event in got] == [0, 1, 2, None]
    assert got[3] == {"error": "no more"}


def test_an_error_before_the_first_response_is_an_event_with_its_status(server: Served) -> None:
    response = post(server, "repeat/generate_stream", {"IN": [9, 0]})
    assert (response.status, response.headers["content-type"]) == (500, "text/event-stream; charset=utf-8")
    assert response.read() == b'data: {"error":"no more"}\n\n'


@pytest.mark.fault("P3")
def test_infer_is_refused_for_a_decoupled_model(server: Served) -> None:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    response = post(server, "repeat/infer", {"inputs": [tensor]})
    assert response.status == 501
    text = json.loads(response.read())["error"]
    assert text.startswith("HTTP end point doesn't support models with decoupled transaction policy")


@pytest.mark.fault("P4")
@pytest.mark.parametrize("count", [0, 2, 1000])
def test_generate_requires_exactly_one_response(server: Served, count: int) -> None:
    response = post(server, "repeat/generate", {"IN": [count]})
    assert response.status == 400
    assert json.loads(response.read())["error"].startswith(
        "generate expects model to produce exactly 1 response, use generate stream"
    )
    assert json.loads(post(server, "repeat/generate", {"IN": 1}).read())["OUT"] == 0


@pytest.mark.fault("P5")
def test_a_closed_connection_stops_the_model(server: Served, log: Path) -> None:
    log.unlink(missing_ok=True)
    response = post(server, "repeat/generate_stream", {"IN": [100_000, -1, 5]})
    next(events(response))
    response.close()
    connections.pop().close()
    deadline = time.monotonic() + 30
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(log.read_text()) < 1000


@pytest.mark.fault("P6")
def test_a_client_that_does_not_read_blocks_only_its_own_stream(server: Served, log: Path) -> None:
    log.unlink(missing_ok=True)
    host, port = server.address.split(":")
    body = json.dumps({"IN": [2000, -1, 0, 20_000]}).encode()
    with socket.create_connection((host, int(port))) as slow:
        head = (
            b"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        slow.sendall(head + body)
        for _ in range(10):
            assert len([*events(post(server, "repeat/generate_stream", {"IN": [20]}))]) == 20
        time.sleep(0.3)
        assert "2000" not in log.read_text().split()  # 80 MB of unread responses are not produced
        got = 0
        while got < 1_000_000:
            got += len(slow.recv(1 << 20))


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ({"TEXT": "hi"}, {"TEXT_OUT": "hi"}),
        ({"TEXT": ["hi"], "FLAG": True}, {"TEXT_OUT": "hi", "FLAG_OUT": True}),
        (
            {"TEXT": "hi", "parameters": {"NUMBERS": [1, 2, 3, 4.5], "k": 3}},
            {"TEXT_OUT": "hi", "NUMBERS_OUT": [1, 2, 3, 4.5]},
        ),
    ],
)
def test_json_members_of_generate_are_tensors_and_tensors_members(server: Served, asked: Any, answered: Any) -> None:
    response = post(server, "echo/generate", asked)
    assert response.status == 200
    assert json.loads(response.read()) == {"model_name": "echo", "model_version": "1"} | answered


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"TEXT": "a", "NUMBERS": [1, 2, 3]}, "The schema can not convert input 'NUMBERS' to tensor with proper shape"),
        ({"TEXT": ["a", "b"]}, "The schema can not convert input 'TEXT' to tensor with proper shape"),
        ({"TEXT": 1}, "input 'TEXT' is BYTES, its data holds integers"),
        ({"TEXT": [["a"]]}, "Unable to parse 'TEXT'"),
        ({"FLAG": True}, "missing required input(s) ['TEXT']"),
        ('{"TEXT": "a", "TEXT": "b"}', "input 'TEXT' already exists in request"),
        ({"TEXT": "a", "parameters": {"TEXT": "b"}}, "input 'TEXT' already exists in request"),
        ({"TEXT": "a", "SHORT": 1}, "receiving BF16 data via JSON is not supported"),
        ({"TEXT": "a", "SHORT": 2**63}, "receiving BF16 data via JSON is not supported"),
        ({"TEXT": "a", "other": {}}, "parameter 'other' has invalid type"),
        ({"TEXT": "a", "other": 2**64}, "parameter 'other' has invalid type"),
        ('{"TEXT": "a", "other": "\\ud800", "third": NaN}', "failed to parse the request JSON buffer"),
        ({"TEXT": "a", "parameters": 3}, "Unable to parse 'parameters'"),
        ({"TEXT": "a", "parameters": []}, "Unable to parse 'parameters'"),
        ({"TEXT": {}}, "Unable to parse 'TEXT'"),
        ("[1]", "not a JSON object"),
        ("{", "failed to parse the request JSON buffer"),
    ],
)
def test_an_invalid_generate_request_is_refused(server: Served, asked: Any, text: str) -> None:
    for verb in ("generate", "generate_stream"):
        response = post(server, f"echo/{verb}", asked)
        assert response.status == 400
        assert text in json.loads(response.read())["error"]
    assert post(server, "nobody/generate", {}).status == 404


@pytest.mark.fault("X4")
def test_a_stream_completes_during_shutdown_or_fails_at_its_end(
    tmp_path: Path, add_model: Callable[..., Path], log: Path
) -> None:
    add_model(tmp_path, "repeat", DECOUPLED, {"1/model.py": REPEAT.replace("LOG", str(log))})
    with serving(tmp_path, "--exit-timeout-secs=2") as server:
        stream = events(post(server, "repeat/generate_stream", {"IN": [10, -1, 50]}))
        endless = events(post(server, "repeat/generate_stream", {"IN": [100_000, -1, 50]}))
        next(stream)
        next(endless)
        server.process.terminate()
        assert [event["OUT"] for event in stream] == [*range(1, 10)]
        last = [*endless][-1]
        assert last["error"].startswith("Server is stopping")
        assert server.process.wait(30) == 1
