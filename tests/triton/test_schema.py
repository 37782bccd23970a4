"""Configurations and statistics as JSON and as messages are of Triton's schema, and so programs can read them with it.

Model Analyzer, for instance, reads the JSON with `ParseDict` of Triton's own message, which fails for an unknown field.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

X, Y = spec("X", "FP32", "2"), spec("Y", "FP32", "2")
BATCHES = "max_batch_size: 4"
ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
SENDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range(3):
            sender.send(respond(Y=given(request, "X")))
        sender.send(flags=FINAL)
"""


def place(name: str) -> str:
    """flowserve's parameter of the place where a model runs; another server ignores it."""
    return f'parameters {{ key: "execution" value {{ string_value: "{name}" }} }}'


LEVELS = "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 value { max_queue_size: 7 } }"
START = 'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]'
INITIAL = 'initial_state: [ { name: "i" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } ]'
STATE = f'state [ {{ input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: [ 2 ] {INITIAL} }} ]'
DATA = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } }'
MODELS = {
    "process": python_config([X], [Y], place("process")),
    "thread": python_config([X], [Y], place("thread")),
    "inline": python_config([X], [Y], place("inline")),
    "batches": python_config([X], [Y], BATCHES, f"dynamic_batching {{ {LEVELS} }}"),
    "sequences": python_config([X], [Y], BATCHES, f"sequence_batching {{ oldest {{ }} {START} {STATE} }}"),
    "direct": python_config([X], [Y], BATCHES, f"sequence_batching {{ direct {{ }} {START} }}"),
    "cached": python_config([X], [Y], "response_cache { enable: true }"),
    "warm": python_config([X], [Y], f'model_warmup [ {{ name: "w" batch_size: 1 {DATA} }} ]'),
    "limited": python_config(
        [X],
        [Y],
        'instance_group [ { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } priority: 2 } } ]',
    ),
    "reshaped": python_config([spec("X", "FP32", "2", "reshape { shape: [ 1, 2 ] }")], [spec("Y", "FP32", "-1, 2")]),
    "named": python_config(
        [X], [Y], 'metric_tags { key: "a" value: "b" }', "version_policy { all { } }", "optimization { priority: 1 }"
    ),
}
CHAIN = (
    ("ensemble", "process", "X", "Y"),
    ("nested", "ensemble", "A", "B"),
    ("over_batches", "batches", "X", "Y"),
    ("over_stream", "streams", "X", "Y"),
)
NAMES = [*MODELS, "streams", *(name for name, *_ in CHAIN)]
CALLED = [name for name in NAMES if name not in ("sequences", "direct", "streams", "over_stream")]


def ensemble(model: str, given: str, made: str, *, batches: bool = False) -> str:
    maps = f'input_map {{ key: "{given}" value: "A" }} output_map {{ key: "{made}" value: "B" }}'
    lines = ['platform: "ensemble"', BATCHES if batches else ""]
    lines += [f"input [ {spec('A', 'FP32', '2')} ]", f"output [ {spec('B', 'FP32', '2')} ]"]
    step = f'step [ {{ model_name: "{model}" model_version: -1 {maps} }} ]'
    return "\n".join([*lines, f"ensemble_scheduling {{ {step} }}", ""])


