"""Errors, parameters, headers and endpoints, over HTTP and gRPC, as Triton has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

TEXT = python_config([spec("X", "STRING", "1")], [spec("Y", "STRING", "1")])

# Answers with its parameters, refuses with the kind of error whose name it is sent, or raises.
TELLS = """
def execute(self, requests):
    return [self.one(request) for request in requests]

def one(self, request):
    word = given(request, "X")[0].decode()
    if word == "raise":
        raise ValueError("raised")
    if hasattr(pb_utils.TritonError, word):
        refused = pb_utils.TritonError(f"told {word}", getattr(pb_utils.TritonError, word))
        return pb_utils.InferenceResponse(error=refused)
    return respond(Y=np.array([request.parameters().encode()], object))
"""

# A response for each word; an error for the word "refuse".
WORDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for word in given(request, "X")[0].decode().split():
            if word == "refuse":
                refused = pb_utils.TritonError("refused", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=refused))
            else:
                sender.send(respond(Y=np.array([word.encode()], object)))
        sender.send(flags=FINAL)
"""

KINDS = {  # of TritonError: the statuses over HTTP and gRPC
    "UNKNOWN": (400, "UNKNOWN"),
    "INTERNAL": (500, "INTERNAL"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "INVALID_ARG": (400, "INVALID_ARGUMENT"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "UNSUPPORTED": (501, "UNIMPLEMENTED"),
    "ALREADY_EXISTS": (400, "ALREADY_EXISTS"),
    "CANCELLED": (400, "CANCELLED"),
}


@dataclass
class Server:
    url: str
    grpc: Any

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, str) else json.dumps(body)
        return httpx.post(f"{self.url}/v2/{path}", content=content, headers=headers, timeout=60, verify=False)

    def ask(self, word: str, parameters: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        return self.post(
            "models/tells/infer", {"inputs": [tensor(data=[word])], "parameters": parameters or {}}, **headers
        )

    def parameters(self, given: dict[str, Any] | None = None, **headers: str) -> Any:
        """The parameters that reach the model."""
        return json.loads(self.ask("-", given, **headers).json()["outputs"][0]["data"][0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("protocol")
    write_model(repository, "tells", TEXT, TELLS)
    write_model(repository, "words", TEXT + "model_transaction_policy { decoupled: true }", WORDS)
    port = free_port()
    url = triton_like(
        repository,
        "--http-header-forward-pattern=(?-i)^X-.*|y-a",
        "--grpc-header-forward-pattern=X-.*",
        "--allow-grpc=true",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
    )
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield Server(url, client)


def word(text: str) -> Any:
    return tritonclient.grpc.InferInput("X", [1], "BYTES").set_data_from_numpy(np.array([text.encode()], object))


# ------------------------------------------------------------------------------------------------------ metadata


def test_the_servers_name_is_tritons(server: Server) -> None:
    told = httpx.get(f"{server.url}/v2", verify=False).json()
    assert told["name"] == "triton"
    assert server.grpc.get_server_metadata().name == "triton"
    assert set(told["extensions"]) == {
        "classification",
        "sequence",
        "model_repository",
        "model_repository(unload_dependents)",
        "schedule_policy",
        "model_configuration",
        "system_shared_memory",
        "cuda_shared_memory",
        "binary_tensor_data",
        "parameters",
        "statistics",
        "trace",
        "logging",
    }


@pytest.mark.parametrize("path", ["health/live", "health/ready", "models/tells/ready", "models/tells/versions/1/ready"])
def test_health_is_a_status_with_an_empty_body(server: Server, path: str) -> None:
    reply = httpx.get(f"{server.url}/v2/{path}", verify=False)
    assert (reply.status_code, reply.content) == (200, b"")


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_a_models_error_has_its_status(server: Server, kind: str) -> None:
    http, grpc = KINDS[kind]
    reply = server.ask(kind)
    assert (reply.status_code, reply.json()) == (http, {"error": f"told {kind}"})
    with pytest.raises(InferenceServerException) as refused:
        server.grpc.infer("tells", [word(kind)])
    assert (refused.value.status(), refused.value.message()) == (f"StatusCode.{grpc}", f"told {kind}")


def test_an_exception_of_a_model_is_500_and_names_it(server: Server) -> None:
    reply = server.ask("raise")
    assert reply.status_code == 500
    # 2.51 has "for model 'tells_0'", later versions and flowserve "for model instance 'tells_0'".
    assert reply.json()["error"].startswith("Failed to process the request(s) for model ")
    assert "'tells_0'" in reply.json()["error"]
    assert "message: ValueError: raised" in reply.json()["error"]


def tensor(**fields: Any) -> dict[str, Any]:
    """An input; a field that is None is left out."""
    whole = {"name": "X", "shape": [1], "datatype": "BYTES", "data": ["a"], **fields}
    return {key: value for key, value in whole.items() if value is not None}


ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But no"
)
NO_INPUT = (
    "expected 1 inputs but got 0 inputs for model 'tells'. Got input(s) [], but missing "
    "required input(s) ['X']. Please provide all required input(s)."
)
OTHER_TYPE = "inference input 'X' data-type is 'INT32', but model 'tells' expects 'BYTES'"


@pytest.mark.parametrize(
    ("body", "text", "triton_status"),
    [
        ("nojson", "failed to parse the request JSON buffer: ", 500),
        ("[]", "", 500),
        ({"inputs": [tensor(shape=None)]}, "Unable to parse 'shape': ", 500),
        ({"inputs": [tensor(shape=[-1])]}, "Unable to parse 'shape': ", 500),
        ({"inputs": [tensor(datatype=None)]}, "Unable to parse 'datatype': ", 500),
        ({"inputs": [tensor(name=None)]}, "Unable to parse 'name': ", 500),
        ({"inputs": [tensor(data=None)]}, ONE_FIELD, 400),
        ({"inputs": [tensor(datatype="INT32", data=[1])]}, OTHER_TYPE, 400),
        ({"id": "seven", "inputs": [tensor(datatype="INT32", data=[1])]}, f"[request id: seven] {OTHER_TYPE}", 400),
        ({"inputs": [tensor(name="Z")]}, "unexpected inference input 'Z' for model 'tells'", 400),
        ({"inputs": []}, NO_INPUT, 400),
        ({"inputs": [tensor(shape=[2], data=["a", "b"])]}, "Expected [1], got [2]", 400),
        ({"inputs": [tensor()], "outputs": [{"name": "Z"}]}, "unexpected inference output 'Z' for model 'tells'", 400),
        ({"inputs": [tensor()] * 2}, "input 'X' already exists in request", 400),
        ({"inputs": [tensor()], "parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are ", 400),
        ({"inputs": [tensor(datatype="FP16", data=[1])]}, "receiving FP16 data via JSON is not supported. ", 400),
    ],
)
def test_an_invalid_request_is_refused_with_tritons_text(
    server: Server, on_triton: bool, body: Any, text: str, triton_status: int
) -> None:
    reply = server.post("models/tells/infer", body)
    # The servers do not agree where "[request id: ID] " comes first; two cases above pin it.
    assert text in reply.json()["error"]
    assert reply.status_code == (triton_status if on_triton else 400)  # a client's mistake is never a 500 in flowserve


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "models/nothing", 404, "Request for unknown model: 'nothing' is not found"),
        ("GET", "models/nothing/config", 404, "Request for unknown model: 'nothing' is not found"),
        ("POST", "models/nothing/infer", 404, "Request for unknown model: 'nothing' is not found"),
        ("GET", "models/tells/versions/9", 404, "Request for unknown model: 'tells' version 9 is not found"),
        ("POST", "models/tells/versions/9/infer", 404, "Request for unknown model: 'tells' version 9 is not found"),
        ("GET", "models/nothing/stats", 400, "requested model 'nothing' is not available"),
        ("GET", "models/tells/versions/9/stats", 400, "requested model version is not available for model 'tells'"),
        ("GET", "nothing", 404, "Not Found"),
        ("PUT", "models/tells/infer", 405, "Method Not Allowed"),
        ("POST", "repository/models/tells/load", 503, "explicit model load / unload is not allowed"),
        ("POST", "repository/models/tells/unload", 503, "explicit model load / unload is not allowed"),
        ("POST", "repository/other/models/tells/load", 501, "'repository_name' specification is not supported"),
    ],
)
def test_a_wrong_name_or_verb_is_refused_with_tritons_status(
    server: Server, method: str, path: str, status: int, text: str
) -> None:
    reply = httpx.request(method, f"{server.url}/v2/{path}", content="{}" if method == "POST" else None, verify=False)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(text)


# ------------------------------------------------------------------------------------------------------ parameters


def test_parameters_of_every_type_reach_the_model(server: Server) -> None:
    given = {"text": "a", "whole": -3, "true": True, "real": 0.5}
    assert server.parameters(given) == given


@pytest.mark.parametrize("value", [None, {"a": 1}, [1]])
def test_a_parameter_of_another_type_is_refused(server: Server, value: Any) -> None:
    assert server.ask("-", {"odd": value}).status_code == 400


def test_headers_are_forwarded_by_a_pattern_of_re2_and_keep_their_case(server: Server) -> None:
    headers = {"X-One": "1", "x-two": "2", "Y-A": "3", "my-y-after": "4", "Not-X-Five": "5"}
    assert server.parameters({"mine": 6}, **headers) == {"X-One": "1", "my-y-after": "4", "mine": 6}


def test_headers_of_grpc_are_forwarded_in_any_case(server: Server) -> None:
    reply = server.grpc.infer("tells", [word("-")], headers={"x-one": "1", "y": "2"})
    assert json.loads(reply.as_numpy("Y")[0]) == {"x-one": "1"}


# ------------------------------------------------------------------------------------------------------ generate


def events(text: str) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]


