"""Temporary folders, and whose they are.

Decided here: how such a folder is known, and what becomes of those that a killed process left behind. One belongs to
whoever holds its lock, which ends with the process; what nobody holds is removed by the next server that starts, and by
whoever unpacks an environment. Their names are like nobody's own. What lies in a folder is not known here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from typing import Final

# What the names of folders of each kind begin with, and what those of all end with.
UNPACKED: Final = "flowserve-environment-"
MODELS: Final = "flowserve-models-"
_END: Final = ".claimed"
_NAMES: Final = re.compile(f"({UNPACKED}|{MODELS})[a-z0-9_]{{8}}{re.escape(_END)}")


def claim(kind: str) -> tuple[str, int]:
    """A new folder that only this user can enter, and the descriptor that holds its lock. Raises OSError."""
    while True:
        folder = tempfile.mkdtemp(prefix=kind, suffix=_END)
        try:
            fd = _opened(folder)
        except FileNotFoundError:
            continue  # another server took it for one that was left behind
        except OSError:
            os.rmdir(folder)
            raise
        with suppress(OSError):  # not every file system has locks; without them nobody removes what is left behind
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, fd
        os.close(fd)


def give_up(folder: str, fd: int) -> None:
    """Remove a folder that was claimed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)


def sweep(parent: str = "") -> None:
    """Remove what was left behind in a folder; "": in the one for temporary files."""
    names: list[str] = []
    with suppress(OSError):  # there may be no folder for temporary files; who needs one says so
        parent = parent or tempfile.gettempdir()
        names = [*filter(_NAMES.fullmatch, os.listdir(parent))]
    for name in names:
        with suppress(OSError, RecursionError):  # of one; others are looked at all the same
            _remove_if_left(os.path.join(parent, name))


def _remove_if_left(folder: str) -> None:
    fd = _opened(folder)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def _opened(folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
