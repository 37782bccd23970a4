"""Bodies to arrays and back."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowserve.errors import Internal, Invalid
from flowserve.http.api.decode import Decoder, LargeBody, decode_raw
from flowserve.http.api.encode import HEADER_LENGTH, JSON_HEADERS, Encoder
from flowserve.http.api.request_json import ALL_BINARY, AnswerForm
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.raw import encode_bytes as encode_strings
from flowserve.values import BY_NUMPY, Array, DType, Parameter, Response, TensorSpec

MANY_VARIABLE = "can not be deduced because there are more than one variable-sized dimension"
NUMERIC = [dtype for dtype in DType if dtype is not DType.BYTES]
IN_JSON = [dtype for dtype in NUMERIC if dtype not in (DType.FP16, DType.BF16)]


def binary_request(tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 0) -> tuple[bytes, int]:
    """A body and its header's length. `pad` spaces move the tensors in memory."""
    inputs = [
        {"name": name, "datatype": wire, "shape": shape, "parameters": {"binary_data_size": len(block)}}
        for name, (wire, shape, block) in tensors.items()
    ]
    header = json.dumps({"inputs": inputs}).encode() + b" " * pad
    return header + b"".join(block for _, _, block in tensors.values()), len(header)


def decoded(body: bytes, header_length: int | None = None) -> dict[str, Array]:
    decoder = Decoder(ClientMemory())
    found = decoder.decode(body, header_length, "m")
    return decoded_in_steps(body, header_length) if found is None else found[0].inputs


def decoded_in_steps(body: bytes, header_length: int | None = None) -> dict[str, Array]:
    """The request, decoded in steps as large bodies are."""
    large = LargeBody(Decoder(ClientMemory()), body, header_length, "m")
    expected = large.parse(lambda: None).inputs
    large.prepare(None)
    arrays = large.arrays(lambda: None)
    assert [(name, array.dtype, array.shape) for name, array in arrays.items()] == [
        (name, array.dtype, array.shape) for name, array in expected.items()
    ]
    return arrays


ENCODER = Encoder()  # one for all tests, so that its cache is tested too


def encode(response: Response, form: AnswerForm) -> tuple[list[Any], int | None]:
    """The buffers, and how many bytes of them are JSON: None where the headers say that all are."""
    encoded = ENCODER.encode(response, form)
    assert encoded is not None  # it is small
    parts, headers = encoded
    if headers == JSON_HEADERS:
        return parts, None
    assert dict(headers)[b"content-type"] == b"application/octet-stream"
    return parts, int(dict(headers)[HEADER_LENGTH])


def from_json(wire: str, shape: list[int], data: Any) -> Array:
    document = {"inputs": [{"name": "A", "datatype": wire, "shape": shape, "data": data}]}
    return decoded(json.dumps(document).encode())["A"]


def as_json(array: Array) -> dict[str, Any]:
    (text,), length = encode(Response("m", 1, {"A": array}), AnswerForm())
    assert length is None
    output: dict[str, Any] = json.loads(text)["outputs"][0]
    return output


def answered(array: Array, form: AnswerForm = ALL_BINARY) -> tuple[dict[str, Any], bytes]:
    parts, length = encode(Response("m", 1, {"A": array}), form)
    body = b"".join(parts)
    assert length is not None
    return json.loads(body[:length]), body[length:]


@pytest.fixture(params=NUMERIC, ids=str)
def dtype(request: pytest.FixtureRequest) -> DType:
    value: DType = request.param
    return value


