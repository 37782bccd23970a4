"""docs/python-graphs.md does what it says: its blocks are run, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from flowserve.testing.serve import serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINES_PROMISED = 24


@pytest.fixture(scope="module")
def blocks(root: Path) -> list[tuple[str, str]]:
    return BLOCK.findall((root / "docs/python-graphs.md").read_text())


@pytest.fixture
def home(blocks: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's module in it, which is where its reader stands."""
    (tmp_path / "sound.py").write_text(blocks[0][1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_dozen_lines_are_a_pipeline_with_a_branch(blocks: list[tuple[str, str]]) -> None:
    code = [line for line in blocks[0][1].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= LINES_PROMISED


def test_every_block_prints_what_stands_below_it(blocks: list[tuple[str, str]], home: Path) -> None:
    run = 0
    for (language, code), (kind, printed) in pairwise(blocks[1:]):
        if language != "python":
            continue
        assert kind == "text"
        (home / "broken.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "broken.py"], cwd=home, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr == ""
        assert done.stdout.rstrip() == printed.rstrip()
        run += 1
    assert run == 5


def test_the_page_about_engines_in_programs_does_what_it_says(home: Path, root: Path) -> None:
    run = 0
    for (language, code), (kind, printed) in pairwise(BLOCK.findall((root / "docs/in-process.md").read_text())):
        if language == "python":
            assert kind == "text"
            (home / "ask.py").write_text(code)
            done = subprocess.run(
                [sys.executable, "ask.py"], cwd=home, capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.stderr, done.stdout.rstrip()) == ("", printed.rstrip())
            run += 1
    assert run == 2


@pytest.mark.server
def test_the_module_is_served_and_answers_as_the_page_shows(blocks: list[tuple[str, str]], home: Path) -> None:
    command, answer = next((code, shown) for (kind, code), (_, shown) in pairwise(blocks) if kind == "sh")
    body = re.search(r"-d '(.*)'", command)
    assert body is not None
    with serving(Path("sound:graph")) as served:
        asked = httpx.post(f"http://{served.address}/v2/models/sound/infer", content=body[1])
    assert asked.text.strip() == answer.strip()


@pytest.mark.server
def test_what_was_saved_is_served_where_the_module_can_be_imported(
    blocks: list[tuple[str, str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = "from sound import graph; graph.save('models')"
    subprocess.run([sys.executable, "-c", save], cwd=home, timeout=60, check=True)
    body = '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["aaa"]}]}'
    monkeypatch.setenv("PYTHONPATH", str(home) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    with serving(home / "models") as served:
        asked = httpx.post(f"http://{served.address}/v2/models/sound/infer", content=body)
    assert asked.json()["outputs"][1]["data"] == ["sung"]


@pytest.mark.server
def test_a_script_serves_its_own_functions_until_it_is_told_to_stop(blocks: list[tuple[str, str]], home: Path) -> None:
    script = blocks[0][1] + "\nif __name__ == '__main__':\n    raise SystemExit(graph.serve(http_port=0))\n"
    (home / "script.py").write_text(script)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=home, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(90, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("listening on "))
        body = '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["..."]}]}'
        asked = httpx.post(f"{line.split()[-1]}/v2/models/sound/infer", content=body)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        too_late.cancel()
        process.kill()
        process.communicate()
    assert asked.json()["outputs"][1]["data"] == ["silent"]
