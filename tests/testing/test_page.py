"""The examples of docs/testing-graphs.md work, as doctests and as a pytest session."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS

SUMS = """\
from flowserve import Graph, model

@model({"X": "FP32[2]"}, {"SUM": "FP32[1]"}, max_batch_size=4)
def total(rows):
    return rows.sum(axis=1, keepdims=True) * 10

graph = Graph("sums")
graph.output("SUM", total(graph.input("X", "FP32[2]")))
"""


def test_every_example_prints_its_documented_output(root: Path) -> None:
    failed, run = doctest.testfile(str(root / "docs/testing-graphs.md"), module_relative=False, optionflags=OPTIONS)
    assert (failed, run > 20) == (0, True)


def beside(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    for name, code in BLOCK.findall((root / "docs/testing-graphs.md").read_text()):
        (folder / name).write_text(code)
    (folder / "sums.py").write_text(SUMS)
    save = [sys.executable, "-c", "from sums import graph; graph.save('models')"]
    subprocess.run(save, cwd=folder, timeout=60, check=True)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run(
        pytest_command,
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.server
def test_the_fixtures_work_in_another_test_session(done_beside: subprocess.CompletedProcess[str]) -> None:
    assert "2 passed" in done_beside.stdout, done_beside.stdout + done_beside.stderr


def test_the_kit_needs_none_of_the_tools_that_flowserves_own_tests_need() -> None:
    names = "Arrival, Faked, FakeModel, Served, Simulation, serving, simulate"
    loaded = "print(sorted({'hypothesis', 'onnx', 'pytest'} & sys.modules.keys()))"
    code = f"import sys; from flowserve.testing import {names}; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
