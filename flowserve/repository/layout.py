"""Directory layout of a repository: model folders and version folders.

Decides Triton's layout, which entries are skipped silently and which with a warning, and which versions on disk a
version policy selects. Does not open files. Callers: `read`, `runtime/loading`, `authoring`, `cli`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.config.backends import FILES, is_version_folder
from flowserve.config.load import CONFIG_FILE
from flowserve.config.parameters import MARKS
from flowserve.config.suggest import did_you_mean, meant, misnamed
from flowserve.config.types import ModelConfig, VersionPolicy
from flowserve.errors import NO_PERMISSION, FlowserveError, NotFound, Place, Problem, Problems

# Folders of a model that are not versions: Triton's own (one is for named configurations), and Python's cache.
CONFIG_FOLDER: Final = "configs"
SET_ASIDE: Final = frozenset({"warmup", "initial_state", CONFIG_FOLDER, "labels", "__pycache__"})
# A file that keeps the version folder of an ensemble: git drops empty folders.
KEEP: Final = ".gitkeep"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model's folder. `versions` are those on disk, ascending; `warnings` are about entries that were ignored."""

    name: str
    path: Path
    repository: Path
    versions: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundModels:
    """All models of all repositories, by name. A name in two repositories is in `duplicates` only."""

    folders: tuple[ModelFolder, ...]
    duplicates: Mapping[str, Problems]
    warnings: tuple[Problem, ...]


def find_models(repositories: Sequence[Path], only: Collection[str] | None = None) -> FoundModels:
    """Scan every repository, for everything or `only` for these names. Raises NotFound or Problems if one of them
    cannot be read or is a single model's folder.
    """
    by_name: dict[str, list[ModelFolder]] = {}
    warnings: list[Problem] = []
    for repository in dict.fromkeys(repositories):
        folders, skipped = _scan(repository, only)
        if not folders and only is None and is_version_folder(repository.name) and is_model_folder(repository.parent):
            text = f"'{repository}' is a version of one model; a repository is the folder that holds models' folders"
            hint = f"give '{Path(os.path.abspath(repository)).parent.parent}'"
            raise Problems([Problem(text, rule="R5", hint=hint)])
        if not folders and only is None and is_model_folder(repository):
            text = f"'{repository}' is the folder of one model; a repository is the folder that holds such folders"
            hint = f"give '{Path(os.path.abspath(repository)).parent}'"
            raise Problems([Problem(text, rule="R5", hint=hint)])
        warnings += skipped
        for folder in folders:
            by_name.setdefault(folder.name, []).append(folder)
    return FoundModels(
        folders=tuple(same[0] for _, same in sorted(by_name.items()) if len(same) == 1),
        duplicates={name: _duplicate(name, same) for name, same in sorted(by_name.items()) if len(same) > 1},
        warnings=tuple(warnings),
    )


def scan(repository: Path) -> list[ModelFolder]:
    """The models of one repository, by name. Raises NotFound or Problems if it cannot be read."""
    return _scan(repository)[0]


def why_missing(repositories: Sequence[Path], name: str) -> str:
    """The reason why `find_models` finds no model of that name, with a suggestion."""
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
    """Whether a folder is a model's folder rather than a repository."""
    # Not with pathlib, which raises for a folder without permission.
    return os.path.exists(path / CONFIG_FILE) or bool(os.path.isdir(path) and model_folder_at(path).versions)


def versions_to_serve(folder: ModelFolder, policy: VersionPolicy, is_ensemble: bool = False) -> tuple[int, ...]:
    """The versions that the policy selects, ascending. Raises Problems if it selects none.

    An ensemble without version folders is version 1: nothing need be in its folder, and git drops empty ones.
    """
    there = folder.versions or ((1,) if is_ensemble else ())
    if policy.specific:
        chosen = tuple(version for version in there if version in policy.specific)
    elif policy.all:
        chosen = there
    else:
        chosen = there[max(0, len(there) - policy.latest) :]
    if chosen:
        return chosen
    message = f"at least one version must be available under the version policy of model '{folder.name}'"
    raise Problems([Problem(message, Place(folder.name), "R1", _how_to_have_a_version(folder, policy, is_ensemble))])


def without_folder(folder: ModelFolder, config: ModelConfig, versions: Collection[int]) -> list[Problem]:
    """The warning about an ensemble that is served without a version folder."""
    if folder.versions or not (config.is_ensemble and versions):
        return []
    text = "no version folder, which git drops if it is empty; the ensemble is served as version 1"
    hint = f"Triton refuses it: mkdir {folder.name}/1, and put an empty {KEEP} into it"
    return [Problem(text, Place(folder.name), "R16", hint)]


