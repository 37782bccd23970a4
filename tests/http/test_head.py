"""The parser of request heads, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.http.server.request_parser import Head, HeadCache, HeadParser, Limits, Refused

PLAIN = b"POST /v2/models/a%20b/infer?x=%2f HTTP/1.1\r\nHost: h\r\nX-Name: Some Value\r\nContent-Length: 12\r\n\r\n"


def parsed(data: bytes) -> Head:
    return HeadCache(Limits()).parse(data)


def test_the_scope_has_the_keys_of_asgi() -> None:
    scope = parsed(PLAIN).scope
    assert scope["method"] == "POST"
    assert scope["path"] == "/v2/models/a b/infer"
    assert scope["raw_path"] == b"/v2/models/a%20b/infer"
    assert scope["query_string"] == b"x=%2f"
    assert (b"x-name", b"Some Value") in scope["headers"]


@pytest.mark.fault("H14")
@given(st.lists(st.integers(1, len(PLAIN) - 1), max_size=8, unique=True))
def test_any_segmentation_gives_the_same_result(cuts: list[int]) -> None:
    parser = HeadParser(Limits())
    ends = [*sorted(cuts), len(PLAIN)]
    for start, end in zip([0, *ends], ends, strict=False):
        parser.feed(PLAIN[start:end])
    assert parser.finish().scope == parsed(PLAIN).scope


def test_a_parsed_head_is_found_by_its_bytes() -> None:
    heads = HeadCache(Limits())
    assert heads.parse(PLAIN) is heads.by_text[bytes(bytearray(PLAIN))]


def test_kept_heads_are_limited() -> None:
    heads = HeadCache(Limits())
    for number in range(1000):
        heads.parse(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number)
    assert len(heads.by_text) <= 512


def test_an_absolute_url_is_its_path() -> None:
    assert parsed(b"GET http://host:1/v2?a=b HTTP/1.1\r\nHost: h\r\n\r\n").scope["path"] == "/v2"


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_keep_alive_follows_the_version_and_the_header(head: bytes, keeps_alive: bool) -> None:
    assert parsed(head).keep_alive is keeps_alive


@pytest.mark.fault("H2")
@pytest.mark.parametrize(
    "head",
    [
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET /\r\n\r\n",
        b"FROB / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nbad name: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nname : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA: b\nC: d\r\n\r\n",
        b"GET / HTTP/1.1\nA: b\n\nGET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /%ff HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_a_malformed_head_is_refused(head: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parsed(head)
    assert refused.value.status in (400, 505)


@pytest.mark.fault("H3")
@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: -1",
        b"Content-Length: abc",
        b"Content-Length: +5",
        b"Content-Length: 5, 5",
        b"Content-Length: 99999999999999999999999",
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 1",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_ambiguous_framing_is_refused(framing: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parsed(b"POST / HTTP/1.1\r\nHost: h\r\n" + framing + b"\r\n\r\n")
    assert refused.value.status == 400


def test_chunks_in_http_1_0_are_refused() -> None:
    with pytest.raises(Refused):
        parsed(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.mark.fault("H16")
def test_an_unknown_expectation_is_417() -> None:
    with pytest.raises(Refused) as refused:
        parsed(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: miracles\r\nContent-Length: 1\r\n\r\n")
    assert refused.value.status == 417


@pytest.mark.fault("W10")
@pytest.mark.parametrize(
    ("head", "is_served"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHOST: h\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\nHost: b\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", False),
        (b"GET http://h/ HTTP/1.1\r\n\r\n", False),
    ],
)
def test_http_1_1_needs_exactly_one_host(head: bytes, is_served: bool) -> None:
    if is_served:
        parsed(head)
        return
    with pytest.raises(Refused, match="Host headers") as refused:
        parsed(head)
    assert refused.value.status == 400