def sample(dtype: DType, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    return (np.arange(count) % 2 if dtype is DType.BOOL else np.arange(count)).astype(dtype.numpy).reshape(shape)


# ---------------------------------------------------------------------------------------------- binary


@pytest.mark.parametrize("pad", range(8))
def test_binary_tensors_of_every_type_are_decoded_at_any_alignment(dtype: DType, pad: int) -> None:
    array = sample(dtype, (2, 3))
    body, length = binary_request({"A": (dtype.wire, [2, 3], array.tobytes()), "B": ("UINT8", [1], b"\7")}, pad)
    inputs = decoded(body, length)
    assert inputs["A"].dtype == dtype.numpy
    assert inputs["A"].flags.aligned
    assert inputs["A"].tobytes() == array.tobytes()
    assert inputs["B"].tolist() == [7]


def test_an_aligned_tensor_is_a_read_only_view_into_the_body() -> None:
    block = np.zeros(4096, np.uint8)
    body, length = binary_request({"A": ("FP32", [4], bytes(16))})
    start = -length % 8
    block[start : start + len(body)] = np.frombuffer(body, np.uint8)
    view = block.data[start : start + len(body)].toreadonly()
    array = decoded(view, length)["A"]  # type: ignore[arg-type]
    assert np.shares_memory(array, block)
    assert not array.flags.writeable


def test_bool_bytes_that_are_neither_0_nor_1_are_true() -> None:
    body, length = binary_request({"A": ("BOOL", [4], b"\0\1\2\xff")})
    array = decoded(body, length)["A"]
    assert array.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.fault("S5")
def test_tensors_without_elements_are_decoded() -> None:
    body, length = binary_request({"A": ("FP32", [0, 3], b""), "B": ("BYTES", [0], b"")})
    inputs = decoded(body, length)
    assert (inputs["A"].shape, inputs["B"].shape) == ((0, 3), (0,))
    assert from_json("INT32", [2, 0], []).shape == (2, 0)


@pytest.mark.fault("B1")
@pytest.mark.parametrize("length", [-1, 100, 99_999_999_999])
def test_a_header_length_outside_the_body_is_refused(length: int) -> None:
    with pytest.raises(Invalid) as error:
        decoded(b"{}", length)
    assert str(error.value) == f"inference header size should be in range (0, 2), got: {length}"


@pytest.mark.fault("B3")
def test_too_few_and_too_many_bytes_are_refused() -> None:
    body, length = binary_request({"A": ("FP32", [4], bytes(16))})
    with pytest.raises(Invalid, match="unexpected size for input 'A', expecting 3 additional bytes for model 'm'"):
        decoded(body[:-3], length)
    with pytest.raises(Invalid, match="unexpected additional input data for model 'm': 1 bytes"):
        decoded(body + b"x", length)


@pytest.mark.fault("B5")
def test_a_string_that_is_longer_than_its_block_is_refused() -> None:
    body, length = binary_request({"A": ("BYTES", [1], b"\xe8\x03\0\0abcd")})
    with pytest.raises(Invalid, match="for inference input 'A' for model 'm', expecting string of length 1000"):
        decoded(body, length)


@pytest.mark.fault("B6")
def test_more_and_fewer_strings_than_the_shape_says_are_refused() -> None:
    three = encode_strings(np.array([b"a", b"b", b"c"], object))
    body, length = binary_request({"A": ("BYTES", [2], three)})
    with pytest.raises(Invalid, match="unexpected number of string elements 3 for inference input 'A'"):
        decoded(body, length)
    body, length = binary_request({"A": ("BYTES", [4], three)})
    with pytest.raises(Invalid, match="expected 4 string elements for inference input 'A' for model 'm', got 3"):
        decoded(body, length)


@pytest.mark.fault("B8")
@given(st.lists(st.binary(max_size=20), max_size=5))
def test_any_bytes_round_trip(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    body, length = binary_request({"A": ("BYTES", [len(elements)], encode_strings(array))})
    inputs = decoded(body, length)
    assert inputs["A"].tolist() == elements
    document, block = answered(inputs["A"])
    assert document["outputs"][0]["parameters"]["binary_data_size"] == len(block)
    assert block == encode_strings(array)


@pytest.mark.fault("B8")
def test_bytes_that_are_not_utf8_cannot_be_encoded_as_json() -> None:
    with pytest.raises(Invalid, match="output 'A' holds bytes that are not UTF-8"):
        as_json(np.array([b"\xff"], object))
    assert as_json(np.array([b"a\0b", "é".encode()], object))["data"] == ["a\0b", "é"]


def test_a_repeated_header_is_decoded_with_its_own_bytes() -> None:
    decoder = Decoder(ClientMemory())
    for value in (1, 2, 3):
        body, length = binary_request({"A": ("UINT8", [2], bytes([value, value]))})
        found = decoder.decode(body, length, "m")
        assert found is not None
        assert found[0].inputs["A"].tolist() == [value, value]
    assert len(decoder._headers) == 1


def test_kept_headers_are_limited() -> None:
    decoder = Decoder(ClientMemory())
    for pad in range(600):
        body, length = binary_request({"A": ("UINT8", [1], b"x")}, pad)
        decoder.decode(body, length, "m")
    assert len(decoder._headers) <= 256


# ---------------------------------------------------------------------------------------------- raw


def spec(wire: str, *dims: int, name: str = "A") -> TensorSpec:
    return TensorSpec(name, DType[wire], dims)


@pytest.mark.parametrize(
    ("one", "limit", "shape"),
    [(spec("FP32", 2, 2), 0, (2, 2)), (spec("FP32", 4), 8, (1, 4)), (spec("FP32", -1, 2), 8, (1, 2, 2))],
)
def test_a_raw_body_is_the_one_input(one: TensorSpec, limit: int, shape: tuple[int, ...]) -> None:
    request, form = decode_raw(np.arange(4, dtype=np.float32).tobytes(), "m", {"A": one}, limit)
    assert request.inputs["A"].tolist() == np.arange(4, dtype=np.float32).reshape(shape).tolist()
    assert form == ALL_BINARY


def test_a_raw_body_can_be_one_string() -> None:
    request, _ = decode_raw(b"\x89PNG", "m", {"A": spec("BYTES", 1)}, 8)
    assert request.inputs["A"].tolist() == [[b"\x89PNG"]]


@pytest.mark.fault("B7")
@pytest.mark.parametrize(
    ("specs", "body", "text"),
    [
        (
            [spec("FP32", 1), spec("FP32", 1, name="B")],
            bytes(4),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            [spec("FP32", -1, -1)],
            bytes(4),
            f"The shape of the raw input 'A' {MANY_VARIABLE}",
        ),
        ([spec("BYTES", 2)], b"", "For BYTE datatype raw input 'A', the model must have input shape [1]"),
        ([spec("FP32", 2)], bytes(9), "input byte size mismatch for input 'A' for model 'm'. Expected 8, got 9"),
        ([spec("FP32", -1)], bytes(9), "input byte size mismatch for input 'A' for model 'm'. Expected 8, got 9"),
    ],
)
def test_a_raw_body_with_an_ambiguous_shape_is_refused(specs: list[TensorSpec], body: bytes, text: str) -> None:
    with pytest.raises(Invalid) as error:
        decode_raw(body, "m", {one.name: one for one in specs}, 0)
    assert str(error.value) == text


# ---------------------------------------------------------------------------------------------- JSON


@pytest.mark.fault("J14")
@given(st.data())
def test_json_round_trips_every_number_exactly(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(IN_JSON))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = data.draw(hnp.arrays(dtype.numpy, shape))
    output = as_json(array)
    assert (output["datatype"], output["shape"]) == (dtype.wire, list(shape))
    back = from_json(dtype.wire, list(shape), output["data"])
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.fault("J14")
@pytest.mark.parametrize(("wire", "value"), [("INT64", -(2**63)), ("INT64", 2**63 - 1), ("UINT64", 2**64 - 1)])
def test_the_largest_integers_are_exact(wire: str, value: int) -> None:
    array = from_json(wire, [1], [value])
    assert array.tolist() == [value]
    assert as_json(array)["data"] == [value]


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], 2], [[[3]]], 4]])
def test_data_may_be_nested_in_any_way(data: list[Any]) -> None:
    assert from_json("INT32", [2, 2], data).tolist() == [[1, 2], [3, 4]]


