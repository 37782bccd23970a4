"""Chunked bodies, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.http.server.request_parser import ChunkedBody, Refused


def decoded(*pieces: bytes, limit: int = 1 << 20) -> tuple[bytes, bytes]:
    body = ChunkedBody(limit)
    done = [body.feed(piece) for piece in pieces]
    assert done == [False] * (len(pieces) - 1) + [True]
    return bytes(body.body), body.rest


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.binary(max_size=10), st.data())
def test_any_segmentation_gives_the_same_result(chunks: list[bytes], after: bytes, data: st.DataObject) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=6, unique=True)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    pieces[-1] += after
    assert decoded(*pieces) == (b"".join(chunks), after)


def test_extensions_and_trailers_are_read_over() -> None:
    assert decoded(b"3;name=value\r\nabc\r\n0\r\nDigest: x\r\n\r\nGET") == (b"abc", b"GET")


@pytest.mark.fault("H4")
@pytest.mark.parametrize(
    "wire",
    [
        b"xyz\r\n",
        b"-3\r\nabc\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"3_0\r\nabc\r\n",
        b"\r\nabc",
        b"3\r\nabcd\r\n",
        b"3\r\nabcdef",
        b"3;a\nb\r\nabc\r\n",
        b"0\r\nA: b\nC: d\r\n\r\n",
        b"1" * 5000,
        b"ffffffffffffffffff\r\n",
    ],
)
def test_a_malformed_chunk_is_refused(wire: bytes) -> None:
    with pytest.raises(Refused) as refused:
        ChunkedBody(1 << 20).feed(wire)
    assert refused.value.status == 400


@pytest.mark.fault("H9", "H10")
def test_more_than_65536_chunks_are_refused_and_no_fewer() -> None:
    body = ChunkedBody(1 << 20)
    assert not body.feed(b"1\r\nx\r\n" * 65_536)
    assert len(body.body) == 65_536
    with pytest.raises(Refused, match="exceeds maximum of 65536 non-empty chunks"):
        body.feed(b"1\r\nx\r\n")


@pytest.mark.fault("H11")
def test_a_body_over_the_limit_is_refused_before_it_arrives() -> None:
    with pytest.raises(Refused, match="exceeds the maximum allowed size of 10 bytes") as refused:
        ChunkedBody(10).feed(b"6\r\nabcdef\r\n5\r\n")
    assert refused.value.status == 413


@pytest.mark.fault("W10")
@pytest.mark.parametrize("before", [b"5\n", b"5;a=b\n", b"5\r\nhello\n", b"0\n", b"0\r\nA: b\n", b"0\r\n\n", b"\n"])
def test_a_bare_line_feed_is_refused_at_once(before: bytes) -> None:
    with pytest.raises(Refused, match="line feed") as refused:
        ChunkedBody(1 << 20).feed(before)
    assert refused.value.status == 400


@pytest.mark.fault("W10")
def test_a_line_feed_in_a_piece_of_its_own_after_a_carriage_return_is_accepted() -> None:
    assert decoded(*[bytes([byte]) for byte in b"3\r\na\nb\r\n0\r\nA: b\r\n\r\n"]) == (b"a\nb", b"")
    body = ChunkedBody(1 << 20)
    with pytest.raises(Refused, match="line feed"):
        [body.feed(bytes([byte])) for byte in b"3\n"]
