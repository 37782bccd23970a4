"""Configurations in JSON, with field paths as places."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from flowserve.config.convert import to_json
from flowserve.config.model_config_pb2 import ModelConfig
from flowserve.config.parse import parse as parse_all
from flowserve.config.parse import parse_model_config
from flowserve.errors import Problems


def parse(text: str) -> ModelConfig:
    return parse_model_config(text, "override", "json")[0]


def refusal(text: str) -> str:
    with pytest.raises(Problems) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"name": "m", "max_batch_size": 4, "output": null}',
        '{"maxBatchSize": "4"}',
        '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", 3, 2.0, 1e1], "optional": true}]}',
        '{"input": [{"data_type": 11}], "output": []}',
        '{"parameters": {"execution": {"string_value": "thread"}}, "metric_tags": {"a": "b"}}',
        '{"dynamic_batching": {"priority_queue_policy": {"1": {"max_queue_size": 3}}}}',
        '{"sequence_batching": {"direct": {"minimum_slot_utilization": "Infinity"}}}',
        '{"version_policy": {"specific": {"versions": [1, "9007199254740993"]}}}',
        '{"name": "\\u00e9\\ud83d\\ude00\\n"}',
    ],
)
def test_the_result_equals_that_of_protobufs_parser(text: str) -> None:
    assert parse(text) == json_format.Parse(text, ModelConfig())


@pytest.mark.parametrize(
    ("text", "same", "warning"),
    [
        ('{"name": "a", "name": "b"}', '{"name": "b"}', "name: field"),
        ('{"max_batch_size": 4, "maxBatchSize": 8}', '{"max_batch_size": 8}', "maxBatchSize: field"),
        ('{"input": [{"name": "x"}], "input": [{}]}', '{"input": [{"name": "x"}, {}]}', "input: field"),
        (
            '{"metric_tags": {"a": "1", "b": "2"}, "metric_tags": {"a": "3"}}',
            '{"metric_tags": {"a": "3", "b": "2"}}',
            "metric_tags[a]: key",
        ),
    ],
)
def test_what_is_given_twice_is_read_as_triton_reads_it_with_a_warning(text: str, same: str, warning: str) -> None:
    read = parse_all(text, "override", "json")
    assert read.message == parse(same)
    assert any(f"{one.place}: {one.message}".startswith(f"override: {warning}") for one in read.warnings)


def test_enumeration_names_are_case_insensitive() -> None:
    assert parse('{"input": [{"data_type": "type_fp32"}]}').input[0].data_type == 11


def test_a_configuration_from_the_server_can_be_sent_back() -> None:
    text = 'name: "m" input { name: "x" data_type: TYPE_STRING dims: [ -1 ] } parameters { key: "k" value { } }'
    message = parse_model_config(text, "m/config.pbtxt")[0]
    assert parse(json.dumps(to_json(message))) == message


def test_places_are_the_paths_of_the_fields() -> None:
    source = parse_model_config('{\n "parameters": {\n  "k": {"string_value": "v"}}}', "override", "json")[1]
    assert str(source.place("parameters[k]")) == "override: parameters[k]"
    assert str(source.place("parameters[k].string_value")) == "override: parameters[k].string_value"
    assert str(source.place("parameters[k].int_value")) == "override: parameters[k]"
    assert str(source.place("input")) == "override"


@pytest.mark.fault("C2")
def test_all_unknown_fields_and_wrong_types_are_reported_at_once() -> None:
    assert refusal('{"nme": 1,\n "max_batch_size": "x",\n "input": {}, "parameters": [], "name": 3}').splitlines() == [
        'override: nme: Message type "inference.ModelConfig" has no field named "nme" (did you mean "name"?)',
        'override: max_batch_size: field "max_batch_size": Expected integer, found "x"',
        'override: input: field "input" takes a list',
        'override: parameters: field "parameters" takes an object',
        'override: name: field "name": Expected string, found 3 (did you mean "3", in quotes?)',
    ]


def test_a_nested_mistake_is_reported_with_its_full_path() -> None:
    inputs = '[{"name": "x"}, {"name": "y", "dims": [1, "a", 2, {}], "reshape": [], "kind": 1}]'
    queues = "dynamic_batching.priority_queue_policy"
    batching = '{"priority_queue_policy": {"1": {"max_queue_size": "many"}, "2": 7}}'
    assert refusal(f'{{"input": {inputs}, "dynamic_batching": {batching}}}').splitlines() == [
        'override: input[1].dims[1]: field "dims": Expected integer, found "a"',
        'override: input[1].dims[3]: field "dims" takes a plain value, not a block',
        'override: input[1].reshape: field "reshape" takes one value, not a list',
        'override: input[1].kind: Message type "inference.ModelInput" has no field named "kind"',
        f'override: {queues}[1].max_queue_size: field "max_queue_size": Expected integer, found "many"',
        f'override: {queues}[2]: field "value" takes an object',
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: Expected a value, found the end of the file"),
        ("[]", "1:1: a configuration in JSON is an object: it begins with {"),
        ('{"name": "m"} x', "1:15: unexpected text after the end of the object"),
        ('{"name" "m"}', '1:9: Expected ":"'),
        ('{"name": "m",}', '1:14: Expected a field name in double quotes or "}"'),
        ('{"name": "m" "x"}', '1:14: Expected "," or "}"'),
        ('{"name": tru}', "1:10: Expected a value, found 't'"),
        ('{"name": "m', "1:10: Unterminated string starting at"),
        ('{"name": "\\ud800"}', ' name: field "name": the string holds half of a surrogate pair'),
        ('{"dynamic_batching": {}, "dynamic_batching": {}}', " dynamic_batching: Non-repeated field"),
        ('{"metric_tags": {"a": "1", "a": "2"}}', ' metric_tags[a]: key "a" is given twice in "metric_tags"'),
        ('{"a":' * 10_000, "1:321: nested deeper than 64 levels"),
        ("[" * 10_000, "1:65: nested deeper than 64 levels"),
    ],
)
@pytest.mark.fault("C1")
def test_a_syntax_error_reports_the_place_and_the_expected_token(text: str, expected: str) -> None:
    assert refusal(text).startswith(f"override:{expected}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "input", "dims", "x"]), inner),
    max_leaves=8,
)


@given(JSON.map(json.dumps) | st.text())
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    try:
        parse(text)
    except Problems as refused:
        problems = refused.problems
    else:
        return
    assert all(problem.place and problem.place.line for problem in problems)


def test_the_answer_of_the_config_endpoint_has_every_plain_field_and_numbers_as_numbers() -> None:
    text = (
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
        "dynamic_batching { max_queue_delay_microseconds: 100"
        " priority_queue_policy { key: 1 value { default_timeout_microseconds: 7 } } }"
    )
    printed = to_json(parse_model_config(text, "m/config.pbtxt")[0])
    assert printed["input"][0] == {
        "name": "x",
        "data_type": "TYPE_FP32",
        "format": "FORMAT_NONE",
        "dims": [-1, 3],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert printed["max_batch_size"] == 0
    assert printed["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert printed["dynamic_batching"]["priority_queue_policy"]["1"]["default_timeout_microseconds"] == 7
    assert "version_policy" not in printed