def test_generate_streams_an_event_for_each_response(server: Server) -> None:
    reply = server.post("models/words/generate_stream", {"X": "to be"})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    shared = {"model_name": "words", "model_version": "1"}
    assert events(reply.text) == [{**shared, "Y": "to"}, {**shared, "Y": "be"}]
    assert server.post("models/words/generate_stream", {"X": ""}).text == ""


@pytest.mark.parametrize(("model", "sent"), [("words", "refuse"), ("tells", "INVALID_ARG"), ("tells", "UNKNOWN")])
def test_an_error_before_the_first_response_is_an_event(server: Server, model: str, sent: str) -> None:
    reply = server.post(f"models/{model}/generate_stream", {"X": sent})
    assert (reply.status_code, reply.headers["content-type"]) == (400, "text/event-stream; charset=utf-8")
    assert events(reply.text) == [{"error": "refused" if model == "words" else f"told {sent}"}]


def test_an_error_after_a_response_is_an_event_of_a_stream_that_succeeds(server: Server, on_triton: bool) -> None:
    reply = server.post("models/words/generate_stream", {"X": "to refuse be"})
    told = [event.get("Y", event.get("error")) for event in events(reply.text)]
    # An error ends a request in flowserve; Triton sends the responses after it.
    assert (reply.status_code, told) == (200, ["to", "refused", "be"] if on_triton else ["to", "refused"])


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "text", "triton_status"),
    [
        ("nothing", {"X": "a"}, "Request for unknown model: 'nothing' is not found", 404),
        ("tells", {}, "expected 1 inputs but got 0 inputs for model 'tells'.", 400),
        ("tells", "nojson", "failed to parse the request JSON buffer: ", 500),
        ("tells", {"X": ["a", "b"]}, "The schema can not convert input 'X' to tensor with proper shape", 400),
        ("tells", '{"X": "a", "X": "b"}', "input 'X' already exists in request", 400),
    ],
)
def test_a_request_that_never_ran_is_refused_in_json(
    server: Server, on_triton: bool, route: str, model: str, body: Any, text: str, triton_status: int
) -> None:
    reply = server.post(f"models/{model}/{route}", body)
    assert reply.headers["content-type"] == "application/json"
    assert text in reply.json()["error"]
    assert reply.status_code == (triton_status if on_triton or triton_status != 500 else 400)


