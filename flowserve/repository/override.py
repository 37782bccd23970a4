"""A model sent with a load call: a configuration and files that are in no repository.

Decides the valid names and paths in such a call, and that the files are in a private folder, which is removed with its
last reference. Does not check the configuration (`config`). Callers: `runtime/loading`, `authoring`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from flowserve.errors import Invalid
from flowserve.temporary import MODELS, claim, give_up

COMPONENT_BYTES_MAX: Final = 255  # the limit of file systems


@dataclass(frozen=True, slots=True)
class Override:
    """`config` is JSON, "" for the folder's own. `files`: path -> contents; {}: the folder's."""

    config: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


class PrivateFolder:
    """A folder accessible only to this process's user. It is removed with the last reference to this object, or when
    the interpreter exits.
    """

    def __init__(self) -> None:
        folder, lock = claim(MODELS)
        self.path = Path(folder)
        weakref.finalize(self, give_up, folder, lock)


def check_name(name: str) -> str:
    """`name`, checked to be a single path component. Raises `Invalid`."""
    reason = _why_no_component(name) if name else "it is empty"
    if "/" in name or "\\" in name:
        reason = "it contains a slash"
    if reason:
        raise Invalid(f"failed to load {name[:COMPONENT_BYTES_MAX]!r}: this cannot be the name of a model: {reason}")
    return name


def write_files(name: str, files: Mapping[str, bytes]) -> PrivateFolder:
    """A private repository with the model `name` consisting of these files. Blocks.

    A path may begin with a slash, which means the model's folder too. Raises `Invalid` for a path that leads, or could
    lead, out of the folder, before anything is written.
    """
    # Triton's documentation has file:1/model.py, and clients write file:/1/model.py, which Triton takes too.
    paths = {_checked(path.lstrip("/")): content for path, content in files.items()}
    try:
        private = PrivateFolder()
        (private.path / name).mkdir()
    except OSError as error:
        raise Invalid(f"there is no folder that file overrides can be written to: {error.strerror}") from None
    for path, content in paths.items():
        target = private.path / name / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except OSError as error:  # a file where another path needs a folder, a path that is too long, a full disk
            raise Invalid(f"file override '{path}' cannot be written: {error.strerror}") from None
    return private


def _checked(path: str) -> PurePosixPath:
    reason = "it is empty" if not path else ""
    for component in path.split("/"):
        reason = reason or _why_no_component(component)
    if reason:
        raise Invalid(
            f"file override {path[:COMPONENT_BYTES_MAX]!r} does not name a file in the model's folder: {reason}"
        )
    return PurePosixPath(path)


def _why_no_component(text: str) -> str:
    if text in ("", ".", ".."):
        return f"{text!r} is not the name of a file or folder"
    if len(text.encode("utf-8", "surrogatepass")) > COMPONENT_BYTES_MAX:
        return f"a name is longer than {COMPONENT_BYTES_MAX} bytes"
    if not text.isprintable() or "\\" in text:
        return "it contains control characters or backslashes"
    return ""
