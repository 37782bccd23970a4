"""The tabs of the pages: each holds a request and its response, for a server of the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowserve.cli.options import DEFAULT_GRPC_PORT
from flowserve.testing.serve import Served, serving

TAB = re.compile(r"^/// tab \| (\w+)\n\n```\w+\n(.*?)^```\n\n```\w+\n(.*?)^```\n\n///$", re.MULTILINE | re.DOTALL)
PAGES = {"http": ["curl", "Python", "gRPC"], "grpc": ["gRPC", "Python", "curl"]}


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with serving(root / "graphs", "--allow-grpc", "true", "--grpc-port", "0") as served:
        yield served


@pytest.mark.server
@pytest.mark.parametrize("page", PAGES)
def test_the_request_of_each_tab_gets_the_response_beneath_it(page: str, root: Path, server: Served) -> None:
    tabs = TAB.findall((root / f"docs/{page}.md").read_text())
    assert [kind for kind, _, _ in tabs] == PAGES[page]
    for kind, program, shown in tabs:
        program = program.replace(f"localhost:{DEFAULT_GRPC_PORT}", server.grpc_address)
        program = program.replace("localhost:8000", server.address)
        interpreter = ["sh", "-c"] if kind == "curl" else [sys.executable, "-c"]
        done = subprocess.run([*interpreter, program], cwd=root, capture_output=True, text=True, timeout=60)
        assert done.stdout.rstrip("\n") == shown.rstrip("\n"), done.stderr
