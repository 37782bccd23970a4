"""Configurations that give a key of a map, or list an output, more than once: protobuf reads them, and so they load."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf import json_format

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

X, Y = spec("X", "FP32", "2"), spec("Y", "FP32", "2")
ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
# The configuration that a model receives, as its output.
TELL = """
def initialize(self, args):
    self.config = args["model_config"].encode()

def execute(self, requests):
    return [respond(Y=np.array([self.config], object)) for _ in requests]
"""
# The data type of its output is that of the configuration.
ASKS = """
def initialize(self, args):
    found = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "Y")
    self.type = pb_utils.triton_string_to_numpy(found["data_type"])

def execute(self, requests):
    return [respond(Y=given(request, "X").astype(self.type)) for request in requests]
"""
SUMS = """
def execute(self, requests):
    return [respond(Y=given(request, "X") + 10, V=given(request, "Z") + 100) for request in requests]
"""
FLAT = """
def execute(self, requests):
    return [respond(Y=given(request, "X").reshape(1, 2)) for request in requests]
"""
SENDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        sender.send(respond(Y=given(request, "X")))
        sender.send(respond(Y=given(request, "X") + 1))
        sender.send(flags=FINAL)
"""
PLACES = "process", "thread", "inline"  # flowserve's; another server ignores the parameter
RESHAPED = "reshape { shape: [ 1, 2 ] }"


def pair(field: str, first: str, second: str) -> str:
    return f"{field} {{ {first} }}\n{field} {{ {second} }}"


# The top-level maps of a model, each with a key twice, and what counts of it.
MAPS: Mapping[str, tuple[str, Any]] = {
    "parameters": (
        pair("parameters", 'key: "a" value { string_value: "one" }', 'key: "a" value { string_value: "two" }'),
        {"a": {"string_value": "two"}},
    ),
    "parameters_empty": (
        pair("parameters", 'key: "a" value { string_value: "one" }', 'key: "a"'),
        {"a": {"string_value": ""}},
    ),
    "parameters_list": (
        (
            'parameters [ { key: "a" value { string_value: "one" } }, { key: "b" value { string_value: "x" } }, '
            '{ key: "a" value { string_value: "two" } } ]'
        ),
        {"a": {"string_value": "two"}, "b": {"string_value": "x"}},
    ),
    "metric_tags": (pair("metric_tags", 'key: "a" value: "1"', 'key: "a" value: "2"'), {"a": "2"}),
    "cc_model_filenames": (pair("cc_model_filenames", 'key: "7.5" value: "x"', 'key: "7.5" value: "y"'), {"7.5": "y"}),
    "model_warmup": (
        'model_warmup { name: "w" batch_size: 1 '
        + pair(
            "inputs",
            'key: "X" value { data_type: TYPE_INT32 dims: [ 7 ] zero_data: true }',
            'key: "X" value { data_type: TYPE_FP32 dims: [ 2 ] random_data: true }',
        )
        + " }",
        [
            {
                "name": "w",
                "batch_size": 1,
                "inputs": {"X": {"data_type": "TYPE_FP32", "dims": [2], "random_data": True}},
                "count": 0,
            }
        ],
    ),
}
LEVELS = "max_batch_size: 4\ndynamic_batching { priority_levels: 2 default_priority_level: 1\n" + pair(
    "priority_queue_policy",
    "key: 1 value { max_queue_size: 1 timeout_action: DELAY }",
    "key: 1 value { max_queue_size: 7 }",
)
# Models with an output listed twice: the listings, and the shape and the data type of a response.
OUTPUTS: Mapping[str, tuple[list[str], str, list[int], str]] = {
    "same": ([Y, Y], ECHO, [2], "FP32"),
    "dims": ([Y, spec("Y", "FP32", "-1")], ECHO, [2], "FP32"),
    "dims_first": ([spec("Y", "FP32", "-1"), Y], ECHO, [2], "FP32"),
    "type_first": ([spec("Y", "INT32", "2"), Y], ASKS, [2], "INT32"),
    "type_second": ([Y, spec("Y", "INT32", "2")], ASKS, [2], "FP32"),
    "reshape_first": ([spec("Y", "FP32", "2", RESHAPED), Y], FLAT, [2], "FP32"),
    "reshape_second": ([Y, spec("Y", "FP32", "2", RESHAPED)], FLAT, [1, 2], "FP32"),
    "labels_first": ([spec("Y", "FP32", "2", 'label_filename: "l.txt"'), Y], ECHO, [2], "FP32"),
    "labels_second": ([Y, spec("Y", "FP32", "2", 'label_filename: "l.txt"')], ECHO, [2], "FP32"),
}
# In ensembles: what the ensemble lists.
B = spec("B", "FP32", "2")
ENSEMBLES: Mapping[str, list[str]] = {
    "e_same": [B, B],
    "e_dims": [B, spec("B", "FP32", "5")],
    "e_dims_first": [spec("B", "FP32", "-1"), B],
    "e_type": [B, spec("B", "INT32", "2")],
}
# Refused in both servers, each with a part of the text.
REFUSED: Mapping[str, tuple[str, str]] = {
    "labels_twice": (
        python_config([X], [spec("Y", "FP32", "2", 'label_filename: "l.txt"')] * 2),
        "multiple label files for 'Y'",
    ),
    "second_without_type": (
        python_config([X], [Y, '{ name: "Y" }']),
        "model output 'Y' must specify 'data_type' for second_without_type",
    ),
    "second_with_zero": (
        python_config([X], [Y, spec("Y", "FP32", "0")]),
        "model output 'Y' dimension must be integer >= 1, or -1 to indicate a variable-size dimension",
    ),
    "e_wrong_first": ("", "in ensemble e_wrong_first, ensemble tensor B: inconsistent shape: "),
    "e_wrong_type": ("", "in ensemble e_wrong_type, ensemble tensor B: inconsistent data type: "),
}


