"""Find the model repositories of a folder and copy them.

Decides which folders are repositories: those whose subfolders are models, which have a `config.pbtxt` or a version
folder with a model file. A folder of single configurations (`NAME.pbtxt`) is a repository for each of them, whose one
model has that name. Copies contain no links out of the copy. Does not know what a model needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.pbtxt"
MODEL_FILES = (
    "model.py",
    "model.onnx",
    "model.plan",
    "model.pt",
    "model.savedmodel",
    "model.graphdef",
    "model.xml",
    "model.json",
)
DEPTH_MAX = 8
SKIPPED = {".git", "__pycache__", "node_modules", ".venv", "venv"}


@dataclass(frozen=True, slots=True)
class Repository:
    """`name` is its path below the searched folder; `configuration` is a file instead of a folder of models."""

    name: str
    path: Path
    configuration: bool = False

    def copy_to(self, target: Path) -> None:
        """Write a copy. Files that cannot be read are left out, like the weights that a link points to in vain."""
        if self.configuration:
            model = target / self.path.stem
            model.mkdir(parents=True)
            shutil.copyfile(self.path, model / CONFIG)
            return
        target.mkdir(parents=True)
        for folder in model_folders(self.path):
            _copy_folder(folder, target / folder.name)


def find_repositories(folder: Path) -> list[Repository]:
    """The repositories at and below `folder`, in alphabetical order."""
    return sorted(_find(folder, folder, 0), key=lambda one: one.name)


def model_folders(repository: Path) -> list[Path]:
    """The folders of a repository's models, in alphabetical order."""
    return sorted(path for path in _folders(repository) if _is_model(path))


def version_folders(model: Path) -> list[Path]:
    return sorted(path for path in _folders(model) if path.name.isdecimal())


def _find(folder: Path, top: Path, depth: int) -> Iterator[Repository]:
    name = folder.relative_to(top).as_posix() if folder != top else folder.resolve().name
    if model_folders(folder):
        yield Repository(name, folder)
        return
    for path in sorted(folder.glob("*.pbtxt")):
        if path.name != CONFIG:
            yield Repository(f"{name}/{path.name}", path, configuration=True)
    if depth < DEPTH_MAX:
        for path in _folders(folder):
            yield from _find(path, top, depth + 1)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and path.name not in SKIPPED]


def _is_model(folder: Path) -> bool:
    if (folder / CONFIG).is_file():
        return True
    return any((version / file).exists() for version in version_folders(folder) for file in MODEL_FILES)


def _copy_folder(source: Path, target: Path) -> None:
    for folder, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in SKIPPED]
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            path = Path(folder, name)
            if path.is_file() and os.access(path, os.R_OK):
                shutil.copyfile(path, here / name)
