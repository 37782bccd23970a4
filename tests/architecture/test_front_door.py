"""Entry points for new users: the README's commands, the examples, the news; and no path of a developer's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from flowserve.version import __version__


def _tracked(root: Path) -> list[Path]:
    """Every file of the tree that is no build output; in an unpacked archive there is no git to ask."""
    asked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0:
        return [root / name for name in asked.stdout.split("\0") if name and (root / name).is_file()]
    return [path for path in root.rglob("*") if path.is_file() and ".venv" not in path.parts]


def _commands(root: Path) -> list[str]:
    """The README's lines that do everything, from an empty folder on."""
    return [line for line in (root / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]


def test_the_ci_runs_the_readmes_test_command_and_nothing_else(root: Path) -> None:
    in_readme = [line for line in _commands(root) if "-m pytest" in line]
    in_ci = [
        line.strip()
        for line in (root / ".ci/run").read_text().splitlines()
        if line.strip() and not line.startswith(("#", "set ", "cd "))
    ]
    assert len(in_readme) == 1
    assert in_ci == in_readme


def test_the_readme_runs_the_examples_with_one_line(root: Path) -> None:
    assert len([line for line in _commands(root) if line.endswith("flowserve run graphs/")]) == 1


def test_the_commands_and_output_of_the_readme_are_tested_with_the_examples(root: Path) -> None:
    example = _blocks(root / "graphs/read_text/README.md")
    shown = _blocks(root / "README.md")
    assert [language for language, _ in shown] == ["sh", "json", "python", "text", "python", "sh", "json"]
    # The pipeline in Python is tested in tests/docs/test_readme.py.
    assert [block for block in shown[:4] if block not in example] == []


def _blocks(document: Path) -> list[tuple[str, str]]:
    """The blocks of a document that say their language, which commands to type from an empty folder on do not."""
    return re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def test_every_link_of_the_documents_has_a_target(root: Path) -> None:
    broken = []
    for document in [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "graphs").rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        here = [target for target in targets if not re.match(r"[a-z]+:", target)]
        broken += [f"{document.name}: {target}" for target in here if not (document.parent / target).exists()]
    assert not broken


def test_the_comparison_with_other_servers_is_about_this_version(root: Path) -> None:
    (version,) = re.findall(r"^\| flowserve \| ([\d.]+) \|", (root / "docs/flowserve-or.md").read_text(), re.MULTILINE)
    assert __version__.startswith(f"{version}.")


def test_every_page_has_its_line_in_the_site_once_and_every_line_its_page(root: Path) -> None:
    lines = re.findall(r": ([\w/-]+\.md)$", (root / ".mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(lines) == sorted(page.name for page in (root / "docs").glob("*.md"))


def test_no_file_contains_a_path_of_a_developers_machine(root: Path) -> None:
    checkout = re.escape(f"{root}/")
    home = re.compile(f"{checkout}|/home/[a-z]|/Users/[A-Za-z]|/root/".encode())
    found = []
    for path in _tracked(root):
        if path == Path(__file__) or path.stat().st_size > 1_000_000:
            continue
        match = home.search(path.read_bytes())
        if match:
            found.append(f"{path.relative_to(root)}: {match[0]!r}")
    assert not found


def test_every_example_has_a_readme_with_its_request_answer_and_graph(root: Path) -> None:
    folders = [folder for folder in (root / "graphs").iterdir() if (folder / "config.pbtxt").is_file()]
    assert folders
    served = [folder for folder in folders if (folder / "README.md").is_file()]
    assert len(served) >= 3
    for folder in served:
        text = (folder / "README.md").read_text()
        assert "curl" in text, f"{folder.name}/README.md shows no request"
        assert "```" in text, f"{folder.name}/README.md shows no answer"


def test_news_fragments_are_valid_and_the_changelog_has_a_place_for_them(root: Path) -> None:
    fragments = [path for path in (root / "docs/news").glob("*.md") if path.name != "README.md"]
    changelog = (root / "docs/changelog.md").read_text()
    assert fragments or f"## {__version__} " in changelog
    assert "<!-- towncrier release notes start -->" in changelog
    for fragment in fragments:
        assert re.fullmatch(r".+\.(feature|bugfix|change)\.md", fragment.name), fragment.name
        assert fragment.read_text().strip()
