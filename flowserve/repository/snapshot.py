"""Whether a model's folder changed: a stamp that is cheap, and a digest of its contents that is certain.

Decided here: which files count (all that are not hidden, links followed), and that contents decide, never times: a
copy with its old times, or a file touched for nothing, is what it is. Nothing here knows what the files mean.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PIECE: Final = 1 << 20

# What `stat` says of everything in a folder: equal stamps taken while nothing was written mean equal contents.
Stamp = tuple[tuple[str, int, int, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """The stamp of everything below `folder`; () where there is nothing. Blocks; opens no file."""
    return tuple(
        (name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino) for name, _, found in _files(folder)
    )


def digest(folder: Path) -> str:
    """A digest over the names of everything below `folder` and the contents of files. Blocks while all of it is read.

    Raises OSError where a file cannot be read, or disappears meanwhile.
    """
    whole = hashlib.blake2b(digest_size=20)
    for name, path, _ in _files(folder):
        one = hashlib.blake2b(digest_size=20)
        if os.path.isfile(path):  # and not a pipe or a device, which whoever opens may wait for for ever
            with open(path, "rb") as stream:
                while piece := stream.read(_PIECE):
                    one.update(piece)
        whole.update(name.encode("utf-8", "surrogateescape") + b"\0" + one.digest())
    return whole.hexdigest()


def _files(folder: str | Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Every file and folder, by name, with its name relative to the top. Links that lead in circles are not entered."""
    try:
        top = _identity(os.stat(folder))
    except OSError:
        return
    yield from _below(folder, "", (top,))


def _below(
    folder: str | Path, prefix: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, str, os.stat_result]]:
    """`above`: which folders `folder` and those around it are."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        name = prefix + entry.name
        try:
            found = entry.stat()
        except OSError:  # a link that leads nowhere, or gone since
            continue
        if not entry.is_dir():
            yield name, entry.path, found
            continue
        # A folder's own times and size tell of hidden files too, so only its being there counts.
        yield f"{name}/", entry.path, os.stat_result((found.st_mode, *(0,) * 9))
        here = _identity(found)
        if here not in above:
            yield from _below(entry.path, f"{name}/", (*above, here))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
