"""The example and the table of statuses in docs/grpc.md are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowserve.cli.options import DEFAULT_GRPC_PORT
from flowserve.grpc.encode import STATUS
from flowserve.testing.serve import serving


@pytest.mark.server
@pytest.mark.slow
def test_the_pages_example_prints_its_documented_output(root: Path, options: tuple[str, ...]) -> None:
    page = (root / "docs/grpc.md").read_text()
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    with serving(root / "graphs", *options) as served:
        program = program.replace(f"localhost:{DEFAULT_GRPC_PORT}", served.grpc_address)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=120
        )
    assert done.stdout == printed


def test_the_page_names_every_status(root: Path) -> None:
    page = (root / "docs/grpc.md").read_text()
    assert {status.name for status in STATUS.values()} - {"CANCELLED"} == set(
        re.findall(r"^\|.*\| `(\w+)` \|", page, re.MULTILINE)
    )
