"""docs/tutorial.md works as written: its commands are pasted in order, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from flowserve.testing.serve import serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(line: str, home: Path) -> str:
    """One command as a newcomer's shell runs it, in an environment where flowserve is installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=home,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.server
@pytest.mark.slow
def test_every_command_works_in_order(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/tutorial.md").read_text()
    before, after = page.split("```sh\nflowserve run songs\n```")
    blocks = BLOCK.findall(before)
    assert [code for _, code in blocks[:1]] == [
        "python3 -m venv .venv && . .venv/bin/activate\npip install flowserve pytest\n"
    ]
    shown = [run_block(blocks[i:], tmp_path) for i in range(1, len(blocks)) if blocks[i][0] == "sh"]
    assert len(shown) == 4
    assert mistaken(tmp_path) == next(code for kind, code in blocks if kind == "text" and "leters" in code)
    assert (tmp_path / "songs.svg").read_text().startswith("<svg")
    with serving(tmp_path / "songs") as served:
        blocks = BLOCK.findall(after.replace("localhost:8000", served.address))
        shown = [run_block(blocks[i:], tmp_path) for i in range(len(blocks)) if blocks[i][0] == "sh"]
    assert '"data":["spoken"]' in shown[1]
    assert "songs_judge" in shown[2]
    assert "recommended for songs_count, songs_judge: " in shown[3]


def mistaken(home: Path) -> str:
    """What `flowserve check` says of the mistake that the page makes."""
    config = home / "songs/songs/config.pbtxt"
    right = config.read_text()
    before, after = right.rsplit('"letters"', 1)
    config.write_text(f'{before}"leters"{after}')
    checked = subprocess.run(
        [sys.executable, "-m", "flowserve", "check", "songs"], cwd=home, capture_output=True, text=True, check=False
    )
    config.write_text(right)
    return checked.stderr


def run_block(blocks: list[tuple[str, str]], home: Path) -> str:
    """Run the first block, and compare with the one below where that shows an output."""
    printed = "".join(run(line, home) for line in blocks[0][1].splitlines())
    if len(blocks) > 1 and blocks[1][0] == "text" and "leters" not in blocks[1][1]:
        for got, wanted in zip_longest(printed.splitlines(), blocks[1][1].splitlines()):
            assert got == wanted
    return printed
