"""What `flowserve check` says about a repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHECK_S_MAX = 120.0


def problems_of(repository: Path) -> list[str]:
    """Its problems, each in one line; the last line of its error if it did not finish."""
    command = [sys.executable, "-m", "flowserve", "check", str(repository), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        return [f"not finished within {CHECK_S_MAX:.0f} s"]
    try:
        told = json.loads(done.stdout)
    except ValueError:
        return [(done.stderr.strip().splitlines() or ["no output"])[-1]]
    return [one if isinstance(one, str) else json.dumps(one) for one in told["problems"]]
