"""The pipeline in the README, served and asked as it says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from flowserve.testing.serve import serving


@pytest.mark.server
def test_the_pipeline_of_the_readme_is_served_and_gives_the_response_that_is_shown(root: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    places = [place for place, (_, text) in enumerate(blocks) if text.startswith("# pipeline.py")]
    (_, program), (_, run), (_, ask), (_, shown) = blocks[places[0] : places[0] + 4]
    assert run.split()[1:] == ["run", "pipeline:graph"]
    (tmp_path / "pipeline.py").write_text(program)
    with serving(Path("pipeline:graph"), environment={"PYTHONPATH": str(tmp_path)}) as served:
        command = ask.replace("localhost:8000", served.base_url.removeprefix("http://"))
        printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60).stdout
    assert json.loads(printed) == json.loads(shown)