def ensemble(outputs: list[str], maps: str, inputs: str = spec("A", "FP32", "2"), model: str = "same") -> str:
    step = f'step [ {{ model_name: "{model}" model_version: -1\n{maps} }} ]'
    return (
        f'platform: "ensemble"\ninput [ {inputs} ]\noutput [ {", ".join(outputs)} ]\nensemble_scheduling {{ {step} }}'
    )


STRAIGHT = 'input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" }'


@dataclass
class Server:
    url: str
    http: tritonclient.http.InferenceServerClient
    grpc: tritonclient.grpc.InferenceServerClient
    log: Path

    def config(self, front: str, model: str) -> dict[str, Any]:
        if front == "http":
            return dict(self.http.get_model_config(model))
        found = self.grpc.get_model_config(model).config
        return dict(json_format.MessageToDict(found, preserving_proto_field_name=True))

    def ask(self, front: str, model: str, **arrays: Any) -> Any:
        module, client = (tritonclient.http, self.http) if front == "http" else (tritonclient.grpc, self.grpc)
        tensors = [
            module.InferInput(name, [*np.shape(array)], "FP32").set_data_from_numpy(np.array(array, np.float32))
            for name, array in arrays.items()
        ]
        return client.infer(model, tensors)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repeated")
    for name, (text, _) in MAPS.items():
        write_model(repository, name, python_config([X], [spec("Y", "STRING", "1")], text), TELL)
    write_model(repository, "levels", python_config([X], [Y], f"{LEVELS} }}"), ECHO)
    for name, (outputs, body, _, _) in OUTPUTS.items():
        write_model(repository, name, python_config([X], outputs), body, l__txt="c\nd\n")
    for place in PLACES:
        more = f'parameters {{ key: "execution" value {{ string_value: "{place}" }} }}'
        write_model(repository, f"{place}_batches", python_config([X], [Y, Y], "max_batch_size: 4", more), ECHO)
    write_model(
        repository, "streams", python_config([X], [Y, Y], "model_transaction_policy { decoupled: true }"), SENDS
    )
    write_model(repository, "sums", python_config([X, spec("Z", "FP32", "2")], [Y, spec("V", "FP32", "2")]), SUMS)
    write_model(repository, "straight", python_config([X], [Y]), ECHO)
    for name, outputs in ENSEMBLES.items():
        write_model(repository, name, ensemble(outputs, STRAIGHT, model="straight"))
    two = f"{spec('A', 'FP32', '2')}, {spec('A2', 'FP32', '2')}"
    maps = pair("input_map", 'key: "Z" value: "A"', 'key: "Z" value: "A2"') + ' input_map { key: "X" value: "A" } '
    write_model(repository, "e_input_map", ensemble([B], f'{maps} output_map {{ key: "V" value: "B" }}', two, "sums"))
    maps = 'input_map { key: "X" value: "A" } input_map { key: "Z" value: "A" } '
    maps += pair("output_map", 'key: "Y" value: "C"', 'key: "Y" value: "B"')
    write_model(repository, "e_output_map", ensemble([B], maps, model="sums"))
    for name, (text, _) in REFUSED.items():
        if text:
            write_model(repository, name, text, ECHO, l__txt="c\nd\n")
    write_model(repository, "e_over_twice", ensemble([B], STRAIGHT, model="same"))
    write_model(repository, "input_twice", python_config([X, X], [Y]), ECHO)
    write_model(repository, "e_wrong_first", ensemble([spec("B", "FP32", "5"), B], STRAIGHT, model="straight"))
    write_model(repository, "e_wrong_type", ensemble([spec("B", "INT32", "2"), B], STRAIGHT, model="straight"))
    port = free_port()
    grpc = "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={port}"
    lenient = "--exit-on-error=false", "--strict-readiness=false"
    url = triton_like(repository, *grpc, *lenient, "--model-control-mode=explicit", "--load-model=*")
    http = tritonclient.http.InferenceServerClient(url.removeprefix("http://"))
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
    yield Server(url, http, client, repository.parent / f"{repository.name}.triton.log")
    http.close()
    client.close()


