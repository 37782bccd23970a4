"""docs/graph-files.md is true: its examples are accepted or refused as it says, and it lists every field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowserve.config.ignored import IGNORED, IGNORED_IN_GROUPS
from flowserve.config.load import Draft, finish
from flowserve.config.schema import MESSAGES, MODEL_CONFIG, Message
from flowserve.errors import Problems

Read = Callable[..., Draft]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs/graph-files.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(page: str) -> dict[str, str]:
    """Field -> what happens, of the table of every field."""
    table = page.partition("## Every field")[2]
    return dict(re.findall(r"^\| `([a-z_.*]+)` \| (.+) \|$", table, re.MULTILINE))


def test_what_it_shows_as_right_is_right(page: str, draft: Read) -> None:
    examples = re.findall(r"```pbtxt\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for text in examples:
        name = re.match(r'name: "(.*)"', text)
        finish(draft(text, "1/model.onnx", name=name[1] if name else "m"), None)


def test_what_it_shows_as_wrong_is_refused_in_these_words(page: str, draft: Read) -> None:
    examples = re.findall(r"```pbtxt refused\n(.*?)```\s+```text\n(.*?)\n```", page, re.DOTALL)
    assert len(examples) == 3
    for text, expected in examples:
        with pytest.raises(Problems) as caught:
            finish(draft(text), None)
        assert str(caught.value) == expected


def fields(schema: Message = MODEL_CONFIG, prefix: str = "") -> Iterator[str]:
    """Every field that can be written, dotted; what stands inside a map's values as inside the map."""
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


def test_what_it_calls_ignored_is_what_the_log_tells(rows: dict[str, str]) -> None:
    said = {row.removesuffix(".*") for row, what in rows.items() if what.startswith("ignored")}
    assert said == {*IGNORED, *(f"instance_group.{field}" for field in IGNORED_IN_GROUPS)}