def test_strings_are_encoded_as_utf8() -> None:
    assert from_json("BYTES", [2], ["é", ""]).tolist() == ["é".encode(), b""]


@pytest.mark.fault("J5")
@pytest.mark.parametrize(
    ("wire", "value", "found"),
    [
        ("FP32", "1", "strings"),
        ("INT32", 1.5, "fractions"),
        ("BYTES", 1, "integers"),
        ("FP32", True, "booleans"),
        ("BOOL", 1, "integers"),
        ("INT32", None, "null"),
        ("FP32", {}, "objects"),
        ("INT64", 2**64, "fractions"),  # what JSON readers make of it
    ],
)
def test_an_element_of_another_type_is_refused(wire: str, value: object, found: str) -> None:
    with pytest.raises(Invalid, match=f"input 'A' is {wire}, its data holds {found}"):
        from_json(wire, [1], [value])


@pytest.mark.parametrize(("wire", "value"), [("UINT8", 256), ("UINT8", -1), ("INT8", 128), ("UINT64", -1)])
def test_a_number_outside_its_type_is_refused_and_not_wrapped(wire: str, value: int) -> None:
    with pytest.raises(Invalid, match=f"input 'A' holds a number outside {wire}"):
        from_json(wire, [1], [value])


@pytest.mark.fault("J6")
@pytest.mark.parametrize("data", [[1], [1, 2, 3], []])
def test_data_of_another_count_than_the_shape_is_refused(data: list[int]) -> None:
    with pytest.raises(Invalid) as error:
        from_json("INT32", [1, 2], data)
    assert str(error.value) == (
        "Unable to parse 'data': Shape does not match true shape of 'data' field "
        f"(input 'A': shape [1, 2] holds 2 elements, 'data' has {len(data)})"
    )


