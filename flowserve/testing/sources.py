"""What tests are about: a graph in Python, or a repository's folder; and how either becomes a folder.

Decided here: that both are good wherever the test tools want models.
"""

from __future__ import annotations

from pathlib import Path

from flowserve.cli.target import PythonGraph, is_graph
from flowserve.errors import Invalid

Source = PythonGraph | str | Path


def folder_of(source: Source) -> tuple[Path, str, object]:
    """The repository, the name of what is meant in it ("" where nothing says), and what keeps a private one there.
    Blocks. Raises Problems.
    """
    if isinstance(source, str | Path):
        return Path(source), "", None
    if not is_graph(source):
        raise Invalid(f"models are in a repository's folder or in a graph, not in {source!r}")
    private = source.write_private()
    return private.path, source.name, private
