"""Folders for a while, below the one for temporary files.

Decided here: whose one is, and what becomes of those that a killed process left behind. A folder belongs to whoever
holds its lock, which ends with the process; what nobody holds is removed by the next server that starts, and by whoever
unpacks an environment. What lies in a folder is not known here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

# What the names of folders of each kind begin with.
UNPACKED: Final = "flowserve-environment-"
MODELS: Final = "flowserve-models-"


def claim(kind: str) -> tuple[str, int]:
    """A new folder that only this user can enter, and the descriptor that holds its lock. Raises OSError."""
    while True:
        folder = tempfile.mkdtemp(prefix=kind)
        with suppress(FileNotFoundError):
            fd = _locked(folder, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, fd
            os.close(fd)  # another server took it for one that was left behind


def give_up(folder: str, fd: int) -> None:
    """Remove a folder that was claimed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)


def sweep() -> None:
    """Remove what was left behind."""
    with suppress(OSError):  # there may be no folder for temporary files; who needs one says so
        for folder in _claimed(tempfile.gettempdir()):
            with suppress(OSError):
                give_up(folder, _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))


def _claimed(parent: str) -> Iterator[str]:
    with os.scandir(parent) as entries:
        for entry in entries:
            is_one = entry.name.startswith((UNPACKED, MODELS)) and entry.is_dir(follow_symlinks=False)
            if is_one and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield entry.path


def _locked(folder: str, how: int) -> int:
    """A descriptor that holds its lock. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd
