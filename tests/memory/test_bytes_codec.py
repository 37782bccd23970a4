"""BYTES tensors round-trip exactly, and malformed ones raise Triton's errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from flowserve.errors import Internal, Invalid
from flowserve.memory.assemble import gather
from flowserve.memory.column import Column, scatter
from flowserve.memory.pool import HOST
from flowserve.memory.raw import EncodedBytes
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


# ---------------------------------------------------------------------------------------------- in their wire form


def no_pause() -> None:
    pass


@given(
    elements=st.lists(st.binary(max_size=9), max_size=24),
    width=st.sampled_from([1, 2, 3]),
    cuts=st.lists(st.integers(0, 24), min_size=2, max_size=2),
)
def test_encoded_strings_read_as_the_array_of_their_elements(
    elements: list[bytes], width: int, cuts: list[int]
) -> None:
    rows = len(elements) // width
    array = objects(*elements[: rows * width]).reshape(rows, width)
    encoded = EncodedBytes.of(encode(array), "x", "m", array.shape)
    start, stop = sorted(min(cut, rows) for cut in cuts)
    for wanted, found in (
        (array, encoded),
        (array[start:stop], encoded[start:stop]),
        (array[start:][: stop - start], encoded[start:][: stop - start]),
        (array.reshape(-1), encoded.reshape(-1)),
        (array.ravel()[start:stop], encoded.reshape(-1)[start:stop]),
    ):
        assert (found.shape, found.size, found.ndim, found.dtype) == (
            wanted.shape,
            wanted.size,
            wanted.ndim,
            wanted.dtype,
        )
        assert len(found) == len(wanted)
        assert bytes(found.data) == bytes(found.checked(no_pause)) == encode(wanted)
        assert np.asarray(found).tolist() == found.tolist() == wanted.tolist()
        assert found.in_own_memory().ravel().tolist() == wanted.ravel().tolist()


def test_encoded_strings_of_members_are_gathered_in_one_piece_and_apart() -> None:
    array = objects(b"a", b"", b"ccc", b"d").reshape(4, 1)
    encoded = EncodedBytes.of(encode(array), "x", "m", array.shape)
    tensors = scatter(encoded, [1, 2, 1])
    found = Column.of([*tensors], [1, 2, 1]).block
    assert found is not None
    assert found is encoded
    assert [part.tolist() for part in Column.whole(encoded, [1] * 4).arrays] == [
        [[b"a"]],
        [[b""]],
        [[b"ccc"]],
        [[b"d"]],
    ]
    for members in (tensors, tensors[::-1], tensors[1:]):
        gathered, _ = gather(members, HOST)
        assert type(gathered) is np.ndarray
        assert gathered.tolist() == np.concatenate([member.array.copy() for member in members]).tolist()


@pytest.mark.parametrize(("buffer", "count"), [(TWO, 1), (TWO, 3), (TWO[:-1], 2), (TWO[:-3], 2), (b"\xff" * 9, 2)])
def test_encoded_strings_are_checked_when_they_are_read(buffer: bytes, count: int) -> None:
    with pytest.raises(Invalid) as expected:
        decode(buffer, count, name="x", model="m")
    given = EncodedBytes.of(buffer, "x", "m", (count,))
    made = EncodedBytes.of(buffer, "x", "m", (count,), is_output=True)
    reads: list[Callable[[EncodedBytes], object]] = [
        lambda one: one.checked(no_pause),
        lambda one: one.copy(),
        lambda one: one[count - 1 :].copy(),
    ]
    for read in reads:
        with pytest.raises(Invalid) as caught:
            read(given)
        assert str(caught.value) == str(expected.value)
        with pytest.raises(Internal, match="model 'm' made output 'x' of invalid BYTES: "):
            read(made)
