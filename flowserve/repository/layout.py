"""Where deployments come from: which folders of a repository are models, which of their folders are versions.

Decided here: Triton's directory layout, what is skipped in silence and what with a warning, and which of the versions
on disk a version policy serves. Nothing here opens a file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.config.backends import is_version
from flowserve.config.environments import MARKS
from flowserve.config.load import CONFIG_FILE
from flowserve.config.suggest import meant
from flowserve.config.types import VersionPolicy
from flowserve.errors import FlowserveError, NotFound, Place, Problem, Problems

# Folders of a model that are no versions: Triton's own, and what Python leaves behind.
SET_ASIDE: Final = frozenset({"warmup", "initial_state", "configs", "labels", "__pycache__"})


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model's folder. `versions` are those on disk, ascending; `warnings` name what looked like one and is none."""

    name: str
    path: Path
    repository: Path
    versions: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """All models of all repositories, by name. A name that two repositories have is in `duplicates` only."""

    folders: tuple[ModelFolder, ...]
    duplicates: Mapping[str, Problems]
    warnings: tuple[Problem, ...]


def find_models(repositories: Sequence[Path], only: Collection[str] | None = None) -> Found:
    """Scan every repository, for everything or `only` for these names. Raises NotFound or Problems where one of them
    cannot be read, or is none: one model's own folder.
    """
    by_name: dict[str, list[ModelFolder]] = {}
    warnings: list[Problem] = []
    for repository in dict.fromkeys(repositories):
        folders, skipped = _scan(repository, only)
        if not folders and only is None and is_model_folder(repository):
            raise Problems([_no_repository(repository)])
        warnings += skipped
        for folder in folders:
            by_name.setdefault(folder.name, []).append(folder)
    return Found(
        folders=tuple(same[0] for _, same in sorted(by_name.items()) if len(same) == 1),
        duplicates={name: _duplicate(name, same) for name, same in sorted(by_name.items()) if len(same) > 1},
        warnings=tuple(warnings),
    )


def scan(repository: Path) -> list[ModelFolder]:
    """The models of one repository, by name. Raises NotFound or Problems where it cannot be read."""
    return _scan(repository)[0]


def why_missing(repositories: Sequence[Path], name: str) -> str:
    """Why `find_models` knows no model of that name, and which one was probably meant."""
    names: set[str] = set()
    for repository in repositories:
        try:
            names |= {entry.name for entry in _entries(repository, None) if _is_folder(entry)}
        except FlowserveError:
            continue
    if name in names and not _is_hidden(name):
        unread = [text for one in repositories for text in _unread(model_folder_at(one / name))]
        if unread:
            return f"its folder {unread[0]}"
        return f"its folder holds neither {CONFIG_FILE} nor a version folder"
    known = (one for one in sorted(names) if not _is_hidden(one))
    return f"there is no folder '{name}' in it{meant(name, known)}"


def is_model_folder(path: Path) -> bool:
    """Whether a folder is one model's rather than a repository of them."""
    # Not of pathlib, which raises where a folder may not be looked into.
    return os.path.exists(path / CONFIG_FILE) or bool(os.path.isdir(path) and model_folder_at(path).versions)


def model_folder_at(path: Path) -> ModelFolder:
    """The model in a folder; what is around the folder is its repository."""
    return _model_folder(path.parent, path)


def look_again(folder: ModelFolder) -> ModelFolder:
    """The same folder with what is in it now; without versions where it is not there any more."""
    return _model_folder(folder.repository, folder.path)


def versions_to_serve(folder: ModelFolder, policy: VersionPolicy, is_ensemble: bool = False) -> tuple[int, ...]:
    """The versions that the policy picks, ascending. Raises Problems where it picks none."""
    if policy.specific:
        chosen = tuple(version for version in folder.versions if version in policy.specific)
    elif policy.all:
        chosen = folder.versions
    else:
        chosen = folder.versions[max(0, len(folder.versions) - policy.latest) :]
    if chosen:
        return chosen
    message = f"at least one version must be available under the version policy of model '{folder.name}'"
    raise Problems([Problem(message, Place(folder.name), "R1", _how_to_have_a_version(folder, policy, is_ensemble))])


def missing_versions(folder: ModelFolder, policy: VersionPolicy) -> tuple[int, ...]:
    """Those of a `specific` policy that are not on disk: served without them, as Triton does."""
    return tuple(version for version in policy.specific if version not in folder.versions)


