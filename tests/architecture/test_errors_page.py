"""docs/errors.md lists the status of every kind of failure."""

from __future__ import annotations

import re
from pathlib import Path

from flowserve import errors
from flowserve.http.api.json_bodies import STATUS


def test_the_table_has_every_kind_with_its_status(root: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (root / "docs/errors.md").read_text(), re.MULTILINE)
    assert {getattr(errors, name).kind: int(status) for name, status in rows} == dict(STATUS)
