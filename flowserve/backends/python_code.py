"""The Python files of a model, as they were when it was loaded.

Decided here: which files are a model's code, and that an instance which is started again runs that code and not what
lies in its folder by then: during a reload that may be half of the next one. How code becomes modules is
python_import.py's. Other files, weights among them, are read by the model itself, from disk, each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from flowserve.config.environments import MARKS

# By path. Read once, and handed to each process that runs the model.
Code = Mapping[str, bytes]
NO_CODE: Final[Code] = {}

# A model that brings more along (an environment of its own, say) is read from disk, as it is then.
_BYTES_MAX: Final = 8 << 20
_FILES_MAX: Final = 2000


def code_in(folder: Path, version_folder: Path) -> Code:
    """The code beside a model: of this version, and what all versions share. Blocks. What cannot be read is left out,
    and missed when it is imported.
    """
    code: dict[str, bytes] = {}
    nbytes = 0
    for path in _files(folder, version_folder):
        try:
            code[path] = Path(path).read_bytes()
        except OSError:
            continue
        nbytes += len(code[path])
        if nbytes > _BYTES_MAX or len(code) > _FILES_MAX:
            return NO_CODE
    return code


def _files(folder: Path, version_folder: Path) -> Iterator[str]:
    for top in (version_folder, folder):
        for here, folders, files in os.walk(top):
            is_model = here == str(folder)
            if any(mark in folders or mark in files for mark in MARKS):
                folders.clear()  # thousands of files, and none of them is the model's own code
                continue
            folders[:] = [name for name in folders if name != "__pycache__" and not (is_model and name.isdecimal())]
            for name in files:
                if name.endswith(".py"):
                    yield os.path.join(here, name)
