"""Unpacking of Python environments: no file outside the folder, and no folder is left behind."""

from __future__ import annotations

import io
import logging
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from flowserve.backends.worker.unpack import unpack_environment
from flowserve.errors import Invalid
from flowserve.temporary import UNPACKED, claim, give_up


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "places").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "places"))
    return tmp_path / "places"


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, mtime: float = 0
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.mtime, made.uid = kind, link, mode, mtime, 12345
    if "\0" in name:  # the usual header ends at a NUL
        made.pax_headers = {"path": name}
    return made


def unpacked(folder: Path, *entries: tarfile.TarInfo, content: bytes = b"x") -> Path:
    with tarfile.open(folder / "env.tar.gz", "w:gz") as tar:
        for one in entries:
            one.size = len(content) if one.isreg() else 0
            tar.addfile(one, io.BytesIO(content) if one.isreg() else None)
    made, fd = claim(UNPACKED)
    try:
        unpack_environment(str(folder / "env.tar.gz"), made)
    except BaseException:
        give_up(made, fd)
        raise
    os.close(fd)
    return Path(made)


@pytest.mark.parametrize(
    "entries",
    [
        [entry("/etc/flowserve")],
        [entry("../beside")],
        [entry("lib/../../beside")],
        [entry("out", tarfile.SYMTYPE, ".."), entry("out/beside")],
        [entry("out", tarfile.SYMTYPE, "../beside"), entry("out")],
        [entry("out", tarfile.SYMTYPE, ".."), entry("out/beside", tarfile.SYMTYPE, "x")],
        [entry("out", tarfile.LNKTYPE, "../precious")],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("device", tarfile.CHRTYPE)],
    ],
)
def test_an_archive_with_an_entry_outside_its_folder_is_refused(
    tmp_path: Path, places: Path, entries: list[tarfile.TarInfo]
) -> None:
    (places / "precious").write_text("precious")
    with pytest.raises(Invalid, match=r"it cannot be unpacked: '.*' (leads out of it|is a device or the like)"):
        unpacked(tmp_path, *entries)
    assert [one.name for one in places.iterdir()] == ["precious"]
    assert (places / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (entry("a", tarfile.LNKTYPE, "b"), "linkname 'b' not found"),
        (entry("a\0b"), "embedded null byte"),
        (entry("a", mtime=1e30), "timestamp out of range"),
    ],
)
def test_an_entry_that_is_no_file_folder_or_link_is_refused(tmp_path: Path, one: tarfile.TarInfo, why: str) -> None:
    with pytest.raises(Invalid, match=f"it cannot be unpacked: .*{why}"):
        unpacked(tmp_path, one)


def test_links_are_kept_and_permissions_are_set_to_defaults(tmp_path: Path) -> None:
    folder = unpacked(
        tmp_path,
        entry("bin", tarfile.DIRTYPE, mode=0o555),
        entry("bin/python3.12", mode=0o4777),
        entry("bin/python", tarfile.SYMTYPE, "python3.12"),
        entry("bin/python3", tarfile.LNKTYPE, "bin/python3.12", mode=0o777),
        entry("bin/env", tarfile.SYMTYPE, "/usr/bin/env"),
    )
    assert os.readlink(folder / "bin/python") == "python3.12"
    assert os.readlink(folder / "bin/env") == "/usr/bin/env"
    assert (folder / "bin/python3").samefile(folder / "bin/python")
    found = (folder / "bin/python3.12").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o755, os.geteuid())


@pytest.mark.parametrize("status", [0, 1])
def test_conda_unpack_is_run_in_the_new_folder(tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture) -> None:
    script = f"import os, sys; os.mkdir('told'); sys.exit('no such prefix' if {status} else 0)".encode()
    python = entry("bin/python", tarfile.SYMTYPE, sys.executable)
    with caplog.at_level(logging.WARNING):
        folder = unpacked(tmp_path, python, entry("bin/conda-unpack"), content=script)
    assert (folder / "told").is_dir()
    assert caplog.messages == ["bin/conda-unpack failed: no such prefix"][:status]


def test_folders_of_a_killed_server_are_removed_by_the_next_unpacking(tmp_path: Path, places: Path) -> None:
    _, fd = claim(UNPACKED)
    os.close(fd)  # as at the end of a process
    latest = unpacked(tmp_path, entry("x"))
    assert [*places.iterdir()] == [latest]
