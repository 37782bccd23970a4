"""The pipeline in the README: checked, drawn, served and asked as it says, with only the files that it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowserve.testing.serve import serving


@pytest.mark.server
def test_the_pipeline_of_the_readme_is_checked_drawn_and_served_and_gives_the_response_that_is_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    places = [place for place, (_, text) in enumerate(blocks) if text.startswith("# pipeline.py")]
    (_, program), (_, commands), (_, ask), (_, shown) = blocks[places[0] : places[0] + 4]
    check, draw, run = (line.split() for line in commands.splitlines())
    (tmp_path / "pipeline.py").write_text(program)
    (tmp_path / "graphs").symlink_to(root / "graphs")
    monkeypatch.chdir(tmp_path)
    for name, *arguments in (check, draw):
        assert name == ".venv/bin/flowserve"
        command = [sys.executable, "-m", "flowserve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": ""})
        assert done.returncode == 0, done.stderr
    assert (tmp_path / draw[-1]).read_text() == (root / "docs/pipeline.svg").read_text()
    assert run[1:] == ["run", "pipeline:graph"]
    with serving(Path("pipeline:graph"), environment={"PYTHONPATH": ""}) as served:
        command_line = ask.replace("localhost:8000", served.base_url.removeprefix("http://"))
        printed = subprocess.run(["sh", "-c", command_line], capture_output=True, text=True, timeout=60).stdout
    assert json.loads(printed) == json.loads(shown)
