"""The JSON of an inference request: accepted fields and error messages."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import FlowserveError, Invalid
from flowserve.http.api.request_json import AnswerForm, parse_header
from flowserve.memory.client_memory import Portion
from flowserve.values import Request

INPUT: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def request(**fields: Any) -> bytes:
    return json.dumps({"inputs": [INPUT], **fields}).encode()


def one_input(**fields: Any) -> bytes:
    """A request whose one input has these fields; None leaves one out."""
    entry = {key: value for key, value in {**INPUT, **fields}.items() if value is not None}
    return json.dumps({"inputs": [entry]}).encode()


def refusal(text: bytes, kind: type[FlowserveError] = Invalid) -> str:
    with pytest.raises(FlowserveError) as error:
        parse_header(text, "m")
    assert type(error.value) is kind
    return str(error.value)


def fields(text: bytes) -> Request:
    return Request({}, *parse_header(text, "m").fields)


def test_every_field_is_read() -> None:
    header = parse_header(
        request(
            id="a",
            outputs=[{"name": "X", "parameters": {"binary_data": True}}, {"name": "Y"}],
            parameters={
                "sequence_id": 2**64 - 1,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 3,
                "timeout": 1000,
                "binary_data_output": True,
                "mine": "text",
                "flag": True,
                "number": -5,
                "fraction": 0.5,
            },
        ),
        "m",
    )
    parsed = Request({}, *header.fields)
    assert (parsed.id, parsed.priority, parsed.timeout_us) == ("a", 3, 1000)
    assert (parsed.sequence_id, parsed.sequence_start, parsed.sequence_end) == (2**64 - 1, True, False)
    assert parsed.parameters == {"mine": "text", "flag": True, "number": -5, "fraction": 0.5}
    assert parsed.outputs == ("X", "Y")
    # Listed outputs look at their own parameter only; the request's parameter applies to unlisted outputs.
    assert header.form == AnswerForm(default_is_binary=True, listed={"X": True, "Y": False})


def test_a_sequence_may_have_a_name_for_a_number() -> None:
    assert fields(request(parameters={"sequence_id": "session"})).sequence_id == "session"


@pytest.mark.parametrize("outputs", [[], None])
def test_no_outputs_means_all(outputs: list[Any] | None) -> None:
    text = request() if outputs is None else request(outputs=outputs)
    assert fields(text).outputs is None


@pytest.mark.fault("J1")
@pytest.mark.parametrize("text", [b"", b"hello", b'{"inputs": [', b"\xef\xbb\xbf{}", b'{"inputs": [],}'])
def test_a_body_that_is_not_json_is_refused(text: bytes) -> None:
    assert refusal(text).startswith("failed to parse the request JSON buffer")


@pytest.mark.fault("J2")
@pytest.mark.parametrize("text", [b"[]", b"null", b'"x"', b"1"])
def test_a_body_that_is_not_a_json_object_is_refused(text: bytes) -> None:
    assert "not a JSON object" in refusal(text)


@pytest.mark.fault("J3")
def test_inputs_that_are_no_list_are_refused_and_missing_inputs_accepted_here() -> None:
    text = "Unable to parse 'inputs': attempt to access JSON non-array as array; write a list: [...]"
    assert refusal(request(inputs={})) == text
    assert parse_header(b"{}", "m").inputs == ()
    assert parse_header(request(inputs=[]), "m").inputs == ()


def test_inputs_by_another_name_are_named() -> None:
    text = refusal(b'{"id": "x", "instances": [[1, 2]]}')
    assert text.startswith(
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs': it has 'instances'; expected "
    )
    assert refusal(b"").startswith("failed to parse the request JSON buffer: Input is a zero-length")
    for shown in (text, refusal(b"[]"), refusal(b"")):
        example = shown.partition("expected ")[2].partition("; ")[0]
        assert parse_header(example.encode(), "m").inputs[0].shape == (1, 2)


@pytest.mark.fault("J1")
def test_bytes_after_the_json_without_its_length_header_are_refused() -> None:
    text = refusal(request() + bytes(8))
    assert text.startswith("failed to parse the request JSON buffer: unexpected content after document: line 1 column")
    assert text.endswith(
        " (where binary data follow the JSON, Inference-Header-Content-Length says how long the JSON is)"
    )


@pytest.mark.fault("J4")
@pytest.mark.parametrize("field", ["name", "shape", "datatype", "data"])
def test_a_missing_field_is_named(field: str) -> None:
    assert f"'{field}'" in refusal(one_input(**{field: None}))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": 5}, "Unable to parse 'name': attempt to access JSON non-string as string (inputs[0])"),
        ({"datatype": "FP31"}, "invalid datatype 'FP31' for input 'INPUT0'; use one of BOOL,"),
        ({"data": 5}, "Unable to parse 'data': attempt to access JSON non-array as array (input 'INPUT0')"),
        ({"parameters": 5}, "Unable to parse 'parameters': attempt to access JSON non-object as object"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, Any], text: str) -> None:
    assert refusal(one_input(**fields)).startswith(text)


@pytest.mark.fault("J7")
def test_a_repeated_input_is_refused() -> None:
    assert refusal(request(inputs=[INPUT, INPUT])) == "input 'INPUT0' already exists in request"


@pytest.mark.fault("J9")
def test_a_repeated_output_is_refused() -> None:
    assert refusal(request(outputs=[{"name": "A"}, {"name": "A"}])) == "output 'A' already exists in request"


@pytest.mark.fault("J8")
@pytest.mark.parametrize("depth", [120, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    text = b'{"inputs": [{"name": "A", "data": ' + b"[" * depth + b"]" * depth + b"}]}"
    assert refusal(text) == "JSON nesting depth exceeds maximum allowed limit (100)"
    assert refusal(b"[" * depth) == "JSON nesting depth exceeds maximum allowed limit (100)"


@pytest.mark.fault("J8")
@given(st.lists(st.text(alphabet='[]{}"\\x', max_size=30), max_size=40), st.integers(0, 150))
def test_depth_is_counted_outside_strings_only(strings: list[str], depth: int) -> None:
    data: Any = strings
    for _ in range(depth):
        data = [data]
    text = one_input(datatype="BYTES", data=data)
    if 4 + depth > 100:
        assert refusal(text) == "JSON nesting depth exceeds maximum allowed limit (100)"
    else:
        assert parse_header(text, "m").inputs[0].data == data


@pytest.mark.fault("J8")
def test_nesting_of_50_and_brackets_inside_strings_are_accepted() -> None:
    data: Any = [1, 2]
    for _ in range(46):
        data = [data]
    assert parse_header(one_input(data=data), "m").inputs[0].data == data
    brackets = ['[[[["' * 100, "{" * 200, "\\" * 7 + "[" * 200, '"', "[" * 200]
    assert parse_header(one_input(datatype="BYTES", data=brackets), "m").inputs[0].data == brackets


@pytest.mark.fault("J10")
@pytest.mark.parametrize(
    "fields",
    [
        {"outputs": [{"name": str(number)} for number in range(100_000)]},
        {"parameters": {str(number): 1 for number in range(100_000)}},
        {"inputs": [INPUT] * 100_000},
    ],
)
def test_a_hundred_thousand_entries_are_refused(fields: dict[str, Any]) -> None:
    assert "100000 entries, at most 1024 are accepted" in refusal(request(**fields))


@pytest.mark.fault("J11")
@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": "high"},
        {"priority": -1},
        {"priority": True},
        {"timeout": 1.5},
        {"timeout": 2**64},
        {"sequence_id": -1},
        {"sequence_id": None},
        {"sequence_start": "yes"},
        {"sequence_end": 1},
        {"binary_data_output": "true"},
        {"mine": {}},
        {"mine": None},
        {"mine": [1]},
    ],
)
def test_a_parameter_of_the_wrong_type_is_named(parameters: dict[str, Any]) -> None:
    (key,) = parameters
    assert f"'{key}'" in refusal(request(parameters=parameters))


def test_reserved_parameters_are_refused() -> None:
    text = refusal(request(parameters={"triton_x": 1}))
    assert text.startswith("parameter keys starting with 'triton_' are reserved")


@pytest.mark.fault("J12")
@pytest.mark.parametrize("text", [b'{"id": "\xff"}', b'{"id": "\\ud800"}', b'{"\xc3": 1}'])
def test_text_that_is_not_unicode_is_refused(text: bytes) -> None:
    assert refusal(text).startswith("failed to parse the request JSON buffer")


@pytest.mark.fault("J15")
@pytest.mark.parametrize("dtype", ["FP16", "BF16"])
def test_an_input_of_half_precision_as_json_is_refused(dtype: str) -> None:
    text = f"receiving {dtype} data via JSON is not supported. Please use the binary data format for input INPUT0"
    assert refusal(one_input(datatype=dtype)) == text


@pytest.mark.fault("B4")
def test_an_input_with_two_sources_of_data_is_refused() -> None:
    text = refusal(one_input(parameters={"binary_data_size": 8}))
    assert text.startswith("Input must set only one of the following fields: 'data', 'binary_data_size'")
    assert "But 'data' and 'binary_data_size' were given for input 'INPUT0'" in text


@pytest.mark.fault("B2")
@pytest.mark.parametrize(
    ("size", "text"),
    [
        (12, "input byte size mismatch for input 'INPUT0' for model 'm'. Expected 8, got 12"),
        (2**40, "input byte size mismatch for input 'INPUT0' for model 'm'. Expected 8, got 1099511627776"),
        (-8, "Unable to parse 'binary_data_size'"),
        ("8", "Unable to parse 'binary_data_size'"),
    ],
)
def test_a_binary_size_that_does_not_fit_the_shape_is_refused(size: object, text: str) -> None:
    assert refusal(one_input(data=None, parameters={"binary_data_size": size})).startswith(text)


@pytest.mark.fault("S6")
@pytest.mark.parametrize("dim", [-1, 1.5, "2", None, True, 2**64])
def test_a_dimension_is_a_number_from_0_up(dim: object) -> None:
    text = refusal(one_input(shape=[1, dim]))
    wanted = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    assert text.startswith(wanted)
    assert "input 'INPUT0': dimension 1 is" in text


@pytest.mark.fault("S7b")
def test_a_shape_with_too_many_elements_is_refused() -> None:
    text = refusal(one_input(shape=[2**4, 2**60 + 2]))
    assert "causes total element count to exceed maximum size of 9223372036854775807" in text


@pytest.mark.fault("S8")
def test_a_byte_size_that_overflows_is_refused() -> None:
    assert refusal(one_input(shape=[2**62])).startswith("byte size overflow for input 'INPUT0'")


def test_an_output_is_a_tensor_or_a_number_of_classes() -> None:
    def form(*counts: int | None) -> AnswerForm:
        outputs = [
            {"name": f"O{i}", **({} if count is None else {"parameters": {"classification": count}})}
            for i, count in enumerate(counts)
        ]
        return parse_header(request(outputs=outputs), "m").form

    assert form(3, None, 0, 1).classes == {"O0": 3, "O3": 1}
    assert form(None).classes == {}
    output = {"name": "O", "parameters": {"classification": "many"}}
    assert refusal(request(outputs=[output])).startswith("Unable to parse 'classification': attempt to access JSON")


def test_tensors_may_be_in_shared_memory() -> None:
    place = {"shared_memory_region": "r", "shared_memory_offset": 16, "shared_memory_byte_size": 8}
    (one,) = parse_header(one_input(data=None, parameters=place), "m").inputs
    assert (one.portion, one.data, one.binary_size) == (Portion("r", 16, 8), None, None)
    header = parse_header(request(outputs=[{"name": "A", "parameters": place}, {"name": "B"}]), "m")
    assert header.portions == {"A": Portion("r", 16, 8)}
    assert Request({}, *header.fields).outputs == ("A", "B")


@pytest.mark.fault("M8")
def test_a_shared_memory_reference_is_complete_and_has_the_tensors_size() -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}

    def said(**parameters: Any) -> str:
        return refusal(one_input(data=None, parameters={**place, **parameters}))

    assert said(shared_memory_byte_size=12) == (
        "input byte size mismatch for input 'INPUT0' for model 'm'. Expected 8, got 12"
    )
    assert said(shared_memory_region=7).startswith("Unable to parse 'shared_memory_region'")
    assert said(shared_memory_offset=-1).startswith("Unable to parse 'shared_memory_offset'")
    assert said(shared_memory_byte_size="8").startswith("Unable to parse 'shared_memory_byte_size'")
    text = refusal(one_input(data=None, parameters={"shared_memory_region": "r"}))
    assert "non-existing object member 'shared_memory_byte_size'" in text
    assert "'data' and 'shared_memory_region' were given" in refusal(one_input(parameters=place))
    for other in ({"binary_data": True}, {"classification": 1}):
        (key,) = other
        text = refusal(request(outputs=[{"name": "A", "parameters": {**place, **other}}]))
        assert text == f"'{key}' cannot be set for an output that goes to shared memory (output 'A')"


@pytest.mark.fault("S7")
def test_a_huge_shape_allocates_no_memory() -> None:
    began = time.thread_time()
    parse_header(one_input(shape=[1, 2**31]), "m")
    assert time.thread_time() - began < 0.5


HALF_A_PAIR = b'"\\ud800"'


@pytest.mark.fault("J12")
@pytest.mark.parametrize(
    "where",
    [b'"id": %b', b'"parameters": {"mine": %b}', b'"parameters": {%b: 1}', b'"parameters": {"sequence_id": %b}'],
)
@pytest.mark.parametrize("half", [HALF_A_PAIR, b'"\xed\xa0\x80"'])
def test_half_of_a_surrogate_pair_is_refused_beside_nan(where: bytes, half: bytes) -> None:
    """The parser for NaN accepts them; no response could contain such text."""
    text = b'{"inputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": [NaN]}], %b}' % (where % half)
    assert "failed to parse the request JSON buffer" in refusal(text)
    whole = where % b'"\\ud83d\\ude00"'
    assert parse_header(text.replace(where % half, whole), "m").inputs[0].data is not None


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_a_parameter_of_more_than_64_bits_is_refused_beside_nan(value: int) -> None:
    text = b'{"inputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": [NaN]}], "parameters": {"mine": %d}}'
    assert "parameter 'mine' has invalid type" in refusal(text % value)
    assert fields(text % (2**64 - 1)).parameters == {"mine": 2**64 - 1}
