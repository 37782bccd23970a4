"""`python -m bench --grpc` on a small scale."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def beside(root: Path, folder: Path) -> str:
    command = ["--grpc", "--concurrency", "2", "--rounds", "1", "--seconds", "0.1"]
    return subprocess.run(
        [sys.executable, "-m", "bench", *command], cwd=root, capture_output=True, text=True, timeout=120, check=True
    ).stdout


@pytest.mark.slow
@pytest.mark.server
def test_calls_are_compared_with_those_of_empty_handlers(done_beside: str) -> None:
    rows = re.findall(
        r"concurrency +(\d+): flowserve +(\d+) \(\d+ us\), "
        r"empty on asyncio +(\d+) .*, empty on pool +(\d+) \(\d+ us\): ",
        done_beside,
    )
    assert [row[0] for row in rows] == ["2"]
    assert all(int(rate) > 0 for row in rows for rate in row[1:])
