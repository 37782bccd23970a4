"""docs/ensembles.md is correct: its files are a repository, and its requests get the documented responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from flowserve.config.parameters import ADMISSION_KEYS
from flowserve.testing.serve import Served
from tests.support.forked import serving

PAGE = Path(__file__).resolve().parents[2] / "docs/ensembles.md"
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
    with serving(repository, "--cache-config", "local,size=1000000") as served:
        yield served


@pytest.mark.parametrize(("command", "printed"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_gets_the_documented_response(
    served_page: Served, command: str, printed: str, by_shell: Callable[[str, Served], str]
) -> None:
    assert by_shell(command, served_page).strip() == printed.strip()


def test_the_page_has_requests_and_every_parameter() -> None:
    assert len(REQUESTS) == 4
    assert [key for key in ADMISSION_KEYS if f"| `{key}` |" not in PAGE.read_text(encoding="utf-8")] == []
