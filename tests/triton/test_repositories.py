"""Whole repositories, as public ones are written, compared with the real server: `tests/compatibility` does it.

Without `--against-triton` there is nothing to compare: tests/compatibility/ has the tests of the comparison itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.compare import compare
from tests.compatibility.repositories import Repository, find_repositories
from tests.compatibility.stand_ins import Machine

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize(
    "repository",
    [*find_repositories(ROOT / "tests/golden"), Repository("graphs", ROOT / "graphs")],
    ids=lambda repository: repository.name,
)
def test_a_repository_has_no_differences_that_are_not_documented(on_triton: bool, repository: Repository) -> None:
    if not on_triton:
        pytest.skip("compares with the real server: --against-triton")
    result = compare(repository, Machine(), with_triton=True)
    assert [str(one) for one in result.different] == []
