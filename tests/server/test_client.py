"""Triton's own Python client against a real server: every call it has, every data type, both ways.

docs/compatibility.md is the table of these calls; the last tests here keep it complete.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.http import aio
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import Served
from flowserve.values import BY_WIRE
from flowserve.version import __version__

Client: TypeAlias = triton.InferenceServerClient

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    **{
        kind: [np.iinfo(kind.lower()).min, np.iinfo(kind.lower()).max, 7]
        for kind in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
    },
    "FP16": [0.5, -65504.0, 6e-8],
    "BF16": [1.5, -3.0e38, 1e-30],
    "FP32": [0.1, -3.4e38, 1e-45],
    "FP64": [0.1, -1.7e308, 5e-324],
    "BYTES": [b"", "ünïcode".encode(), b"a\nb\x00c"],
}
NUMPY = {
    **{kind: np.dtype(kind.lower()) for kind in VALUES if "INT" in kind},
    "BOOL": np.dtype(bool),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
BINARY_ONLY = ("FP16", "BF16")


def rows(wire_name: str, count: int) -> np.ndarray[Any, Any]:
    """`count` different rows of three values, extremes among them."""
    values = np.array(VALUES[wire_name], NUMPY[wire_name])
    return np.stack([np.roll(values, row) for row in range(count)])


def tensor(
    name: str, array: np.ndarray[Any, Any], wire_name: str = "FP32", *, binary: bool = True
) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), wire_name).set_data_from_numpy(array, binary_data=binary)


def numbers(*row: float) -> np.ndarray[Any, Any]:
    return np.array([row], np.float32)


def wanted(name: str, *, binary: bool = True) -> triton.InferRequestedOutput:
    return triton.InferRequestedOutput(name, binary_data=binary)


def refused(status: int, text: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(InferenceServerException, match=re.escape(text)) as raised:
        call(*arguments, **named)
    assert raised.value.status() == str(status)


# ----------------------------------------------------------------------------------------- health, metadata, statistics


def test_the_server_is_live_and_ready(client: Client) -> None:
    assert client.is_server_live() is True
    assert client.is_server_ready() is True


def test_a_model_is_ready_by_name_and_by_version(client: Client) -> None:
    assert client.is_model_ready("versioned")
    assert client.is_model_ready("versioned", "3")
    assert not client.is_model_ready("versioned", "2")
    assert not client.is_model_ready("nobody")
    assert client.is_model_ready("chain", "1")


def test_server_metadata_has_name_version_and_all_extensions(client: Client) -> None:
    told = client.get_server_metadata()
    assert (told["name"], told["version"]) == ("triton", __version__)
    assert "binary_tensor_data" in told["extensions"]


def test_a_models_metadata_lists_its_versions_and_tensors(client: Client) -> None:
    tensors = [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in ("IN", "OUT")]
    assert client.get_model_metadata("versioned") == {
        "name": "versioned",
        "versions": ["1", "3"],
        "platform": "onnxruntime_onnx",
        "inputs": tensors[:1],
        "outputs": tensors[1:],
    }
    assert client.get_model_metadata("versioned", "3")["versions"] == ["3"]
    refused(404, "'versioned' version 2 is not found", client.get_model_metadata, "versioned", "2")


def test_a_models_configuration_is_the_completed_one(client: Client) -> None:
    told = client.get_model_config("onnx_INT64")
    assert told["name"] == "onnx_INT64"
    assert (told["backend"], told["max_batch_size"]) == ("onnxruntime", 4)
    assert [one["name"] for one in told["input"]] == ["x"]
    assert client.get_model_config("versioned", "1")["version_policy"] == {"specific": {"versions": [1, 3]}}
    steps = client.get_model_config("chain")["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["gather", "plus_one", "times_three"]


def test_the_index_lists_every_version_that_serves(client: Client, repository: Path) -> None:
    index = client.get_model_repository_index()
    assert {row["name"] for row in index} == {folder.name for folder in repository.iterdir()}
    assert [row["version"] for row in index if row["name"] == "versioned"] == ["1", "3"]
    assert {row["state"] for row in index} == {"READY"}


def test_statistics_count_requests(client: Client) -> None:
    def count(version: str) -> tuple[int, int]:
        (row,) = client.get_inference_statistics("versioned", version)["model_stats"]
        return row["inference_stats"]["success"]["count"], row["inference_count"]

    before = count("1"), count("3")
    client.infer("versioned", [tensor("IN", np.zeros((5, 4), np.float32))], model_version="1")
    assert count("1") == (before[0][0] + 1, before[0][1] + 5)
    assert count("3") == before[1]
    versions = client.get_inference_statistics("versioned")["model_stats"]
    assert [row["version"] for row in versions] == ["1", "3"]
    assert {"versioned", "chain"} <= {row["name"] for row in client.get_inference_statistics()["model_stats"]}
    refused(400, "requested model 'nobody' is not available", client.get_inference_statistics, "nobody")


# ----------------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("wire_name", VALUES)
@pytest.mark.parametrize(("model", "given", "made"), [("py", "IN", "OUT"), ("onnx", "x", "y")])
def test_every_data_type_round_trips(client: Client, model: str, given: str, made: str, wire_name: str) -> None:
    ways = (True,) if wire_name in BINARY_ONLY else (True, False)
    for count in (1, 8 if model == "py" else 4):
        array = rows(wire_name, count)
        for binary_in in ways:
            for binary_out in ways:
                answer = client.infer(
                    f"{model}_{wire_name}",
                    [tensor(given, array, wire_name, binary=binary_in)],
                    outputs=[wanted(made, binary=binary_out)],
                )
                got, spec = answer.as_numpy(made), answer.get_output(made)
                assert (spec["datatype"], spec["shape"]) == (wire_name, [count, 3])
                assert ("data" in spec) is not binary_out
                expected = array
                if wire_name == "BYTES" and not binary_out:
                    got = np.array([[text.encode() for text in row] for row in got], np.object_)
                assert got.dtype == expected.dtype
                assert got.tolist() == expected.tolist()


def test_every_data_type_is_tried() -> None:
    assert set(VALUES) == set(BY_WIRE)


def test_bytes_that_are_not_utf8_are_served_as_binary_and_refused_as_json(client: Client) -> None:
    array = np.array([[b"\xff\xfe\x00", b"\x80"]], np.object_)
    answer = client.infer("py_BYTES", [tensor("IN", array, "BYTES")], outputs=[wanted("OUT")])
    assert answer.as_numpy("OUT").tolist() == array.tolist()
    refused(
        400,
        "binary",
        client.infer,
        "py_BYTES",
        [tensor("IN", array, "BYTES")],
        outputs=[wanted("OUT", binary=False)],
    )


@pytest.mark.parametrize("wire_name", BINARY_ONLY)
@pytest.mark.parametrize(("model", "given", "made"), [("py", "IN", "OUT"), ("onnx", "x", "y")])
def test_half_precision_is_refused_as_json_both_ways(
    client: Client, model: str, given: str, made: str, wire_name: str
) -> None:
    name, array = f"{model}_{wire_name}", rows(wire_name, 1)
    out = [wanted(made, binary=False)]
    text = f"sending {wire_name} data via JSON is not supported"
    refused(400, text, client.infer, name, [tensor(given, array, wire_name)], outputs=out)
    if wire_name == "FP16":  # the client itself refuses BF16
        text = "receiving FP16 data via JSON is not supported"
        refused(400, text, client.infer, name, [tensor(given, array, wire_name, binary=False)])


@pytest.mark.parametrize("wire_name", VALUES)
@pytest.mark.parametrize(("model", "given", "made"), [("py", "IN", "OUT"), ("onnx", "x", "y")])
def test_a_tensor_without_elements_round_trips(
    client: Client, model: str, given: str, made: str, wire_name: str
) -> None:
    array = np.empty((2, 0), NUMPY[wire_name])
    for binary in (True,) if wire_name in BINARY_ONLY else (True, False):
        answer = client.infer(
            f"{model}_{wire_name}",
            [tensor(given, array, wire_name, binary=binary)],
            outputs=[wanted(made, binary=binary)],
        )
        assert answer.as_numpy(made).shape == (2, 0)
        assert answer.as_numpy(made).dtype == NUMPY[wire_name]


@pytest.mark.parametrize(("name", "given", "made"), [("py_FP32", "IN", "OUT"), ("onnx_FP32", "x", "y")])
@pytest.mark.parametrize("binary", [True, False])
def test_a_tensor_of_four_megabytes_round_trips(client: Client, name: str, given: str, made: str, binary: bool) -> None:
    width = 1 << (20 if binary else 18)  # this client writes about twenty characters per number of JSON
    array = np.random.default_rng(1).standard_normal((1, width), np.float32)
    answer = client.infer(name, [tensor(given, array, binary=binary)], outputs=[wanted(made, binary=binary)])
    np.testing.assert_array_equal(answer.as_numpy(made), array)


def test_all_outputs_are_returned_unless_some_are_requested(client: Client) -> None:
    left, right = numbers(1, 2, 3, 4), numbers(10, 20, 30, 40)
    inputs = [tensor("INPUT0", left), tensor("INPUT1", right, binary=False)]
    answer = client.infer("addsub", inputs)
    assert [one["name"] for one in answer.get_response()["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert answer.as_numpy("OUTPUT0").tolist() == (left + right).tolist()
    assert answer.as_numpy("OUTPUT1").tolist() == (left - right).tolist()
    answer = client.infer("addsub", inputs, outputs=[wanted("OUTPUT1", binary=False)])
    assert [one["name"] for one in answer.get_response()["outputs"]] == ["OUTPUT1"]
    assert answer.as_numpy("OUTPUT0") is None
    mixed = client.infer("addsub", inputs, outputs=[wanted("OUTPUT1", binary=False), wanted("OUTPUT0")])
    assert mixed.as_numpy("OUTPUT0").tolist() == (left + right).tolist()
    assert mixed.as_numpy("OUTPUT1").tolist() == (left - right).tolist()


def test_the_requested_version_responds_or_else_the_latest(client: Client) -> None:
    inputs = [tensor("IN", numbers(0, 0, 0, 0))]

    def added(version: str) -> tuple[str, float]:
        answer = client.infer("versioned", inputs, model_version=version)
        return answer.get_response()["model_version"], float(answer.as_numpy("OUT")[0, 0])

    assert added("1") == ("1", 1.0)
    assert added("3") == ("3", 3.0)
    assert added("") == ("3", 3.0)
    refused(404, "unknown model: 'versioned' version 2", client.infer, "versioned", inputs, model_version="2")


def test_a_response_has_the_request_id_if_the_request_has_one(client: Client) -> None:
    inputs = [tensor("IN", numbers(1, 2, 3, 4))]
    assert client.infer("chain", inputs, request_id="ä-17").get_response()["id"] == "ä-17"
    assert "id" not in client.infer("times_three", inputs).get_response()


def test_the_id_and_the_parameters_reach_a_python_model(client: Client) -> None:
    sent = {"shade": "dark", "depth": 3, "ratio": 0.5, "loud": True}
    inputs = [tensor("IN", np.ones(1, np.float32))]
    answer = client.infer("tells", inputs, request_id="17", parameters=sent)
    assert answer.as_numpy("ID").tolist() == [b"17"]
    told = answer.as_numpy("PARAMETERS")[0].decode()
    assert all(word in told for word in ('"shade"', "dark", "depth", "ratio", "loud"))
    with pytest.raises(InferenceServerException, match="triton_"):
        client.infer("tells", inputs, parameters={"triton_secret": 1})


def test_priority_timeout_and_sequence_parameters_are_accepted_by_any_model(client: Client) -> None:
    answer = client.infer(
        "times_three",
        [tensor("IN", numbers(1, 2, 3, 4))],
        priority=1,
        timeout=60_000_000,
        sequence_id=5,
        sequence_start=True,
        sequence_end=True,
    )
    assert answer.as_numpy("OUT").tolist() == [[3, 6, 9, 12]]


def test_unknown_headers_and_query_parameters_change_nothing(client: Client) -> None:
    inputs = [tensor("IN", numbers(1, 2, 3, 4))]
    extra = {"headers": {"X-Anything": "1"}, "query_params": {"trace": "yes", "tags": ["a", "b"]}}
    assert client.is_server_ready(**extra)
    assert client.get_model_metadata("times_three", **extra)["name"] == "times_three"
    assert client.infer("times_three", inputs, **extra).as_numpy("OUT").tolist() == [[3, 6, 9, 12]]


def test_32_concurrent_requests_get_their_own_responses(client: Client) -> None:
    def send(number: int) -> triton.InferAsyncRequest:
        return client.async_infer("chain", [tensor("IN", numbers(*[number] * 4))], request_id=str(number))

    for first in (0, 100):
        waiting = {number: send(number) for number in range(first, first + 32)}
        for number, each in waiting.items():
            answer = each.get_result()
            assert answer.get_response()["id"] == str(number)
            assert answer.as_numpy("OUT").tolist() == [[(2 * number + 1) * 3] * 4]


def test_errors_of_asynchronous_requests_are_raised_by_get_result(client: Client) -> None:
    good, bad = tensor("IN", numbers(1, 2, 3, 4)), tensor("IN", numbers(1, 2, 3))
    waiting = [client.async_infer("times_three", [one]) for one in (good, bad, good)]
    assert waiting[0].get_result().as_numpy("OUT").tolist() == [[3, 6, 9, 12]]
    refused(400, "unexpected shape for input 'IN' for model 'times_three'", waiting[1].get_result)
    assert waiting[2].get_result().as_numpy("OUT").tolist() == [[3, 6, 9, 12]]


def test_a_body_from_generate_request_body_is_accepted(client: Client, served: Served) -> None:
    body, length = Client.generate_request_body([tensor("IN", numbers(1, 2, 3, 4))], outputs=[wanted("OUT")])
    headers = {"Inference-Header-Content-Length": str(length)}
    url = f"{served.base_url}/v2/models/times_three/infer"
    answer = httpx.post(url, content=body, headers=headers, trust_env=False, verify=False)
    parsed = Client.parse_response_body(
        answer.content, header_length=int(answer.headers["inference-header-content-length"])
    )
    assert parsed.as_numpy("OUT").tolist() == [[3, 6, 9, 12]]


def test_a_plugin_of_the_client_adds_its_header(client: Client) -> None:
    client.register_plugin(BasicAuth("somebody", "secret"))
    try:
        assert client.plugin() is not None
        assert client.is_server_live()
    finally:
        client.unregister_plugin()


def test_the_server_survives_a_closed_client(client: Client, served: Served) -> None:
    with Client(served.address) as other:
        assert other.is_server_live()
    other.close()
    assert client.is_server_live()


def test_the_asyncio_client_makes_every_call(served: Served) -> None:
    inputs = [tensor("IN", numbers(1, 2, 3, 4))]

    async def talk() -> list[float]:
        async with aio.InferenceServerClient(served.address) as client:
            client.register_plugin(BasicAuth("somebody", "secret"))
            assert client.plugin() is not None
            client.unregister_plugin()
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("versioned", "3")
            assert (await client.get_server_metadata())["name"] == "triton"
            assert (await client.get_model_metadata("chain"))["platform"] == "ensemble"
            assert (await client.get_model_config("versioned"))["name"] == "versioned"
            assert any(row["name"] == "chain" for row in await client.get_model_repository_index())
            assert (await client.get_inference_statistics("chain"))["model_stats"]
            assert (await client.get_trace_settings())["trace_level"] == ["OFF"]
            assert (await client.update_trace_settings(None, {"trace_level": ["OFF"]}))["trace_rate"] == "1000"
            assert (await client.get_log_settings())["log_info"] is True
            assert (await client.update_log_settings({"log_warning": True}))["log_warning"] is True
            assert await client.get_system_shared_memory_status() == []
            assert await client.get_cuda_shared_memory_status() == []
            for call in (
                client.load_model("chain"),
                client.unload_model("chain"),
                client.register_system_shared_memory("r", "/r", 8),
                client.unregister_system_shared_memory(),
                client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 8),
                client.unregister_cuda_shared_memory("r"),
            ):
                with pytest.raises(InferenceServerException, match=r"not allowed|disabled"):
                    await call
            body, length = client.generate_request_body(inputs)
            assert len(body) > length
            assert client.parse_response_body(b'{"outputs": []}') is not None
            packed = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}
            answers = await asyncio.gather(
                *[client.infer("times_three", inputs, **(packed if number % 2 else {})) for number in range(8)]
            )
            return [float(answer.as_numpy("OUT")[0, 3]) for answer in answers]

    assert asyncio.run(talk()) == [12.0] * 8


# ---------------------------------------------------------------------------------------------------------- extensions


def test_an_output_may_be_classified(client: Client) -> None:
    inputs = [tensor("IN", np.array([[1, 4, 2, 3], [9, 6, 7, 8]], np.float32))]
    for binary in (True, False):
        outputs = [triton.InferRequestedOutput("OUT", binary_data=binary, class_count=2)]
        got = client.infer("times_three", inputs, outputs=outputs).as_numpy("OUT")
        rows = [[one.decode() if isinstance(one, bytes) else one for one in row] for row in got]
        assert rows == [["12.000000:1", "9.000000:3"], ["27.000000:0", "24.000000:3"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_both_bodies_may_be_compressed(client: Client, algorithm: str) -> None:
    array = np.zeros((2, 50_000), np.float32)
    for binary in (True, False):
        answer = client.infer(
            "py_FP32",
            [tensor("IN", array, binary=binary)],
            outputs=[wanted("OUT", binary=binary)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        np.testing.assert_array_equal(answer.as_numpy("OUT"), array)


def test_log_settings_can_be_read_and_changed(client: Client, served: Served) -> None:
    before = client.get_log_settings()
    assert before["log_verbose_level"] == 0
    try:
        changed = client.update_log_settings({"log_verbose_level": 1, "log_format": "ISO8601"})
        assert changed == {**before, "log_verbose_level": 1, "log_format": "ISO8601"}
    finally:
        assert client.update_log_settings({"log_verbose_level": 0, "log_format": "default"}) == before
    text = "log file location can not be updated through network protocol"
    refused(501, text, client.update_log_settings, {"log_file": "/tmp/elsewhere"})


def test_trace_settings_can_be_read_and_changed(client: Client) -> None:
    off = client.get_trace_settings()
    assert off["trace_level"] == ["OFF"]
    assert client.get_trace_settings("times_three") == off
    assert client.update_trace_settings("times_three", {"trace_level": None}) == off
    assert client.update_trace_settings("times_three", {"trace_rate": "5"}) == {**off, "trace_rate": "5"}
    assert client.update_trace_settings("times_three", {"trace_rate": None}) == off
    text = "Attempting to set invalid trace setting: trace file name is not given"
    refused(400, text, client.update_trace_settings, None, {"trace_level": ["TIMESTAMPS"]})


# ---------------------------------------------------------------------------------------- refusals


def test_errors_have_tritons_texts(client: Client) -> None:
    one = tensor("IN", numbers(1, 2, 3, 4))
    refused(404, "Request for unknown model: 'nobody' is not found", client.infer, "nobody", [one])
    refused(400, "expected 2 inputs but got 1 inputs for model 'addsub'", client.infer, "addsub", [one])
    out = [wanted("NOPE")]
    text = "unexpected inference output 'NOPE' for model 'times_three'"
    refused(400, text, client.infer, "times_three", [one], outputs=out)
    many = tensor("IN", np.zeros((17, 4), np.float32))
    text = "inference request batch-size must be <= 16 for 'times_three'"
    refused(400, text, client.infer, "times_three", [many])
    whole = tensor("IN", np.zeros((1, 4), np.int32), "INT32")
    text = "inference input 'IN' data-type is 'INT32', but model 'times_three' expects 'FP32'"
    refused(400, text, client.infer, "times_three", [whole])


def test_loading_and_unloading_are_refused_by_default(client: Client) -> None:
    text = "explicit model load / unload is not allowed if polling is enabled"
    refused(503, text, client.load_model, "times_three")
    refused(503, text, client.load_model, "times_three", config='{"backend": "onnxruntime"}')
    refused(503, text, client.unload_model, "times_three")
    assert client.is_model_ready("times_three")


@pytest.mark.fault("M1")
def test_shared_memory_is_off_unless_the_operator_allows_it(client: Client) -> None:
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    for kind in ("system", "cuda"):
        assert getattr(client, f"get_{kind}_shared_memory_status")() == []
        refused(404, "Unable to find", getattr(client, f"get_{kind}_shared_memory_status"), "region")
        refused(501, text, getattr(client, f"unregister_{kind}_shared_memory"))
        refused(501, text, getattr(client, f"unregister_{kind}_shared_memory"), "region")
    refused(501, text, client.register_system_shared_memory, "region", "/key", 64)
    refused(501, text, client.register_cuda_shared_memory, "region", b"aGFuZGxl", 0, 64)
    shared = triton.InferInput("IN", [1, 4], "FP32")
    shared.set_shared_memory("region", 16)
    refused(501, text, client.infer, "times_three", [shared])
    output = wanted("OUT")
    output.set_shared_memory("region", 16)
    refused(501, text, client.infer, "times_three", [tensor("IN", numbers(1, 2, 3, 4))], outputs=[output])


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_table_lists_every_call_of_both_clients_and_a_test_that_makes_it(root: Path) -> None:
    def calls(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    text = (root / "docs/compatibility.md").read_text()
    http = re.split(r"\n#+ ", text.partition("## HTTP\n")[2])[0]
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| `(test_\w+)` \|$", http, re.MULTILINE))
    assert set(listed) == calls(Client)
    bodies: dict[str, str] = {}
    for path in [*(root / "tests/server").glob("test_*.py"), root / "tests/http/test_shared_memory.py"]:
        found = re.findall(
            r"^(?:async )?def (test_\w+)\((.*?)(?=^(?:def|async def|@|# ---)|\Z)",
            path.read_text(),
            re.MULTILINE | re.DOTALL,
        )
        bodies |= dict(found)
    for call, test in listed.items():
        assert test in bodies, f"{test} does not exist"
        assert f".{call}" in bodies[test], f"{test} does not call {call}"
    every = bodies["test_the_asyncio_client_makes_every_call"]
    for call in calls(aio.InferenceServerClient) - {"close"}:  # `async with` closes the client
        assert f"client.{call}(" in every, f"the asyncio client's {call}"


def test_the_server_process_imports_no_client_library(served: Served, client: Client) -> None:
    assert client.is_server_live()
    mapped = Path(f"/proc/{served.pid}/maps").read_text()
    assert "httptools" in mapped  # extension modules are listed here
    assert "gevent" not in mapped
    assert "rapidjson" not in mapped


def test_importing_the_server_imports_no_client() -> None:
    program = "import sys, flowserve.cli.run; print([m for m in ('gevent', 'tritonclient') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
