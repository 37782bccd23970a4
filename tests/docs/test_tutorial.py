"""docs/tutorial.md works as written: its commands are pasted in order, into an environment that has nothing yet, and
what they print is compared.

What is new in that environment is flowserve itself, installed by pip from a wheel of this checkout. What flowserve
needs, and pytest, is linked from where this test runs instead of being downloaded again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
from functools import partial
from itertools import zip_longest
from pathlib import Path

import pytest

from flowserve.testing.serve import serving, started
from tests.support.packages import build, copy_source

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_LINKED = re.compile(r"flowserve|pip\b|.*\.pth$|__pycache__")


class Newcomer:
    """A home, and a shell in it that has a plain `python3`."""

    def __init__(self, home: Path, wheels: Path) -> None:
        self.home = home
        self.python = home / ".venv" / "bin" / "python"
        (home / "bin").mkdir()
        python3 = home / "bin" / "python3"
        python3.write_text(f'#!/bin/sh\nexec {getattr(sys, "_base_executable", sys.executable)} "$@"\n')
        python3.chmod(0o755)
        # As `pip install` without a network, which finds its packages in a folder.
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._environment = {**kept, **pip, "PATH": os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"])}

    def run(self, line: str, status: int = 0) -> tuple[str, str]:
        """What one command prints, to standard output and standard error."""
        done = subprocess.run(
            ["sh", "-c", f". .venv/bin/activate && {line}" if self.python.exists() else line],
            cwd=self.home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout, done.stderr

    def paste(self, blocks: list[tuple[str, str]]) -> str:
        """Run the first block, and compare with the one below where that shows an output."""
        kind, code = blocks[0]
        (self.home / "pasted.py").write_text(code)
        lines = ["python pasted.py"] if kind == "python" else code.splitlines()
        printed = "".join(self.run(line)[0] for line in lines)
        if len(blocks) > 1 and blocks[1][0] == "text" and "leters" not in blocks[1][1]:
            for got, wanted in zip_longest(printed.splitlines(), blocks[1][1].splitlines()):
                assert got == wanted
        return printed

    def link_dependencies(self) -> None:
        """Everything that is installed here but flowserve."""
        links = self.home / "dependencies"
        links.mkdir()
        for one in Path(sysconfig.get_path("purelib")).iterdir():
            if not NOT_LINKED.match(one.name):
                (links / one.name).symlink_to(one)
        (packages,) = (self.home / ".venv" / "lib").glob("python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{links}\n")


def beside(root: Path, folder: Path) -> list[str]:
    """Paste everything. Returns what the commands after `flowserve run` printed."""
    home, wheels = folder / "home", folder / "wheels"
    home.mkdir()
    build(copy_source(root, folder / "source"), wheels)
    page = (root / "docs/tutorial.md").read_text()
    before, after = page.split("```sh\nflowserve run songs\n```")
    blocks = BLOCK.findall(before)
    newcomer = Newcomer(home, wheels)
    create, install = blocks[0][1].splitlines()
    newcomer.run(create)
    newcomer.link_dependencies()
    assert "path/to/flowserve" in install  # here the wheel, which is made of that folder
    newcomer.run(install.replace("path/to/flowserve", "flowserve"))
    where, _ = newcomer.run("python -c 'import flowserve; print(flowserve.__file__)'")
    assert where.startswith(str(home / ".venv"))
    shown = [newcomer.paste(blocks[i:]) for i in range(1, len(blocks)) if blocks[i][0] == "sh"]
    assert len(shown) == 4
    assert mistaken(newcomer) == next(code for kind, code in blocks if kind == "text" and "leters" in code)
    assert (home / "songs.svg").read_text().startswith("<svg")
    # Not the flowserve of the folder where the tests run, which `python -m` would find first.
    elsewhere = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    with serving(home / "songs", environment=elsewhere, start=partial(started, python=str(newcomer.python))) as served:
        with urllib.request.urlopen(served.base_url) as page:  # all of it came with the wheel
            assert page.read().rstrip().endswith(b"</html>")
        blocks = BLOCK.findall(after.replace("localhost:8000", served.address))
        return [newcomer.paste(blocks[i:]) for i in range(len(blocks)) if blocks[i][0] in ("sh", "python")]


def mistaken(newcomer: Newcomer) -> str:
    """What `flowserve check` says of the mistake that the page makes."""
    config = newcomer.home / "songs/songs/config.pbtxt"
    right = config.read_text()
    before, after = right.rsplit('"letters"', 1)
    config.write_text(f'{before}"leters"{after}')
    _, said = newcomer.run("flowserve check songs", status=1)
    config.write_text(right)
    return said


@pytest.mark.server
@pytest.mark.slow
def test_every_command_works_in_order(done_beside: list[str]) -> None:
    assert '"data":["spoken"]' in done_beside[1]
    assert "songs_judge" in done_beside[3]
    assert "recommended for songs_count, songs_judge: " in done_beside[4]
