"""Writes a graph built in Python as a repository of files: a permanent one, or a private one for this process.

Decides the contents of each file. Both kinds have the same configurations. The permanent one has copies of the models'
files and imports functions from their modules; the private one links to the user's files and refers to the function
objects. Caller: `authoring/graph`.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from flowserve.authoring.parts import FolderModel
from flowserve.backends.functions.backend import offer
from flowserve.config.load import CONFIG_FILE, note_author
from flowserve.config.parse import config_text
from flowserve.errors import Problem, Problems
from flowserve.graph.builder import DeclaredPart
from flowserve.graph.functions import FunctionModel
from flowserve.repository.override import PrivateFolder

SavedPart = FolderModel | DeclaredPart  # all kinds of parts
VERSION: Final = "1"


def write_private(parts: Sequence[SavedPart], private: PrivateFolder) -> None:
    """Write all parts into an empty folder, for this process only. Blocks."""
    for part in parts:
        home = private.path / part.name
        if isinstance(part, FolderModel):
            home.symlink_to(part.path)
        else:
            _write(home, part, offer)
            note_author(home, part.source(), private)


def write_to_keep(parts: Sequence[SavedPart], folder: Path) -> None:
    """Write all parts into a repository, which may hold other deployments. Blocks. Raises Problems before anything is
    written.
    """
    problems = [*_existing(parts, folder), *_not_importable(parts)]
    if problems:
        raise Problems(problems)
    for part in parts:
        home = folder / part.name
        if isinstance(part, FolderModel):
            shutil.copytree(part.path, home, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            _write(home, part, _import_of)


def _write(home: Path, part: DeclaredPart, program_of: Callable[[FunctionModel], str]) -> None:
    (home / VERSION).mkdir(parents=True)
    (home / CONFIG_FILE).write_text(config_text(part.config(), part.name), encoding="utf-8")
    for path in _beside(part):
        shutil.copy(path, home)
    if isinstance(part, FunctionModel):
        (home / VERSION / "model.py").write_text(program_of(part), encoding="utf-8")


def contents(parts: Sequence[SavedPart]) -> dict[str, dict[str, bytes]]:
    """The files that would be saved: for each part, contents by path. Blocks while the models' files are read."""
    return {part.name: dict(_contents(part)) for part in parts}


def _contents(part: SavedPart) -> Iterator[tuple[str, bytes]]:
    if isinstance(part, FolderModel):
        for path in part.path.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(part.path).as_posix(), path.read_bytes()
        return
    yield CONFIG_FILE, config_text(part.config(), part.name).encode()
    for path in _beside(part):
        yield path.name, path.read_bytes()
    if isinstance(part, FunctionModel):
        yield f"{VERSION}/model.py", (_import_of(part) if not _why_not_importable(part) else repr(part)).encode()


def _beside(part: DeclaredPart) -> Iterator[Path]:
    """The files next to the configuration of a graph loaded from a folder: labels, a README."""
    if part.folder is not None:
        yield from (path for path in sorted(part.folder.iterdir()) if path.is_file() and path.name != CONFIG_FILE)


def _existing(parts: Sequence[SavedPart], folder: Path) -> Iterator[Problem]:
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
