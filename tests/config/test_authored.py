"""Whose lines the places of a written file are."""

from __future__ import annotations

from pathlib import Path

from flowserve.config.authored import authored, note_author
from flowserve.config.types import SourceMap
from flowserve.errors import Place


class Owner:
    """Somebody."""


def test_places_of_a_written_file_are_its_authors_as_long_as_it_has_an_owner(tmp_path: Path) -> None:
    home, link, owner = tmp_path / "m", tmp_path / "also", Owner()
    link.symlink_to(home)
    read = SourceMap(
        "m/config.pbtxt", {"input[0].dims": Place("m/config.pbtxt", 3, 4), "name": Place("m/config.pbtxt")}
    )
    note_author(home, SourceMap("steps.py", {"": Place("steps.py", 7), "input[0]": Place("steps.py", 9, 5)}), owner)
    for folder in (home, link):
        known = authored(folder, read)
        assert known.places == {"input[0].dims": Place("steps.py", 9, 5), "name": Place("steps.py", 7)}
    assert authored(tmp_path, read) is read
    del owner
    assert authored(home, read) is read
