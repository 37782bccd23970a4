"""Large JSON in pieces: the arrays, or the refusal, are those of the same text parsed at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Internal, Invalid, TooLarge
from flowserve.http.api import encode as encoding
from flowserve.http.api import large_json
from flowserve.http.api.compression import compress, expand
from flowserve.http.api.decode import Decoder, LargeBody
from flowserve.http.api.encode import Encoder, encode_large
from flowserve.http.api.request_json import AnswerForm, parse_large_header
from flowserve.memory.client_memory import ClientMemory
from flowserve.runtime.protocol import ElementLimits
from flowserve.runtime.threads import INLINE_BYTES_MAX
from flowserve.values import Array, Response

pytestmark = pytest.mark.fault("W2")

STRINGS = st.text(st.sampled_from('a"\\,[]{}:é\n '), max_size=6)
NUMBERS = st.one_of(st.integers(-9, 9), st.floats(width=32))
STEPS = st.integers(1, 40)


def no_pause() -> None:
    """A pause in which nothing else runs."""


def at_once(body: bytes) -> dict[str, Array]:
    found = Decoder(ClientMemory()).decode(body, None, "m")
    assert found is not None  # it is small
    return found[0].inputs


def in_steps(body: bytes, limits: ElementLimits | None = None) -> dict[str, Array]:
    large = LargeBody(Decoder(ClientMemory(), limits), body, None, "m")
    large.parse(no_pause)
    large.prepare(None)
    return large.arrays(no_pause)


def equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and (one[name].dtype.hasobject or one[name].tobytes() == other[name].tobytes())
        and (not one[name].dtype.hasobject or one[name].tolist() == other[name].tolist())
        for name in one
    )


@pytest.fixture(autouse=True)
def _step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "_STEP_BYTES", large_json._STEP_BYTES)  # restored after each test


def written(value: Any, gap: str) -> str:
    """JSON with whitespace, including NaN and the infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(f"{gap},{gap}", f"{gap}:"))


def body_of(data: list[tuple[str, Any]], gap: str = "") -> bytes:
    inputs = []
    for place, (datatype, values) in enumerate(data):
        count = len(list(leaves(values)))
        inputs.append({"name": f"X{place}", "datatype": datatype, "data": values, "shape": [count]})
    return written({"id": '"data":[', "inputs": inputs, "parameters": {"x": 'a\\"data":[1'}}, gap).encode()


def leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        yield from chain.from_iterable(map(leaves, values))
    else:
        yield values


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(
        st.recursive(values, lambda inner: st.lists(inner, min_size=1, max_size=4)), min_size=1, max_size=30
    )


INPUTS = st.lists(
    st.one_of(st.tuples(st.just("BYTES"), nested(STRINGS)), st.tuples(st.just("FP32"), nested(NUMBERS))), max_size=3
)


@given(INPUTS, STEPS, st.sampled_from(["", " ", "\n\t"]))
def test_every_valid_body_is_the_same_in_pieces_of_any_size(data: list[tuple[str, Any]], step: int, gap: str) -> None:
    large_json._STEP_BYTES = step  # type: ignore[misc]
    body = body_of(data, gap)
    assert equal(in_steps(body), at_once(body))


@given(
    INPUTS, STEPS, st.integers(0, 10_000), st.sampled_from([b"", b",", b"[", b"]", b'"', b"\\", b"{", b"}", b"1", b" "])
)
def test_a_damaged_body_is_not_accepted_in_pieces_unless_it_is_at_once(
    data: list[tuple[str, Any]], step: int, at: int, piece: bytes
) -> None:
    large_json._STEP_BYTES = step  # type: ignore[misc]
    body = body_of(data)
    at %= len(body)
    for damaged in (body[:at] + piece + body[at + 1 :], body[:at] + piece + body[at:]):
        try:
            found = in_steps(damaged)
        except (Invalid, TooLarge):
            continue
        assert equal(found, at_once(damaged))


