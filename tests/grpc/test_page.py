"""The table of statuses in docs/grpc.md is complete; tests/docs/test_tabs.py runs its example."""

from __future__ import annotations

import re
from pathlib import Path

from flowserve.grpc.encode import STATUS


def test_the_page_names_every_status(root: Path) -> None:
    page = (root / "docs/grpc.md").read_text()
    assert {status.name for status in STATUS.values()} - {"CANCELLED"} == set(
        re.findall(r"^\|.*\| `(\w+)` \|", page, re.MULTILINE)
    )