def _scan(repository: Path, only: Collection[str] | None = None) -> tuple[list[ModelFolder], list[Problem]]:
    folders: list[ModelFolder] = []
    warnings: list[Problem] = []
    for entry in _entries(repository, only):
        if not _is_text(entry.name):
            warnings.append(Problem("a name that is not UTF-8; skipped", Place(_legible(entry.name)), "R10"))
            continue
        if not _is_folder(entry):
            if entry.is_symlink() and not os.path.exists(entry):
                warnings.append(Problem("a symbolic link that leads nowhere; skipped", Place(entry.name), "R3"))
            continue
        if _is_hidden(entry.name):
            continue
        folder = _model_folder(repository, repository / entry.name)
        if folder.versions or os.path.exists(os.path.join(entry, CONFIG_FILE)):
            folders.append(folder)
        elif _unread(folder):
            warnings += folder.warnings
        else:
            text = f"neither {CONFIG_FILE} nor a version folder in it; not a model, skipped"
            warnings.append(Problem(text, Place(entry.name), "R4"))
    return folders, warnings


def _no_repository(repository: Path) -> Problem:
    text = f"'{repository}' is the folder of one model; a repository is the folder that holds such folders"
    return Problem(text, rule="R5", hint=f"give '{Path(os.path.abspath(repository)).parent}'")


def _entries(repository: Path, only: Collection[str] | None) -> list[os.DirEntry[str]]:
    """What lies in the repository, by name."""
    try:
        with os.scandir(repository) as entries:
            found = [entry for entry in entries if only is None or entry.name in only]
        return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        raise NotFound(f"model repository '{repository}' does not exist") from None
    except NotADirectoryError:
        raise Problems(
            [Problem(f"model repository '{repository}' is a file; give the folder that holds the models' folders")]
        ) from None
    except OSError as error:
        raise Problems([Problem(f"model repository '{repository}' cannot be read: {error.strerror}")]) from error


def _model_folder(repository: Path, path: Path) -> ModelFolder:
    versions: list[int] = []
    warnings: list[Problem] = []
    try:
        with os.scandir(path) as entries:
            folders = {entry.name: _is_folder(entry) for entry in entries}
        inside = sorted(name for name, is_folder in folders.items() if is_folder)
        if CONFIG_FILE not in folders:
            warnings += _misplaced(path, folders)
    except OSError as error:
        inside = []
        hint = "it is skipped; the user that flowserve runs as must be allowed to read it and what is in it"
        warnings.append(Problem(f"cannot be read: {error.strerror}", Place(path.name), "R6", hint))
    for name in inside:
        if _is_hidden(name) or name in SET_ASIDE:
            continue
        if is_version(name):
            versions.append(int(name))
        elif not any(os.path.exists(path / name / mark) for mark in MARKS):
            text = "not a version (a positive number without leading zeros); ignored"
            warnings.append(Problem(text, Place(f"{path.name}/{_legible(name)}"), "R7"))
    return ModelFolder(path.name, path, repository, tuple(sorted(versions)), tuple(warnings))


def _unread(folder: ModelFolder) -> list[str]:
    """What keeps a folder from being read, where anything does."""
    return [warning.message for warning in folder.warnings if warning.rule == "R6"]


def _misplaced(path: Path, folders: Mapping[str, bool]) -> Iterator[Problem]:
    """What was meant as the configuration of a model that has none. `folders`: what is in it, and what of it is one."""
    files = [name for name, is_folder in folders.items() if not is_folder]
    found = [name for name in files if name.lower().startswith(("config.pb", "config.pr")) or name.endswith(".pbtxt")]
    inside = (f"{name}/{CONFIG_FILE}" for name in folders if is_version(name))
    found += [name for name in inside if os.path.exists(path / name)]
    for name in sorted(found):
        text = f"not read: a model's configuration is {path.name}/{CONFIG_FILE}"
        yield Problem(text, Place(f"{path.name}/{_legible(name)}"), "R12")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


def _is_text(name: str) -> bool:
    """Names of files are bytes, which Python spells in halves of surrogate pairs where they are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _legible(name: str) -> str:
    return os.fsencode(name).decode(errors="backslashreplace")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _duplicate(name: str, folders: Sequence[ModelFolder]) -> Problems:
    where = ", ".join(f"'{folder.repository}'" for folder in folders)
    message = f"model '{name}' appears in two or more repositories: {where}"
    return Problems([Problem(message, rule="R2", hint="rename or remove all but one; none of them is served")])


def _how_to_have_a_version(folder: ModelFolder, policy: VersionPolicy, is_ensemble: bool) -> str:
    if folder.versions:
        there = ", ".join(map(str, folder.versions))
        return f"the policy wants {', '.join(map(str, policy.specific))}, and the folder has {there}"
    if is_ensemble:
        return f"an ensemble needs a version folder too, though nothing need be in it: mkdir {folder.name}/1"
    return f"put the model's files into {folder.name}/1/"