@pytest.mark.parametrize(
    "data",
    [
        "[1,,2]",
        "[1,2,]",
        "[,1,2]",
        "[[1,],2]",
        "[[1],[,2]]",
        "[[,[1]],2]",
        "[1 2]",
        "[1,2",
        "[1,]2]",
        "[1],2]",
        '["1",2]',
    ],
)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_an_invalid_array_is_refused_wherever_it_is_cut(data: str, step: int) -> None:
    large_json._STEP_BYTES = step  # type: ignore[misc]
    body = b'{"inputs":[{"name":"X","datatype":"INT32","shape":[2],"data":%b}]}' % data.encode()
    with pytest.raises(Invalid):
        in_steps(body)


def test_an_error_in_a_piece_names_its_byte() -> None:
    large_json._STEP_BYTES = 8  # type: ignore[misc]
    body = b'{"inputs":[{"name":"X","datatype":"INT32","shape":[9],"data":[1,2,3,4,5,6,7x,8,9]}]}'
    with pytest.raises(Invalid, match=r"failed to parse the request JSON buffer: .*counted from byte \d\d"):
        in_steps(body)


def one_input(data: bytes, shape: int, datatype: str = "INT32") -> bytes:
    return b'{"inputs":[{"name":"X","datatype":"%b","shape":[%d],"data":%b}]}' % (datatype.encode(), shape, data)


def test_more_elements_than_the_shape_or_the_limit_are_refused_before_objects_are_made() -> None:
    ones = b"[" + b"1," * 300_000 + b"1]"
    with pytest.raises(Invalid, match=r"shape \[5\] holds 5 elements, 'data' has 300001"):
        in_steps(one_input(ones, 5))
    with pytest.raises(TooLarge, match=r"more than 300000 elements \(--http-max-json-elements\)"):
        in_steps(one_input(ones, 300_001), ElementLimits(json_elements=300_000))
    assert len(in_steps(one_input(ones, 300_001), ElementLimits(json_elements=300_001))["X"]) == 300_001
    with pytest.raises(Invalid, match="holds objects"):
        in_steps(one_input(b"[{},1]", 2))
    with pytest.raises(TooLarge, match=r"have 3 elements, at most 2 are accepted \(--max-bytes-elements\)"):
        in_steps(one_input(b'["","",""]', 3, "BYTES"), ElementLimits(bytes_elements=2))


def test_an_empty_array_has_no_elements() -> None:
    assert in_steps(one_input(b"[ ]", 0))["X"].shape == (0,)
    with pytest.raises(Invalid, match="holds 1 elements, 'data' has 0"):
        in_steps(one_input(b"[[]]", 1))
    with pytest.raises(Invalid, match=f"holds {2**40} elements, 'data' has 1"):  # and no memory is allocated
        in_steps(one_input(b"[1]", 2**40))


def test_the_length_of_a_value_and_of_the_rest_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLarge, match="without the 'data' of its inputs has more than 1048576 bytes"):
        in_steps(b'{"a":[' + b"[]," * 400_000 + b'1],"inputs":[]}')
    monkeypatch.setattr(large_json, "VALUE_BYTES_MAX", 1 << 17)
    for text in (b'"%b"' % (b"a," * 200_000), b"0.%b" % (b"1" * 300_000), b" " * 300_000):
        with pytest.raises(TooLarge, match="one value in the request's JSON has more than 131072 bytes"):
            in_steps(one_input(b"[1," + text + b",1]", 3))


def test_data_that_no_input_has_is_refused() -> None:
    for body in (
        b'{"parameters":{"data":[1]},"inputs":[]}',
        b'{"inputs":[{"name":"X","datatype":"INT32","shape":[1],"data":[1],"data":[2]}]}',
    ):
        with pytest.raises(Invalid):
            in_steps(body)


