"""docs/graph-files.md lists every feature that is refused, by its rule, and nothing that works."""

from __future__ import annotations

import re
from pathlib import Path

from flowserve.config.unsupported import BACKEND_RULE, UNSUPPORTED


def test_every_refused_feature_is_listed_under_its_rule(root: Path) -> None:
    text = (root / "docs/graph-files.md").read_text()
    listed = [rule for row in re.findall(r"^\| (N\d+(?:, N\d+)*) \|", text, re.MULTILINE) for rule in row.split(", ")]
    assert sorted(listed) == sorted([*UNSUPPORTED, BACKEND_RULE])
