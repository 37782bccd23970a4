"""The pages make a site without a broken link, with the reference from docstrings, tabs, pictures and a search."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def beside(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy of the pages: the build writes beside its configuration."""
    shutil.copytree(root / "docs", folder / "docs")
    shutil.copy(root / ".mkdocs.yml", folder)
    build = [
        "nice",
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--config-file",
        str(folder / ".mkdocs.yml"),
    ]
    return subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def site(done_beside: subprocess.CompletedProcess[str]) -> Path:
    assert done_beside.returncode == 0, done_beside.stdout + done_beside.stderr
    return Path(done_beside.args[-1]).parent / "site"


@pytest.mark.slow
def test_the_site_has_the_public_api_in_its_reference(site: Path) -> None:
    reference = (site / "reference/index.html").read_text()
    for name in ("AsyncEngine.infer", "Engine.stream", "flowserve.Graph", "flowserve.testing.simulate"):
        assert f'id="{name}"' in reference or name in reference


@pytest.mark.slow
def test_the_site_has_tabs_pictures_and_a_search_over_its_pages(site: Path) -> None:
    page = (site / "http/index.html").read_text()
    assert re.findall(r"<label for=[^>]*>(\w+)</label>", page) == ["curl", "Python", "gRPC"]
    assert "/// tab" not in page
    assert (site / "live-page-light.png").is_file()
    assert "typical-mistakes" in (site / "search.json").read_text()


@pytest.mark.slow
def test_every_block_of_a_page_is_shown_as_code_with_the_name_of_its_file(site: Path) -> None:
    assert '<span class="filename">detect/1/model.py</span>' in (site / "rows/index.html").read_text()
    pages = {path.parent.name: path.read_text() for path in site.rglob("*.html")}
    assert [name for name, text in pages.items() if re.search(r"^(?:<p>)?```", text, re.MULTILINE)] == []


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)=["']?https?://[^"'>]*\.(?:js|css|woff2?)|fonts\.googleapis""", page)
