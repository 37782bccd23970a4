"""Detection of changed model folders: a cheap stamp, digests of the contents, and the polling state.

Decides which files count (all that are not hidden, links followed); that contents are compared and not times, so that a
copy with old times counts as a change and a touched file does not; which part of a folder a file belongs to (a version,
the configuration, or the files that all versions share); and when a changing folder has settled. The polling state is
pure: stamps and integer nanoseconds in, names out. Does not know what follows from a change. Callers: `repository`,
`runtime/loading`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.config.backends import is_version_folder
from flowserve.config.load import CONFIG_FILE
from flowserve.repository.layout import CONFIG_FOLDER

_PIECE: Final = 1 << 20
_CONFIG: Final = "config"
_SHARED: Final = "shared"

# The `stat` of everything in a folder: equal stamps taken while nothing was written mean equal contents.
Stamp = tuple[tuple[str, int, int, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """The stamp of everything below `folder`; () if it does not exist. Blocks; opens no file."""
    return tuple(
        (name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino) for name, _, found in _files(folder)
    )


@dataclass(frozen=True, slots=True)
class Contents:
    """Digests of the parts of a model's folder: of its configuration files, of each version folder, and of the files
    that all versions share, which are all others. Each is over names and the contents of files.
    """

    config: str
    shared: str
    versions: Mapping[int, str]


def read_contents(folder: Path) -> Contents:
    """Blocks while all files are read. Raises OSError if a file cannot be read or disappears."""
    parts = {part: hashlib.blake2b(digest_size=20) for part in (_CONFIG, _SHARED)}
    for name, path, _ in _files(folder):
        one = hashlib.blake2b(digest_size=20)
        if os.path.isfile(path):  # not a pipe or a device, which could block forever
            with open(path, "rb") as stream:
                while piece := stream.read(_PIECE):
                    one.update(piece)
        part = parts.setdefault(_part_of(name), hashlib.blake2b(digest_size=20))
        part.update(name.encode("utf-8", "surrogateescape") + b"\0" + one.digest())
    found = {part: digest.hexdigest() for part, digest in parts.items()}
    config, shared = found.pop(_CONFIG), found.pop(_SHARED)
    return Contents(config, shared, {int(version): digest for version, digest in found.items()})


def _part_of(name: str) -> str:
    """The part of a model's folder to which a file or folder belongs; of a version the number."""
    first, is_below, _ = name.partition("/")
    if is_below and is_version_folder(first):
        return first
    is_config = first == CONFIG_FOLDER if is_below else first == CONFIG_FILE
    return _CONFIG if is_config else _SHARED


def _files(folder: str | Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Every file and folder, by name, with its path relative to the top. Circular links are not entered."""
    try:
        top = _identity(os.stat(folder))
    except OSError:
        return
    yield from _below(folder, "", (top,))


def _below(
    folder: str | Path, prefix: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, str, os.stat_result]]:
    """`above`: the identities of `folder` and its parents."""
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
        except OSError:  # a broken link, or deleted meanwhile
            continue
        if not entry.is_dir():
            yield name, entry.path, found
            continue
        # A folder's own times and size change with hidden files too, so only its existence counts.
        yield f"{name}/", entry.path, os.stat_result((found.st_mode, *(0,) * 9))
        here = _identity(found)
        if here not in above:
            yield from _below(entry.path, f"{name}/", (*above, here))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


# How long a folder must be unchanged before it is loaded: a running copy changes it continuously.
QUIET_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Settled:
    """Folders that changed and have settled. `gone` are the names of removed folders."""

    changed: Mapping[str, Stamp]
    gone: frozenset[str]


class FolderWatch:
    """Keeps each folder's stamp of the last processed state, and reports folders whose stamp differs and has been
    stable for `quiet_ns`.
    """

    def __init__(self, quiet_ns: int = QUIET_NS) -> None:
        self._quiet_ns = quiet_ns
        self._known: dict[str, Stamp] = {}
        self._unsettled: dict[str, tuple[Stamp | None, int]] = {}  # the current stamp, and since when

    @property
    def has_unsettled(self) -> bool:
        """Whether a folder changed and has not settled yet; the caller should poll again soon."""
        return bool(self._unsettled)

    def mark_seen(self, stamps: Mapping[str, Stamp]) -> None:
        """Record these stamps as processed."""
        self._known.update(stamps)

    def was_seen(self, name: str) -> bool:
        """Whether a folder of that name existed in the last processed state."""
        return name in self._known

    def update(self, stamps: Mapping[str, Stamp], now_ns: int) -> Settled:
        """Compare with the current stamps. Returned folders count as processed."""
        changed: dict[str, Stamp] = {}
        gone: set[str] = set()
        for name in {*stamps, *self._known, *self._unsettled}:
            seen = stamps.get(name)
            if seen == self._known.get(name):
                self._unsettled.pop(name, None)
                continue
            before, since_ns = self._unsettled.get(name, (None, None))
            if since_ns is None or before != seen:
                self._unsettled[name] = seen, now_ns
            elif now_ns - since_ns >= self._quiet_ns:
                del self._unsettled[name]
                if seen is None:
                    gone.add(name)
                    del self._known[name]
                else:
                    changed[name] = self._known[name] = seen
        return Settled(changed, frozenset(gone))
