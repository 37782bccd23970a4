"""Repositories as the public examples of Triton's Python backend describe them, asked as their clients ask."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

TWO_IN = [spec("INPUT0", "FP32", "4"), spec("INPUT1", "FP32", "4")]
TWO_OUT = [spec("OUTPUT0", "FP32", "4"), spec("OUTPUT1", "FP32", "4")]

# add_sub: the types of the outputs are those of the configuration that the model receives.
ADD_SUB = """
def initialize(self, args):
    config = json.loads(args["model_config"])
    found = [pb_utils.get_output_config_by_name(config, name)["data_type"] for name in ("OUTPUT0", "OUTPUT1")]
    self.types = [pb_utils.triton_string_to_numpy(one) for one in found]

def execute(self, requests):
    responses = []
    for request in requests:
        left, right = given(request, "INPUT0"), given(request, "INPUT1")
        added, less = (left + right).astype(self.types[0]), (left - right).astype(self.types[1])
        responses.append(respond(OUTPUT0=added, OUTPUT1=less))
    return responses

def finalize(self):
    print("add_sub ends")
"""

# auto_complete: the model has no config.pbtxt but for its backend.
COMPLETES = """
@staticmethod
def auto_complete_config(auto_complete_model_config):
    for n in (0, 1):
        auto_complete_model_config.add_input({"name": f"INPUT{n}", "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.add_output({"name": f"OUTPUT{n}", "data_type": "TYPE_FP32", "dims": [4]})
    auto_complete_model_config.set_max_batch_size(0)
    auto_complete_model_config.set_dynamic_batching()
    return auto_complete_model_config
"""

# bls: the name of the model that computes comes with the request.
CALL = """
def ask(self, request):
    name = given(request, "MODEL_NAME")[0].decode()
    tensors = [pb_utils.get_input_tensor_by_name(request, one) for one in ("INPUT0", "INPUT1")]
    return pb_utils.InferenceRequest(
        model_name=name, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=tensors
    )
"""
BLS = f"""{CALL}
def execute(self, requests):
    responses = []
    for request in requests:
        answer = self.ask(request).exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        responses.append(pb_utils.InferenceResponse(output_tensors=answer.output_tensors()))
    return responses
"""
BLS_ASYNC = """
async def execute(self, requests):
    import asyncio

    responses = []
    for request in requests:
        tensors = [pb_utils.get_input_tensor_by_name(request, one) for one in ("INPUT0", "INPUT1")]
        calls = [
            pb_utils.InferenceRequest(model_name=name, requested_output_names=[output], inputs=tensors)
            for name, output in (("add_sub", "OUTPUT0"), ("auto_complete", "OUTPUT1"))
        ]
        answers = await asyncio.gather(*[call.async_exec() for call in calls])
        for answer in answers:
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
        responses.append(pb_utils.InferenceResponse([answer.output_tensors()[0] for answer in answers]))
    return responses
"""
# decoupled: one response for each of N, an index and its delay.
SQUARE = """
def execute(self, requests):
    for request in requests:
        sender, number = request.get_response_sender(), given(request, "IN")
        for _ in range(int(number[0])):
            sender.send(respond(OUT=number))
        sender.send(flags=FINAL)
    return None
"""
# bls_decoupled: adds up the responses of the decoupled model.
BLS_DECOUPLED = """
def execute(self, requests):
    responses = []
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        call = pb_utils.InferenceRequest(model_name="square", inputs=[tensor], requested_output_names=["OUT"])
        total = np.zeros(1, np.int32)
        for answer in call.exec(decoupled=True):
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            if len(answer.output_tensors()) > 0:
                total += pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
        responses.append(respond(SUM=total))
    return responses
"""
# parameters: the request's parameters come back as outputs, and go out with the response.
PARAMETERS = """
def execute(self, requests):
    responses = []
    for request in requests:
        told = json.loads(request.parameters())
        keys = np.array([key.encode() for key in sorted(told)], object)
        values = np.array([str(told[key]).encode() for key in sorted(told)], object)
        tensors = [pb_utils.Tensor("key", keys), pb_utils.Tensor("value", values)]
        responses.append(pb_utils.InferenceResponse(tensors))
    return responses
"""
# preprocessing: a step that makes pixels of a file, in front of a model that reads pixels, in an ensemble.
DECODES = """
def execute(self, requests):
    responses = []
    for request in requests:
        raw = given(request, "FILE")
        pixels = raw.reshape(len(raw), 1, 2, 2).astype(np.float32) / 255
        responses.append(respond(PIXELS=pixels))
    return responses
"""
READS = """
def execute(self, requests):
    return [respond(SCORE=given(request, "PIXELS").sum(axis=(1, 2, 3))[:, None]) for request in requests]
"""
ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "decodes" model_version: -1
    input_map { key: "FILE" value: "INPUT" } output_map { key: "PIXELS" value: "pixels" } },
  { model_name: "reads" model_version: -1
    input_map { key: "PIXELS" value: "pixels" } output_map { key: "SCORE" value: "OUTPUT" } }
] }
"""
# custom_metrics: a counter of the requests.
METRICS = """
def initialize(self, args):
    self.family = pb_utils.MetricFamily(
        name="requests_process_latency_ns", description="Time spent", kind=pb_utils.MetricFamily.COUNTER
    )
    self.metric = self.family.Metric(labels={"model": "custom_metrics", "version": "1"})

def execute(self, requests):
    self.metric.increment(len(requests))
    return [respond(OUT=np.array([self.metric.value()], np.float64)) for _ in requests]
"""

LEFT, RIGHT = np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 1], np.float32)


