"""Every endpoint over a real server and a real engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from flowserve.http.api.app import make_app
from flowserve.http.api.infer import AppOptions
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.version import __version__
from tests.support.engine import add_function

NOT_FOUND = {
    "error": "Not Found: no such path; /docs has the list of them, and inference is POST /v2/models/NAME/infer"
}


def http(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def ask(api: Any, method: str, path: str, body: bytes = b"", *headers: str) -> tuple[int, Any]:
    """The status and the JSON of the response (None for an empty body)."""
    client = await api.connect()
    answer = await client.ask(http(method, path, body, *headers))
    if answer.body:
        assert answer.headers["content-type"] == "application/json"
    return answer.status, json.loads(answer.body) if answer.body else None


def numbers(*rows: Sequence[float], **fields: Any) -> bytes:
    shape, data = [len(rows), 4], [number for row in rows for number in row]
    return json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": shape, "data": data}], **fields}).encode()


# ---------------------------------------------------------------------------------------------- inference


async def test_a_json_request_gets_a_json_response(api: Any) -> None:
    status, answer = await ask(api, "POST", "/v2/models/double/infer", numbers([1, 2, 3, 4], id="x"))
    assert status == 200
    assert answer == {
        "id": "x",
        "model_name": "double",
        "model_version": "1",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 4], "data": [2, 4, 6, 8]}],
    }


async def test_a_binary_request_gets_a_binary_response(api: Any) -> None:
    header = json.dumps(
        {
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    body = header + np.array([1, 2, 3, 4], np.float32).tobytes()
    length = f"Inference-Header-Content-Length: {len(header)}"
    client = await api.connect()
    answer = await client.ask(http("POST", "/v2/models/double/versions/1/infer", body, length))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    cut = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.body[:cut])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(answer.body[cut:], np.float32).tolist() == [2, 4, 6, 8]


async def test_a_raw_body_is_the_tensor_and_all_outputs_are_binary(api: Any) -> None:
    client = await api.connect()
    body = np.array([1, 2, 3, 4], np.float32).tobytes()
    answer = await client.ask(http("POST", "/v2/models/double/infer", body, "Inference-Header-Content-Length: 0"))
    assert answer.status == 200
    cut = int(answer.headers["inference-header-content-length"])
    assert np.frombuffer(answer.body[cut:], np.float32).tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("rows", [1, 4])
async def test_the_official_client_is_understood(engine: Engine, api: Any, rows: int) -> None:
    add_function(engine, "wide", [lambda array: array + np.float32(1)], dims=(50_000,))

    def talk() -> None:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{api.port}")
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("wide", "1")
        assert client.get_model_metadata("wide")["inputs"][0]["shape"] == [-1, 50_000]
        array = np.random.default_rng(rows).random((rows, 50_000), np.float32)
        one = tritonclient.http.InferInput("IN", [rows, 50_000], "FP32")
        for binary_in in (True, False):
            one.set_data_from_numpy(array, binary_data=binary_in)
            for binary_out in (True, False):
                wanted = [tritonclient.http.InferRequestedOutput("OUT", binary_data=binary_out)]
                answer = client.infer("wide", [one], outputs=wanted, request_id="7")
                np.testing.assert_array_equal(answer.as_numpy("OUT"), array + np.float32(1))
                assert answer.get_response()["id"] == "7"
        answer = client.async_infer("wide", [one]).get_result()
        np.testing.assert_array_equal(answer.as_numpy("OUT"), array + np.float32(1))
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            client.infer("nope", [one])
        client.close()

    await trio.to_thread.run_sync(talk)


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b"", [], 400, "failed to parse the request JSON buffer"),
        (b"[]", [], 400, "not a JSON object"),
        (b"{}", [], 400, "expected 1 inputs but got 0 inputs for model 'double'"),
        (b"{}", ["Inference-Header-Content-Length: abc"], 400, "Unable to parse inference header size, got: abc"),
        (b"{}", ["Inference-Header-Content-Length: -1"], 400, "inference header size should be in range (0, 2)"),
        (b"{}", [f"Inference-Header-Content-Length: {'9' * 30}"], 400, "Unable to parse inference header size"),
        (b"abc", ["Inference-Header-Content-Length: 0"], 400, "Expected 16, got 3"),
        (numbers([1, 2, 3, 4], outputs=[{"name": "NOPE"}]), [], 400, "unexpected inference output 'NOPE'"),
        (numbers([1, 2, 3, 4], parameters={"priority": "high"}), [], 400, "Unable to parse 'priority'"),
        (numbers(*[[1, 2, 3, 4]] * 17), [], 400, "inference request batch-size must be <= 16 for 'double'"),
        (b"\x1f\x8b", ["Content-Encoding: gzip"], 400, "its compressed data goes on"),
        (b"x", ["Content-Encoding: zebra"], 415, "unknown Content-Encoding 'zebra'"),
    ],
)
@pytest.mark.fault("J1", "J2", "J3", "J11", "B1", "S3", "S9")
async def test_a_bad_request_gets_a_4xx_and_affects_no_other(
    api: Any, body: bytes, headers: list[str], status: int, text: str
) -> None:
    found, answer = await ask(api, "POST", "/v2/models/double/infer", body, *headers)
    assert (found, list(answer)) == (status, ["error"])
    assert text in answer["error"]
    assert (await ask(api, "POST", "/v2/models/double/infer", numbers([1, 1, 1, 1])))[0] == 200


async def test_unknown_models_and_versions_are_404(api: Any) -> None:
    for path, text in [
        ("/v2/models/nope/infer", "Request for unknown model: 'nope' is not found"),
        ("/v2/models/double/versions/9/infer", "Request for unknown model: 'double' version 9 is not found (it has 1)"),
    ]:
        assert await ask(api, "POST", path, numbers([1, 2, 3, 4])) == (404, {"error": text})


async def test_a_closed_connection_cancels_its_request(engine: Engine, api: Any) -> None:
    import threading

    gate = threading.Event()

    def wait(array: Any) -> Any:
        gate.wait(30)
        return array

    add_function(engine, "slow", [wait], inline=False, max_batch_size=1)

    def waiting() -> int:
        return sum(queued.requests for _, queued in engine.deployments.counters())

    first, second = await api.connect(), await api.connect()
    await first.say(http("POST", "/v2/models/slow/infer", numbers([1, 2, 3, 4])))
    await second.say(http("POST", "/v2/models/slow/infer", numbers([1, 2, 3, 4])))
    await api.until(lambda: waiting() == 1)
    await second.stream.aclose()
    await api.until(lambda: waiting() == 0)
    gate.set()
    assert (await first.answer()).status == 200
    assert (await ask(api, "GET", "/v2/models/slow/stats"))[1]["model_stats"][0]["inference_count"] == 1


# ---------------------------------------------------------------------------------------------- the other endpoints


async def test_health_has_a_body_for_clients_that_accept_json(api: Any) -> None:
    for what in ("live", "ready"):
        client = await api.connect()
        head = f"GET /v2/health/{what} HTTP/1.1\r\nHost: h\r\nAccept: application/json\r\n\r\n"
        reply = await client.ask(head.encode())
        assert (reply.status, json.loads(reply.body)) == (200, {what: True})


async def test_health_is_a_status_without_a_body(api: Any) -> None:
    assert await ask(api, "GET", "/v2/health/live") == (200, None)
    assert await ask(api, "GET", "/v2/health/ready") == (200, None)
    assert await ask(api, "GET", "/v2/models/double/ready") == (200, None)
    assert await ask(api, "GET", "/v2/models/double/versions/1/ready") == (200, None)


async def test_a_server_that_still_loads_is_live_and_not_ready(start: Callable[..., Awaitable[Any]]) -> None:
    async with open_engine(EngineOptions()) as engine:
        api = await start(engine)
        assert await ask(api, "GET", "/v2/health/live") == (200, None)
        assert await ask(api, "GET", "/v2/health/ready") == (400, None)


async def test_server_metadata_lists_name_version_and_extensions(api: Any) -> None:
    status, answer = await ask(api, "GET", "/v2")
    assert status == 200
    assert (answer["name"], answer["version"]) == ("triton", __version__)
    assert {"binary_tensor_data", "system_shared_memory", "cuda_shared_memory", "trace"} <= set(answer["extensions"])


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_model_metadata_lists_inputs_and_outputs(api: Any, version: str) -> None:
    assert await ask(api, "GET", f"/v2/models/double{version}") == (
        200,
        {
            "name": "double",
            "versions": ["1"],
            "platform": "functions",
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
        },
    )
    assert (await ask(api, "GET", f"/v2/models/double{version}/config"))[0] == 200


async def test_statistics_count_served_requests(api: Any) -> None:
    await ask(api, "POST", "/v2/models/double/infer", numbers([1, 2, 3, 4], [1, 2, 3, 4]))
    for path in ("/v2/models/double/stats", "/v2/models/double/versions/1/stats", "/v2/models/stats"):
        status, answer = await ask(api, "GET", path)
        (row,) = answer["model_stats"]
        assert (status, row["name"], row["inference_count"], row["execution_count"]) == (200, "double", 2, 1)
        assert row["inference_stats"]["success"]["count"] == 1
    assert await ask(api, "GET", "/v2/models/nope/stats") == (
        400,
        {"error": "requested model 'nope' is not available"},
    )


async def test_what_flowserve_counts_besides_has_a_path_of_its_own(api: Any) -> None:
    await ask(api, "POST", "/v2/models/double/infer", numbers([1, 2, 3, 4], [1, 2, 3, 4]))
    await ask(api, "POST", "/v2/models/double/infer", b'{"inputs": []}')
    for path in ("/flowserve/models/double/stats", "/flowserve/models/double/versions/1/stats", "/flowserve/stats"):
        status, answer = await ask(api, "GET", path)
        (row,) = answer["graph_stats"]
        assert (status, row["name"], row["version"], row["failures"]["OTHER"]) == (200, "double", "1", 1)
        (node,) = row["nodes"]
        assert (node["name"], node["batch_count"], node["batch_rows"]) == ("double", 1, 2)
    for path, said in (("models/nope", "model 'nope'"), ("models/double/versions/9", "model version")):
        status, answer = await ask(api, "GET", f"/flowserve/{path}/stats")
        assert (status, answer["error"].startswith(f"requested {said} is not available")) == (400, True)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": true}'])
async def test_the_repository_index_lists_all_models(api: Any, body: bytes) -> None:
    row = {"name": "double", "version": "1", "state": "READY"}
    assert await ask(api, "POST", "/v2/repository/index", body) == (200, [row])


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"ready": 1}'])
async def test_a_bad_index_request_is_400(api: Any, body: bytes) -> None:
    assert (await ask(api, "POST", "/v2/repository/index", body))[0] == 400


async def test_metrics_are_prometheus_text(api: Any) -> None:
    await ask(api, "POST", "/v2/models/double/infer", numbers([1, 2, 3, 4]))
    client = await api.connect()
    answer = await client.ask(http("GET", "/metrics"))
    assert answer.headers["content-type"].startswith("text/plain")
    assert b'\nnv_inference_request_success{model="double",version="1"} 1\n' in answer.body


@pytest.mark.fault("H17", "Z1")
@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/nope",
        "/v2/",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models//ready",
        "/v2//models/double/infer",
        "/v2/models/double/infer/",
        "/v2/models/a/b/infer",
        "/v2/models/a%2fb/infer",
        "/v2/models/..%2f..%2fetc%2fpasswd/infer",
        "/v2/models/double/versions/x/infer",
        "/v2/models/double/versions//infer",
        "/v2/models/double/versions/%C2%B2/infer",
        "/v2/models/double/versions/1/2/infer",
    ],
)
async def test_unknown_paths_are_404(api: Any, path: str) -> None:
    for method in ("POST", "GET"):
        status, answer = await ask(api, method, path)
        assert status in (404, 405)
        assert answer in (NOT_FOUND, {"error": "Method Not Allowed: GET where POST is asked for"})
    assert status != 405 or path.startswith("/v2/models/double/versions/")
    assert (await ask(api, "POST", path))[0] == 404


async def test_a_version_of_five_thousand_digits_is_an_unknown_path(api: Any) -> None:
    path = f"/v2/models/double/versions/{'9' * 5000}"
    assert await ask(api, "POST", f"{path}/infer") == (404, NOT_FOUND)
    for page in ("", "/stats", "/ready", "/config"):
        assert await ask(api, "GET", path + page) == (404, NOT_FOUND)


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", "/v2/models/double/infer", "POST"),
        ("DELETE", "/v2/models/double/versions/1/infer", "POST"),
        ("POST", "/v2", "GET"),
        ("PUT", "/v2/health/live", "GET"),
        ("GET", "/v2/repository/index", "POST"),
        ("POST", "/metrics", "GET"),
        ("PUT", "/v2/logging", "GET or POST"),
    ],
)
async def test_a_wrong_method_is_405_and_the_error_names_the_right_one(
    api: Any, method: str, path: str, right: str
) -> None:
    told = {"error": f"Method Not Allowed: {method} where {right} is asked for"}
    assert await ask(api, method, path) == (405, told)


@pytest.mark.parametrize("path", ["/v2/models/double", "/v2/models/double/versions/1", "/v2/models/double/config"])
async def test_an_inference_on_the_path_of_a_model_is_told_the_right_one(api: Any, path: str) -> None:
    told = "Method Not Allowed: POST where GET is asked for; inference is POST /v2/models/NAME/infer"
    assert await ask(api, "POST", path) == (405, {"error": told})


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_models_are_not_loaded_over_http(api: Any, verb: str) -> None:
    status, answer = await ask(api, "POST", f"/v2/repository/models/double/{verb}")
    assert status == 503
    assert answer["error"].startswith("explicit model load / unload is not allowed if polling is enabled")


async def test_an_internal_error_is_500_without_details(
    api: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.deployments, "index", lambda **_: 1 // 0)
    assert await ask(api, "POST", "/v2/repository/index") == (500, {"error": "internal server error"})
    assert "ZeroDivisionError" in caplog.text


async def test_a_body_in_pieces_is_joined_and_limited(engine: Engine) -> None:
    """Other ASGI servers pass bodies on in pieces."""
    body = numbers([1, 2, 3, 4])
    small = await _through_asgi(make_app(engine), [body[:20], body[20:]])
    assert small[0]["status"] == 200
    large = await _through_asgi(make_app(engine, AppOptions(max_body_bytes=30)), [body[:20], body[20:]])
    assert large[0]["status"] == 413


async def _through_asgi(app: Any, pieces: list[bytes]) -> list[Any]:
    sent: list[Any] = []
    waiting = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v2/models/double/infer", "headers": []}
    await app(scope, receive, send)
    return sent
