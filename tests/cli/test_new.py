"""Repositories that flowserve writes survive a commit and a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from flowserve import Graph
from flowserve.testing.serve import serving

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def run(*command: str | Path, folder: Path) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.server
def test_a_new_repository_and_a_saved_graph_are_served_from_a_clone(tmp_path: Path) -> None:
    work, clone = tmp_path / "work", tmp_path / "clone"
    work.mkdir()
    run(sys.executable, "-m", "flowserve", "new", "hello", folder=work)
    graph = Graph.load(work / "hello", "hello")
    graph.save(work / "saved")
    (work / "hello/__pycache__").mkdir()
    (work / "hello/__pycache__/test_hello.pyc").touch()  # what its test leaves
    run("git", "init", "--quiet", folder=work)
    run("git", "add", "--all", folder=work)
    run("git", "commit", "--quiet", "--message", "a repository", folder=work)
    run("git", "clone", "--quiet", work, clone, folder=tmp_path)

    assert not [*clone.rglob("*.pyc")]
    for name in ("hello", "saved"):
        assert "hello" in run(sys.executable, "-m", "flowserve", "check", clone / name, folder=clone)
    with serving(clone / "saved") as served:
        assert httpx.get(f"{served.base_url}/v2/models/hello/ready", verify=False).status_code == 200
