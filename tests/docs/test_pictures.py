"""The pictures of the pages are those that `flowserve graph` draws of the graphs on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def flowserve(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "flowserve", *arguments], cwd=folder, capture_output=True, check=True)


def check(root: Path, picture: Path) -> None:
    is_same = (root / "docs" / picture.name).read_text() == picture.read_text()
    assert is_same, f"docs/{picture.name} is another picture; if the new one is as it should be, put it there"


def test_the_page_about_pictures_shows_read_text(root: Path, tmp_path: Path) -> None:
    (tmp_path / "graphs").symlink_to(root / "graphs")
    flowserve(tmp_path, "graph", "graphs/", "read_text", "-o", "read_text.svg")
    check(root, tmp_path / "read_text.svg")


def test_the_tutorial_shows_the_graph_that_it_writes(root: Path, tmp_path: Path) -> None:
    flowserve(tmp_path, "new", "songs")
    flowserve(tmp_path, "graph", "songs", "songs", "-o", "songs.svg")
    check(root, tmp_path / "songs.svg")


def test_the_page_about_graphs_in_python_shows_its_first_graph(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/python-graphs.md").read_text()
    block = re.search(r"^```python\n(# sound\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "sound.py").write_text(block[1])
    flowserve(tmp_path, "graph", "sound:graph", "-o", "sound.svg")
    check(root, tmp_path / "sound.svg")
