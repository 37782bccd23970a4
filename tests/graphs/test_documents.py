"""The READMEs of the examples are correct: commands are run, output is compared, pictures are drawn again.

In a README a block marked `sh` or `python` is a request, and the block that follows it is what it prints.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from flowserve.graph.advice import advise
from flowserve.render.text import render_mermaid
from flowserve.runtime.loading.reading import Reading, read_repositories
from flowserve.testing.serve import Served

GRAPHS = Path(__file__).resolve().parents[2] / "graphs"
EXAMPLES = sorted(path.parent for path in GRAPHS.glob("*/config.pbtxt"))
# Models in .tensorflow are a repository of their own (test_language_of_text.py).
READMES = [path for path in GRAPHS.rglob("README.md") if ".tensorflow" not in path.parts]
DOCUMENTS = sorted([*READMES, GRAPHS.parent / "docs/examples.md"])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIGITS = re.compile(r"(\d\.\d{3})\d+(?:e-\d+)?")


def _name(path: Path) -> str:
    return str(path.relative_to(GRAPHS.parent))


def _requests() -> list[tuple[Path, str, str, str]]:
    """Every request of every document: where, language, command, what it prints."""
    found = []
    for document in DOCUMENTS:
        blocks = BLOCK.findall(document.read_text(encoding="utf-8"))
        for (language, command), (_, printed) in pairwise(blocks):
            if language in {"sh", "python"}:
                found.append((document, language, command, printed))
    return found


@pytest.fixture(scope="module")
def reading() -> Reading:
    """All examples."""
    return read_repositories([GRAPHS])


@pytest.fixture(scope="module")
def pictures(reading: Reading) -> Mapping[str, str]:
    """The graph of each example as Mermaid draws it."""
    graphs, configs = reading.resolution.graphs, reading.configs
    assert not reading.resolution.failed
    return {name: render_mermaid(versions[max(versions)], configs) for name, versions in graphs.items()}


def test_every_example_is_valid(pictures: Mapping[str, str]) -> None:
    assert {"read_text", "digit", "detect_language"} <= set(pictures)


def test_no_example_needs_a_warning(reading: Reading) -> None:
    graphs = [graph for versions in reading.resolution.graphs.values() for graph in versions.values()]
    assert not reading.warnings
    assert [str(problem) for graph in graphs for problem in advise(graph, reading.configs)] == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda path: path.name)
def test_the_picture_in_the_readme_is_the_graph_that_is_served(pictures: Mapping[str, str], folder: Path) -> None:
    drawn = [text for language, text in BLOCK.findall((folder / "README.md").read_text()) if language == "mermaid"]
    assert drawn == [pictures[folder.name]], f"flowserve graph graphs/{folder.name} --format mermaid draws it anew"


@pytest.mark.server
@pytest.mark.parametrize(
    ("document", "language", "command", "printed"),
    [pytest.param(*each, id=f"{_name(each[0])}-{number}") for number, each in enumerate(_requests())],
)
def test_the_request_in_the_document_prints_its_documented_output(
    served_graphs: Served, document: Path, language: str, command: str, printed: str
) -> None:
    program = {"sh": ["bash", "-ec", command], "python": [sys.executable, "-c", command]}[language]
    if language == "sh" and (shutil.which("bash") is None or shutil.which("curl") is None):
        pytest.skip("needs bash and curl")
    program[-1] = command.replace("localhost:8000", served_graphs.address)
    done = subprocess.run(program, cwd=GRAPHS.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # Processors differ in the last digits of a floating point sum: three after the point are the promise.
    assert DIGITS.sub(r"\1", done.stdout).strip() == DIGITS.sub(r"\1", printed).strip()