FRONTS = pytest.mark.parametrize("front", ["http", "grpc"])


@pytest.mark.parametrize("model", MAPS)
def test_the_last_value_of_a_key_counts(server: Server, model: str) -> None:
    field = model.removesuffix("_empty").removesuffix("_list")
    assert server.config("http", model)[field] == MAPS[model][1]
    told = json.loads(server.ask("http", model, X=[1, 2]).as_numpy("Y")[0])[field]
    if field == "model_warmup":  # the model gets 64-bit integers as text
        told[0]["inputs"]["X"]["dims"] = [*map(int, told[0]["inputs"]["X"]["dims"])]
    assert told == MAPS[model][1]


def test_the_last_policy_of_a_level_counts(server: Server) -> None:
    found = server.config("http", "levels")["dynamic_batching"]["priority_queue_policy"]["1"]
    assert (found["max_queue_size"], found["timeout_action"]) == (7, "REJECT")


@FRONTS
@pytest.mark.parametrize(("model", "expected"), [("e_input_map", [103, 104]), ("e_output_map", [11, 12])])
def test_the_last_entry_of_a_steps_maps_counts(server: Server, front: str, model: str, expected: list[float]) -> None:
    given = {"A": [1, 2], "A2": [3, 4]} if model == "e_input_map" else {"A": [1, 2]}
    assert server.ask(front, model, **given).as_numpy("B").tolist() == expected


@FRONTS
@pytest.mark.parametrize("model", [*OUTPUTS, *ENSEMBLES])
def test_the_configuration_and_the_metadata_have_every_listing(server: Server, front: str, model: str) -> None:
    name = "Y" if model in OUTPUTS else "B"
    assert [one["name"] for one in server.config(front, model)["output"]] == [name, name]
    if front == "http":
        listed = [
            (one["name"], one["datatype"], one["shape"]) for one in server.http.get_model_metadata(model)["outputs"]
        ]
    else:
        found = server.grpc.get_model_metadata(model).outputs
        listed = [(one.name, one.datatype, [*one.shape]) for one in found]
    config = server.config("http", model)["output"]
    assert listed == [(name, one["data_type"].removeprefix("TYPE_"), one["dims"]) for one in config]


@FRONTS
@pytest.mark.parametrize("model", OUTPUTS)
def test_a_response_has_the_output_once_as_first_listed(server: Server, front: str, model: str) -> None:
    _, _, shape, datatype = OUTPUTS[model]
    answer = server.ask(front, model, X=[1, 2])
    made = answer.get_response()
    made = made if front == "http" else json_format.MessageToDict(made, preserving_proto_field_name=True)
    assert [(one["name"], one["datatype"], [*map(int, one["shape"])]) for one in made["outputs"]] == [
        ("Y", datatype, shape)
    ]
    assert answer.as_numpy("Y").ravel().tolist() == [1, 2]


@FRONTS
@pytest.mark.parametrize("model", ENSEMBLES)
def test_an_ensemble_answers_with_the_output_once(server: Server, front: str, model: str) -> None:
    answer = server.ask(front, model, A=[1, 2])
    made = answer.get_response()
    outputs = made["outputs"] if front == "http" else made.outputs
    assert len(outputs) == 1
    assert answer.as_numpy("B").tolist() == [1, 2]


