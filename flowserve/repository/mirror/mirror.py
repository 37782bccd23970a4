"""The folder on this machine that a repository in a store is served from.

Decides that a model's files are fetched into a folder of their own, a *generation*, and put in force all at once when
they are complete and the store still has the same; that unchanged files are taken from the previous generation; that
files fetched before an interruption are kept; which generations are removed; and that models here are served even if
the store cannot be reached. `path` is a repository as `layout` reads it: each model is a link to its generation.

Layout of `folder`: `models/NAME` -> `../generations/NAME/STATE/files`, and beside `files` its `listing.json`; a
generation that is not complete ends with `.partial`. A lock in the folder keeps several servers apart. Blocks; called
on threads. Callers: `cli`, `runtime/loading`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flowserve.errors import FlowserveError, Invalid, Problem, Problems, Unavailable
from flowserve.repository.mirror.listing import (
    MANIFEST,
    Files,
    Listing,
    RemoteFile,
    listing_from_json,
    listing_to_json,
    manifest,
    read_listing,
    state_of,
    unchanged,
)
from flowserve.repository.mirror.storage import Storage

log = logging.getLogger("flowserve.load")

ATTEMPTS: Final = 3  # to fetch a model whose files change meanwhile
KEPT_S: Final = 600.0  # a generation that is not in force any more may still be read
_AT_ONCE: Final = 8
_CHUNK: Final = 16 << 20
_PARTIAL: Final = ".partial"
_CODE: Final = (".py", ".so", ".pkl", ".joblib")  # files that can run code when they are read


class RepositoryMirror:
    """`limit_bytes`: of all generations, None for no limit. `may_have_code`: whether models with Python files are taken
    over. `problems`: why models of the store are not here, by name. `outage`: why the last request to the store failed,
    "" if it succeeded.
    """

    def __init__(
        self, name: str, storage: Storage, folder: Path, *, limit_bytes: int | None = None, may_have_code: bool = True
    ) -> None:
        self.name = name
        self.path = folder / "models"
        self.problems: dict[str, Problems] = {}
        self.outage = ""
        self.names: frozenset[str] = frozenset()  # of the models that the store has
        self._storage = storage
        self._folder = folder
        self._limit = limit_bytes
        self._may_have_code = may_have_code
        self._lock = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)
        log.info("repository %s is kept in %s", name, self.path)

    def update(self, wanted: Collection[str] | None = None, *, is_listed_only: bool = False) -> None:
        """Update the models here, all or only these, to those of the store, and remove those that it no longer has.
        `is_listed_only`: only list the store's models. Raises Unavailable if the store cannot be reached and there is
        no model here.
        """
        with self._lock, self._alone():
            try:
                listing = self._list(None if wanted is None else wanted)
            except FlowserveError as error:
                self._note_outage(str(error))
                if not any(self.path.iterdir()):
                    raise
                return
            self._note_outage("")
            self.problems = {name: _problem(name, why) for name, why in listing.refused.items()}
            if is_listed_only:
                return
            names = [*listing.models] if wanted is None else [*wanted]
            for name in names:
                if name in listing.models:
                    self._take_over(name, listing.models[name])
            self._drop({link.name for link in self.path.iterdir()} if wanted is None else set(wanted), listing)
            self._remove_old()

    def _list(self, wanted: Collection[str] | None) -> Listing:
        if wanted is None:
            found = read_listing(self._storage.list())
            self.names = frozenset(found.models)
            return found
        whole = Listing()
        for name in wanted:
            one = read_listing(self._storage.list(name))
            whole.models |= one.models
            whole.refused |= one.refused
        return whole

    def _note_outage(self, why: str) -> None:
        if why and not self.outage:
            log.warning("%s; what was fetched before serves on", why)
        elif self.outage and not why:
            log.warning("repository %s can be reached again", self.name)
        self.outage = why

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self._folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # ------------------------------------------------------------------ one model

    def _take_over(self, name: str, files: Files) -> None:
        """Fetch a model if its files differ from those here, and put them in force."""
        try:
            if not self._may_have_code and (code := next((path for path in files if path.endswith(_CODE)), "")):
                raise Invalid(f"it has code of others, {code}; --trust-remote-code runs it on this machine")
            for _ in range(ATTEMPTS):
                state = state_of(files)
                if self._is_here(name, state):
                    self._put_in_force(name, state)
                    return
                self._fetch(name, files)
                files = read_listing(self._storage.list(name)).models.get(name, {})
                if state_of(files) == state:
                    self._put_in_force(name, state)
                    return
                shutil.rmtree(self._home(name, state))  # its files are of several states
            raise Unavailable(f"it is being written: its files changed {ATTEMPTS} times while they were fetched")
        except (FlowserveError, OSError) as error:
            if (self.path / name).exists():
                log.warning("model '%s' of %s is not updated: %s", name, self.name, error)
            else:
                self.problems[name] = _problem(name, str(error))

    def _home(self, name: str, state: str) -> Path:
        return self._folder / "generations" / name / state

    def _is_here(self, name: str, state: str) -> bool:
        return (self._home(name, state) / "listing.json").exists()

    def _fetch(self, name: str, files: Files) -> None:
        """Make the generation of these files."""
        made = self._home(name, state_of(files))
        partial = made.with_name(made.name + _PARTIAL)
        (partial / "files").mkdir(parents=True, exist_ok=True)
        before = self._in_force(name)
        kept = unchanged(files, _listing_of(before)) if before is not None else frozenset()
        missing = (file.size - _bytes_of(partial / "files" / path) for path, file in files.items() if path not in kept)
        self._make_room(partial, sum(missing))
        jobs: list[tuple[RemoteFile, Path]] = []
        for path, file in files.items():
            target = partial / "files" / path.rstrip("/")
            if file.is_folder:
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists() and target.stat().st_size == file.size:
                continue
            if path in kept and before is not None:
                os.link(before / "files" / path, target)
                continue
            jobs.append((file, target))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda job: self._fetch_file(*job), jobs):
                pass
        _check_manifest(partial / "files")
        (partial / "listing.json").write_text(listing_to_json(files))
        partial.rename(made)

    def _fetch_file(self, file: RemoteFile, target: Path) -> None:
        """Fetch a file, from where an interruption left it: the name of the generation says that it is the same."""
        part = target.with_name(target.name + _PARTIAL)
        with open(part, "ab") as out:
            while (start := out.tell()) < file.size:
                data = self._storage.read(file, start, min(start + _CHUNK, file.size))
                if not data:
                    raise Unavailable(f"{file.path} ends at {start} of {file.size} bytes")
                out.write(data)
        part.rename(target)

    def _put_in_force(self, name: str, state: str) -> None:
        link = self.path / name
        target = os.path.join("..", "generations", name, state, "files")
        if link.is_symlink() and os.readlink(link) == target:
            return
        fresh = self._folder / f"link-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        os.symlink(target, fresh)
        os.replace(fresh, link)

    def _in_force(self, name: str) -> Path | None:
        link = self.path / name
        return link.resolve().parent if link.is_symlink() and link.exists() else None

    # ------------------------------------------------------------------ removal of generations

    def _drop(self, names: Collection[str], listing: Listing) -> None:
        for name in names:
            link = self.path / name
            if name not in listing.models and name not in listing.refused and link.is_symlink():
                link.unlink()

    def _generations(self) -> list[Path]:
        """The generations that are not in force, the most recently used last."""
        used = {self._in_force(link.name) for link in self.path.iterdir()}
        found = [one for home in (self._folder / "generations").glob("*") for one in home.iterdir()]
        return sorted((one for one in found if one.resolve() not in used), key=lambda one: one.stat().st_mtime)

    def _remove_old(self) -> None:
        if not (self._folder / "generations").exists():
            return
        lock = self._folder / "lock"
        os.utime(lock)
        oldest = lock.stat().st_mtime - KEPT_S
        for link in self.path.iterdir():  # the time of a generation is that at which it was last in force
            if (generation := self._in_force(link.name)) is not None:
                os.utime(generation)
        for generation in self._generations():
            if generation.stat().st_mtime < oldest:
                shutil.rmtree(generation, ignore_errors=True)

    def _make_room(self, made: Path, nbytes: int) -> None:
        """Remove generations other than `made` until so many more bytes fit. Raises Invalid if they do not."""
        if self._limit is None:
            return
        held = _bytes_below(self._folder / "generations")
        for generation in self._generations():
            if held + nbytes <= self._limit:
                return
            if generation == made:
                continue
            held -= _bytes_below(generation)
            shutil.rmtree(generation, ignore_errors=True)
        if held + nbytes > self._limit:
            text = f"it needs {nbytes} bytes, and {held} of the {self._limit} of --repository-cache-size are used"
            raise Invalid(text)


def _problem(name: str, why: str) -> Problems:
    return Problems([Problem(f"model '{name}' cannot be fetched: {why}", rule="R16")])


def _listing_of(generation: Path) -> Files:
    try:
        return listing_from_json((generation / "listing.json").read_text())
    except (OSError, ValueError):
        return {}


def _check_manifest(folder: Path) -> None:
    """Raises Invalid if a model has a manifest and its files differ from it."""
    try:
        text = (folder / MANIFEST).read_text()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise Invalid(f"{MANIFEST} cannot be read: {error}") from None
    for path, (size, digest) in manifest(text).items():
        file = folder / path
        if not file.is_file():
            raise Invalid(f"{MANIFEST} promises {path}, which is not there yet")
        if file.stat().st_size != size or _sha256(file) != digest:
            raise Invalid(f"{path} is not what {MANIFEST} promises")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_of(path: Path) -> int:
    """The size of a fetched file, or of the part that an interrupted fetch left."""
    for one in (path, path.with_name(path.name + _PARTIAL)):
        if one.is_file():
            return one.stat().st_size
    return 0


def _bytes_below(folder: Path) -> int:
    """The bytes of all files below a folder; a file with several names counts once."""
    found: dict[tuple[int, int], int] = {}
    for home, _, names in os.walk(folder):
        for name in names:
            about = os.lstat(os.path.join(home, name))
            found[about.st_dev, about.st_ino] = about.st_size
    return sum(found.values())