def test_generate_answers_one_object_with_parameters_from_every_other_key(server: Server) -> None:
    reply = server.post("models/tells/generate", {"X": "-", "id": "seven", "depth": 2, "parameters": {"wide": True}})
    told = reply.json()
    assert (told["id"], told["model_name"], told["model_version"]) == ("seven", "tells", "1")
    assert json.loads(told["Y"]) == {"id": "seven", "depth": 2, "wide": True}


@pytest.mark.parametrize("words", ["", "a b"])
def test_generate_refuses_any_other_number_of_responses_than_one(server: Server, on_triton: bool, words: str) -> None:
    reply = server.post("models/words/generate", {"X": words})
    assert reply.json()["error"].startswith("generate expects model to produce exactly 1 response")
    assert reply.status_code == (200 if on_triton else 400)  # an error has the status of an error in flowserve


def test_a_decoupled_model_cannot_be_asked_over_plain_http(server: Server) -> None:
    reply = server.post("models/words/infer", {"inputs": [tensor()]})
    assert reply.status_code == 501
    text = "HTTP end point doesn't support models with decoupled transaction policy"
    assert reply.json()["error"].startswith(text)


# ------------------------------------------------------------------------------------------------------ logging


def test_log_settings_are_changed_and_validated(server: Server) -> None:
    before = httpx.get(f"{server.url}/v2/logging", verify=False).json()
    assert server.post("logging", {"log_verbose_level": 1, "log_format": "ISO8601"}).json() == {
        **before,
        "log_verbose_level": 1,
        "log_format": "ISO8601",
    }
    assert server.post("logging", before | {"log_file": before["log_file"]}).status_code in (200, 501)
    settings = {key: value for key, value in before.items() if key != "log_file"}
    assert server.post("logging", settings).json() == before
    reply = server.post("logging", {"log_file": "elsewhere"})
    assert (reply.status_code, reply.json()["error"]) == (
        501,
        "log file location can not be updated through network protocol",
    )
