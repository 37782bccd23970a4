"""A response from memory that a worker process reads too, to a slow client."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

WIDTH = 4_000_000  # 16 MB: more than any socket takes at once


def request(method: str, path: str, document: Any = None) -> bytes:
    body = json.dumps(document or {}).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask(number: float) -> bytes:
    given = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [number] * 4}
    return request("POST", "/v2/models/both/infer", {"inputs": [given], "parameters": {"binary_data_output": True}})


def read_head(sock: socket.socket) -> tuple[bytes, int]:
    """The part of the body that was received with the head, and the length of the whole body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(1000)
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], received
    (length,) = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")]
    return rest, int(length)


def read(sock: socket.socket, body: bytes, length: int) -> bytes:
    pieces = [body]
    length -= len(body)
    while length:
        pieces.append(sock.recv(min(length, 1 << 20)))
        length -= len(pieces[-1])
        assert pieces[-1], "the answer ends too early"
    return b"".join(pieces)


def test_a_slow_client_gets_its_whole_response_under_load_and_unload(
    tmp_path: Path,
    serve: Callable[..., Served],
    add_model: Callable[..., Path],
    make_ensemble: Callable[..., str],
    make_python: Callable[..., dict[str, str | bytes]],
) -> None:
    wide = f"data_type: TYPE_FP32 dims: [ {WIDTH} ]"
    four = "data_type: TYPE_FP32 dims: [ 4 ]"
    repeats = helper.make_tensor("repeats", TensorProto.INT64, [2], [1, WIDTH // 4])
    net = onnx_model(
        [onnx_node("Tile", ["IN", "repeats"], ["OUT"])],
        [onnx_value("IN", DType.FP32, ["N", 4])],
        [onnx_value("OUT", DType.FP32, ["N", WIDTH])],
        [repeats],
    )
    ports = 'max_batch_size: 4\ninput [ {{ name: "IN" {} }} ]\noutput [ {{ name: "OUT" {} }} ]'
    add_model(tmp_path, "net", 'backend: "onnxruntime"\n' + ports.format(four, wide), {"1/model.onnx": net})
    sums = make_python('return answer(OUT=given("IN")[:, :4] * 2)')
    add_model(tmp_path, "post", 'backend: "python"\n' + ports.format(wide, four), sums)
    ensemble = make_ensemble(
        ["IN"], ["OUT", "WIDE"], [("net", {"IN": "IN"}, {"OUT": "WIDE"}), ("post", {"IN": "WIDE"}, {"OUT": "OUT"})], 4
    ).replace(f'output {{ name: "WIDE" {four} }}', f'output {{ name: "WIDE" {wide} }}')
    add_model(tmp_path, "both", ensemble)
    served = serve(tmp_path, "--model-control-mode=explicit", "--load-model=*")

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", served.port), timeout=30)

    with connect() as slow, connect() as other:
        slow.sendall(ask(3))
        begun = read_head(slow)
        for number in (5, 6):
            other.sendall(ask(number))
            answer = read(other, *read_head(other))
            assert np.frombuffer(answer[-4 * WIDTH :], np.float32).max() == number
        other.sendall(request("GET", "/flowserve/models/both/stats"))
        (row,) = json.loads(read(other, *read_head(other)))["graph_stats"]
        (edge,) = row["nodes"][1]["inputs"]
        assert (edge["producer"], edge["handed_on_bytes"], edge["copied_bytes"]) == ("net", 3 * 4 * WIDTH, 0)
        for name in ("both", "net", "post"):
            other.sendall(request("POST", f"/v2/repository/models/{name}/unload"))
            read(other, *read_head(other))
        body = read(slow, *begun)
    numbers = np.frombuffer(body[-4 * (WIDTH + 4) :], np.float32)
    assert (numbers[:4] == 6).all()
    assert (numbers[4:] == 3).all()
