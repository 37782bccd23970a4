"""Detection of changed folders by contents, not by times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowserve.repository.snapshot import read_contents, stamp


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
def test_every_change_of_contents_changes_stamp_and_digests(folder: Path, change: object) -> None:
    before = stamp(folder), read_contents(folder)
    assert callable(change)
    change(folder)
    after = stamp(folder), read_contents(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_touched_file_has_the_same_digests(folder: Path) -> None:
    before = stamp(folder), read_contents(folder)
    os.utime(folder / "1/model.onnx", (1, 1))
    assert read_contents(folder) == before[1]
    assert stamp(folder) != before[0]


def test_a_change_that_keeps_size_and_times_changes_the_digests(folder: Path) -> None:
    file = folder / "1/model.onnx"
    before, times = (stamp(folder), read_contents(folder)), file.stat()
    other = folder.parent / "other"
    other.write_bytes(b"two")
    other.rename(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert stamp(folder) != before[0]
    assert read_contents(folder) != before[1]


def test_hidden_files_and_python_caches_do_not_count(folder: Path) -> None:
    before = stamp(folder), read_contents(folder)
    (folder / "1/.model.py.swp").touch()
    (folder / ".git").mkdir()
    (folder / "1/__pycache__").mkdir()
    (folder / "1/__pycache__/x.pyc").touch()
    assert (stamp(folder), read_contents(folder)) == before


def test_links_are_followed_and_circular_ones_terminate(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "weights"
    elsewhere.write_bytes(b"w1")
    (folder / "1/weights").symlink_to(elsewhere)
    (folder / "1/again").symlink_to(folder)
    (folder / "1/nowhere").symlink_to(tmp_path / "nothing")
    before = stamp(folder), read_contents(folder)
    elsewhere.write_bytes(b"w2+")
    assert stamp(folder) != before[0]
    assert read_contents(folder) != before[1]


def test_a_missing_folder_has_an_empty_stamp(tmp_path: Path) -> None:
    assert stamp(tmp_path / "nothing") == ()


def test_a_pipe_counts_by_name_and_is_not_read(folder: Path) -> None:
    before = read_contents(folder)
    os.mkfifo(folder / "1/pipe")
    assert read_contents(folder) != before


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("config.pbtxt", "config"),
        ("configs/gpu.pbtxt", "config"),
        ("1/model.onnx", 1),
        ("1/parts/a/weights", 1),
        ("1/config.pbtxt", 1),
        ("2/model.onnx", 2),
        ("labels.txt", "shared"),
        ("initial_state/1/zero", "shared"),
        ("03/model.onnx", "shared"),
        ("3", "shared"),  # a file
    ],
)
def test_a_file_belongs_to_one_part_of_the_folder(folder: Path, path: str, part: str | int) -> None:
    before = read_contents(folder)
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"new")
    after = read_contents(folder)
    changed: set[str | int] = {
        one
        for one in before.versions.keys() | after.versions.keys()
        if before.versions.get(one) != after.versions.get(one)
    }
    changed |= {one for one in ("config", "shared") if getattr(before, one) != getattr(after, one)}
    assert changed == {part}
