"""What models and clients read of both servers: names and constants of Triton's classes, the errors of `execute` and of
shapes, batch tensors that no model reads, and what is said about models that do not serve.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

PLACES = ("process", "thread", "inline")  # Triton ignores the parameter
IN_EACH_PLACE = pytest.mark.parametrize("place", PLACES)
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])
X, Y = spec("X", "FP32", "-1"), spec("Y", "FP32", "-1")
CPU = "instance_group [ { kind: KIND_CPU } ]"
EVALUATES = """
def raised(self, function):
    try:
        return repr(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def execute(self, requests):
    import copy, pickle
    import c_python_backend_utils
    found = []
    for request in requests:
        names = {**globals(), **locals(), "raised": self.raised}
        found.append(respond(TEXT=np.array([json.dumps(eval(given(request, "CODE")[0].decode(), names))], object)))
    return found
"""
RETURNS = """
def execute(self, requests):
    responses = [respond(Y=given(request, "X")) for request in requests]
    return {returned}
"""
RAISES = """
def execute(self, requests):
    {statement}
    return []
"""
ECHOES = RETURNS.format(returned="responses")
# What a model does, and the beginning of the error.
FAILURES = {
    "too_few": (
        RETURNS.format(returned="[]"),
        (
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"
        ),
    ),
    "too_many": (
        RETURNS.format(returned="responses * 2"),
        (
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2"
        ),
    ),
    "no_list": (
        RETURNS.format(returned="responses[0]"),
        "Expected a list in the execute return, found type '<class 'c_python_backend_utils.InferenceResponse'>'.",
    ),
    "request": (
        RETURNS.format(returned="requests"),
        (
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'c_python_backend_utils.InferenceRequest'>'."
        ),
    ),
    "number": (
        RETURNS.format(returned="[5]"),
        "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
    ),
    "no_text": (RAISES.format(statement="assert not requests"), "AssertionError: <EMPTY MESSAGE>"),
    "empty_text": (RAISES.format(statement="raise ValueError('')"), "ValueError: <EMPTY MESSAGE>"),
    "list": (
        RAISES.format(statement="pb_utils.Tensor('Y', [[1.0]])"),
        (
            "TypeError: __init__(): incompatible constructor arguments. The following argument types are supported:\n"
            "    1. c_python_backend_utils.Tensor(arg0: str, arg1: numpy.ndarray)\n\nInvoked with: 'Y', [[1.0]]"
        ),
    ),
}
RETURNS_A_LIST = """
def execute(self, requests):
    return []
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: {size}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
ensemble_scheduling {{ step [ {{ model_name: "{model}" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }} ] }}
{more}
"""
BATCH_TENSORS = """
batch_input [ { kind: BATCH_ITEM_SHAPE target_name: "SHAPE" data_type: TYPE_FP32 source_input: "X" } ]
batch_output [ { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" } ]
"""
NAMES_INPUTS = """
def execute(self, requests):
    names = ",".join(tensor.name() for tensor in requests[0].inputs())
    return [respond(Y=given(one, "X"), NAMES=np.array([[names]], object)) for one in requests]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Server(NamedTuple):
    url: str
    grpc: tritonclient.grpc.InferenceServerClient
    grpc_url: str

    def infer(self, protocol: str, model: str, array: Any) -> tuple[Any, Any]:
        """The status, and the outputs or the error."""
        array = np.asarray(array, np.float32)
        if protocol == "http":
            tensor = {"name": "X", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
            url = f"{self.url}/v2/models/{model}/infer"
            reply = httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)
            if reply.status_code != 200:
                return reply.status_code, reply.json()["error"]
            return 200, {output["name"]: output["data"] for output in reply.json()["outputs"]}
        given = tritonclient.grpc.InferInput("X", array.shape, "FP32").set_data_from_numpy(array)
        try:
            found = self.grpc.infer(model, [given])
        except tritonclient.grpc.InferenceServerException as error:
            codes = {"StatusCode.INVALID_ARGUMENT": 400, "StatusCode.INTERNAL": 500}
            return codes[error.status()], error.message()
        outputs = found.get_response().outputs
        texts = {one.name: found.as_numpy(one.name).ravel().tolist() for one in outputs}
        return 200, {
            name: [one.decode() if isinstance(one, bytes) else one for one in data] for name, data in texts.items()
        }

    def evaluated(self, place: str, code: str) -> Any:
        """The value of an expression in a model that runs in this place."""
        tensor = {"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [code]}
        url = f"{self.url}/v2/models/evaluates_{place}/infer"
        reply = httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)
        assert reply.status_code == 200, reply.text
        return json.loads(reply.json()["outputs"][0]["data"][0])

    def streamed(self, model: str) -> list[Any]:
        """The responses to a request over a stream of gRPC."""
        request = service_pb2.ModelInferRequest(model_name=model, id="a")
        request.inputs.add(name="X", datatype="FP32", shape=[1])
        request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
        with grpc.insecure_channel(self.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return [*stub.ModelStreamInfer(iter([request]), timeout=60)]

    def listed(self, *, ready: bool = False) -> dict[str, Any]:
        body = {"ready": True} if ready else {}
        rows = httpx.post(f"{self.url}/v2/repository/index", json=body, timeout=60, verify=False).json()
        return {row.pop("name"): row for row in rows}


def execution(place: str) -> str:
    return f'parameters {{ key: "execution" value {{ string_value: "{place}" }} }}'


def write_models(repository: Path) -> None:
    text = [spec("CODE", "STRING", "1")], [spec("TEXT", "STRING", "1")]
    for place in PLACES:
        where = CPU, execution(place)
        write_model(repository, f"evaluates_{place}", python_config(*text, *where), EVALUATES)
        for name, (body, _) in FAILURES.items():
            write_model(repository, f"{name}_{place}", python_config([X], [Y], *where), body)
        if place != "inline":
            write_model(repository, f"streams_{place}", python_config([X], [Y], DECOUPLED, *where), RETURNS_A_LIST)
    four = spec("X", "FP32", "4")
    write_model(repository, "rows", python_config([four], [Y], "max_batch_size: 8", CPU), ECHOES)
    write_model(repository, "single", python_config([four], [Y], CPU), ECHOES)
    write_model(repository, "ragged_rows", ENSEMBLE.format(size=8, model="rows", more=""), versions=("1",))
    write_model(repository, "any_single", ENSEMBLE.format(size=0, model="single", more=""), versions=("1",))
    ragged = spec("X", "FP32", "-1", "allow_ragged_batch: true"), spec("NAMES", "STRING", "1")
    config = python_config([ragged[0]], [Y, ragged[1]], "max_batch_size: 8", CPU, BATCH_TENSORS)
    write_model(repository, "batch_tensors", config, NAMES_INPUTS)
    more = ENSEMBLE.format(size=8, model="batch_tensors", more=BATCH_TENSORS)
    write_model(repository, "ensemble_batch_tensors", more, versions=("1",))
    policy = "version_policy { specific { versions: [ 7 ] } }"
    write_model(repository, "no_version", python_config([X], [Y], policy, CPU), ECHOES)
    write_model(repository, ".hidden", python_config([X], [Y], CPU), ECHOES)
    (repository / "docs").mkdir()
    (repository / "docs" / "notes.txt").touch()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("texts") / "models"
    write_models(repository)
    port = free_port()
    options = "--allow-grpc=true", "--grpc-address=127.0.0.1", f"--grpc-port={port}"
    url = triton_like(repository, "--exit-on-error=false", "--strict-readiness=false", *options)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield Server(url, client, f"127.0.0.1:{port}")


# -------------------------------------------------------------------------------------------------- names and constants

ERROR = "pb_utils.TritonError"
VALUES: dict[str, tuple[str, Any]] = {
    "classes": (
        (
            "[repr(getattr(pb_utils, name)) for name in ('InferenceRequest', 'InferenceResponse', 'Tensor', "
            "'TritonError', 'TritonModelException')]"
        ),
        [
            f"<class 'c_python_backend_utils.{name}'>"
            for name in ("InferenceRequest", "InferenceResponse", "Tensor", "TritonError", "TritonModelException")
        ],
    ),
    "request": (
        "[repr(type(request)), type(request).__name__, type(request).__module__, type(request).__qualname__]",
        [
            "<class 'c_python_backend_utils.InferenceRequest'>",
            "InferenceRequest",
            "c_python_backend_utils",
            "InferenceRequest",
        ],
    ),
    "input": ("repr(type(request.inputs()[0]))", "<class 'c_python_backend_utils.Tensor'>"),
    "object": ("repr(request).partition(' object at')[0]", "<c_python_backend_utils.InferenceRequest"),
    "codes": (
        (
            f"[int(getattr({ERROR}, name)) for name in ('UNKNOWN', 'INTERNAL', 'NOT_FOUND', 'INVALID_ARG', "
            "'UNAVAILABLE', 'UNSUPPORTED', 'ALREADY_EXISTS', 'CANCELLED')]"
        ),
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "code as text": (
        f"[*(f(code) for f in (repr, str, '{{}}'.format) for code in [{ERROR}.NOT_FOUND])]",
        [
            "<__ErrorCode.NOT_FOUND: 2>",
            "__ErrorCode.NOT_FOUND",
            "__ErrorCode.NOT_FOUND",
        ],
    ),
    "code of an error": (
        f"[repr({ERROR}('a').code()), {ERROR}('a', {ERROR}.NOT_FOUND).code().name, {ERROR}('a').code().value]",
        ["<__ErrorCode.INTERNAL: 1>", "NOT_FOUND", 1],
    ),
    "code as number": (
        (
            f"[{ERROR}.INVALID_ARG == 3, 3 == {ERROR}.INVALID_ARG, {ERROR}.INVALID_ARG != 3, "
            f"{ERROR}.INVALID_ARG == None, {{3: 'a'}}.get({ERROR}.INVALID_ARG), "
            f"'abcd'[{ERROR}.INVALID_ARG], hash({ERROR}.INVALID_ARG)]"
        ),
        [True, True, False, False, "a", "d", 3],
    ),
    "code as JSON": (
        f"raised(lambda: json.dumps({ERROR}.NOT_FOUND))",
        "TypeError: Object of type __ErrorCode is not JSON serializable",
    ),
    "pickled code": (f"pickle.loads(pickle.dumps({ERROR}.NOT_FOUND)) == {ERROR}.NOT_FOUND", True),
    "pickled exception": ("str(pickle.loads(pickle.dumps(pb_utils.TritonModelException('a'))))", "a"),
    "message of bytes": (f"{ERROR}(b'a').message()", "a"),
    "memory": (
        (
            "[repr(pb_utils.TRITONSERVER_MEMORY_CPU), str(pb_utils.TRITONSERVER_MEMORY_GPU), "
            "int(pb_utils.TRITONSERVER_MEMORY_GPU)]"
        ),
        ["<MemoryType.TRITONSERVER_MEMORY_CPU: 1>", "MemoryType.TRITONSERVER_MEMORY_GPU", 0],
    ),
    "kinds of metrics": (
        "[repr(one) for one in (pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE)]",
        ["<MetricKind.COUNTER: 0>", "<MetricKind.GAUGE: 1>"],
    ),
    "levels": (
        "[repr(pb_utils.Logger.INFO), str(pb_utils.Logger.LogLevel.ERROR), pb_utils.Logger.WARNING == 1]",
        ["<LogLevel.INFO: 0>", "LogLevel.ERROR", True],
    ),
    "types": (
        (
            "[pb_utils.triton_string_to_numpy('TYPE_BOOL') is bool, pb_utils.triton_to_numpy_type(1) is np.bool_, "
            "pb_utils.triton_string_to_numpy('TYPE_STRING') is np.object_]"
        ),
        [True, True, True],
    ),
    "tensor named by bytes": ("pb_utils.Tensor(b'Y', np.zeros(1)).name()", "Y"),
}


@IN_EACH_PLACE
@pytest.mark.parametrize("what", VALUES)
def test_classes_and_constants_show_themselves_as_tritons(server: Server, what: str, place: str) -> None:
    expression, value = VALUES[what]
    assert server.evaluated(place, expression) == value


@IN_EACH_PLACE
def test_an_unknown_attribute_of_a_request_is_named_with_its_class(server: Server, place: str) -> None:
    text = server.evaluated(place, "raised(lambda: request.no_such)")
    assert re.fullmatch(
        r"AttributeError: '(c_python_backend_utils\.)?InferenceRequest' object has no attribute 'no_such'", text
    )


@IN_EACH_PLACE
def test_a_level_may_be_the_constant(server: Server, place: str) -> None:
    assert server.evaluated(place, "raised(lambda: pb_utils.Logger.log('said', pb_utils.Logger.WARNING))") == "None"


# ------------------------------------------------------------------------------------------------- failures of execute


@PROTOCOLS
@IN_EACH_PLACE
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_execute_names_the_instance_and_what_is_wrong(
    server: Server, name: str, place: str, protocol: str
) -> None:
    status, error = server.infer(protocol, f"{name}_{place}", [1])
    begin, is_one, text = error.partition(f" '{name}_{place}_0_0', message: ")
    assert (status, begin) in [
        (500, f"Failed to process the request(s) for model{instance}") for instance in ("", " instance")
    ]
    assert is_one
    assert text.startswith(FAILURES[name][1])


@pytest.mark.parametrize("place", ["process", "thread"])
def test_a_decoupled_execute_that_returns_a_list_fails_as_any(server: Server, place: str, on_triton: bool) -> None:
    error = next(one.error_message for one in server.streamed(f"streams_{place}") if one.error_message)
    name = f"streams_{place}_0_0"
    instance = "" if on_triton else " instance"
    assert error.startswith(
        f"Failed to process the request(s) for model{instance} '{name}', message: Python model '{name}' is using the "
        "decoupled mode and the execute function must return None."
    )


# ------------------------------------------------------------------------------------------------------------- shapes

NOTE = (
    ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@PROTOCOLS
@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        ("rows", (1, 3), "unexpected shape for input 'X' for model 'rows'. Expected [-1,4], got [1,3]" + NOTE),
        ("rows", (4,), "unexpected shape for input 'X' for model 'rows'. Expected [-1,4], got [4]" + NOTE),
        ("ragged_rows", (2, 3), "unexpected shape for input 'X' for model 'rows'. Expected [-1,4], got [2,3]" + NOTE),
        ("single", (3,), "unexpected shape for input 'X' for model 'single'. Expected [4], got [3]"),
        ("any_single", (3,), "unexpected shape for input 'X' for model 'single'. Expected [4], got [3]"),
    ],
)
def test_an_unexpected_shape_of_a_model_that_batches_has_the_note_about_its_batch_dimension(
    server: Server, protocol: str, model: str, shape: tuple[int, ...], text: str
) -> None:
    status, error = server.infer(protocol, model, np.ones(shape))
    assert (status, text in error, "NOTE" in error) == (400, True, "NOTE" in text), error


# ------------------------------------------------------------------------------------------------------ batch tensors


@PROTOCOLS
def test_batch_tensors_of_a_python_model_are_ignored(server: Server, protocol: str) -> None:
    assert server.infer(protocol, "batch_tensors", [[1, 2, 3]]) == (200, {"Y": [1.0, 2.0, 3.0], "NAMES": ["X"]})


@PROTOCOLS
def test_batch_tensors_of_an_ensemble_are_ignored(server: Server, protocol: str) -> None:
    assert server.infer(protocol, "ensemble_batch_tensors", [[1, 2, 3]]) == (200, {"Y": [1.0, 2.0, 3.0]})


@pytest.mark.parametrize("model", ["batch_tensors", "ensemble_batch_tensors"])
def test_batch_tensors_are_in_the_configuration(server: Server, model: str) -> None:
    config = httpx.get(f"{server.url}/v2/models/{model}/config", verify=False).json()
    assert (config["batch_input"][0]["target_name"], config["batch_output"][0]["target_name"]) == (["SHAPE"], ["Y"])


# ------------------------------------------------------------------------------------------- models that do not serve


@pytest.mark.parametrize("model", ["nowhere", "no_version", "docs", ".git", "rows/versions/9", "no_version/versions/1"])
def test_a_model_that_does_not_serve_is_not_ready_over_http(server: Server, model: str) -> None:
    reply = httpx.get(f"{server.url}/v2/models/{model}/ready", verify=False)
    assert (reply.status_code, reply.json()["error"][:23]) == (400, "Model version not ready")


@pytest.mark.parametrize("model", ["nowhere", "no_version", "docs", ".git"])
def test_a_model_that_does_not_serve_is_not_ready_over_grpc(server: Server, model: str) -> None:
    assert server.grpc.is_model_ready(model) is False
    assert server.grpc.is_model_ready("rows", "9") is False


def test_the_index_of_models_that_do_not_serve(server: Server, on_triton: bool) -> None:
    """flowserve tells the reason, and lists neither hidden folders nor those without a model."""
    rows = server.listed()
    names = {name for name in ("no_version", "docs", ".hidden") if name in rows}
    if on_triton:
        assert names == {"docs", ".hidden"}
        assert rows["docs"] == {}
    else:
        assert names == {"no_version"}
        assert rows["no_version"]["state"] == "UNAVAILABLE"
        assert "at least one version must be available under the version policy" in rows["no_version"]["reason"]
    assert {"no_version", "docs", "nowhere"}.isdisjoint(server.listed(ready=True))


def test_an_error_of_a_stream_is_final(server: Server, on_triton: bool) -> None:
    """2.51 has no such parameter in the error of a request that no model ran; flowserve's ends the request."""
    (one,) = server.streamed("nowhere")
    assert one.error_message.startswith("Request for unknown model: 'nowhere' is not found")
    assert ("triton_final_response" in one.infer_response.parameters) is not on_triton


def test_the_statistics_of_a_version_that_is_loaded_again(
    tmp_path: Path, triton_like: Callable[..., str], on_triton: bool
) -> None:
    """Triton resets them; flowserve goes on counting, as its metrics do."""
    write_model(tmp_path / "models", "m", python_config([X], [Y], CPU), ECHOES)
    url = triton_like(tmp_path / "models", "--model-control-mode=explicit", "--load-model=m")
    tensor = {"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}

    def count() -> int:
        reply = httpx.post(f"{url}/v2/models/m/infer", json={"inputs": [tensor]}, timeout=60, verify=False)
        assert reply.status_code == 200
        rows = httpx.get(f"{url}/v2/models/m/stats", verify=False).json()["model_stats"]
        return int(rows[0]["inference_stats"]["success"]["count"])

    assert (count(), count()) == (1, 2)
    with (tmp_path / "models" / "m" / "1" / "model.py").open("a") as file:
        file.write("# changed\n")
    assert httpx.post(f"{url}/v2/repository/models/m/load", json={}, timeout=60, verify=False).status_code == 200
    assert count() == (1 if on_triton else 3)
