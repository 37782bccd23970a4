"""Unpacks an archive of a Python environment, in a process of its own, since it keeps an interpreter busy for long.

Decides that no file of an archive is written outside its folder, whatever the names of its entries and the targets of
its links are; and that an environment made by conda-pack is adjusted to its new folder. temporary.py decides which
folder that is.

Callers: runtime/processes/environments.py runs it as a task (main.py).
"""

from __future__ import annotations

import errno
import logging
import lzma
import os
import subprocess
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Final

from flowserve.errors import Invalid
from flowserve.temporary import remove_abandoned

log = logging.getLogger("flowserve.child")

ENTRY: Final = f"{__name__}:unpack_environment"
# The script that adjusts an environment made by conda-pack to its folder. Other archives have none.
_CONDA_UNPACK: Final = "bin/conda-unpack"


def unpack_environment(archive: str, folder: str) -> None:
    """Unpack the archive into a folder that was claimed. Raises Invalid."""
    remove_abandoned(os.path.dirname(folder))
    top = os.path.realpath(folder)
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = lambda member, path: member  # `_check` does this: some Pythons have no filters
            for member in tar:
                _check(member, top)
                tar.extract(member, top)
    except OSError as error:
        raise Invalid(f"it cannot be unpacked into {folder}: {error.strerror or error}{_room(error)}") from None
    # The last three: a link to a missing entry, an invalid file name, an invalid time.
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, KeyError, ValueError, OverflowError) as error:
        raise Invalid(f"it cannot be unpacked: {error}") from None
    _run_conda_unpack(Path(top))


def _check(member: tarfile.TarInfo, top: str) -> None:
    """Raises Invalid for an entry that could be written outside `top`. Sets a default owner and default permissions."""
    is_link = member.issym()
    if not (member.isreg() or member.isdir() or is_link or member.islnk()):
        raise Invalid(f"it cannot be unpacked: '{member.name}' is a device or the like")
    path = PurePosixPath(member.name)
    # A link may point anywhere, since it is only created; any other entry must not be written through a link.
    lands = os.path.realpath(os.path.join(top, path.parent if is_link else path))
    leads = os.path.realpath(os.path.join(top, member.linkname)) if member.islnk() else top
    if path.is_absolute() or ".." in path.parts or not all(_is_in(top, one) for one in (lands, leads)):
        raise Invalid(f"it cannot be unpacked: '{member.name}' leads out of it")
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
    member.mode = (member.mode & 0o755) | (0o700 if member.isdir() else 0o600)


def _is_in(top: str, path: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _room(error: OSError) -> str:
    return "; TMPDIR says where there is room" if error.errno == errno.ENOSPC else ""


def _run_conda_unpack(folder: Path) -> None:
    python, script = folder / "bin/python", folder / _CONDA_UNPACK
    if not (python.is_file() and script.is_file()):
        return
    done = subprocess.run([python, script], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:  # not an error: Triton never runs the script, and most environments work without
        log.warning("%s failed: %s", _CONDA_UNPACK, (done.stderr or done.stdout).strip()[-400:])
