"""Where a version's model file lies.

Decided here: that it lies in the version's folder, under the name that the configuration or else the backend gives,
and how a missing one is reported. This file does not know what the file holds.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from flowserve.backends.base import ModelFiles
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problem, Problems


def model_file(config: ModelConfig, files: ModelFiles, default_filename: str) -> Path:
    """The file or folder of that name. Raises `Invalid` naming it, and what lies there instead, when it is missing."""
    name = config.default_model_filename or default_filename
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        message = f"default_model_filename '{name}' leads out of the version's folder"
        raise Problems([Problem(message, config.source.place("default_model_filename"))])
    path = files.version_folder / name
    failed = f"failed to load '{config.name}' version {files.version}: "
    try:
        is_there = path.exists()
    except OSError as error:
        raise Invalid(f"{failed}{relative(path, files)} cannot be read: {error.strerror}") from error
    if not is_there:
        raise Invalid(f"{failed}file {relative(path, files)} does not exist; {_neighbours(files)}")
    return path


def relative(path: Path, files: ModelFiles) -> str:
    """`path` as messages show it: relative to the repository."""
    return path.relative_to(files.repository).as_posix()


def _neighbours(files: ModelFiles) -> str:
    folder = files.version_folder
    where = relative(folder, files)
    if not folder.is_dir():
        return f"there is no folder {where} either"
    found = sorted(entry.name for entry in folder.iterdir())
    if not found:
        return f"folder {where} is empty"
    return f"folder {where} holds {', '.join(found)}; default_model_filename can name another file"