class Clients:
    def __init__(self, address: str, grpc_address: str) -> None:
        self.http = tritonclient.http.InferenceServerClient(address)
        self.grpc = tritonclient.grpc.InferenceServerClient(grpc_address)

    def ask(self, model: str, outputs: list[str], inputs: dict[str, np.ndarray[Any, Any]], **more: Any) -> list[Any]:
        tensors = []
        for name, array in inputs.items():
            datatype = tritonclient.http.np_to_triton_dtype(array.dtype)
            tensors.append(tritonclient.http.InferInput(name, array.shape, datatype).set_data_from_numpy(array))
        wanted = [tritonclient.http.InferRequestedOutput(name) for name in outputs]
        reply = self.http.infer(model, tensors, outputs=wanted, **more)
        return [reply.as_numpy(name) for name in outputs]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Clients]:
    repository = tmp_path_factory.mktemp("examples")
    write_model(repository, "add_sub", python_config(TWO_IN, TWO_OUT), ADD_SUB)
    write_model(repository, "auto_complete", 'backend: "python"\n', COMPLETES + ADD_SUB)
    named = [spec("MODEL_NAME", "STRING", "1"), *TWO_IN]
    write_model(repository, "bls_sync", python_config(named, TWO_OUT), BLS)
    write_model(repository, "bls_async", python_config(TWO_IN, TWO_OUT), BLS_ASYNC)
    decoupled = "model_transaction_policy { decoupled: true }"
    number = [spec("IN", "INT32", "1")]
    write_model(repository, "square", python_config(number, [spec("OUT", "INT32", "1")], decoupled), SQUARE)
    write_model(repository, "bls_decoupled", python_config(number, [spec("SUM", "INT32", "1")]), BLS_DECOUPLED)
    texts = [spec("key", "STRING", "-1"), spec("value", "STRING", "-1")]
    write_model(repository, "parameters", python_config([spec("dummy", "FP32", "1")], texts), PARAMETERS)
    batches, pixels = "max_batch_size: 8", spec("PIXELS", "FP32", "1, 2, 2")
    write_model(repository, "decodes", python_config([spec("FILE", "UINT8", "-1")], [pixels], batches), DECODES)
    write_model(repository, "reads", python_config([pixels], [spec("SCORE", "FP32", "1")], batches), READS)
    write_model(repository, "preprocessing", ENSEMBLE)
    write_model(repository, "custom_metrics", python_config(number, [spec("OUT", "FP64", "1")]), METRICS)
    port = free_port()
    grpc = "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={port}"
    url = triton_like(repository, *grpc, "--allow-metrics=true", f"--metrics-port={free_port()}")
    made = Clients(url.removeprefix("http://"), f"127.0.0.1:{port}")
    yield made
    made.http.close()
    made.grpc.close()


