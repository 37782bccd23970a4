"""docs/architecture.md agrees with the tree: every package is in its code map, and every path on the page exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| `([\w/]+(?:/|\.py))` \|", re.MULTILINE)
PATH = re.compile(r"`((?:\w+/)+(?:\w+\.\w+)?|\w+\.py)(?:::(\w+))?`")
INVARIANTS = re.compile(r"^## Invariants\n(.*?)(?=^[^|\n])", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def architecture(root: Path) -> str:
    return (root / "docs/architecture.md").read_text()


def test_the_code_map_has_each_package_and_each_top_level_module_once(root: Path, architecture: str) -> None:
    package = root / "flowserve"
    packages = {f"{init.parent.relative_to(package)}/" for init in package.rglob("*/__init__.py")}
    expected = packages | {module.name for module in package.glob("*.py")}
    rows = ROW.findall(architecture)
    missing = sorted(expected - set(rows))
    assert not missing, f"the code map of docs/architecture.md lacks {missing}"
    assert len(rows) == len(set(rows)), "the code map of docs/architecture.md has a row twice"


def test_each_path_on_the_page_exists(root: Path, architecture: str) -> None:
    gone = []
    for path, function in PATH.findall(architecture):
        files = [file for file in (root / path, root / "flowserve" / path) if file.exists()]
        if not files or (function and f"def {function}(" not in files[0].read_text()):
            gone.append(path)
    assert not gone, f"docs/architecture.md names what does not exist: {gone}"


def test_the_reading_order_is_of_twenty_files_of_the_core_at_most(root: Path, architecture: str) -> None:
    section = architecture.partition("## Reading order\n")[2].partition("\n## ")[0]
    numbers, files = zip(*re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \|", section, re.MULTILINE), strict=True)
    assert [*map(int, numbers)] == [*range(1, len(files) + 1)]
    assert 10 < len(files) <= 20
    assert [file for file in files if file.startswith(("elsewhere/", "replicas/", "backends/more/", "cli/"))] == []


def test_each_invariant_names_a_test_that_exists(root: Path, architecture: str) -> None:
    found = INVARIANTS.search(architecture)
    assert found
    rows = [line for line in found[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = [path for path, _ in PATH.findall(row) if path.startswith("tests/")]
        assert named, f"no test is named in: {row}"
