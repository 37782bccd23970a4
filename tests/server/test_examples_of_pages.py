"""The pages with a script that makes a model and one that calls it: the scripts print the documented output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import serving


@pytest.mark.parametrize(("page", "model"), [("ragged", "sums"), ("sequences", "totals")])
def test_the_example_of_a_page_prints_its_documented_output(page: str, model: str, tmp_path: Path, root: Path) -> None:
    blocks = re.findall(r"^```\w+\n(.*?)^```$", (root / f"docs/{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    config, script, client, printed = blocks[:4]
    folder = tmp_path / model
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    _run(script, folder)
    with serving(tmp_path) as served:
        assert _run(client.replace("localhost:8000", served.address), folder) == printed


def _run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
