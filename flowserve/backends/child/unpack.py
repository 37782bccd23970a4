"""A packed Python environment, unpacked: in a process made for it, since it keeps an interpreter busy for a while.

Decided here: that nothing of an archive comes to lie outside of its folder, however its entries are called and whatever
its links lead to; and that what conda-pack wrote is told where it lies now. Whose folders are is temporary.py's.
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
from flowserve.temporary import sweep

log = logging.getLogger("flowserve.child")

ENTRY: Final = f"{__name__}:unpack"
# By which conda-pack lets an environment know where it has come to lie. Other archives have none.
_CONDA_UNPACK: Final = "bin/conda-unpack"


def unpack(archive: str, folder: str) -> None:
    """Fill a folder that was claimed. Raises Invalid."""
    sweep(os.path.dirname(folder))
    top = os.path.realpath(folder)
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = lambda member, path: member  # they are judged here: not every Python does that
            for member in tar:
                _check(member, top)
                tar.extract(member, top)
    except OSError as error:
        raise Invalid(f"it cannot be unpacked into {folder}: {error.strerror or error}{_room(error)}") from None
    # The last ones: a link to an entry that there is not, a name or a time that no file can have.
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, KeyError, ValueError, OverflowError) as error:
        raise Invalid(f"it cannot be unpacked: {error}") from None
    _tell_where_it_lies(Path(top))


def _check(member: tarfile.TarInfo, top: str) -> None:
    """Raises Invalid where it could lead out of `top`; its owner and rights become usual ones."""
    is_link = member.issym()
    if not (member.isreg() or member.isdir() or is_link or member.islnk()):
        raise Invalid(f"it cannot be unpacked: '{member.name}' is a device or the like")
    path = PurePosixPath(member.name)
    # A link is made anew, wherever it leads; whatever else is written must not go through one.
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


def _tell_where_it_lies(folder: Path) -> None:
    python, script = folder / "bin/python", folder / _CONDA_UNPACK
    if not (python.is_file() and script.is_file()):
        return
    done = subprocess.run([python, script], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:  # Triton never does this, and most environments do without
        log.warning("%s failed: %s", _CONDA_UNPACK, (done.stderr or done.stdout).strip()[-400:])
