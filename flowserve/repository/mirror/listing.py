"""Interprets the listing of a store: which models it has, and which files of a model have to be fetched.

Decides which names are refused (a name becomes a path of this machine), how a state of a model's files is named, which
files need not be fetched again, and which files a model's manifest requires. Pure: it accesses neither files nor
stores. Caller: `mirror`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flowserve.errors import Invalid

FILES_MAX: Final = 100_000  # of a repository
MANIFEST: Final = "manifest.json"
_NAME_BYTES_MAX: Final = 255  # of one part of a path, as file systems have it


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store. `path` is relative to the repository. `tag` changes with its contents (an ETag or the like),
    "" if the store has none. A path that ends with "/" is a folder.
    """

    path: str
    size: int
    tag: str = ""

    @property
    def is_folder(self) -> bool:
        return self.path.endswith("/")


Files = Mapping[str, RemoteFile]  # of one model, by the path within its folder


@dataclass(slots=True)
class Listing:
    """The models of a listing, each with its files. `refused`: why models are not taken over, by their names."""

    models: dict[str, dict[str, RemoteFile]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def read_listing(files: Iterable[RemoteFile]) -> Listing:
    """The models of these files; files outside of a folder belong to no model and are left out. Raises Invalid for too
    many files.
    """
    found = Listing()
    for count, file in enumerate(files):
        if count >= FILES_MAX:
            raise Invalid(f"it has more than {FILES_MAX} files")
        name, slash, rest = file.path.partition("/")
        if not slash:
            continue
        if wrong := _wrong(file.path.removesuffix("/")):
            found.refused.setdefault(name, f"the name of its file {file.path!r} {wrong}")
        elif rest:
            found.models.setdefault(name, {})[rest] = file
    for name in found.refused:
        found.models.pop(name, None)
    for name, own in [*found.models.items()]:
        if clash := _clash(own):
            del found.models[name]
            found.refused[name] = f"{clash!r} is a file and a folder"
    return found


def _wrong(path: str) -> str:
    """Why a path is not valid on this machine, "" if it is."""
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "leads out of its folder or has an empty part"
        if not part.isprintable() or "\\" in part:
            return "has a character that names cannot have"
        if len(part.encode()) > _NAME_BYTES_MAX:
            return "is too long"
    return ""


def _clash(files: Files) -> str:
    """A path that is both a file and a folder of others, "" if there is none."""
    plain = {path for path, file in files.items() if not file.is_folder}
    for path in files:
        parts = path.rstrip("/").split("/")
        for count in range(1, len(parts)):
            if (above := "/".join(parts[:count])) in plain:
                return above
    return next((path.rstrip("/") for path in files if path.endswith("/") and path.rstrip("/") in plain), "")


def state_of(files: Files) -> str:
    """The name of this state of a model's files: another one if a path, a size or a tag differs."""
    described = [[path, file.size, file.tag] for path, file in sorted(files.items())]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


def unchanged(files: Files, before: Files) -> frozenset[str]:
    """The paths of the files that are the same in both states. A file without a tag may have changed."""
    return frozenset(
        path for path, file in files.items() if file.tag and not file.is_folder and before.get(path) == file
    )


def listing_to_json(files: Files) -> str:
    return json.dumps([[file.path, file.size, file.tag] for file in files.values()])


def listing_from_json(text: str) -> dict[str, RemoteFile]:
    """The inverse. Raises ValueError for other text."""
    found = {}
    for path, size, tag in json.loads(text):
        if not (isinstance(path, str) and isinstance(size, int) and isinstance(tag, str)):
            raise ValueError("no listing")
        found[path.partition("/")[2]] = RemoteFile(path, size, tag)
    return found


def manifest(text: str) -> dict[str, tuple[int, str]]:
    """The files that a model's manifest lists, each with its size and its SHA-256. Raises Invalid, with the place in
    it.
    """
    try:
        written: Any = json.loads(text)
        listed = written["files"]
        made = {}
        for path, about in listed.items():
            size, digest = about["size"], about["sha256"]
            if _wrong(path) or not isinstance(size, int) or not isinstance(digest, str) or len(digest) != 64:
                raise Invalid(f"{MANIFEST}: {path!r} needs a path within the folder, `size` and `sha256`")
            made[path] = (size, digest.lower())
        return made
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Invalid(f'{MANIFEST} is not {{"files": {{"PATH": {{"size": …, "sha256": …}}}}}}') from None