def test_the_decoder_leaves_large_bodies_to_threads() -> None:
    decoder = Decoder(ClientMemory())
    many = INLINE_BYTES_MAX // 2
    assert decoder.decode(one_input(b"[" + b"1," * many + b"1]", many + 1), None, "m") is None
    header = b'{"inputs":[{"name":"X","datatype":"%b","shape":[%d],"parameters":{"binary_data_size":%d}}]}'
    text = header % (b"BYTES", 1, INLINE_BYTES_MAX + 4)
    block = INLINE_BYTES_MAX.to_bytes(4, "little") + bytes(INLINE_BYTES_MAX)
    assert decoder.decode(text + block, len(text), "m") is None
    text = header % (b"FP32", 1_000_000, 4_000_000)  # decoded at once, as a view of the body
    assert decoder.decode(text + bytes(4_000_000), len(text), "m") is not None


# ---------------------------------------------------------------------------------------------- responses


def response(outputs: dict[str, Array]) -> Response:
    return Response("m", 1, outputs, "id")


OUTPUTS: dict[str, Array] = {
    "floats": np.array([[1.5, np.nan], [-np.inf, 1e-7]], np.float32),
    "none": np.empty((0, 2), np.int64),
    "one": np.array([7], np.uint8),
    "truth": np.array([True, False, True]),
    "texts": np.array([b"a", "é\n".encode(), b"x" * 50, b""], object),
}


@pytest.mark.parametrize("binary", [[], ["floats"], ["texts", "truth"], list(OUTPUTS)])
def test_a_response_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, binary: list[str]) -> None:
    form = AnswerForm(listed={name: name in binary for name in OUTPUTS})
    encoded = Encoder().encode(response(OUTPUTS), form)
    assert encoded is not None
    monkeypatch.setattr(encoding, "_PIECE_ELEMENTS", 2)
    monkeypatch.setattr(encoding, "_PIECE_BYTES", 16)
    parts, headers = encode_large(response(OUTPUTS), form, no_pause)
    assert headers == encoded[1]
    assert b"".join(parts) == b"".join(encoded[0])


def test_large_responses_are_left_to_threads_and_very_large_ones_refused() -> None:
    encoder = Encoder(ElementLimits(json_elements=100_000))
    json_form, binary_form = AnswerForm(), AnswerForm(default_is_binary=True)
    assert encoder.encode(response({"Y": np.zeros(40_000)}), json_form) is None
    assert encoder.encode(response({"Y": np.zeros(40_000)}), binary_form) is not None
    assert encoder.encode(response({"Y": np.array([b"a" * 2_000_000], object)}), json_form) is None
    with pytest.raises(Invalid, match=r'100001 elements, at most 100000 .*"binary_data": true'):
        encoder.encode(response({"Y": np.zeros(100_001)}), json_form)
    with pytest.raises(Internal):
        encode_large(response({"Y": np.zeros(40_000, np.complex128)}), json_form, no_pause)
    (text, *_), _ = encode_large(response({"Y": np.zeros(3)}), json_form, no_pause)
    assert orjson.loads(text + b"}")["id"] == "id"


def test_a_compressed_body_of_any_length_is_expanded_in_pieces() -> None:
    for size in (0, 1, 1 << 20, (1 << 20) + 1, 5_000_000):
        body = bytes(size)
        packed = compress([body], b"gzip") if size > 2000 else None
        if packed is not None:
            assert expand(packed, size) == body
            with pytest.raises(TooLarge):
                expand(packed, size - 1)
            with pytest.raises(Invalid, match="cut short"):
                expand(packed[:-1], size)
            with pytest.raises(Invalid, match="goes on after"):
                expand(packed + b"x", size)


def test_an_escaped_key_does_not_replace_the_array_of_a_large_body() -> None:
    text = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[2.5],"d\\u0061ta":[0]}]}'
    with pytest.raises(Invalid, match="'data': it is a member of an input, once"):
        parse_large_header(memoryview(text), "m", ElementLimits(), lambda: None)