@dataclass
class Server:
    url: str
    grpc: tritonclient.grpc.InferenceServerClient

    def json(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/v2/{path}", verify=False)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    """Every model has answered a request, and failed one."""
    repository = tmp_path_factory.mktemp("schema")
    for name, config in MODELS.items():
        write_model(repository, name, config, ECHO)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "streams", python_config([X], [Y], decoupled), SENDS)
    for name, model, given, made in CHAIN:
        write_model(repository, name, ensemble(model, given, made, batches=name == "over_batches"))
    port = free_port()
    grpc = "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={port}"
    url = triton_like(repository, *grpc, "--cache-config=local,size=1048576")
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
    for name in CALLED:
        described = httpx.get(f"{url}/v2/models/{name}", verify=False).json()["inputs"][0]
        shape = [max(dim, 1) for dim in described["shape"]]
        tensor = {"name": described["name"], "datatype": "FP32", "shape": shape, "data": [1, 2]}
        for _ in range(2):
            answer = httpx.post(f"{url}/v2/models/{name}/infer", json={"inputs": [tensor]}, verify=False)
            assert answer.status_code == 200, answer.text
        httpx.post(f"{url}/v2/models/{name}/infer", json={"inputs": [{**tensor, "name": "nothing"}]}, verify=False)
    for model, name in (("streams", "X"), ("over_stream", "A")):
        _stream(client, model, name)
    yield Server(url, client)
    client.close()


def _stream(client: tritonclient.grpc.InferenceServerClient, model: str, name: str) -> None:
    received: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: received.put(error or result))
    tensor = tritonclient.grpc.InferInput(name, [2], "FP32").set_data_from_numpy(np.array([1, 2], np.float32))
    client.async_stream_infer(model, [tensor])
    for _ in range(3):
        assert not isinstance(received.get(timeout=30), Exception)
    client.stop_stream()


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_of_tritons_schema(server: Server, name: str) -> None:
    found = server.json(f"models/{name}/config")
    theirs = json_format.ParseDict(found, model_config_pb2.ModelConfig())
    assert theirs.name == name
    assert theirs == server.grpc.get_model_config(name).config


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_over_grpc_has_no_unknown_fields(server: Server, name: str) -> None:
    config = server.grpc.get_model_config(name).config
    before = config.SerializeToString(deterministic=True)
    config.DiscardUnknownFields()
    assert config.SerializeToString(deterministic=True) == before


PLAIN_FIELDS = {
    *("name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output"),
    *("batch_input", "batch_output", "instance_group", "default_model_filename", "cc_model_filenames"),
    *("metric_tags", "parameters", "model_warmup"),
}


def test_a_models_configuration_has_the_fields_that_tritons_has(server: Server) -> None:
    assert server.json("models/process/config").keys() == {*PLAIN_FIELDS, "optimization"}


def test_an_ensembles_configuration_has_the_fields_that_tritons_has(server: Server) -> None:
    found = server.json("models/ensemble/config")
    assert found.keys() == {*PLAIN_FIELDS, "ensemble_scheduling", "model_transaction_policy"}
    assert found["ensemble_scheduling"].keys() == {"step"}
    (step,) = found["ensemble_scheduling"]["step"]
    assert step.keys() == {"model_name", "model_version", "input_map", "output_map", "model_namespace"}


ROW = {
    *("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats", "response_stats"),
    *("batch_stats", "memory_usage"),
}


@pytest.mark.parametrize("name", ["", *NAMES])
def test_statistics_are_of_tritons_schema(server: Server, name: str) -> None:
    found = server.json(f"models/{name}/stats" if name else "models/stats")
    theirs = json_format.ParseDict(found, service_pb2.ModelStatisticsResponse())
    assert {row.name for row in theirs.model_stats} == ({name} if name else {*NAMES})
    for row in found["model_stats"]:
        assert row.keys() == ROW
    if name in CALLED:
        assert theirs.model_stats[0].inference_stats.success.count >= 2


@pytest.mark.parametrize("name", ["", *NAMES])
def test_statistics_over_grpc_are_those_of_http(server: Server, name: str) -> None:
    found = server.json(f"models/{name}/stats" if name else "models/stats")
    message = server.grpc.get_inference_statistics(name)
    unread = message.SerializeToString(deterministic=True)
    message.DiscardUnknownFields()
    assert message.SerializeToString(deterministic=True) == unread
    theirs = json_format.ParseDict(found, service_pb2.ModelStatisticsResponse())
    by_name = {row.name: row for row in message.model_stats}
    for row in theirs.model_stats:
        other = by_name[row.name]
        assert abs(row.last_inference - other.last_inference) <= 1  # milliseconds of a clock that is read each time
        other.last_inference = row.last_inference
        assert row == other
