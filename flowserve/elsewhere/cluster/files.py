"""The files of a model on another machine.

Decides which files an instance needs (its version's folder, and the files beside the version folders), and when the
files on a machine equal the server's: a folder at the same path with the same digest, as on a shared file system, or
one in the machine's cache, whose name is the digest. Otherwise they are sent, as an archive in pieces, and unpacked
into the cache; the archive is written by the server and trusted as its code is. Does not know how pieces are sent.
Callers: runtime/ (the digest), the engines (pieces), and the process of an actor (`files_here`).
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from flowserve.backends.base import ModelFiles
from flowserve.config.backends import is_version_folder
from flowserve.errors import Unavailable

PIECE_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
_IGNORED: Final = frozenset({"__pycache__"})
Fetch = Callable[[], Iterable[bytes]]  # the pieces of an archive


def digest_of(files: ModelFiles) -> str:
    """The digest of all files that an instance of this version needs: their names and contents. Reads them all."""
    whole = hashlib.sha256()
    for name, path in _needed(files):
        one = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                one.update(piece)
        whole.update(f"{len(name)} {name} {one.hexdigest()}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def archive_of(files: ModelFiles) -> Iterator[bytes]:
    """The same files as an archive, in pieces of at most `PIECE_BYTES`."""
    made = _Pieces()
    with tarfile.open(fileobj=made, mode="w|", bufsize=_READ_BYTES, dereference=True) as archive:
        for name, path in _needed(files):
            archive.add(path, name)
            yield from made.take(PIECE_BYTES)
    yield from made.take(1)


def files_here(files: ModelFiles, digest: str, fetch: Fetch | None) -> ModelFiles:
    """The path of the files on this machine; they are fetched if necessary. Raises Unavailable if that is impossible.
    `fetch` None: they cannot be sent.
    """
    if files.version_folder.is_dir() and digest_of(files) == digest:
        return files
    cached = replace(files, repository=cache() / digest, folder=cache() / digest / files.folder.name)
    if cached.folder.is_dir():
        return cached
    if fetch is None:
        where = f"{files.folder} of machine '{os.uname().nodename}'"
        raise Unavailable(f"{where} does not hold the files of the server; put the repository on a shared file system")
    cache().mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache()))
    try:
        with tarfile.open(fileobj=_Stream(fetch()), mode="r|") as archive:
            for member in archive:
                _check(member)
                archive.extract(member, made / files.folder.name)
        found = digest_of(replace(files, repository=made, folder=made / files.folder.name))
        if found != digest:
            raise Unavailable("the files changed while they were sent; load the model again")
        try:
            made.rename(cached.repository)
        except OSError:  # another actor was faster
            if not cached.folder.is_dir():
                raise
    except (tarfile.TarError, OSError) as error:
        raise Unavailable(f"the files of a model cannot be unpacked into {made}: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return cached


def cache() -> Path:
    """The folder of files that were sent to this machine; an operator may empty it at any time."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "flowserve" / "models"


def _check(member: tarfile.TarInfo) -> None:
    """Raises Unavailable for an entry that `archive_of` would not have written."""
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts:
        raise Unavailable(f"the files of a model have the entry '{member.name}', which is not one of its files")
    member.mode = 0o600


def _needed(files: ModelFiles) -> Iterator[tuple[str, Path]]:
    """Names in the model's folder, and paths, in a fixed order."""
    version = files.version_folder.name
    for at, folders, names in os.walk(files.folder, followlinks=True):
        here = Path(at)
        if here == files.folder:
            folders[:] = [one for one in folders if one == version or not is_version_folder(one)]
        folders[:] = sorted(one for one in folders if one not in _IGNORED)
        for name in sorted(names):
            path = here / name
            if path.is_file():
                yield str(path.relative_to(files.folder)), path


class _Pieces(io.RawIOBase):
    """The file that `tarfile` writes to."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        piece = bytes(data)  # type: ignore[call-overload]  # any buffer
        self._held.append(piece)
        self._nbytes += len(piece)
        return len(piece)

    def take(self, at_least: int) -> Iterator[bytes]:
        """Remove and return what was written, once it is at least this much."""
        if self._nbytes < at_least:
            return
        whole = b"".join(self._held)
        self._held, self._nbytes = [], 0
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]


class _Stream(io.RawIOBase):
    """The file that `tarfile` reads an archive's pieces from."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        parts, wanted = [], size if size >= 0 else 1 << 62
        while wanted:
            if not self._held:
                self._held = next(self._pieces, b"")
                if not self._held:
                    break
            part, self._held = self._held[:wanted], self._held[wanted:]
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
