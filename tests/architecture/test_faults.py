"""The fault catalogue: each kept row is named by a test, and each named row exists.

`fault_rows.txt` lists every row: `kept` ones must be named by a test's `@pytest.mark.fault`, `later` ones wait for
the feature they belong to. A test may name any listed row.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, str]:
    """Row id -> "kept" or "later"."""
    lines = (root / "tests/architecture/fault_rows.txt").read_text().splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return {row: state for state, *listed in pairs for row in listed}


@pytest.fixture(scope="module")
def named(root: Path) -> dict[str, list[str]]:
    """Row id -> the test files that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fault":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path.name}:{node.lineno}: rows are named literally"
                    found[str(argument.value)].append(path.relative_to(root).as_posix())
    return found


def test_every_row_a_test_names_is_in_the_catalogue(rows: dict[str, str], named: dict[str, list[str]]) -> None:
    unknown = {row: files for row, files in named.items() if row not in rows}
    assert not unknown


def test_every_kept_row_is_named_by_a_test(rows: dict[str, str], named: dict[str, list[str]]) -> None:
    assert set(rows.values()) <= {"kept", "later"}
    without = [row for row, state in rows.items() if state == "kept" and row not in named]
    assert not without, f"rows without a test: {' '.join(without)}"
