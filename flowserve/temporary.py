"""Temporary folders and their owners.

Decides how such a folder is recognised (by its name, which no other program uses), and what happens to the folders of a
killed process. A folder belongs to the process that holds its lock, which ends with the process. Folders without a
lock are removed by the next server that starts, and when an environment is unpacked. Does not know the contents of a
folder. Callers: `repository`, `runtime`, `backends`, `replicas`, `cli`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from typing import Final

# Name prefixes of the kinds of folders, and the common suffix.
UNPACKED: Final = "flowserve-environment-"
MODELS: Final = "flowserve-models-"
WORKERS: Final = "flowserve-workers-"
_END: Final = ".claimed"
_NAMES: Final = re.compile(f"({UNPACKED}|{MODELS}|{WORKERS})[a-z0-9_]{{8}}{re.escape(_END)}")


def claim(kind: str) -> tuple[str, int]:
    """A new folder accessible to this user only, and the descriptor that holds its lock. Raises OSError."""
    while True:
        folder = tempfile.mkdtemp(prefix=kind, suffix=_END)
        try:
            fd = _opened(folder)
        except FileNotFoundError:
            continue  # another server removed it as abandoned, before it was locked
        except OSError:
            os.rmdir(folder)
            raise
        with suppress(OSError):  # not every file system has locks; without them abandoned folders are not removed
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, fd
        os.close(fd)


def give_up(folder: str, fd: int) -> None:
    """Remove a claimed folder."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)


def remove_abandoned(parent: str = "") -> None:
    """Remove the abandoned folders in `parent`; "": in the system's folder for temporary files."""
    names: list[str] = []
    with suppress(OSError):  # there may be no folder for temporary files; `claim` reports that
        parent = parent or tempfile.gettempdir()
        names = [*filter(_NAMES.fullmatch, os.listdir(parent))]
    for name in names:
        with suppress(OSError, RecursionError):  # of this folder; the others are still checked
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
