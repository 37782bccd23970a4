"""docs/architecture.md is the map; these tests compare it with the ground."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MAP_LINE = re.compile(r"^- `(flowserve/[\w/]+\.py)` \S", re.MULTILINE)
INVARIANT = re.compile(r"^\*\*Invariant[^*]*\*\*.*?(?=^\s*$)", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.fixture(scope="module")
def architecture(root: Path) -> str:
    return (root / "docs/architecture.md").read_text() + "\n\n"


def test_every_module_has_its_line_in_the_code_map(root: Path, architecture: str) -> None:
    on_disk = {
        path.relative_to(root).as_posix()
        for path in (root / "flowserve").rglob("*.py")
        if not path.name.endswith("_pb2.py") and path.read_text().strip()
    }
    on_map = MAP_LINE.findall(architecture)
    missing = [f"- `{path}` ..." for path in sorted(on_disk - set(on_map))]
    assert not missing, "docs/architecture.md lacks these lines:\n" + "\n".join(missing)
    gone = sorted(set(on_map) - on_disk)
    assert not gone, f"docs/architecture.md has lines for modules that do not exist: {gone}"
    assert len(on_map) == len(set(on_map)), "docs/architecture.md names a module twice"


def test_every_module_begins_with_its_charter(root: Path) -> None:
    without = [
        path.relative_to(root).as_posix()
        for path in (root / "flowserve").rglob("*.py")
        if not path.name.endswith("_pb2.py") and path.read_text().strip() and not path.read_text().startswith('"""')
    ]
    assert not without


def test_every_invariant_names_a_test_that_exists(root: Path, architecture: str) -> None:
    invariants = INVARIANT.findall(architecture)
    assert invariants, "docs/architecture.md states no invariant"
    for paragraph in invariants:
        named = NAMED_TEST.findall(paragraph)
        assert named, f"no test is named in: {paragraph}"
        for path, function in named:
            assert (root / path).is_file(), f"{path} does not exist, named in: {paragraph}"
            assert not function or f"def {function}(" in (root / path).read_text(), f"{path} has no {function}"