@pytest.mark.fault("S7")
def test_a_huge_shape_with_one_number_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="holds 2147483648 elements, 'data' has 1"):
            from_json("FP32", [1, 2**31], [1])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_shape_numpy_cannot_hold_is_refused() -> None:
    with pytest.raises(Invalid, match="the shape of input 'A' cannot be used"):
        from_json("INT32", [1] * 70, [1])


@pytest.mark.fault("J13")
def test_non_finite_numbers_are_decoded_and_encoded() -> None:
    text = b'{"inputs": [{"name": "A", "datatype": "FP32", "shape": [4], "data": [NaN, Infinity, -Infinity, 0.1]}]}'
    array = decoded(text)["A"]
    np.testing.assert_array_equal(array, np.array([np.nan, np.inf, -np.inf, 0.1], np.float32))
    (answer,), _ = encode(Response("m", 1, {"A": array}), AnswerForm())
    assert b'"data":[NaN,Infinity,-Infinity,0.1]' in answer
    assert json.loads(answer)["outputs"][0]["data"][1:] == [float("inf"), float("-inf"), 0.1]


def test_a_non_finite_parameter_is_encoded_as_json() -> None:
    said: dict[str, Parameter] = {"a": math.inf, "b": -math.inf, "c": 0.1, "d": "NaN", "e": True}
    response = Response("m", 1, {}, parameters={**said, "nan": math.nan})
    (answer,), _ = encode(response, AnswerForm())
    parameters = json.loads(answer)["parameters"]
    assert math.isnan(parameters.pop("nan"))
    assert parameters == said


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(values=st.lists(st.floats(width=32), max_size=8))
def test_non_finite_numbers_are_encoded_at_any_position(dtype: Any, values: list[float]) -> None:
    (answer,), _ = encode(Response("m", 1, {"A": np.array(values, dtype)}), AnswerForm())
    np.testing.assert_array_equal(np.array(json.loads(answer)["outputs"][0]["data"], dtype), np.array(values, dtype))


@pytest.mark.fault("J13")
def test_a_number_beyond_fp32_is_infinite_and_one_beyond_fp64_refused() -> None:
    assert from_json("FP32", [1], [1e300]).tolist() == [float("inf")]
    with pytest.raises(Invalid, match="failed to parse the request JSON buffer"):
        decoded(b'{"inputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": [1e400]}]}')


# ---------------------------------------------------------------------------------------------- answers


