"""Places of generated configuration files."""

from __future__ import annotations

from pathlib import Path

from flowserve.config.load import authored, note_author
from flowserve.config.types import SourceMap
from flowserve.errors import Place


class Owner:
    """The owner of a generated folder."""


def test_places_of_a_generated_file_are_its_authors_while_its_owner_is_alive(tmp_path: Path) -> None:
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
