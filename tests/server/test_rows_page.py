"""docs/rows.md is correct: its files are a repository, its requests and its script get the documented responses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

PAGE = Path(__file__).resolve().parents[2] / "docs/rows.md"
BLOCKS = re.findall(
    r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
REQUESTS = [(command, printed) for (kind, _, command), (_, _, printed) in pairwise(BLOCKS) if kind == "sh"]


@pytest.fixture(scope="module")
def served_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("page")
    for _, path, text in BLOCKS:
        if path:
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(text)
            (repository / Path(path).parts[0] / "1").mkdir(exist_ok=True)
    with serving(repository) as served:
        yield served


@pytest.mark.parametrize(("command", "printed"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_gets_the_documented_response(
    served_page: Served, command: str, printed: str, by_shell: Callable[[str, Served], str]
) -> None:
    assert by_shell(command, served_page).strip() == printed.strip()


def test_the_script_prints_the_documented_output(tmp_path: Path) -> None:
    ((script, printed),) = [
        (text, after) for (kind, path, text), (_, _, after) in pairwise(BLOCKS) if kind == "python" and not path
    ]
    (tmp_path / "street.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "street.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
    assert len(REQUESTS) == 3
