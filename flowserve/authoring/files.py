"""A graph built in Python as a repository of files: one to keep, or a private one for this process.

Decided here: which file says what. Both kinds hold the same configurations; the one to keep also holds copies of the
models' files, and imports functions from the modules they live in, while the private one leads to the user's own files
and to the very function objects.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from flowserve.authoring.parts import FolderModel
from flowserve.backends.callable import offer
from flowserve.config.authored import note_author
from flowserve.config.load import CONFIG_FILE
from flowserve.config.write import text_of
from flowserve.errors import Problem, Problems
from flowserve.graph.builder import Declared
from flowserve.graph.functions import FunctionModel
from flowserve.repository.override import PrivateFolder

SavedPart = FolderModel | Declared  # which all parts are
VERSION: Final = "1"


def write_private(parts: Sequence[SavedPart], private: PrivateFolder) -> None:
    """Write everything into an empty folder, for this process only. Blocks."""
    for part in parts:
        home = private.path / part.name
        if isinstance(part, FolderModel):
            home.symlink_to(part.path)
            continue
        _write(home, part.config())
        note_author(home, part.source(), private)
        _copy_beside(part, home)
        if isinstance(part, FunctionModel):
            (home / VERSION / "model.py").write_text(offer(part), encoding="utf-8")


def write_to_keep(parts: Sequence[SavedPart], folder: Path) -> None:
    """Write everything into a repository, which may hold other deployments. Blocks. Raises Problems; nothing is written
    then.
    """
    problems = [*_in_the_way(parts, folder), *_not_importable(parts)]
    if problems:
        raise Problems(problems)
    for part in parts:
        home = folder / part.name
        if isinstance(part, FolderModel):
            shutil.copytree(part.path, home, ignore=shutil.ignore_patterns("__pycache__"))
            continue
        _write(home, part.config())
        _copy_beside(part, home)
        if isinstance(part, FunctionModel):
            (home / VERSION / "model.py").write_text(_import_of(part), encoding="utf-8")


def contents(parts: Sequence[SavedPart]) -> dict[str, dict[str, bytes]]:
    """What would be saved: each part's files, by their paths. Blocks while the models' files are read."""
    return {part.name: dict(_contents(part)) for part in parts}


def _contents(part: SavedPart) -> Iterator[tuple[str, bytes]]:
    if isinstance(part, FolderModel):
        for path in part.path.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(part.path).as_posix(), path.read_bytes()
        return
    yield CONFIG_FILE, text_of(part.config(), part.name).encode()
    for path in _beside(part):
        yield path.name, path.read_bytes()
    if isinstance(part, FunctionModel):
        yield f"{VERSION}/model.py", (_import_of(part) if not _why_not_importable(part) else repr(part)).encode()


def _beside(part: Declared) -> Iterator[Path]:
    """The files that lie beside the configuration where a graph was loaded from a folder: labels, a README."""
    if part.folder is not None:
        yield from (path for path in sorted(part.folder.iterdir()) if path.is_file() and path.name != CONFIG_FILE)


def _copy_beside(part: Declared, home: Path) -> None:
    for path in _beside(part):
        shutil.copy(path, home)


def _write(home: Path, config: dict[str, Any]) -> None:
    (home / VERSION).mkdir(parents=True)
    (home / CONFIG_FILE).write_text(text_of(config, home.name), encoding="utf-8")


def _in_the_way(parts: Sequence[SavedPart], folder: Path) -> Iterator[Problem]:
    for part in parts:
        if (folder / part.name).exists():
            text = f"'{folder / part.name}' exists already"
            yield Problem(text, part.place, "B5", "nothing is overwritten; remove it, or save elsewhere")


def _not_importable(parts: Sequence[SavedPart]) -> Iterator[Problem]:
    for part in parts:
        if isinstance(part, FunctionModel) and (reason := _why_not_importable(part)):
            text = f"the function of model '{part.name}' cannot be saved: {reason}"
            hint = "a file can only import what has a name at the top of a module"
            yield Problem(text, part.place, "B6", hint)


def _why_not_importable(model: FunctionModel) -> str:
    module, name = model.function.__module__, model.function.__qualname__
    if "<lambda>" in name:
        return "it is a lambda"
    if "<locals>" in name:
        return f"it is defined inside {name.partition('.<locals>')[0]}()"
    if module == "__main__":
        return "it is defined in the script that was run, or in a notebook; move it into a module of its own"
    try:
        found: object = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        return f"{module}.{name} cannot be imported: {error}"
    return "" if found is model else f"{module}.{name} is something else"


def _import_of(model: FunctionModel) -> str:
    module, name = model.function.__module__, model.function.__qualname__
    return f"from {module} import {name.partition('.')[0]}\n\nfunction = {name}\n"
