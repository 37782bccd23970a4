"""The exact bytes of requests of curl, Node and common Python libraries, and the responses that they require."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

from flowserve.runtime.engine.engine import Engine
from tests.support.engine import add_function

ASKED = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
BODY = json.dumps(ASKED).encode()
PATH = "/v2/models/double/infer"
CURL = ("Host: localhost:8000", "User-Agent: curl/8.5.0", "Accept: */*")
NODE_FETCH = (
    "host: localhost:8000",
    "connection: keep-alive",
    "accept: */*",
    "accept-language: *",
    "sec-fetch-mode: cors",
    "user-agent: node",
    "accept-encoding: gzip, deflate",
)


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", ""]).encode()


def doubled(answer: Any) -> list[float]:
    assert answer.status == 200, answer.body
    values: list[float] = json.loads(answer.body)["outputs"][0]["data"]
    return values


async def test_curl_with_data(api: Any) -> None:
    """curl -d '{...}' URL: its content type is that of a form, which is accepted."""
    client = await api.connect()
    form = "Content-Type: application/x-www-form-urlencoded"
    asked = head("POST", PATH, *CURL, f"Content-Length: {len(BODY)}", form) + BODY
    for _ in range(2):  # curl keeps the connection for the next URL
        assert doubled(await client.ask(asked)) == [2, 4, 6, 8]


async def test_curl_waits_for_100_continue_before_it_sends_a_large_body(engine: Engine, api: Any) -> None:
    """curl --data-binary @file: above a megabyte it asks first."""
    add_function(engine, "wide", [lambda array: array], dims=(300_000,))
    values = np.arange(300_000, dtype=np.float32)
    headers = ("Content-Length: 1200000", "Inference-Header-Content-Length: 0", "Expect: 100-continue")
    client = await api.connect()
    await client.say(head("POST", "/v2/models/wide/infer", *CURL, *headers))
    assert (await client.answer(has_body=False)).status == 100
    answer = await client.ask(values.tobytes())
    cut = int(answer.headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(answer.body[cut:], np.float32), values)


async def test_curl_that_takes_compressed_answers(engine: Engine, api: Any) -> None:
    """curl --compressed: it names more encodings than there are."""
    add_function(engine, "wide", [lambda array: array], dims=(3000,))
    one = {"name": "IN", "datatype": "FP32", "shape": [1, 3000], "data": [0.5] * 3000}
    body = json.dumps({"inputs": [one]}).encode()
    encodings = "Accept-Encoding: deflate, gzip, br, zstd"
    client = await api.connect()
    answer = await client.ask(
        head("POST", "/v2/models/wide/infer", *CURL, encodings, f"Content-Length: {len(body)}") + body
    )
    assert answer.headers["content-encoding"] == "deflate"
    assert json.loads(zlib.decompress(answer.body))["outputs"][0]["data"] == [0.5] * 3000


async def test_curl_that_only_wants_the_head(api: Any) -> None:
    """curl -I"""
    client = await api.connect()
    for path, status in (("/v2/health/live", 200), ("/v2/models/double", 200), ("/v2/models/nobody", 404)):
        await client.say(head("HEAD", path, *CURL))
        assert (await client.answer(has_body=False)).status == status
    assert (await client.ask(head("GET", "/v2/health/live", *CURL))).status == 200  # no body was left over


async def test_the_fetch_of_node(api: Any) -> None:
    """await fetch(url, {method: 'POST', body: JSON.stringify(...)}): lower-case names, a text's type."""
    client = await api.connect()
    headers = (*NODE_FETCH, "content-type: text/plain;charset=UTF-8", f"content-length: {len(BODY)}")
    for _ in range(2):
        answer = await client.ask(head("POST", PATH, *headers) + BODY)
        assert doubled(answer) == [2, 4, 6, 8]
        assert "content-encoding" not in answer.headers  # too small to compress


async def test_a_stream_that_node_pipes(api: Any) -> None:
    """http.request(url, {method: 'POST'}) and write(), write(), end(): chunks, the last one empty."""
    client = await api.connect()
    await client.say(head("POST", PATH, "Host: localhost:8000", "Connection: keep-alive", "Transfer-Encoding: chunked"))
    for piece in (BODY[:7], BODY[7:]):
        await client.say(b"%x\r\n%b\r\n" % (len(piece), piece))
    assert doubled(await client.ask(b"0\r\n\r\n")) == [2, 4, 6, 8]


async def test_binary_out_of_node(api: Any) -> None:
    """A Buffer of JSON and tensor, and an ArrayBuffer back."""
    one = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    body = text + np.array([1, 2, 3, 4], np.float32).tobytes()
    length = f"inference-header-content-length: {len(text)}"
    client = await api.connect()
    answer = await client.ask(head("POST", PATH, *NODE_FETCH, length, f"content-length: {len(body)}") + body)
    cut = int(answer.headers["inference-header-content-length"])
    assert np.frombuffer(answer.body[cut:], np.float32).tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_generate_works_with_fetch_of_a_web_page(api: Any, verb: str) -> None:
    """curl -N, or fetch with a reader: members named like inputs, plain JSON or events back."""
    body = json.dumps({"IN": [1, 2, 3, 4], "temperature": 0.5, "id": "7"}).encode()
    client = await api.connect()
    path = f"/v2/models/double/{verb}"
    answer = await client.ask(head("POST", path, *CURL, f"Content-Length: {len(body)}") + body)
    assert answer.status == 200, answer.body
    text = answer.body.removeprefix(b"data: ") if verb == "generate_stream" else answer.body
    assert json.loads(text)["OUT"] == [2, 4, 6, 8]
    kind = "text/event-stream" if verb == "generate_stream" else "application/json"
    assert answer.headers["content-type"].startswith(kind)


async def test_python_requests_and_aiohttp_name_encodings_too(api: Any) -> None:
    client = await api.connect()
    for encodings in ("gzip, deflate", "gzip, deflate, br, zstd"):
        headers = ("Host: h", f"Accept-Encoding: {encodings}", "Connection: keep-alive", f"Content-Length: {len(BODY)}")
        assert doubled(await client.ask(head("POST", PATH, *headers) + BODY)) == [2, 4, 6, 8]
