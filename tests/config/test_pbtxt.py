"""Text format: accepted syntax, places, error messages."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.text_encoding import CEscape
from hypothesis import example, given
from hypothesis import strategies as st

from flowserve.config.build import ENUMS, MESSAGES, MODEL_CONFIG, RANGES, Field, Message
from flowserve.config.model_config_pb2 import ModelConfig
from flowserve.config.parse import parse as parse_all
from flowserve.config.parse import parse_model_config, read_text
from flowserve.errors import Place, Problem, Problems


def parse(text: str) -> ModelConfig:
    return parse_model_config(text, "m/config.pbtxt")[0]


def refusals(text: str) -> tuple[Problem, ...]:
    with pytest.raises(Problems) as caught:
        parse_model_config(text, "m/config.pbtxt")
    return caught.value.problems


def read_or_refused(text: str) -> ModelConfig | None:
    """The message, or None if the text was refused with a place for every problem."""
    try:
        return parse(text)
    except Problems as refused:
        problems = refused.problems
    assert all(problem.place and problem.place.line for problem in problems)
    return None


def refusal(text: str) -> str:
    (problem,) = refusals(text)
    return str(problem)


# Accepted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing but a comment",
        'name: "a" # why\nplatform:"b"',
        "name: 'single \"quoted\"'",
        'name: "adjacent" \'strings\' # between\n "are one"',
        r'name: "\n\t\\\"\'\101\x41\u00e9\U0001F600 \303\251"',
        "max_batch_size: 0x10",
        "max_batch_size: 010",
        "max_batch_size: -1",
        'input { name: "x" }, input { name: "y" };',
        'input: { name: "x" } input < name: "y" > input: < >',
        'input [ { name: "x" }, { name: "y" } ]',
        'input: [ { name: "x" }, < name: "y" > ]',
        "input []",
        "input { dims: 1 dims: [2, 3] dims: [] dims: 4 }",
        "input { data_type: TYPE_FP32 format: 2 }",
        "input { data_type: 11, optional: true, allow_ragged_batch: t; is_shape_tensor: 1 }",
        "input { optional: False }",
        'parameters { key: "k" value { string_value: "v" } }',
        'parameters { key: "k", value: { string_value: "v" } }',
        'parameters [ { key: "k" value < string_value: "v" > }, { key: "l" } ]',
        'parameters { value { string_value: "for the empty key" } }',
        'cc_model_filenames { key: "7.5" value: "m" } metric_tags [ { key: "a" value: "b" } ]',
        "dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 3 } } }",
        "dynamic_batching {}",
        "sequence_batching { direct { minimum_slot_utilization: .5f } }",
        "model_metrics { metric_control { histogram_options { buckets: [1, 2.5, 1e3, inf, -inf] } } }",
        "version_policy: { specific: { versions: [1, 3] } }",
        "optimization { graph : { level : 1 } }",
        "\ufeffname: 'x'"[1:],
    ],
)
def test_the_result_equals_that_of_protobufs_parser(text: str) -> None:
    assert parse(text) == text_format.Parse(text, ModelConfig())


# Places


def test_every_field_every_element_and_every_map_entry_has_its_place() -> None:
    text = (
        'name: "pipe"\n'
        "input [\n"
        '  { name: "IMAGE" dims: [ 1,\n'
        "      224 ] }\n"
        "]\n"
        "ensemble_scheduling {\n"
        '  step { model_name: "a"\n'
        '    input_map { key: "X" value: "IMAGE" } }\n'
        "  step [ {\n"
        '    input_map { value: "IMAGE",\n'
        '                key: "IMAGE" } } ]\n'
        "}\n"
    )
    source = parse_model_config(text, "pipe/config.pbtxt")[1]
    places = {path: (place.line, place.column) for path, place in source.places.items()}
    assert places == {
        "name": (1, 1),
        "input": (2, 1),
        "input[0]": (3, 3),
        "input[0].name": (3, 5),
        "input[0].dims": (3, 19),
        "input[0].dims[0]": (3, 27),
        "input[0].dims[1]": (4, 7),
        "ensemble_scheduling": (6, 1),
        "ensemble_scheduling.step": (7, 3),
        "ensemble_scheduling.step[0]": (7, 3),
        "ensemble_scheduling.step[0].model_name": (7, 10),
        "ensemble_scheduling.step[0].input_map": (8, 5),
        "ensemble_scheduling.step[0].input_map[X]": (8, 17),
        "ensemble_scheduling.step[1]": (9, 10),
        "ensemble_scheduling.step[1].input_map": (10, 5),
        "ensemble_scheduling.step[1].input_map[IMAGE]": (11, 17),
    }
    assert str(source.place("ensemble_scheduling.step[1].input_map[IMAGE]")) == "pipe/config.pbtxt:11:17"


def test_a_missing_field_has_the_place_of_its_parent() -> None:
    source = parse_model_config('\n\n  input { name: "x" }', "m/config.pbtxt")[1]
    assert source.place("input[0].reshape.shape[2]") == Place("m/config.pbtxt", 3, 3)
    assert source.place("output[0]") == Place("m/config.pbtxt")


def test_columns_count_characters_not_bytes() -> None:
    assert refusal("name: 'éé' nme: 1").startswith("m/config.pbtxt:1:12: ")


# Mistakes


@pytest.mark.fault("C2")
def test_an_unknown_field_is_named_with_its_place_and_a_suggestion() -> None:
    assert refusal('name: "m"\n  inputs { }') == (
        'm/config.pbtxt:2:3: Message type "inference.ModelConfig" has no field named "inputs" (did you mean "input"?)'
    )


@pytest.mark.fault("C2")
def test_a_nested_unknown_field_is_named_with_its_message() -> None:
    text = 'ensemble_scheduling { step [ { model_nam: "x" } ] }'
    expected = (
        'Message type "inference.ModelEnsembling.Step" has no field named "model_nam" (did you mean "model_name"?)'
    )
    assert refusal(text) == f"m/config.pbtxt:1:32: {expected}"


def test_all_mistakes_of_a_file_are_reported_at_once_in_order() -> None:
    text = """
    nmae: "m"
    max_batch_size: 2147483648
    input { data_type: FP32 dims: [ 1, "2" ] }
    name: m
    input { optional: maybe dims { } }
    """
    assert [str(problem) for problem in refusals(text)] == [
        'm/config.pbtxt:2:5: Message type "inference.ModelConfig" has no field named "nmae" (did you mean "name"?)',
        (
            'm/config.pbtxt:3:21: field "max_batch_size": Integer out of range (2147483648); int32 holds -2147483648 to'
            " 2147483647"
        ),
        (
            'm/config.pbtxt:4:24: field "data_type": Unknown enumeration value of "FP32" for DataType; did you mean'
            ' "TYPE_FP32"?'
        ),
        'm/config.pbtxt:4:40: field "dims": Expected integer, found "2"',
        'm/config.pbtxt:5:11: field "name": Expected string, found m (did you mean "m", in quotes?)',
        'm/config.pbtxt:6:23: field "optional": Expected true or false, found maybe',
        'm/config.pbtxt:6:34: field "dims" takes a plain value, not a block',
    ]


def test_a_field_given_twice_names_the_first() -> None:
    assert refusal('name: "a"\nname: "b"') == (
        'm/config.pbtxt:2:1: Non-repeated field "name" is specified multiple times (the first is at m/config.pbtxt:1:1)'
    )


@pytest.mark.fault("C8")
def test_two_schedulers_are_refused_and_both_are_named() -> None:
    assert refusal("dynamic_batching {}\nsequence_batching {}") == (
        'm/config.pbtxt:2:1: Field "sequence_batching" is specified along with field "dynamic_batching", another member'
        ' of oneof "scheduling_choice" (keep one of them; the first is at m/config.pbtxt:1:1)'
    )


# Every map field of the schema: its text, the place of the first key, that of the second.
MAPS = {
    "parameters": (
        (
            'parameters { key: "a" value { string_value: "one" } }\n'
            'parameters [ { key: "b" }, { key: "a" value { string_value: "two" } } ]'
        ),
        "1:14",
        "2:30",
    ),
    "metric_tags": ('metric_tags { key: "a" value: "1" }\nmetric_tags { key: "a" value: "2" }', "1:15", "2:15"),
    "cc_model_filenames": ('cc_model_filenames [ { key: "7.5" value: "x" }, { key: "7.5" } ]', "1:24", "1:51"),
    "input_map": (
        'ensemble_scheduling { step {\ninput_map { key: "X" value: "A" }\ninput_map { key: "X" value: "B" } } }',
        "2:13",
        "3:13",
    ),
    "output_map": (
        'ensemble_scheduling { step {\noutput_map { key: "Y" value: "A" }\noutput_map { key: "Y" value: "B" } } }',
        "2:14",
        "3:14",
    ),
    "inputs": (
        (
            'model_warmup {\ninputs { key: "X" value { data_type: TYPE_FP32 dims: [ 7 ] zero_data: true } }\n'
            'inputs { key: "X" value { data_type: TYPE_INT32 random_data: true } } }'
        ),
        "2:10",
        "3:10",
    ),
    "priority_queue_policy": (
        (
            "dynamic_batching {\n"
            "priority_queue_policy { key: 1 value { timeout_action: DELAY max_queue_size: 1 } }\n"
            "priority_queue_policy { key: 0x1 value { max_queue_size: 2 } } }"
        ),
        "2:25",
        "3:25",
    ),
    "accelerators": (
        (
            "optimization { execution_accelerators { gpu_execution_accelerator {\n"
            'parameters { key: "k" value: "1" }\nparameters { key: "k" value: "2" } } } }'
        ),
        "2:14",
        "3:14",
    ),
    "agents": (
        'model_repository_agents { agents {\nparameters { key: "k" value: "1" }\nparameters { key: "k" } } }',
        "2:14",
        "3:14",
    ),
}


@pytest.mark.parametrize("text", [text for text, _, _ in MAPS.values()], ids=MAPS)
def test_the_last_value_of_a_key_counts_as_for_protobuf(text: str) -> None:
    assert parse(text) == text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize(("text", "first", "second"), MAPS.values(), ids=MAPS)
def test_a_key_given_twice_is_a_warning_with_both_places(text: str, first: str, second: str) -> None:
    (warning,) = parse_all(text, "m/config.pbtxt").warnings
    assert re.fullmatch(r'key "[^"]+" is given twice in "\w+"; the last one counts', warning.message)
    assert (str(warning.place), warning.rule) == (f"m/config.pbtxt:{second}", "R17")
    assert warning.hint == f"the one before is at m/config.pbtxt:{first}"


def test_a_mistake_in_the_value_that_counts_is_reported_there() -> None:
    text = 'model_warmup { inputs { key: "X" value { dims: 7 } }\n inputs { key: "X" value { dims: -1 } } }'
    source = parse_all(text, "m/config.pbtxt").source
    assert str(source.place("model_warmup[0].inputs[X].dims[0]")) == "m/config.pbtxt:2:28"
    text = 'model_warmup { inputs { key: "X" value { dims: 7 } }\n inputs { key: "X" value { } } }'
    source = parse_all(text, "m/config.pbtxt").source
    assert str(source.place("model_warmup[0].inputs[X].dims[0]")) == "m/config.pbtxt:2:11"  # the key's


def test_many_repeated_keys_are_read_at_once_and_a_hundred_of_them_reported() -> None:
    text = "".join(f'parameters {{ key: "{n}" value {{ string_value: "x" }} }}\n' for n in range(5_000)) * 2
    started = time.thread_time()
    read = parse_all(text, "m/config.pbtxt")
    assert time.thread_time() - started < 5
    assert (len(read.message.parameters), len(read.warnings)) == (5_000, 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name "m"', '1:6: Expected ":", found "m"'),
        ("name:", "1:6: Expected a value, found the end of the file"),
        (
            "x: 1\ninput {",
            (
                '2:8: Expected a field name or "}", found the end of the file'
                ' (what opens at m/config.pbtxt:2:7 is not closed with "}")'
            ),
        ),
        ("x: [1, ]", '1:8: Expected a value, found ] (leave out the "," before it)'),
        ("input [ {}, ]", '1:13: Expected a value, found ] (leave out the "," before it)'),
        (
            "input [ { dims: [ 1 ] ]",
            '1:23: Expected a field name or "}", found ] (what opens at m/config.pbtxt:1:9 is not closed with "}")',
        ),
        ("input { dims: [ 1 ] ] }", '1:21: Expected a field name or "}", found ]'),
        (
            'm { "k": "v" }',
            (
                '1:5: Expected a field name or "}", found "k"'
                " (names of fields stand without quotes; what has keys is written { key: ... value: ... })"
            ),
        ),
        (
            '\n{"name": 1}',
            "2:1: Expected a field name, found { (is it JSON? This file is text format, as in max_batch_size: 8)",
        ),
        (
            "x: 1\n<<<<<<< HEAD",
            "2:1: Expected a field name, found < (this line is of a merge that was left with conflicts)",
        ),
        ("x: 1\n=======", "2:1: unexpected character '=' (this line is of a merge that was left with conflicts)"),
        ("max_batch_size = 4", "1:16: unexpected character '=' (a value stands behind \":\")"),
        ("// why", "1:1: unexpected character '/' (a comment begins with \"#\")"),
        ("name: “m”", "1:7: unexpected character '“' (a string stands in straight quotes)"),
        (
            "x:\u00a01",
            r"1:3: unexpected character '\xa0' (it looks like a space, or like nothing; write a space for it)",
        ),
        ("input }", '1:7: Expected ":", found }'),
        ("}", "1:1: Expected a field name, found } (all that was opened before it is closed already)"),
        ("input [ {} {} ]", '1:12: Expected "," or "]", found {'),
        ("input { dims [ 1 ] }", '1:16: Expected "{" (a list of plain values wants ":" before its "["), found 1'),
        ('name: "open', "1:7: String literals cannot cross line boundaries (is the closing quote missing?)"),
        ('name: "a\nb"', "1:7: String literals cannot cross line boundaries (is the closing quote missing?)"),
        (r'name: "\q"', r"1:7: Invalid escape sequence \q in a string"),
        (r'name: "\xff"', "1:7: string is not valid UTF-8 after its escapes are resolved"),
        (r'name: "\ud800"', "1:7: a string holds half of a surrogate pair"),
        (r'name: "\U00110000"', r"1:7: \U00110000 is not a Unicode character"),
        ("max_batch_size: 3abc", "1:17: Invalid number: 3a"),
        ("[ext.name]: 1", "1:1: extensions and Any values are not part of a model configuration"),
        ("name: @", "1:7: unexpected character '@' (is this a text-format file?)"),
        ("input: 3", '1:8: field "input" takes a block: input { ... }'),
        ('name: ["a"]', '1:7: field "name" takes one value, not a list'),
        ("parameters: 3", '1:13: field "parameters" takes a block: parameters { key: ... value: ... }'),
        ("max_batch_size: 1.5", '1:17: field "max_batch_size": Expected integer, found 1.5'),
        ("max_batch_size: 08", '1:17: field "max_batch_size": Expected integer, found 08'),
        (
            "input { format: 7 }",
            (
                '1:17: field "format": Unknown enumeration value of "7" for Format; known are FORMAT_NONE, FORMAT_NHWC,'
                " FORMAT_NCHW"
            ),
        ),
    ],
)
def test_a_syntax_error_reports_the_place_and_the_expected_token(text: str, expected: str) -> None:
    assert refusal(text) == f"m/config.pbtxt:{expected}"


# Hostile files


@pytest.mark.fault("C1")
def test_deep_nesting_is_refused_with_its_place() -> None:
    assert refusal("a {" * 100_000) == "m/config.pbtxt:1:195: nested deeper than 64 levels"
    assert refusal("a [" * 100_000).startswith("m/config.pbtxt:1:4: Expected")


@pytest.mark.fault("C1")
def test_binary_junk_is_refused_at_its_first_bad_byte(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "m"\n\xc3\xa9 \xff\xfe\x00')
    with pytest.raises(Problems) as caught:
        read_text(path, "m/config.pbtxt")
    assert str(caught.value) == "m/config.pbtxt:2:3: not UTF-8 text: byte 0xff (is this a text-format file?)"
    assert refusal("\x00\x01ELF").startswith("m/config.pbtxt:1:1: unexpected character")


@pytest.mark.fault("C1")
def test_a_file_of_ten_megabytes_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"input { dims: 3 }\n" * 600_000)
    started = time.thread_time()
    with pytest.raises(Problems) as caught:
        read_text(path, "m/config.pbtxt")
    assert time.thread_time() - started < 1
    assert str(caught.value) == "m/config.pbtxt:1:1: larger than 1 MiB, which is too large for a configuration"


@pytest.mark.fault("C1")
def test_parsing_stops_after_a_hundred_mistakes() -> None:
    problems = refusals("x: 1 " * 20_000)
    assert len(problems) == 101
    assert problems[-1].message == "more mistakes follow"


def test_an_unreadable_file_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").mkdir()
    with pytest.raises(Problems, match=r"m/config\.pbtxt: cannot be read: Is a directory"):
        read_text(tmp_path / "config.pbtxt", "m/config.pbtxt")


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes('\ufeffname: "m"'.encode())
    assert parse(read_text(path, "m/config.pbtxt")).name == "m"


# Cross-checks with protobuf's own parser

SPACES = st.sampled_from([" ", "\n", "  \t", " # note { \n", "\r\n"])
ENDS = st.sampled_from(["", ",", ";"])
BRACKETS = st.sampled_from([("{", "}"), ("<", ">")])


@st.composite
def plain(draw: st.DrawFn, field: Field) -> str:
    """One value of a plain field, in any of its spellings."""
    if field.kind == "string":
        text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
        as_utf8 = draw(st.booleans())
        cut = draw(st.integers(0, len(text)))
        return draw(SPACES).join(_quoted(part, as_utf8) for part in (text[:cut], text[cut:]))
    if field.kind == "bool":
        return draw(st.sampled_from(["true", "false", "True", "False", "t", "f", "1", "0"]))
    if field.kind == "float":
        number = draw(st.floats(allow_nan=False, width=32))
        return draw(st.sampled_from([repr(number), f"{number:.3e}", "inf", "-inf", "1.", ".5f", "3F"]))
    if field.kind == "enum":
        name, number = draw(st.sampled_from(sorted(ENUMS[field.type].items())))
        return draw(st.sampled_from([name, str(number)]))
    integer = draw(st.integers(*RANGES[field.kind]))
    digits = draw(st.sampled_from([f"{abs(integer):d}", f"0x{abs(integer):X}", f"0{abs(integer):o}"]))
    return f"-{digits}" if integer < 0 else digits


def _quoted(text: str, as_utf8: bool) -> str:
    return f'"{CEscape(text.encode(), as_utf8)}"'


@st.composite
def block(draw: st.DrawFn, schema: Message, depth: int, *, own: bool) -> str:
    opening, closing = draw(BRACKETS)
    return f"{opening}{draw(SPACES)}{draw(entries(schema, depth, own=own))}{draw(SPACES)}{closing}"


@st.composite
def entries(draw: st.DrawFn, schema: Message, depth: int, *, own: bool = True) -> str:
    """Some fields of a message, each in one of its possible spellings. `own`: also those that Triton does not have."""
    fields = [field for field in schema.fields.values() if depth or field.kind != "message"]
    fields = [field for field in fields if own or not field.is_own]
    if not fields:
        return ""
    chosen = draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.oneof or field.name, max_size=4))
    written = []
    for field in chosen:
        values = [
            draw(value(field, depth, own=own)) for _ in range(draw(st.integers(0, 3)) if field.is_repeated else 1)
        ]
        colon = ":" if field.kind != "message" or draw(st.booleans()) else ""
        name = f"{field.name}{colon}{draw(SPACES)}"
        if field.is_repeated and draw(st.booleans()):
            values = ["[" + draw(SPACES) + f",{draw(SPACES)}".join(values) + draw(SPACES) + "]"]
        written += [f"{name}{item}{draw(ENDS)}{draw(SPACES)}" for item in values]
    return "".join(written)


def value(field: Field, depth: int, *, own: bool) -> st.SearchStrategy[str]:
    return block(MESSAGES[field.type], depth - 1, own=own) if field.kind == "message" else plain(field)


@given(entries(MODEL_CONFIG, 3))
def test_property_any_style_is_parsed_as_by_protobuf(text: str) -> None:
    assert parse(text) == text_format.Parse(text, ModelConfig())


@given(entries(MODEL_CONFIG, 3), st.booleans(), st.booleans())
def test_property_protobufs_output_round_trips(text: str, one_line: bool, short: bool) -> None:
    message = parse(text)
    printed = text_format.MessageToString(message, as_one_line=one_line, use_short_repeated_primitives=short)
    assert parse(printed) == message


@given(entries(MODEL_CONFIG, 2), st.data())
def test_property_a_damaged_file_is_parsed_as_by_protobuf_or_refused_with_a_place(
    text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 3)))
    damage = data.draw(st.sampled_from(["", "{", "}", ":", '"', "\\", "-", "[", "]", "x", "9"]))
    damaged = text[:start] + damage + text[stop:]
    message = read_or_refused(damaged)
    assert message is None or message == text_format.Parse(damaged, ModelConfig())


@given(st.text())
@example("'\\")
@example("0x")
@example("name: '\\u12'")
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    read_or_refused(text)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("TYPE_FLOAT", "TYPE_FP32"), ("float64", "TYPE_FP64"), ("TYPE_BYTES", "TYPE_STRING"), ("TYPE_FP23", "TYPE_FP32")],
)
def test_other_names_of_data_types_are_suggested(written: str, meant: str) -> None:
    (problem,) = refusals(f"input {{ data_type: {written} }}")
    assert str(problem).endswith(f'Unknown enumeration value of "{written}" for DataType; did you mean "{meant}"?')
