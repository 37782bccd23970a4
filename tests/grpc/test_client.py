"""Triton's own gRPC client against a real server: every call and every data type.

docs/compatibility.md is the table of these calls; the last test here keeps it complete.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import aio
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import Served
from flowserve.values import BY_WIRE, DType
from flowserve.version import __version__

pytestmark = pytest.mark.server


VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    **{one.wire: [np.iinfo(one.numpy).min, np.iinfo(one.numpy).max, 7] for one in DType if "INT" in one.wire},
    "FP16": [0.5, -65504.0, 6e-8],
    "BF16": [1.5, -3.0e38, 1e-30],
    "FP32": [0.1, -3.4e38, np.nan],
    "FP64": [0.1, -1.7e308, 5e-324],
    "BYTES": [b"", "ünïcode".encode(), b"a\nb\x00c"],
}


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def numbers(*values: float) -> triton.InferInput:
    return tensor("IN", np.array(values, np.float32))


def batch(*values: float) -> triton.InferInput:
    return tensor("IN", np.array([values], np.float32))


def refused(code: str, text: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(InferenceServerException, match=re.escape(text)) as raised:
        call(*arguments, **named)
    assert raised.value.status() == f"StatusCode.{code}"


def test_single_requests_to_a_process_get_their_own_responses(client: Client) -> None:
    for number in range(160):
        answer = client.infer("single", [batch(number)], request_id=str(number))
        assert (answer.as_numpy("OUT").tolist(), answer.get_response().id) == ([[number]], str(number))
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    for number in range(20):
        client.async_stream_infer("single", [batch(number)], request_id=str(number))
        result, error = results.get(timeout=20)
        assert error is None
        assert (result.as_numpy("OUT").tolist(), result.get_response().id) == ([[number]], str(number))
    client.stop_stream()
    refused("INVALID_ARGUMENT", "unexpected shape for input 'IN'", client.infer, "single", [batch(1, 2)])
    counted = client.get_inference_statistics("single").model_stats[0]
    assert (counted.inference_count, counted.execution_count) == (180, 180)


def calls_of(client: type) -> list[str]:
    return [name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))]


# ----------------------------------------------------------------------------------------------- metadata, settings


def test_the_server_is_live_and_ready(client: Client) -> None:
    assert client.is_server_live() is True
    assert client.is_server_ready() is True


def test_a_model_is_ready_by_name_and_by_version(client: Client) -> None:
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1")
    assert not client.is_model_ready("echo", "2")
    assert not client.is_model_ready("absent")
    refused("INVALID_ARGUMENT", "failed to get model version", client.is_model_ready, "echo", "one")


def test_server_metadata_has_name_version_and_extensions(client: Client) -> None:
    reply = client.get_server_metadata()
    assert (reply.name, reply.version) == ("triton", __version__)
    assert "classification" in reply.extensions


def test_a_models_metadata_lists_its_versions_and_tensors(client: Client) -> None:
    reply = client.get_model_metadata("echo", as_json=True)
    assert reply["versions"] == ["1"]
    assert reply["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": ["-1", "-1"]}]
    refused("NOT_FOUND", "Request for unknown model: 'absent' is not found", client.get_model_metadata, "absent")
    refused("NOT_FOUND", "'echo' version 9 is not found", client.get_model_metadata, "echo", "9")


def test_a_models_configuration_is_the_completed_one(client: Client) -> None:
    reply = client.get_model_config("repeats").config
    assert (reply.name, reply.backend, reply.model_transaction_policy.decoupled) == ("repeats", "python", True)
    assert client.get_model_config("echo").config.max_batch_size == 8


def test_statistics_count_requests(client: Client) -> None:
    def count() -> int:
        (row,) = client.get_inference_statistics("echo", "1").model_stats
        return int(row.inference_stats.success.count)

    before = count()
    client.infer("echo", [batch(1)])
    assert count() == before + 1
    assert {row.name for row in client.get_inference_statistics().model_stats} >= {"echo", "repeats"}
    refused("INVALID_ARGUMENT", "requested model 'absent' is not available", client.get_inference_statistics, "absent")


def test_models_are_listed_unloaded_and_loaded(client: Client) -> None:
    def state() -> tuple[str, str]:
        (row,) = [row for row in client.get_model_repository_index().models if row.name == "fails"]
        return row.state, row.reason

    assert state() == ("READY", "")
    refused("INTERNAL", "no, thank you", client.infer, "fails", [numbers(1)])
    client.unload_model("fails", client_timeout=20)  # waits for all users of the model; a failed call must not be one
    assert state() == ("UNAVAILABLE", "unloaded")
    refused("UNAVAILABLE", "is not at ready state", client.infer, "fails", [numbers(1)])
    assert not client.is_model_ready("fails")
    client.load_model("fails")
    assert client.is_model_ready("fails")
    refused("INVALID_ARGUMENT", "failed to load 'absent'", client.load_model, "absent")


def test_a_model_is_loaded_with_a_configuration_and_files_from_the_call(client: Client, repository: Path) -> None:
    model = (repository / "echo/1/model.py").read_bytes()
    config = {
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    client.load_model("brought", config=json.dumps(config), files={"file:1/model.py": model})
    assert client.infer("brought", [numbers(1, 2)]).as_numpy("OUT").tolist() == [1, 2]
    client.unload_model("brought", unload_dependents=True)


@pytest.mark.fault("W10")
def test_a_load_call_with_too_many_files_is_refused(client: Client) -> None:
    files = dict.fromkeys([f"file:1/{n}" for n in range(10_001)], b"")
    refused("INVALID_ARGUMENT", "at most 10000 'file:'", client.load_model, "many", config="{}", files=files)


@pytest.mark.fault("Z3")
def test_settings_are_read_and_changed(client: Client) -> None:
    assert client.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
    reply = client.update_log_settings({"log_verbose_level": 1}, as_json=True)
    assert reply["settings"]["log_verbose_level"] == {"uint32_param": 1}
    client.update_log_settings({"log_verbose_level": 0})
    refused("UNIMPLEMENTED", "log file location can not be updated", client.update_log_settings, {"log_file": "x"})
    refused("UNIMPLEMENTED", "trace file location", client.update_trace_settings, settings={"trace_file": "x"})
    assert client.get_trace_settings(as_json=True)["settings"]["trace_level"] == {"value": ["OFF"]}
    assert client.update_trace_settings(settings={"trace_rate": "1000"}).settings["trace_rate"].value == ["1000"]
    refused("UNIMPLEMENTED", "trace file", client.update_trace_settings, settings={"trace_file": ["elsewhere"]})
    refused("INVALID_ARGUMENT", "Request for unknown model : absent", client.get_trace_settings, "absent")


# ------------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("kind", sorted(BY_WIRE))
def test_every_data_type_round_trips(client: Client, kind: str) -> None:
    array = np.array(VALUES[kind], BY_WIRE[kind].numpy)
    back = client.infer("types", [tensor(f"IN_{kind}", array, kind)]).as_numpy(f"OUT_{kind}")
    np.testing.assert_array_equal(back, array)


def test_an_empty_tensor_round_trips(client: Client) -> None:
    assert client.infer("types", [tensor("IN_INT64", np.zeros(0, np.int64), "INT64")]).as_numpy("OUT_INT64").size == 0


def test_a_response_has_the_model_version_and_request_id(client: Client) -> None:
    reply = client.infer("echo", [batch(1, 2)], model_version="1", request_id="mine").get_response()
    assert (reply.model_name, reply.model_version, reply.id) == ("echo", "1", "mine")
    assert list(reply.outputs[0].shape) == [1, 2]


def test_only_requested_outputs_are_returned(client: Client) -> None:
    inputs = [tensor("IN_FP32", np.ones(1, np.float32)), tensor("IN_INT8", np.ones(1, np.int8), "INT8")]
    answer = client.infer("types", inputs, outputs=[triton.InferRequestedOutput("OUT_INT8")])
    assert [output.name for output in answer.get_response().outputs] == ["OUT_INT8"]


def test_classes_have_labels(client: Client) -> None:
    outputs = [triton.InferRequestedOutput("OUT", class_count=2)]
    answer = client.infer("score", [numbers(0.5, 2.0, 1.0)], outputs=outputs)
    assert answer.as_numpy("OUT").tolist() == [b"2.000000:1:dog", b"1.000000:2:bird"]


def test_parameters_reach_the_model(client: Client) -> None:
    answer = client.infer("tells", [numbers(1)], parameters={"a": "b", "n": 3, "f": True}, priority=0, timeout=10**6)
    assert json.loads(answer.as_numpy("OUT")[0]) == {"a": "b", "n": 3, "f": True}


def test_32_concurrent_requests_get_their_own_responses(client: Client) -> None:
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for n in range(32):
        client.async_infer("echo", [batch(n)], lambda result, error, n=n: answers.put((n, result, error)))
    for _ in range(32):
        n, result, error = answers.get(timeout=30)
        assert error is None
        assert result.as_numpy("OUT").tolist() == [[n]]


def test_a_tensor_of_eight_megabytes_round_trips(client: Client) -> None:
    array = np.arange(2**21, dtype=np.float32)
    np.testing.assert_array_equal(client.infer("score", [tensor("IN", array)]).as_numpy("OUT"), array)


def test_a_compressed_request_is_accepted(client: Client) -> None:
    for algorithm in ("gzip", "deflate"):
        assert client.infer("echo", [batch(7)], compression_algorithm=algorithm).as_numpy("OUT").tolist() == [[7]]


def test_errors_have_their_status_and_text(client: Client) -> None:
    refused("NOT_FOUND", "Request for unknown model: 'absent' is not found", client.infer, "absent", [batch(1)])
    refused(
        "INVALID_ARGUMENT",
        "unexpected inference input 'X'",
        client.infer,
        "echo",
        [tensor("X", np.ones((1, 1), np.float32))],
    )
    refused(
        "INVALID_ARGUMENT", "batch-size must be <= 8", client.infer, "echo", [tensor("IN", np.ones((9, 1), np.float32))]
    )
    refused("INTERNAL", "no, thank you", client.infer, "fails", [numbers(1)])
    refused(
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
        client.infer,
        "repeats",
        [numbers(1)],
    )


@pytest.mark.fault("Z1", "Z5")
def test_path_traversal_is_refused_and_error_texts_contain_no_server_path(client: Client, repository: Path) -> None:
    config = json.dumps({"backend": "python"})
    errors = []
    for call in (
        lambda: client.load_model("../echo"),
        lambda: client.load_model("echo/1"),
        lambda: client.load_model("new", config=config, files={"file:../../stolen": b"x"}),
        lambda: client.load_model("new", config=config, files={"file:/tmp/stolen": b"x"}),
        lambda: client.get_model_config("../echo"),
        lambda: client.get_model_metadata("echo", "../1"),
        lambda: client.infer("../echo", [batch(1)]),
        lambda: client.register_system_shared_memory("r", "../../etc/passwd", 8),
        lambda: client.infer("fails", [numbers(1)]),
    ):
        with pytest.raises(InferenceServerException) as refusal:
            call()  # type: ignore[no-untyped-call]
        errors.append((refusal.value.status().removeprefix("StatusCode."), refusal.value.message()))
    assert {status for status, _ in errors[:-1]} == {"INVALID_ARGUMENT", "NOT_FOUND"}
    for _, text in errors:
        assert str(repository) not in text
        assert "Traceback" not in text
    assert not [*repository.parent.glob("**/stolen")]


# ------------------------------------------------------------------------------------------------------- shared memory


@pytest.fixture
def region(client: Client) -> Iterator[Any]:
    made = shm.create_shared_memory_region("region", "/flowserve_grpc_test", 64)
    try:
        client.register_system_shared_memory("region", "/flowserve_grpc_test", 64)
        yield made
    finally:
        client.unregister_system_shared_memory("region")
        shm.destroy_shared_memory_region(made)


def test_tensors_are_read_from_shared_memory_and_written_to_it(client: Client, region: Any) -> None:
    assert client.get_system_shared_memory_status("region").regions["region"].byte_size == 64
    again = ("region", "/flowserve_grpc_test", 64)
    refused("ALREADY_EXISTS", "already in manager", client.register_system_shared_memory, *again)
    shm.set_shared_memory_region(region, [np.array([[1, 2]], np.float32)])
    given = triton.InferInput("IN", [1, 2], "FP32")
    given.set_shared_memory("region", 8)
    wanted = triton.InferRequestedOutput("OUT")
    wanted.set_shared_memory("region", 8, offset=32)
    answer = client.infer("echo", [given], outputs=[wanted])
    assert not answer.get_response().raw_output_contents
    assert shm.get_contents_as_numpy(region, np.float32, [1, 2], offset=32).tolist() == [[1, 2]]
    wanted.set_shared_memory("region", 4, offset=32)
    refused("INVALID_ARGUMENT", "should be at least 8 bytes", client.infer, "echo", [given], outputs=[wanted])
    given.set_shared_memory("nowhere", 8)
    refused("NOT_FOUND", "Unable to find shared memory region: 'nowhere'", client.infer, "echo", [given])


def test_an_invalid_cuda_handle_is_refused_with_the_reason(client: Client) -> None:
    assert not client.get_cuda_shared_memory_status().regions
    text = "failed to register CUDA shared memory region"
    refused("INVALID_ARGUMENT", text, client.register_cuda_shared_memory, "r", b"aGFuZGxl", 0, 64)
    refused("NOT_FOUND", "Unable to find cuda shared memory region: 'r'", client.get_cuda_shared_memory_status, "r")
    client.unregister_cuda_shared_memory("r")


# --------------------------------------------------------------------------------------------------- the client's own


def test_a_plugin_of_the_client_adds_its_header(client: Client) -> None:
    plugin = BasicAuth("me", "secret")
    client.register_plugin(plugin)
    assert client.plugin() is plugin
    assert client.is_server_live()
    client.unregister_plugin()


def test_the_server_survives_a_closed_client(served: Served, client: Client) -> None:
    other = Client(served.grpc_address)
    other.start_stream(lambda result, error: None)
    other.close()
    assert client.is_server_live()


def test_the_asyncio_client_makes_every_call(served: Served) -> None:
    async def requests() -> Any:
        for count in (2, 0, 1):
            yield {"model_name": "repeats", "inputs": [numbers(count)], "request_id": f"r{count}"}

    async def talk(client: aio.InferenceServerClient) -> None:
        client.register_plugin(BasicAuth("user", "secret"))
        assert client.plugin() is not None
        client.unregister_plugin()
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("echo", "1")
        assert (await client.get_server_metadata()).name == "triton"
        assert (await client.get_model_metadata("echo")).versions == ["1"]
        assert (await client.get_model_config("echo")).config.name == "echo"
        assert any(row.name == "echo" for row in (await client.get_model_repository_index()).models)
        assert (await client.get_inference_statistics("echo")).model_stats
        assert (await client.get_trace_settings()).settings["trace_level"].value == ["OFF"]
        assert (await client.update_trace_settings(settings={"trace_level": ["OFF"]})).settings["trace_rate"].value
        assert (await client.get_log_settings()).settings["log_info"].bool_param
        assert (await client.update_log_settings({"log_warning": True})).settings["log_warning"].bool_param
        await client.unload_model("score")
        assert not await client.is_model_ready("score")
        await client.load_model("score")
        assert await client.is_model_ready("score")
        made = shm.create_shared_memory_region("aio", "/flowserve_grpc_aio_test", 64)
        try:
            await client.register_system_shared_memory("aio", "/flowserve_grpc_aio_test", 64)
            assert (await client.get_system_shared_memory_status("aio")).regions["aio"].byte_size == 64
            await client.unregister_system_shared_memory("aio")
        finally:
            shm.destroy_shared_memory_region(made)
        assert not (await client.get_cuda_shared_memory_status()).regions
        with pytest.raises(InferenceServerException, match="CUDA shared memory"):
            await client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64)
        await client.unregister_cuda_shared_memory("r")
        answers = await asyncio.gather(*(client.infer("echo", [batch(n)]) for n in range(16)))
        assert [answer.as_numpy("OUT").tolist() for answer in answers] == [[[n]] for n in range(16)]
        got = [result.get_response().id async for result, error in client.stream_infer(requests()) if error is None]
        assert sorted(got) == ["r1", "r2", "r2"]

    async def main() -> None:
        async with aio.InferenceServerClient(served.grpc_address) as client:
            await talk(client)

    asyncio.run(main())


def test_the_asyncio_test_makes_every_call() -> None:
    made = Path(__file__).read_text().partition("def test_the_asyncio_client_makes_every_call")[2]
    made = made.partition("\n\n\ndef ")[0]
    missing = [call for call in calls_of(aio.InferenceServerClient) if f"client.{call}(" not in made]
    assert missing == ["close"]  # `async with` calls it


def test_the_grpc_health_service_reports_readiness(served: Served) -> None:
    from flowserve.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

    with grpc.insecure_channel(served.grpc_address) as channel:
        kinds = (HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
        check = channel.unary_unary("/grpc.health.v1.Health/Check", *kinds)
        for service in ("", "inference.GRPCInferenceService"):
            assert check(HealthCheckRequest(service=service)).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refusal:
            check(HealthCheckRequest(service="absent"))
        assert refusal.value.code() == grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", *kinds)(HealthCheckRequest())
        assert next(watch).status == HealthCheckResponse.SERVING
        watch.cancel()


def test_the_compatibility_table_lists_every_call(root: Path) -> None:
    page = (root / "docs/compatibility.md").read_text().partition("# The gRPC client")[2].partition("\n# ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(test_\w+)` \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == {*calls_of(Client)}
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_stream.py").read_text()
    assert [test for _, test in rows if f"def {test}(" not in here] == []
