"""docs/python-graphs.md is correct: its code blocks are run, and their output is compared."""

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

from tests.support.forked import serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINES_PROMISED = 24


@pytest.fixture(scope="module")
def blocks(root: Path) -> list[tuple[str, str]]:
    return BLOCK.findall((root / "docs/python-graphs.md").read_text())


@pytest.fixture
def home(blocks: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that contains the page's module."""
    (tmp_path / "sound.py").write_text(blocks[0][1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pipeline_with_a_branch_has_two_dozen_lines(blocks: list[tuple[str, str]]) -> None:
    code = [line for line in blocks[0][1].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= LINES_PROMISED


def beside(root: Path, folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    """For each block of Python: its standard error, its standard output, and the output that the page shows."""
    pages = {
        name: BLOCK.findall((root / "docs" / f"{name}.md").read_text()) for name in ("python-graphs", "in-process")
    }
    (folder / "sound.py").write_text(pages["python-graphs"].pop(0)[1])
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name, page in pages.items():
        for (language, code), (kind, shown) in pairwise(page):
            if language == "python":
                assert kind == "text"
                (folder / "broken.py").write_text(code)  # the name that the messages on the page have
                command = [sys.executable, "broken.py"]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
                found.setdefault(name, []).append((done.stderr, done.stdout.rstrip(), shown.rstrip()))
    return found


def test_every_block_prints_its_documented_output(done_beside: dict[str, list[tuple[str, str, str]]]) -> None:
    assert len(done_beside["python-graphs"]) == 6
    for error, printed, shown in done_beside["python-graphs"]:
        assert (error, printed) == ("", shown)


def test_the_page_about_engines_in_programs_is_correct(
    done_beside: dict[str, list[tuple[str, str, str]]],
) -> None:
    assert len(done_beside["in-process"]) == 3
    for error, printed, shown in done_beside["in-process"]:
        assert (error, printed) == ("", shown)


@pytest.mark.server
def test_the_module_is_served_and_answers_as_the_page_shows(blocks: list[tuple[str, str]], home: Path) -> None:
    command, answer = next((code, shown) for (kind, code), (_, shown) in pairwise(blocks) if kind == "sh")
    body = re.search(r"-d '(.*)'", command)
    assert body is not None
    with serving(Path("sound:graph")) as served:
        asked = httpx.post(f"http://{served.address}/v2/models/sound/infer", content=body[1], verify=False)
    assert asked.text.strip() == answer.strip()


@pytest.mark.server
def test_a_saved_graph_is_served_if_its_module_can_be_imported(
    blocks: list[tuple[str, str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = "from sound import graph; graph.save('models')"
    subprocess.run([sys.executable, "-c", save], cwd=home, timeout=60, check=True)
    body = '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["aaa"]}]}'
    monkeypatch.setenv("PYTHONPATH", str(home) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    with serving(home / "models") as served:
        asked = httpx.post(f"http://{served.address}/v2/models/sound/infer", content=body, verify=False)
    assert asked.json()["outputs"][1]["data"] == ["sung"]


@pytest.mark.server
def test_a_script_serves_its_own_functions_until_a_stop_signal(blocks: list[tuple[str, str]], home: Path) -> None:
    script = blocks[0][1] + "\nif __name__ == '__main__':\n    raise SystemExit(graph.serve(http_port=0))\n"
    (home / "script.py").write_text(script)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=home, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(90, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("listening on "))
        body = '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["..."]}]}'
        asked = httpx.post(f"{line.split()[-1]}/v2/models/sound/infer", content=body, verify=False)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        too_late.cancel()
        process.kill()
        process.communicate()
    assert asked.json()["outputs"][1]["data"] == ["silent"]
