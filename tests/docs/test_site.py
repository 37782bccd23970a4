"""The pages make a site, with the reference from docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def beside(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    build = ["nice", sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(root / ".mkdocs.yml")]
    return subprocess.run(
        [*build, "-d", str(folder)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_site_is_built_and_its_reference_has_the_public_api(
    done_beside: subprocess.CompletedProcess[str],
) -> None:
    assert (done_beside.returncode, done_beside.stdout) == (0, ""), done_beside.stdout + done_beside.stderr
    reference = (Path(done_beside.args[-1]) / "reference/index.html").read_text()
    for name in ("AsyncEngine.infer", "Engine.stream", "flowserve.Graph", "flowserve.testing.simulate"):
        assert f'id="{name}"' in reference or name in reference
