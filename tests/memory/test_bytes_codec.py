"""BYTES tensors round-trip exactly, and malformed ones raise Triton's errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from flowserve.errors import Invalid
from flowserve.memory.raw import decode_bytes as decode
from flowserve.memory.raw import encode_bytes as encode

TWO = b"\x02\0\0\0ab\x01\0\0\0c"


def objects(*elements: object) -> np.ndarray:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


@pytest.mark.fault("B8")
@given(elements=st.lists(st.binary(max_size=40), max_size=20))
def test_any_bytes_round_trip_through_the_codec(elements: list[bytes]) -> None:
    encoded = encode(objects(*elements))
    assert decode(encoded, len(elements), name="x", model="m").tolist() == elements


@given(elements=st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_the_encoding_is_the_one_tritons_client_speaks(elements: list[bytes]) -> None:
    array = objects(*elements)
    assert encode(array) == serialize_byte_tensor(array).item()
    assert deserialize_bytes_tensor(encode(array)).tolist() == elements


def test_text_becomes_utf_8_and_other_objects_their_text() -> None:
    assert encode(objects("ü", 3, np.bytes_(b"z"))) == b"\x02\0\0\0\xc3\xbc\x01\0\0\x003\x01\0\0\0z"
    assert encode(np.array(["ab", "c"])) == TWO
    assert encode(np.array([b"ab", b"c"])) == TWO


def test_elements_are_encoded_in_row_major_order_whatever_the_array_is() -> None:
    array = objects(b"ab", b"c", b"", b"d").reshape(2, 2)
    assert decode(encode(array.T), 4, name="x", model="m").tolist() == [b"ab", b"", b"c", b"d"]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: type) -> None:
    assert decode(kind(TWO), 2, name="x", model="m").tolist() == [b"ab", b"c"]


@pytest.mark.parametrize(
    ("buffer", "count", "text"),
    [
        (TWO, 1, "unexpected number of string elements 2 for inference input 'x' for model 'm', expecting 1"),
        (TWO, 0, "unexpected number of string elements 1 for inference input 'x' for model 'm', expecting 0"),
        (TWO, 3, "expected 3 string elements for inference input 'x' for model 'm', got 2"),
        (b"", 1, "expected 1 string elements for inference input 'x' for model 'm', got 0"),
        (TWO, 2**60, f"expected {2**60} string elements for inference input 'x' for model 'm', got 2"),
        (
            TWO[:-3],
            2,
            (
                "incomplete string length indicator for inference input 'x' for model 'm', "
                "expecting 4 bytes but only 2 bytes available"
            ),
        ),
        (
            TWO[:-1],
            2,
            (
                "incomplete string data for inference input 'x' for model 'm', "
                "expecting string of length 1 but only 0 bytes available"
            ),
        ),
        (
            b"\xff\xff\xff\xffab",
            1,
            (
                "incomplete string data for inference input 'x' for model 'm', "
                "expecting string of length 4294967295 but only 2 bytes available"
            ),
        ),
    ],
)
def test_a_broken_encoding_is_refused_saying_how(buffer: bytes, count: int, text: str) -> None:
    with pytest.raises(Invalid) as caught:
        decode(buffer, count, name="x", model="m")
    assert str(caught.value) == text