def _scan(repository: Path, only: Collection[str] | None = None) -> tuple[list[ModelFolder], list[Problem]]:
    folders: list[ModelFolder] = []
    warnings: list[Problem] = []
    for entry in _entries(repository, only):
        if (legible := _legible(entry.name)) != entry.name:
            warnings.append(Problem("a name that is not UTF-8; skipped", Place(legible), "R10"))
            continue
        if not _is_folder(entry):
            if entry.is_symlink() and not os.path.exists(entry):
                warnings.append(Problem("a symbolic link that leads nowhere; skipped", Place(entry.name), "R3"))
            continue
        if _is_hidden(entry.name):
            continue
        folder = model_folder_at(repository / entry.name)
        if folder.versions or os.path.exists(os.path.join(entry, CONFIG_FILE)):
            folders.append(folder)
        elif _unread(folder):
            warnings += folder.warnings
        else:
            text = f"neither {CONFIG_FILE} nor a version folder in it; not a model, skipped"
            warnings += [warning for warning in folder.warnings if warning.rule == "R12"]
            warnings.append(Problem(text, Place(entry.name), "R4", _how_to_be_a_model(folder.path)))
    return folders, warnings


def not_a_repository(repository: Path) -> str:
    """Why a path that is not a folder cannot be served, and what to give instead."""
    if repository.exists():
        return f"model repository '{repository}' is a file; give the folder that holds the models' folders"
    here = repository.parent
    folders = [entry.name for entry in here.iterdir() if entry.is_dir()] if here.is_dir() else []
    hint = did_you_mean(repository.name, folders) or "give the folder that holds the models' folders"
    return f"model repository '{repository}' does not exist ({hint})"


def _entries(repository: Path, only: Collection[str] | None) -> list[os.DirEntry[str]]:
    """The entries of the repository, by name."""
    try:
        with os.scandir(repository) as entries:
            found = [entry for entry in entries if only is None or entry.name in only]
        return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        raise NotFound(not_a_repository(repository)) from None
    except NotADirectoryError:
        raise Problems([Problem(not_a_repository(repository))]) from None
    except OSError as error:
        hint = NO_PERMISSION if isinstance(error, PermissionError) else ""
        text = f"model repository '{repository}' cannot be read: {error.strerror}"
        raise Problems([Problem(text, hint=hint)]) from error


def model_folder_at(path: Path) -> ModelFolder:
    """The model in a folder; without versions if there is no such folder. The parent folder is its repository."""
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
        hint = f"it is skipped; {NO_PERMISSION}"
        warnings.append(Problem(f"cannot be read: {error.strerror}", Place(path.name), "R6", hint))
    for name in inside:
        if _is_hidden(name) or name in SET_ASIDE:
            continue
        if is_version_folder(name):
            versions.append(int(name))
        elif not any(os.path.exists(path / name / mark) for mark in MARKS):
            text = "not a version (a positive number without leading zeros); ignored"
            warnings.append(Problem(text, Place(f"{path.name}/{_legible(name)}"), "R7"))
    return ModelFolder(path.name, path, path.parent, tuple(sorted(versions)), tuple(warnings))


def _unread(folder: ModelFolder) -> list[str]:
    """The reasons why a folder cannot be read, if any."""
    return [warning.message for warning in folder.warnings if warning.rule == "R6"]


def _misplaced(path: Path, folders: Mapping[str, bool]) -> Iterator[Problem]:
    """Files that were probably meant as the model's configuration. `folders`: entry name -> whether it is a folder."""
    files = [name for name, is_folder in folders.items() if not is_folder]
    found = [
        name for name in files if name.lower().startswith(("config.pb", "config.pr")) or misnamed([name], [CONFIG_FILE])
    ]
    inside = (f"{name}/{CONFIG_FILE}" for name in folders if is_version_folder(name))
    found += [name for name in inside if os.path.exists(path / name)]
    for name in sorted(found):
        text = f"not read: a model's configuration is {path.name}/{CONFIG_FILE}"
        yield Problem(text, Place(f"{path.name}/{_legible(name)}"), "R12")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def _legible(name: str) -> str:
    """The name itself if it is valid UTF-8; Python represents other names with surrogates."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _duplicate(name: str, folders: Sequence[ModelFolder]) -> Problems:
    where = ", ".join(f"'{folder.repository}'" for folder in folders)
    message = f"model '{name}' appears in two or more repositories: {where}"
    return Problems([Problem(message, rule="R2", hint="rename or remove all but one; none of them is served")])


def _how_to_be_a_model(path: Path) -> str:
    """The hint about a model's file in a folder without version folders, "" if there is none."""
    file = next((file for file, _ in FILES if os.path.exists(path / file)), "")
    return f"move {path.name}/{file} into {path.name}/1/" if file else ""


def _how_to_have_a_version(folder: ModelFolder, policy: VersionPolicy, is_ensemble: bool) -> str:
    if folder.versions:
        there = ", ".join(map(str, folder.versions))
        return f"the policy wants {', '.join(map(str, policy.specific))}, and the folder has {there}"
    if is_ensemble:
        wanted = ", ".join(map(str, policy.specific))
        return f"without version folders it is version 1, and the policy wants {wanted}: mkdir {folder.name}/{wanted}"
    return f"put the model's files into {folder.name}/1/"
