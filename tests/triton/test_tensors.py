"Tensors and endpoints: reshape, zero sizes, types, classification, binary data, versions, metadata, shared memory."

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
SHAPE = """
def execute(self, requests):
    arrays = [given(request, "X") for request in requests]
    return [respond(Y=array, RANK=np.full((len(array), 1), array.ndim, np.int64)) for array in arrays]
"""
VERSION = """
def initialize(self, args):
    self.version = int(args["model_version"])

def execute(self, requests):
    return [respond(Y=np.array([self.version], np.int32)) for request in requests]
"""
ODD = """
def execute(self, requests):
    return [respond(Y=np.array([np.nan, np.inf, -np.inf, 0.5], np.float32)) for request in requests]
"""
TYPES = {
    "BOOL": ("BOOL", [True, False]),
    "INT8": ("INT8", [-128, 127]),
    "INT16": ("INT16", [-(2**15), 2**15 - 1]),
    "INT32": ("INT32", [-(2**31), 2**31 - 1]),
    "INT64": ("INT64", [-(2**63), 2**63 - 1]),
    "UINT8": ("UINT8", [0, 255]),
    "UINT16": ("UINT16", [0, 65535]),
    "UINT32": ("UINT32", [0, 2**32 - 1]),
    "UINT64": ("UINT64", [0, 2**64 - 1]),
    "FP32": ("FP32", [0.5, -2.0]),
    "FP64": ("FP64", [0.1, 1e300]),
    "STRING": ("BYTES", ["a", "ü"]),
}


def reshaped(name: str, dims: str, shape: str, data_type: str = "FP32") -> str:
    return spec(name, data_type, dims, f"reshape {{ shape: [ {shape} ] }}")


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=f"{url}/v2/", timeout=15, verify=False)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def infer(
        self, model: str, shape: Any, data: Any, datatype: str = "FP32", version: str = "", **more: Any
    ) -> httpx.Response:
        tensor = {"name": "X", "shape": shape, "datatype": datatype, "data": data}
        where = f"models/{model}/versions/{version}/infer" if version else f"models/{model}/infer"
        return self.client.post(where, json={"inputs": [tensor], **more})

    def output(self, *arguments: Any, name: str = "Y", **named: Any) -> tuple[Any, Any]:
        """The shape and the data of an output."""
        reply = self.infer(*arguments, **named)
        assert reply.status_code == 200, reply.text
        (found,) = [output for output in json.loads(reply.text)["outputs"] if output["name"] == name]
        return found["shape"], found["data"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("tensors")
    batches = "max_batch_size: 8"
    for data_type in TYPES:
        io = [spec("X", data_type, "-1")], [spec("Y", data_type, "-1")]
        write_model(repository, f"type_{data_type}", python_config(*io), ECHO)
    for name, dims, shape, more in (
        ("scalar", "1", "", [batches]),
        ("split", "4, 4", "2, 2, 4", []),
        ("variable", "-1, 2", "-1, 1, 2", [batches]),
    ):
        told = spec("RANK", "INT64", "1" if more else "-1, 1")
        io = [reshaped("X", dims, shape)], [reshaped("Y", dims, shape), told]
        write_model(repository, name, python_config(*io, *more), SHAPE)
    labelled = spec("Y", "FP32", "-1", 'label_filename: "labels.txt"')
    write_model(
        repository,
        "scores",
        python_config([spec("X", "FP32", "-1")], [labelled], batches),
        ECHO,
        labels__txt="cat\ndog\nbird\n",
    )
    io = [spec("X", "FP32", "1")], [spec("Y", "INT32", "1")]
    write_model(
        repository,
        "latest",
        python_config(*io, "version_policy { latest { num_versions: 2 } }"),
        VERSION,
        versions=("1", "2", "10"),
    )
    write_model(
        repository,
        "specific",
        python_config(*io, "version_policy { specific { versions: [ 1, 3 ] } }"),
        VERSION,
        versions=("1", "2", "3"),
    )
    write_model(repository, "unset", python_config(*io), VERSION, versions=("1", "2", "03", "text"))
    write_model(repository, "odd", python_config([spec("X", "FP32", "1")], [spec("Y", "FP32", "4")]), ODD)
    server = Server(triton_like(repository))
    yield server
    server.client.close()


# ------------------------------------------------------------------------------------------------------ data types


@pytest.mark.parametrize("data_type", TYPES)
def test_every_type_travels_as_json(server: Server, data_type: str) -> None:
    datatype, data = TYPES[data_type]
    assert server.output(f"type_{data_type}", [2], data, datatype) == ([2], data)


@pytest.mark.parametrize("data_type", TYPES)
def test_every_type_travels_with_no_elements(server: Server, data_type: str) -> None:
    datatype, _ = TYPES[data_type]
    assert server.output(f"type_{data_type}", [0], [], datatype) == ([0], [])


def test_data_may_be_nested_and_is_always_returned_flat(server: Server) -> None:
    data = [[1.0, 2.0], [3.0, 4.0]]
    assert server.output("scores", [2, 2], data) == ([2, 2], [1.0, 2.0, 3.0, 4.0])


def test_nan_and_infinity_are_bare_tokens(server: Server) -> None:
    _, (nan, *rest) = server.output("odd", [1], [1])
    assert math.isnan(nan)
    assert rest == [math.inf, -math.inf, 0.5]


# ------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("model", "shape", "rank"),
    [("scalar", [2, 1], 1), ("split", [4, 4], 3), ("variable", [2, 3, 2], 4)],
)
def test_a_reshaped_tensor_reaches_the_model_in_its_shape_only(
    server: Server, model: str, shape: list[int], rank: int
) -> None:
    data = [float(n) for n in range(math.prod(shape))]
    assert server.output(model, shape, data) == (shape, data)
    assert set(server.output(model, shape, data, name="RANK")[1]) == {rank}


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        ("split", [4, 2], "unexpected shape for input 'X' for model 'split'. Expected [4,4], got [4,2]"),
        ("scores", [9, 1], "inference request batch-size must be <= 8 for 'scores'"),
        ("variable", [1, 3], "unexpected shape for input 'X' for model 'variable'. Expected [-1,-1,2], got [1,3]"),
    ],
)
def test_a_wrong_shape_is_refused(server: Server, model: str, shape: list[int], text: str) -> None:
    reply = server.infer(model, shape, [0.0] * math.prod(shape))
    assert reply.status_code == 400
    assert text in reply.json()["error"]


