"""The pages make a site, with the reference from docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_site_is_built_and_its_reference_knows_the_public_door(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(root / ".mkdocs.yml")]
    done = subprocess.run([*build, "-d", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    reference = (tmp_path / "reference/index.html").read_text()
    for name in ("AsyncEngine.infer", "BlockingEngine.stream", "flowserve.Graph", "flowserve.testing.simulate"):
        assert f'id="{name}"' in reference or name in reference
