"""Whether a folder changed: by what is in it, not by what its times say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowserve.repository.snapshot import digest, stamp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.onnx").write_bytes(b"one")
    (tmp_path / "m/config.pbtxt").write_text("")
    return tmp_path / "m"


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "1/model.onnx").write_bytes(b"two"),
        lambda folder: (folder / "config.pbtxt").write_text("max_batch_size: 4"),
        lambda folder: (folder / "config.pbtxt").unlink(),
        lambda folder: (folder / "2").mkdir(),
        lambda folder: (folder / "1/model.onnx").rename(folder / "1/other.onnx"),
        lambda folder: (folder / "labels.txt").touch(),
    ],
)
def test_every_change_of_contents_shows_in_both(folder: Path, change: object) -> None:
    before = stamp(folder), digest(folder)
    assert callable(change)
    change(folder)
    after = stamp(folder), digest(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_file_that_was_only_touched_is_what_it_was(folder: Path) -> None:
    before = stamp(folder), digest(folder)
    os.utime(folder / "1/model.onnx", (1, 1))
    assert digest(folder) == before[1]
    assert stamp(folder) != before[0]


def test_a_change_that_keeps_size_and_times_shows(folder: Path) -> None:
    file = folder / "1/model.onnx"
    before, times = (stamp(folder), digest(folder)), file.stat()
    other = folder.parent / "other"
    other.write_bytes(b"two")
    other.rename(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert stamp(folder) != before[0]
    assert digest(folder) != before[1]


def test_what_editors_and_python_leave_behind_does_not_count(folder: Path) -> None:
    before = stamp(folder), digest(folder)
    (folder / "1/.model.py.swp").touch()
    (folder / ".git").mkdir()
    (folder / "1/__pycache__").mkdir()
    (folder / "1/__pycache__/x.pyc").touch()
    assert (stamp(folder), digest(folder)) == before


def test_links_are_followed_and_those_that_lead_in_a_circle_end(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "weights"
    elsewhere.write_bytes(b"w1")
    (folder / "1/weights").symlink_to(elsewhere)
    (folder / "1/again").symlink_to(folder)
    (folder / "1/nowhere").symlink_to(tmp_path / "nothing")
    before = stamp(folder), digest(folder)
    elsewhere.write_bytes(b"w2+")
    assert stamp(folder) != before[0]
    assert digest(folder) != before[1]


def test_a_folder_that_is_not_there_has_an_empty_stamp(tmp_path: Path) -> None:
    assert stamp(tmp_path / "nothing") == ()


def test_a_pipe_is_a_name_and_nobody_waits_for_what_comes_out_of_it(folder: Path) -> None:
    before = digest(folder)
    os.mkfifo(folder / "1/pipe")
    assert digest(folder) != before