def test_too_few_elements_are_refused(server: Server, on_triton: bool) -> None:
    reply = server.infer("scores", [1, 3], [1.0, 2.0])
    assert reply.status_code == (500 if on_triton else 400)  # a client's mistake is never a 500 in flowserve
    assert "hape does not match true shape of 'data' field" in reply.json()["error"]


# ------------------------------------------------------------------------------------------------------ classes


def classes(count: int, **more: Any) -> dict[str, Any]:
    return {"outputs": [{"name": "Y", "parameters": {"classification": count, **more}}]}


def test_classes_are_ranked_with_values_and_labels(server: Server) -> None:
    reply = server.infer("scores", [2, 4], [0.5, 3, 1, 2, 9, 8, 7, 6], **classes(2)).json()["outputs"][0]
    assert (reply["datatype"], reply["shape"]) == ("BYTES", [2, 2])
    assert reply["data"] == ["3.000000:1:dog", "2.000000:3", "9.000000:0:cat", "8.000000:1:dog"]


def test_more_classes_than_there_are_give_all(server: Server) -> None:
    reply = server.infer("scores", [1, 2], [0.5, 3], **classes(9)).json()["outputs"][0]
    assert (reply["shape"], reply["data"]) == ([1, 2], ["3.000000:1:dog", "0.500000:0:cat"])


@pytest.mark.parametrize("data_type", ["STRING", "BOOL"])
def test_what_has_no_order_is_not_ranked(server: Server, on_triton: bool, data_type: str) -> None:
    if on_triton and data_type == "STRING":
        pytest.skip("2.51 crashes")
    datatype, data = TYPES[data_type]
    reply = server.infer(f"type_{data_type}", [2], data, datatype, **classes(1))
    assert reply.status_code == 400
    assert f"class result not available for output due to unsupported type '{datatype}'" in reply.json()["error"]


# ------------------------------------------------------------------------------------------------------ binary data


def binary(server: Server, model: str, header: Any, data: bytes, length: str = "") -> httpx.Response:
    text = b"" if header is None else json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(text))}
    return server.client.post(f"models/{model}/infer", content=text + data, headers=headers)


