"""The import linter, ruff and mypy, as tests, so that one command checks everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_packages_import_downwards_and_each_heavy_dependency_has_one_importer(root: Path) -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = _run(root, sys.executable, "-c", program, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_check_reports_nothing(root: Path) -> None:
    done = _run(root, sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_formatted(root: Path) -> None:
    done = _run(root, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--output-format=concise")
    assert done.returncode == 0, done.stdout + done.stderr


def beside(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return _run(root, "nice", sys.executable, "-m", "mypy")


@pytest.mark.slow
def test_mypy_reports_nothing(done_beside: subprocess.CompletedProcess[str]) -> None:
    assert done_beside.returncode == 0, done_beside.stdout + done_beside.stderr