def test_a_response_has_the_format_of_kserve() -> None:
    outputs = {"A": np.array([[1, 2]], np.int32), "B": np.array([True])}
    (text,), length = encode(Response("m", 3, outputs, id="x\n", parameters={"p": 1}), AnswerForm())
    assert length is None
    assert json.loads(text) == {
        "id": "x\n",
        "model_name": "m",
        "model_version": "3",
        "parameters": {"p": 1},
        "outputs": [
            {"name": "A", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
            {"name": "B", "datatype": "BOOL", "shape": [1], "data": [True]},
        ],
    }


def test_a_response_to_a_request_without_an_id_has_none() -> None:
    (text,), _ = encode(Response("m", 1, {}), AnswerForm())
    assert json.loads(text) == {"model_name": "m", "model_version": "1", "outputs": []}


def test_each_output_has_the_requested_encoding() -> None:
    outputs: dict[str, Array] = {
        "A": np.array([1, 2], np.int16),
        "B": np.array([3], np.int8),
        "C": np.zeros((0, 2), np.float32),
    }
    parts, length = encode(Response("m", 1, outputs), AnswerForm(True, {"B": False}))
    body = b"".join(parts)
    assert body[length:] == b"\1\0\2\0"
    a, b, c = json.loads(body[:length])["outputs"]
    assert a["parameters"] == {"binary_data_size": 4}
    assert b["data"] == [3]
    assert c["parameters"] == {"binary_data_size": 0}


def test_responses_that_differ_only_in_numbers_share_their_json() -> None:
    def ask(model: str, version: int, array: Array, request_id: str = "") -> tuple[dict[str, Any], bytes]:
        parts, length = encode(Response(model, version, {"A": array}, request_id), ALL_BINARY)
        body = b"".join(parts)
        return json.loads(body[:length]), body[length:]

    ones, twos = np.ones((2, 3), np.int16), np.full((2, 3), 2, np.int16)
    assert ask("m", 1, ones)[0] == ask("m", 1, twos)[0]
    assert ask("m", 1, twos)[1] == twos.tobytes()
    assert ask("m", 1, ones.reshape(3, 2))[0]["outputs"][0]["shape"] == [3, 2]
    assert ask("m", 1, ones.view(np.uint16))[0]["outputs"][0]["datatype"] == "UINT16"
    assert ask("m", 2, ones)[0]["model_version"] == "2"
    assert ask("n", 1, ones)[0]["model_name"] == "n"
    assert ask("m", 1, ones, "r1")[0]["id"] == "r1"
    assert "id" not in ask("m", 1, ones)[0]


def test_binary_outputs_of_every_type_are_their_bytes(dtype: DType) -> None:
    for shape in ((2, 3), (100, 100)):  # small ones are copied, large ones are not
        array = sample(dtype, shape)
        assert answered(array)[1] == array.tobytes()
        turned = array.T
        assert answered(turned)[1] == turned.tobytes()


def test_a_large_output_is_sent_without_a_copy() -> None:
    array = np.zeros((4, 10_000), np.float32)
    parts, _ = encode(Response("m", 1, {"A": array[1:3]}), ALL_BINARY)
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), array)


@pytest.mark.fault("J15")
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16], ids=str)
def test_half_precision_cannot_be_encoded_as_json(dtype: DType) -> None:
    with pytest.raises(Invalid, match=f"sending {dtype} data via JSON is not supported"):
        as_json(np.zeros(1, dtype.numpy))


def test_a_result_that_is_no_tensor_is_an_error_of_the_model() -> None:
    with pytest.raises(Internal, match="model 'm' made output 'A' of numpy type complex64"):
        as_json(np.zeros(1, np.complex64))


def test_every_type_has_its_samples() -> None:
    assert {BY_NUMPY[sample(dtype, (1,)).dtype] for dtype in NUMERIC} == set(NUMERIC)


def test_data_beside_nested_lists_is_not_scanned_once_per_level() -> None:
    deep: list[Any] = [0.5]
    for _ in range(90):
        deep = [deep]
    data = [*[1.0] * 200_000, deep, 2.0]
    text = json.dumps({"inputs": [{"name": "A", "datatype": "FP32", "shape": [len(data)], "data": data}]}).encode()
    began = time.thread_time()
    array = decoded(text)["A"]
    assert time.thread_time() - began < 1
    assert array[-3:].tolist() == [1.0, 0.5, 2.0]


@given(st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=4), max_leaves=30))
def test_nested_data_of_any_shape_keeps_the_order_of_its_elements(nested: Any) -> None:
    nested = nested if isinstance(nested, list) else [nested]
    flat = [int(digit) for digit in json.dumps(nested) if digit.isdigit()]
    assert from_json("INT32", [len(flat)], nested).tolist() == flat