@pytest.mark.parametrize("model", ["add_sub", "auto_complete", "bls_async"])
def test_sum_and_difference(clients: Clients, model: str) -> None:
    added, less = clients.ask(model, ["OUTPUT0", "OUTPUT1"], {"INPUT0": LEFT, "INPUT1": RIGHT})
    assert (added.tolist(), less.tolist()) == ((LEFT + RIGHT).tolist(), (LEFT - RIGHT).tolist())


@pytest.mark.parametrize("model", ["add_sub", "auto_complete"])
def test_a_model_calls_the_one_that_its_request_names(clients: Clients, model: str) -> None:
    name = np.array([model.encode()], object)
    added, _ = clients.ask("bls_sync", ["OUTPUT0", "OUTPUT1"], {"MODEL_NAME": name, "INPUT0": LEFT, "INPUT1": RIGHT})
    assert added.tolist() == (LEFT + RIGHT).tolist()


def test_a_call_of_a_model_that_there_is_not_fails_with_the_reason(clients: Clients) -> None:
    name = np.array([b"nothing"], object)
    with pytest.raises(tritonclient.http.InferenceServerException, match=r"[Mm]odel.*'nothing' is not "):
        clients.ask("bls_sync", ["OUTPUT0"], {"MODEL_NAME": name, "INPUT0": LEFT, "INPUT1": RIGHT})


def test_a_completed_configuration_is_the_models(clients: Clients) -> None:
    told = clients.http.get_model_config("auto_complete")
    assert [(one["name"], one["data_type"]) for one in told["input"]] == [
        ("INPUT0", "TYPE_FP32"),
        ("INPUT1", "TYPE_FP32"),
    ]
    assert told["max_batch_size"] == 0


@pytest.mark.parametrize("count", [0, 4])
def test_a_stream_has_as_many_responses_as_the_model_sends(clients: Clients, count: int) -> None:
    received: queue.Queue[Any] = queue.Queue()
    clients.grpc.start_stream(lambda result, error: received.put(error or result))
    tensor = tritonclient.grpc.InferInput("IN", [1], "INT32").set_data_from_numpy(np.array([count], np.int32))
    clients.grpc.async_stream_infer("square", [tensor], request_id="7", enable_empty_final_response=True)
    got = []
    while True:
        one = received.get(timeout=30)
        if isinstance(one, Exception):
            raise one
        response = one.get_response()
        if response.parameters["triton_final_response"].bool_param:
            break
        got.append((response.id, one.as_numpy("OUT").tolist()))
    clients.grpc.stop_stream()
    assert got == [("7", [count])] * count


@pytest.mark.parametrize("count", [0, 4])
def test_a_model_adds_up_the_responses_of_a_decoupled_one(clients: Clients, count: int) -> None:
    (total,) = clients.ask("bls_decoupled", ["SUM"], {"IN": np.array([count], np.int32)})
    assert total.tolist() == [count * count]


def test_parameters_come_back_as_tensors(clients: Clients) -> None:
    given = {"flag": True, "number": 5, "word": "a b"}
    keys, values = clients.ask("parameters", ["key", "value"], {"dummy": np.ones(1, np.float32)}, parameters=given)
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == {
        b"flag": b"True",
        b"number": b"5",
        b"word": b"a b",
    }


def test_a_file_is_decoded_by_a_step_in_front_of_the_model(clients: Clients) -> None:
    pixels = np.array([[0, 255, 51, 0], [255] * 4], np.uint8)
    (scores,) = clients.ask("preprocessing", ["OUTPUT"], {"INPUT": pixels})
    np.testing.assert_allclose(scores, [[1.2], [4.0]], rtol=1e-6)


def test_a_metric_of_a_model_is_counted(clients: Clients) -> None:
    counted = [clients.ask("custom_metrics", ["OUT"], {"IN": np.zeros(1, np.int32)})[0][0] for _ in range(3)]
    assert counted == [1.0, 2.0, 3.0]