def sized(nbytes: int, shape: list[int], **more: Any) -> dict[str, Any]:
    return {
        "inputs": [{"name": "X", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": nbytes}}],
        **more,
    }


def test_an_output_is_binary_where_it_is_asked_for(server: Server) -> None:
    data = np.array([1, 2], np.float32).tobytes()
    for more in (
        {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]},
        {"parameters": {"binary_data_output": True}},
    ):
        reply = binary(server, "type_FP32", sized(8, [2], **more), data)
        length = int(reply.headers["inference-header-content-length"])
        assert reply.headers["content-type"] == "application/octet-stream"
        assert json.loads(reply.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
        assert reply.content[length:] == data
    assert binary(server, "type_FP32", sized(8, [2]), data).json()["outputs"][0]["data"] == [1.0, 2.0]


def test_a_raw_body_is_the_only_input(server: Server) -> None:
    data = np.array([1, 2, 3], np.float32).tobytes()
    reply = binary(server, "type_FP32", None, data, "0")
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.content[:length])["outputs"][0]["shape"] == [3]
    assert reply.content[length:] == data


@pytest.mark.parametrize(
    ("header", "data", "length", "text"),
    [
        (
            sized(8, [2]),
            b"1234",
            "",
            "unexpected size for input 'X', expecting 4 additional bytes for model 'type_FP32'",
        ),
        (sized(4, [1]), b"12345678", "", "unexpected additional input data for model 'type_FP32'"),
        (sized(4, [2]), b"1234", "", "input byte size mismatch for input 'X' for model 'type_FP32'. Expected 8, got 4"),
        (sized(4, [1]), b"1234", "9999", "inference header size should be in range (0, "),
    ],
)
def test_binary_data_of_the_wrong_size_is_refused(
    server: Server, header: Any, data: bytes, length: str, text: str
) -> None:
    reply = binary(server, "type_FP32", header, data, length)
    assert reply.status_code == 400
    assert text in reply.json()["error"]


# ------------------------------------------------------------------------------------------------------ versions


def test_version_policies_select_versions(server: Server) -> None:
    assert server.get("models/latest").json()["versions"] == ["2", "10"]
    assert server.get("models/specific").json()["versions"] == ["1", "3"]
    assert server.get("models/unset").json()["versions"] == ["2"]
    assert server.output("latest", [1], [1])[1] == [10]
    assert server.output("latest", [1], [1], version="2")[1] == [2]
    reply = server.infer("latest", [1], [1], version="1")
    assert (reply.status_code, "Request for unknown model: 'latest' version 1 is not found" in reply.text) == (
        404,
        True,
    )


def test_the_index_lists_every_version(server: Server) -> None:
    rows = server.client.post("repository/index", json={}).json()
    assert [row for row in rows if row["name"] in ("latest", "specific")] == [
        {"name": name, "version": version, "state": "READY"}
        for name, version in (("latest", "10"), ("latest", "2"), ("specific", "1"), ("specific", "3"))
    ] or sorted(row["version"] for row in rows if row["name"] == "latest") == ["10", "2"]


def test_metadata_has_the_shapes_of_the_client(server: Server) -> None:
    assert server.get("models/variable").json() == {
        "name": "variable",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, -1, 2]}],
        "outputs": [
            {"name": "Y", "datatype": "FP32", "shape": [-1, -1, 2]},
            {"name": "RANK", "datatype": "INT64", "shape": [-1, 1]},
        ],
    }


def test_the_configuration_is_completed(server: Server) -> None:
    told = server.get("models/split/config").json()
    assert (told["name"], told["max_batch_size"], told["backend"]) == ("split", 0, "python")
    assert told["input"][0]["reshape"]["shape"] in ([2, 2, 4], ["2", "2", "4"])
    assert [(group["kind"], group["count"]) for group in told["instance_group"]] == [("KIND_CPU", 1)]
    assert told["version_policy"] == {"latest": {"num_versions": 1}}


# ------------------------------------------------------------------------------------------------------ trace settings


def test_trace_settings_are_text_and_null_clears_a_models_own(server: Server) -> None:
    before = server.get("trace/setting").json()
    assert (before["trace_level"], before["trace_rate"], before["trace_count"]) == (["OFF"], "1000", "-1")
    changed = server.client.post("models/odd/trace/setting", json={"trace_rate": "7"}).json()
    assert changed["trace_rate"] == "7"
    assert server.get("trace/setting").json()["trace_rate"] == "1000"
    assert server.client.post("models/odd/trace/setting", json={"trace_rate": None}).json()["trace_rate"] == "1000"
    assert server.client.post("trace/setting", json={"trace_count": "-2"}).status_code == 400
    assert server.get("models/nothing/trace/setting").status_code == 400


# ------------------------------------------------------------------------------------------------------ shared memory


def test_shared_memory_has_a_status(server: Server) -> None:
    assert server.get("systemsharedmemory/status").json() == []
    assert server.get("cudasharedmemory/status").json() == []
    assert server.get("systemsharedmemory/region/nothing/status").status_code == 404
