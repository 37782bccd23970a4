"""Output of a server's start, on a terminal and elsewhere."""

from __future__ import annotations

import subprocess
import sys

from flowserve.cli.serving.progress import loading_line


def test_the_live_line_of_many_models_stays_on_one_line() -> None:
    assert loading_line([]) == "reading"
    assert loading_line(["a", "b"]) == "loading a, b"
    assert loading_line([f"m{i}" for i in range(1000)]) == "loading m0, m1, m2, m3, m4 and 995 more"


def test_a_server_imports_rich_and_networkx_only_if_it_needs_them() -> None:
    code = "import sys, flowserve.cli.run, flowserve.cli.check; print({'rich', 'networkx'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "set()\n"
