"""docs/graph-files.md is correct: its examples are accepted or refused as shown, and it lists every field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowserve.config.build import MESSAGES, MODEL_CONFIG, Message
from flowserve.config.load import Draft, finish, validate
from flowserve.config.types import Completion
from flowserve.config.unsupported import IGNORED, IGNORED_IN_GROUPS
from flowserve.errors import Problems

Read = Callable[..., Draft]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs/graph-files.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(page: str) -> dict[str, str]:
    """Field -> effect, from the table of all fields."""
    table = page.partition("## Every field")[2]
    return dict(re.findall(r"^\| `([a-z_.*]+)` \| (.+) \|$", table, re.MULTILINE))


def test_valid_examples_of_the_page_are_accepted(page: str, draft: Read) -> None:
    examples = re.findall(r"```pbtxt\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for text in examples:
        name = re.match(r'name: "(.*)"', text)
        finish(draft(text, "1/model.onnx", name=name[1] if name else "m"), None)


def test_invalid_examples_of_the_page_are_refused_with_these_messages(page: str, draft: Read) -> None:
    examples = re.findall(r'```pbtxt title="refused"\n(.*?)```\s+```text\n(.*?)\n```', page, re.DOTALL)
    assert len(examples) == 3
    for text, expected in examples:
        with pytest.raises(Problems) as caught:
            finish(draft(text), None)
        assert str(caught.value) == expected


def test_the_page_shows_the_warnings_about_what_is_given_twice(page: str, draft: Read) -> None:
    (text, expected), *more = re.findall(
        r'```pbtxt title="warned about"\n(.*?)```\s+```text\n(.*?)\n```', page, re.DOTALL
    )
    validated = validate(draft(text), Completion())
    assert [*map(str, validated.ignored)] == expected.splitlines()
    assert not validated.problems
    assert not more


def fields(schema: Message = MODEL_CONFIG, prefix: str = "") -> Iterator[str]:
    """Every field as a dotted path; fields of a map's values are given as if they were in the map."""
    for field in schema.fields.values():
        path = prefix + field.name
        inner = MESSAGES[field.type] if field.kind == "message" else None
        if inner and field.is_map:
            value = inner.fields["value"]
            inner = MESSAGES[value.type] if value.kind == "message" else None
        yield path
        if inner:
            yield from fields(inner, path + ".")


def test_every_field_has_a_row_and_every_row_a_field(rows: dict[str, str]) -> None:
    known = list(fields())
    whole = tuple(row.removesuffix("*") for row in rows if row.endswith(".*"))
    without = [path for path in known if path not in rows and not f"{path}.".startswith(whole)]
    assert not without
    assert [row for row in rows if row.removesuffix(".*") not in known] == []


def test_fields_documented_as_ignored_are_logged(rows: dict[str, str]) -> None:
    said = {row.removesuffix(".*") for row, what in rows.items() if what.startswith("ignored")}
    assert said == {*IGNORED, *(f"instance_group.{field}" for field in IGNORED_IN_GROUPS)}


MODEL = (
    'backend: "python" input { name: "X" data_type: TYPE_FP32 dims: 1 %s }'
    ' output { name: "Y" data_type: TYPE_FP32 dims: 1 %s }'
)
REFUSED = {
    "input.is_shape_tensor": MODEL % ("is_shape_tensor: true", ""),
    "input.is_non_linear_format_io": MODEL % ("is_non_linear_format_io: true", ""),
    "output.is_shape_tensor": MODEL % ("", "is_shape_tensor: true"),
    "output.is_non_linear_format_io": MODEL % ("", "is_non_linear_format_io: true"),
    "ensemble_scheduling.step.model_namespace": (MODEL % ("", "")).replace('backend: "python"', 'platform: "ensemble"')
    + ' ensemble_scheduling { step { model_name: "a" model_version: -1 model_namespace: "n"'
    ' input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } } }',
    "model_operations": MODEL % ("", "") + ' model_operations { op_library_filename: "a.so" }',
    "model_repository_agents": MODEL % ("", "") + ' model_repository_agents { agents { name: "checksum" } }',
}


def test_fields_documented_as_refused_are_refused(rows: dict[str, str], draft: Read) -> None:
    assert {row.removesuffix(".*") for row, what in rows.items() if what == "refused"} == REFUSED.keys()
    for field, text in REFUSED.items():
        with pytest.raises(Problems, match=f"{field.rpartition('.')[2]}.* is not supported yet"):
            finish(draft(text, "1/model.py"), None)