def test_an_ensemble_over_a_model_that_lists_its_output_twice(server: Server, on_triton: bool) -> None:
    if on_triton:
        pytest.skip("Triton takes the two listings for two outputs that are mapped to one tensor, and refuses it")
    assert server.ask("http", "e_over_twice", A=[1, 2]).as_numpy("B").tolist() == [1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_with_an_input_listed_twice_answers_no_request(server: Server, count: int) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    answer = httpx.post(f"{server.url}/v2/models/input_twice/infer", json={"inputs": [tensor] * count}, verify=False)
    assert answer.status_code >= 400


@FRONTS
@pytest.mark.parametrize("place", PLACES)
def test_an_output_listed_twice_of_a_model_that_batches(server: Server, front: str, place: str) -> None:
    assert server.ask(front, f"{place}_batches", X=[[1, 2], [3, 4]]).as_numpy("Y").tolist() == [[1, 2], [3, 4]]


def test_an_output_listed_twice_of_a_decoupled_model(server: Server) -> None:
    received: queue.Queue[Any] = queue.Queue()
    server.grpc.start_stream(lambda result, error: received.put(error or result))
    tensor = tritonclient.grpc.InferInput("X", [2], "FP32").set_data_from_numpy(np.array([1, 2], np.float32))
    server.grpc.async_stream_infer("streams", [tensor])
    answers = [received.get(timeout=30) for _ in range(2)]
    server.grpc.stop_stream()
    assert [one.as_numpy("Y").tolist() for one in answers] == [[1, 2], [2, 3]]


def test_an_output_listed_twice_can_be_asked_for(server: Server) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    body = {"inputs": [tensor], "outputs": [{"name": "Y"}]}
    answer = httpx.post(f"{server.url}/v2/models/same/infer", json=body, verify=False)
    assert (answer.status_code, len(answer.json()["outputs"])) == (200, 1)


@pytest.mark.parametrize("model", ["labels_first", "labels_second"])
def test_the_label_file_of_either_listing_counts(server: Server, model: str) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    body = {"inputs": [tensor], "outputs": [{"name": "Y", "parameters": {"classification": 1}}]}
    (found,) = httpx.post(f"{server.url}/v2/models/{model}/infer", json=body, verify=False).json()["outputs"]
    assert found["data"] == ["2.000000:1:d"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_in_any_listing_is_refused(server: Server, name: str) -> None:
    rows = httpx.post(f"{server.url}/v2/repository/index", verify=False).json()
    (row,) = (row for row in rows if row["name"] == name)
    assert row.get("state") != "READY"
    log = server.log.read_text() if server.log.exists() else ""
    assert REFUSED[name][1] in row.get("reason", "") + log


# ---------------------------------------------------------------------------------------------- JSON in a load call


def document(*fields: str) -> str:
    """A configuration in JSON; Python's own encoder repeats no name."""
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [2]}
    return "{" + ", ".join((f'"backend": "python", "input": [{json.dumps(tensor)}]', *fields)) + "}"


def listed(*outputs: tuple[str, int]) -> str:
    made = [{"name": name, "data_type": "TYPE_FP32", "dims": [dim]} for name, dim in outputs]
    return f'"output": {json.dumps(made)}'


OUT = listed(("Y", 2))
JSON: Mapping[str, tuple[str, Callable[[dict[str, Any]], Any], Any]] = {
    "map twice": (
        document(
            OUT,
            '"parameters": {"a": {"string_value": "one"}, "b": {"string_value": "x"}}',
            '"parameters": {"a": {"string_value": "two"}}',
        ),
        lambda config: {key: value["string_value"] for key, value in config["parameters"].items()},
        {"a": "two", "b": "x"},
    ),
    "number twice": (
        document(OUT, '"max_batch_size": 4', '"max_batch_size": 8'),
        lambda config: config["max_batch_size"],
        8,
    ),
    "two spellings": (
        document(OUT, '"max_batch_size": 4', '"maxBatchSize": 8'),
        lambda config: config["max_batch_size"],
        8,
    ),
    "list twice": (
        document(OUT, listed(("W", 2))),
        lambda config: [one["name"] for one in config["output"]],
        ["Y", "W"],
    ),
    "output twice": (
        document(listed(("Y", 2), ("Y", -1))),
        lambda config: [one["dims"] for one in config["output"]],
        [[2], [-1]],
    ),
}


@pytest.mark.parametrize("case", JSON)
def test_a_field_given_twice_in_json(server: Server, case: str) -> None:
    text, look, expected = JSON[case]
    url = f"{server.url}/v2/repository/models/straight/load"
    assert httpx.post(url, json={"parameters": {"config": text}}, verify=False).status_code == 200
    assert look(server.config("http", "straight")) == expected
    assert httpx.post(url, json={}, verify=False).status_code == 200  # its own configuration again


@pytest.mark.parametrize(
    "more",
    [
        '"metric_tags": {"a": "1", "a": "2"}',
        '"parameters": {"a": {"string_value": "1"}, "a": {"string_value": "2"}}',
        '"dynamic_batching": {}, "dynamic_batching": {}',
        '"dynamic_batching": {}, "sequence_batching": {}',
    ],
)
def test_a_key_or_an_object_given_twice_in_json_is_refused(server: Server, more: str, on_triton: bool) -> None:
    text = document(OUT, '"max_batch_size": 4', more)
    url = f"{server.url}/v2/repository/models/straight/load"
    answer = httpx.post(url, json={"parameters": {"config": text}}, verify=False)
    assert answer.status_code == (500 if on_triton else 400)  # a client's mistake
    assert server.ask("http", "straight", X=[1, 2]).as_numpy("Y").tolist() == [1, 2]
