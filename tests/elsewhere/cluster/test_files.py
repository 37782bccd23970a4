"""The files of a model on another machine: what is compared, sent, and kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowserve.backends.base import ModelFiles
from flowserve.elsewhere.cluster.files import PIECE_BYTES, archive_of, cache, digest_of, files_here
from flowserve.errors import Unavailable


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """Version 3 of a model with a large file, a link and other versions; the machine's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models" / "m"
    for name, content in {
        "config.pbtxt": b"x",
        "2/model.py": b"old",
        "3/model.py": b"new",
        "3/deep/weights.bin": os.urandom(PIECE_BYTES * 2 + 17),
        "3/__pycache__/model.pyc": b"compiled",
        "shared/é.txt": b"",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return ModelFiles(tmp_path / "models", folder, 3)


def elsewhere(files: ModelFiles) -> ModelFiles:
    """The same of a path that this machine does not have."""
    return replace(files, repository=Path("/nowhere"), folder=Path("/nowhere/m"))


def test_the_digest_is_of_names_and_contents_of_what_the_version_needs(files: ModelFiles) -> None:
    before = digest_of(files)
    (files.folder / "2" / "model.py").write_bytes(b"another version")
    (files.folder / "3" / "__pycache__" / "model.pyc").write_bytes(b"compiled again")
    assert digest_of(files) == before
    (files.folder / "3" / "model.py").write_bytes(b"NEW")
    changed = digest_of(files)
    assert changed != before
    (files.folder / "3" / "model.py").rename(files.folder / "3" / "other.py")
    assert digest_of(files) not in (before, changed)


def test_files_are_unpacked_once_and_are_those_of_the_server(files: ModelFiles) -> None:
    digest = digest_of(files)
    assert files_here(files, digest, None) == files, "a shared file system: nothing is sent"
    times = 0

    def fetch() -> Iterator[bytes]:
        nonlocal times
        times += 1
        for piece in archive_of(files):
            assert len(piece) <= PIECE_BYTES
            yield piece

    with pytest.raises(Unavailable, match="put the repository on a shared file system"):
        files_here(elsewhere(files), digest, None)
    there = files_here(elsewhere(files), digest, fetch)
    assert digest_of(there) == digest
    assert (there.version_folder / "deep" / "weights.bin").read_bytes()[-17:] == (
        files.version_folder / "deep" / "weights.bin"
    ).read_bytes()[-17:]
    assert not (there.folder / "2").exists()
    assert files_here(elsewhere(files), digest, fetch) == there
    assert files_here(elsewhere(files), digest, None) == there
    assert times == 1


def test_an_archive_that_is_cut_or_changed_leaves_nothing_behind(files: ModelFiles) -> None:
    digest = digest_of(files)
    pieces = [*archive_of(files)]
    with pytest.raises(Unavailable):
        files_here(elsewhere(files), digest, lambda: pieces[:1])
    with pytest.raises(Unavailable, match="the files changed while they were sent"):
        files_here(elsewhere(files), "0" * 64, lambda: pieces)
    assert [*cache().iterdir()] == []
