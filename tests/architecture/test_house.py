"""The tools' verdicts, as tests, so that one command proves everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_rooms_import_downwards_and_each_heavy_dependency_has_one_doorkeeper(root: Path) -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = _run(root, sys.executable, "-c", program, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_has_nothing_to_say(root: Path) -> None:
    done = _run(root, sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise")
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_is_formatted(root: Path) -> None:
    done = _run(root, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--output-format=concise")
    assert done.returncode == 0, done.stdout + done.stderr


def beside(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return _run(root, "nice", sys.executable, "-m", "mypy")


@pytest.mark.slow
def test_the_package_and_the_typing_tests_are_strictly_typed(done_beside: subprocess.CompletedProcess[str]) -> None:
    assert done_beside.returncode == 0, done_beside.stdout + done_beside.stderr
