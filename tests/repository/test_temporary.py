"""Temporary folders: locked ones stay, those of a killed process are removed, other folders are not touched."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from flowserve.temporary import MODELS, UNPACKED, claim, give_up, remove_abandoned

pytestmark = pytest.mark.fault("X8")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(kind: str = MODELS) -> Path:
    folder, fd = claim(kind)
    (Path(folder) / "m/1").mkdir(parents=True)
    os.close(fd)  # as at the end of a process
    return Path(folder)


@pytest.mark.parametrize("kind", [UNPACKED, MODELS])
def test_abandoned_folders_are_removed_and_locked_ones_stay(places: Path, kind: str) -> None:
    left_behind(kind)
    held, fd = claim(kind)
    remove_abandoned()
    assert [*places.iterdir()] == [Path(held)]
    assert Path(held).stat().st_mode & 0o777 == 0o700
    give_up(held, fd)
    assert [*places.iterdir()] == []


@pytest.mark.parametrize("name", [f"{MODELS}prod", f"{UNPACKED}of-mine", "models.claimed", f"{MODELS}prod.claimed"])
def test_other_folders_stay_whatever_their_name(places: Path, name: str) -> None:
    (places / name / "m").mkdir(parents=True)
    remove_abandoned()
    assert (places / name / "m").is_dir()


def test_a_link_is_not_followed(places: Path) -> None:
    left = left_behind()
    own = left.rename(places / "own")
    left.symlink_to(own)
    remove_abandoned()
    assert (own / "m").is_dir()


def test_a_folder_that_disappears_does_not_prevent_removing_others(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, left = left_behind(), left_behind()
    gone.joinpath("m/1").rmdir()
    gone.joinpath("m").rmdir()
    gone.rmdir()
    monkeypatch.setattr(os, "listdir", lambda _: [gone.name, left.name])
    remove_abandoned()
    assert not left.exists()


def test_without_file_locks_a_folder_can_be_claimed_and_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder, fd = claim(MODELS)
    remove_abandoned()
    assert os.path.isdir(folder)
    give_up(folder, fd)
    assert not os.path.exists(folder)


def test_a_folder_that_cannot_be_opened_is_removed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few:
        few.setattr(os, "open", too_many)
        with pytest.raises(OSError, match="Too many open files"):
            claim(MODELS)
    assert [*places.iterdir()] == []


def test_without_a_temporary_folder_there_is_nothing_to_remove(places: Path) -> None:
    remove_abandoned(str(places / "gone"))
