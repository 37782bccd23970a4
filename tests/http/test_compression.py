"""Compressed requests and responses: formats, negotiation, the size threshold and decompression bombs."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Invalid, TooLarge
from flowserve.http.api.compression import accepted, compress, expand
from flowserve.http.api.infer import AppOptions
from flowserve.runtime.engine.engine import Engine
from tests.support.engine import add_function

LIMIT = 1 << 20
Pack = Callable[[bytes], bytes]
PACKERS: list[Pack] = [gzip.compress, zlib.compress]


@given(st.binary(max_size=3000), st.sampled_from(PACKERS))
def test_gzip_and_deflate_bodies_are_expanded(body: bytes, pack: Pack) -> None:
    assert expand(pack(body), LIMIT) == body
    assert expand(memoryview(pack(body)), len(body)) == body


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_truncated_or_too_long_compressed_stream_is_refused(body: bytes, data: st.DataObject) -> None:
    packed = gzip.compress(body, mtime=0)
    with pytest.raises(Invalid):
        expand(packed[: data.draw(st.integers(0, len(packed) - 1))], LIMIT)
    with pytest.raises(Invalid):
        expand(packed + data.draw(st.binary(min_size=1, max_size=40)), LIMIT)


@pytest.mark.fault("H13")
@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x1f\x8b", b"\x1f\x8b\x08\x00" + bytes(40), gzip.compress(b"x", mtime=0)[:-1]]
)
def test_an_uncompressed_body_announced_as_compressed_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid, match="request body"):
        expand(body, LIMIT)


def test_a_body_may_be_as_large_as_the_limit_and_no_larger() -> None:
    assert len(expand(gzip.compress(bytes(LIMIT)), LIMIT)) == LIMIT
    with pytest.raises(TooLarge, match=f"decompressed request body exceeds the maximum allowed size of {LIMIT} bytes"):
        expand(gzip.compress(bytes(LIMIT + 1)), LIMIT)


@pytest.mark.fault("H18")
@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (b"gzip;q=0, zebra", b""),
        (b"", b""),
        (b"br, zstd", b""),
        (b"*", b""),
        (b"gzip, deflate, br", b"gzip"),
        (b"deflate, gzip", b"deflate"),
        (b"gzip;q=0.5, deflate;q=0.8", b"deflate"),
        (b"GZIP ; Q=1", b"gzip"),
        (b"gzip;q=0.5, identity", b""),
        (b"identity;q=0.5, gzip;q=0.8", b"gzip"),
        (b"identity, gzip", b""),
        (b"gzip;q=many", b""),
        (b"gzip;;;", b""),
        (b",,gzip,,", b"gzip"),
    ],
)
def test_the_response_has_the_preferred_encoding(asked: bytes, got: bytes) -> None:
    assert accepted(asked) == got


def test_a_response_is_not_compressed_if_that_saves_nothing() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()
    assert compress([b"short"], b"gzip") is None
    assert compress([b'{"outputs": []}' * 50, noise], b"gzip") is None
    for encoding in (b"gzip", b"deflate"):
        made = compress([b"{}", bytes(10_000), memoryview(b"tail")], encoding)
        assert made is not None
        assert len(made) < 200
        assert expand(made, LIMIT) == b"{}" + bytes(10_000) + b"tail"


# ------------------------------------------------------------------------------------------------------ over the wire


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v2/models/wide/infer HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture
def wide(engine: Engine) -> Engine:
    add_function(engine, "wide", [lambda array: array + np.float32(1)], dims=(5000,))
    return engine


def numbers(array: Any) -> tuple[bytes, str]:
    """A binary request that wants a binary answer, and its header."""
    one = {"name": "IN", "datatype": "FP32", "shape": [1, 5000], "parameters": {"binary_data_size": 20_000}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    return text + array.tobytes(), f"Inference-Header-Content-Length: {len(text)}"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_both_bodies_may_be_compressed(wide: Engine, api: Any, encoding: str, pack: Pack) -> None:
    body, length = numbers(np.zeros(5000, np.float32))
    client = await api.connect()
    packed: bytes = pack(body)
    for sent, headers in [
        (packed, [f"Content-Encoding: {encoding}"]),
        (body, [f"Accept-Encoding: {encoding}"]),
        (packed, [f"Content-Encoding: {encoding}", f"Accept-Encoding: {encoding}"]),
    ]:
        answer = await client.ask(post(sent, length, *headers))
        assert answer.status == 200
        made = answer.body
        if any(header.startswith("Accept") for header in headers):
            assert answer.headers["content-encoding"] == encoding
            assert len(made) < 1000
            made = expand(made, LIMIT)
        else:
            assert "content-encoding" not in answer.headers
        # The JSON's length is that in the body before it was compressed.
        tensor = made[int(answer.headers["inference-header-content-length"]) :]
        assert np.frombuffer(tensor, np.float32).tolist() == [1.0] * 5000


async def test_incompressible_and_small_responses_and_errors_are_not_compressed(wide: Engine, api: Any) -> None:
    noise = np.random.default_rng(1).integers(0x4C000000, 0x7E000000, 5000, np.int32).view(np.float32)
    body, length = numbers(noise)
    client = await api.connect()
    answer = await client.ask(post(body, length, "Accept-Encoding: gzip"))
    assert (answer.status, "content-encoding" in answer.headers) == (200, False)
    answer = await client.ask(post(b"{}", "Accept-Encoding: gzip"))
    assert (answer.status, "content-encoding" in answer.headers) == (400, False)


@pytest.mark.fault("H13")
async def test_a_body_with_a_wrong_content_encoding_is_refused_and_the_connection_stays_open(
    wide: Engine, api: Any
) -> None:
    body, length = numbers(np.zeros(5000, np.float32))
    client = await api.connect()
    for sent, encoding, status, text in [
        (body, "gzip", 400, "is not what its Content-Encoding says"),
        (b"", "gzip", 400, "is cut short"),
        (gzip.compress(body, mtime=0)[:-9], "gzip", 400, "is cut short"),
        (body, "br", 415, "unknown Content-Encoding 'br'"),
        (body, "gzip, gzip", 415, "unknown Content-Encoding 'gzip, gzip'"),
    ]:
        answer = await client.ask(post(sent, length, f"Content-Encoding: {encoding}"))
        assert answer.status == status
        assert text in json.loads(answer.body)["error"]
    assert (await client.ask(post(body, length, "Content-Encoding: identity"))).status == 200


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.fault("H12")
async def test_a_decompression_bomb_is_refused_before_it_is_expanded(engine: Engine, start: Any) -> None:
    running = await start(engine, AppOptions(max_body_bytes=8 << 20))
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    # The first MiB of zeros with the header of the stream, then one that refers to nothing before it, a thousand times.
    first, another = (stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = first + 1023 * another
    assert len(bomb) < 1_200_000
    client = await running.connect()
    before = resident()
    for path in ("/v2/models/double/infer", "/v2/repository/index"):
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        for _ in range(3):
            answer = await client.ask(head.encode() + bomb)
            assert answer.status == 413
            assert "decompressed request body exceeds the maximum" in json.loads(answer.body)["error"]
    assert resident() - before < 200 << 20
