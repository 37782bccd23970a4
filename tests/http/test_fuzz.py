"""Mutated requests: each is served or refused, without other effects."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowserve.errors import Invalid, Unsupported
from flowserve.http.api.decode import Decoder
from flowserve.http.server.request_parser import ChunkedBody, HeadCache, Limits, Refused
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.raw import encode_bytes as encode_strings
from flowserve.values import BY_NUMPY

HEAD = (
    b"POST /v2/models/m/versions/1/infer?a=b HTTP/1.1\r\nHost: localhost:8000\r\nContent-Length: 12\r\n"
    b"Inference-Header-Content-Length: 5\r\nExpect: 100-continue\r\nConnection: keep-alive\r\n\r\n"
)
CHUNKS = b"4;x=y\r\nabcd\r\n1A\r\n" + b"z" * 26 + b"\r\n0\r\nTrailer: t\r\n\r\n"
JSON = json.dumps(
    {
        "id": "x",
        "parameters": {"priority": 1, "sequence_id": "s", "binary_data_output": True},
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3e4, 4]]},
            {"name": "B", "datatype": "BYTES", "shape": [1], "data": ["é\n"]},
            {"name": "C", "datatype": "INT16", "shape": [1, 3], "parameters": {"binary_data_size": 6}},
            {"name": "D", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
        ],
        "outputs": [{"name": "O", "parameters": {"binary_data": True}}],
    }
).encode()
BODY = JSON + bytes(6) + encode_strings(np.array([b"abc", b""], object))


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """`original` with a few pieces cut out, doubled, or written over."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 8)))
        tokens = st.sampled_from([b"-1", b"null", b"{}", b"[", b'"', b"\r\n", b"\0", b"1e999", b"9" * 30, b"\\ud800"])
        data[start:stop] = draw(st.one_of(st.binary(max_size=6), tokens, st.just(bytes(data[start:stop]) * 3)))
    return bytes(data)


many = settings(max_examples=5 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])


@many
@given(mutated(HEAD))
def test_a_mutated_head_is_parsed_or_refused(data: bytes) -> None:
    with suppress(Refused):
        assert HeadCache(Limits()).parse(data).content_length >= 0


@many
@given(mutated(CHUNKS), st.integers(1, 20))
def test_a_mutated_chunked_body_is_read_or_refused_wherever_it_is_cut(data: bytes, step: int) -> None:
    def outcome(pieces: list[bytes]) -> object:
        body = ChunkedBody(100)
        try:
            for piece in pieces:
                if body.feed(piece):
                    return bytes(body.body)
        except Refused as refused:
            return refused.status
        return "more"

    pieces = [data[start : start + step] for start in range(0, len(data), step)]
    assert outcome(pieces) == outcome([data])


@many
@given(mutated(BODY), st.integers(-2, 3))
def test_a_mutated_body_is_decoded_or_refused(data: bytes, shift: int) -> None:
    for length in (len(JSON) + shift, None):
        with suppress(Invalid, Unsupported):
            found = Decoder(ClientMemory()).decode(data, length, "m")
            assert found is not None
            assert all(array.dtype in BY_NUMPY for array in found[0].inputs.values())
