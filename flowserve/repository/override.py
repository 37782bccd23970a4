"""A model as somebody sent it with a load call: a configuration, and files, that are in no repository.

Decided here: what a name and a path in such a call may be, and that the files live in a private folder that
disappears with the last who holds it. Whether the configuration makes sense is config/'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from flowserve.errors import Invalid
from flowserve.temporary import MODELS, claim, give_up

COMPONENT_BYTES_MAX: Final = 255  # what file systems take


@dataclass(frozen=True, slots=True)
class Override:
    """`config` is JSON, "" for the folder's own. `files`: path in the model's folder -> contents; none: its own."""

    config: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


class PrivateFolder:
    """A folder that only this process's user can enter. It is removed with the last reference to this object, or when
    the interpreter ends.
    """

    def __init__(self) -> None:
        folder, lock = claim(MODELS)
        self.path = Path(folder)
        weakref.finalize(self, give_up, folder, lock)


def check_name(name: str) -> str:
    """`name`, which is one component of a path and nothing else. Raises `Invalid`."""
    reason = _why_no_component(name) if name else "it is empty"
    if "/" in name or "\\" in name:
        reason = "it contains a slash"
    if reason:
        raise Invalid(f"failed to load {name[:COMPONENT_BYTES_MAX]!r}: this cannot be the name of a model: {reason}")
    return name


def write_files(name: str, files: Mapping[str, bytes]) -> PrivateFolder:
    """A private repository that holds the model `name`, made of these files. Blocks.

    Raises `Invalid` for a path that leads, or could lead, anywhere else; nothing is written then.
    """
    paths = {_checked(path): content for path, content in files.items()}
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
        except OSError as error:  # a file where another path needs a folder; too long a path; a full disk
            raise Invalid(f"file override '{path}' cannot be written: {error.strerror}") from None
    return private


def _checked(path: str) -> PurePosixPath:
    reason = "it is empty" if not path else ""
    if path.startswith("/"):
        reason = "it is absolute"
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
