"""Calls of models (BLS), as Triton answers them: a repository in a folder, and requests over HTTP to a base URL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.triton_models import write_source

IN_OUT = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
CALLER = """
backend: "python"
input [ { name: "CODE" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
ENSEMBLE = """
platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "MODEL" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }
"""
MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def response(numbers):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(numbers, np.float32))])

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
DOUBLES = """
    def answer(self, request):
        return response(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2)
"""
FAILS = """
    def answer(self, request):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE))
"""
# As many responses as IN says, and the final flag with the last of them, or after it.
STREAMS = (
    MODEL.partition("class")[0]
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            for number in range(count):
                sender.send(response([number]), flags=FINAL if WITH_LAST and number == count - 1 else 0)
            if not (WITH_LAST and count):
                sender.send(flags=FINAL)
"""
)
CALLS = """
    def answer(self, request):
        code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
        text = json.dumps(eval(code, {"call": call, "shown": shown}))
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text.encode()], np.object_))])

def call(model, number=1.0, **how):
    given = pb_utils.Tensor("IN", np.array([number], np.float32))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUT"], inputs=[given]).exec(**how)

def shown(response):
    if response.has_error():
        return f"{int(response.error().code())} {response.error().message()}"
    return [tensor.as_numpy().tolist() for tensor in response.output_tensors()]
"""


def write_repository(folder: Path) -> None:
    python = 'backend: "python"\n' + IN_OUT
    write_source(folder, "doubles", python, MODEL + DOUBLES)
    write_source(folder, "fails", python, MODEL + FAILS)
    final = STREAMS.replace("FINAL", "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL")
    write_source(folder, "ends_apart", python + DECOUPLED, final.replace("WITH_LAST", "False"))
    write_source(folder, "ends_with_last", python + DECOUPLED, final.replace("WITH_LAST", "True"))
    write_source(folder, "caller", CALLER, MODEL + CALLS)
    for name, model in (("around_doubles", "doubles"), ("around_ends_apart", "ends_apart")):
        write_source(folder, name, ENSEMBLE.replace("MODEL", model))


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> str:
    folder = tmp_path_factory.mktemp("bls")
    write_repository(folder)
    return triton_like(folder)


def ask(base_url: str, code: str) -> Any:
    """The value of an expression that the model `caller` evaluates."""
    tensor = {"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [code]}
    found = httpx.post(f"{base_url}/v2/models/caller/infer", json={"inputs": [tensor]}, timeout=60, verify=False)
    assert found.status_code == 200, found.text
    return json.loads(found.json()["outputs"][0]["data"][0])


def test_a_called_model_or_ensemble_answers_once(base_url: str) -> None:
    assert ask(base_url, "[shown(call(model)) for model in ('doubles', 'around_doubles')]") == [[[2.0]], [[2.0]]]


def test_the_error_of_a_called_model_has_its_text(base_url: str) -> None:
    """Its code is the model's here, and that of an internal error on Triton."""
    assert ask(base_url, "shown(call('fails'))").endswith(" not today")


def test_the_last_response_is_empty_where_the_final_flag_came_without_one(base_url: str) -> None:
    def streamed(model: str, count: int) -> Any:
        return ask(base_url, f"[shown(one) for one in call('{model}', {count}, decoupled=True)]")

    assert streamed("ends_apart", 2) == [[[0.0]], [[1.0]], []]
    assert streamed("ends_with_last", 2) == [[[0.0]], [[1.0]]]
    assert streamed("ends_apart", 0) == streamed("ends_with_last", 0) == [[]]
    assert streamed("around_ends_apart", 2) == [[[0.0]], [[1.0]], []]
    assert streamed("doubles", 2) == [[[4.0]]], "a model that is not decoupled has one response"
