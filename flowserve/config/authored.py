"""Where the files that this process wrote itself were written by somebody: the lines of a graph in Python.

Decided here: that such a file's places are its author's, as long as its folder has an owner. Who writes files is not
known here.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from flowserve.config.types import SourceMap

_sources: dict[str, SourceMap] = {}  # by the real path of a model's folder


def note_author(folder: Path, source: SourceMap, owner: object) -> None:
    """The configuration in a model's folder is what `source` says the places of, until `owner` is gone."""
    path = os.path.realpath(folder)
    _sources[path] = source
    weakref.finalize(owner, _sources.pop, path, None)


def authored(folder: Path, read: SourceMap) -> SourceMap:
    """The places of what was read in a folder: its author's, where those are known."""
    source = _sources.get(os.path.realpath(folder)) if _sources else None
    if source is None:
        return read
    return SourceMap(source.file, {path: source.place(path) for path in read.places})
