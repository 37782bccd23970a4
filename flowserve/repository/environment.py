"""The Python environment that a model specifies, and its checks.

Decides how the parameter EXECUTION_ENV_PATH is interpreted, and the errors that can be found without running code of
the environment. Does not unpack or start it (`runtime/processes`).
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from pathlib import Path
from typing import Final

from flowserve.config.parameters import ENVIRONMENT, MODEL_FOLDER
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, Problem, Problems

PYTHONS: Final = ("bin/python", "bin/python3")
RULE: Final = "R14"


def environment_of(config: ModelConfig, folder: Path) -> Path | None:
    """The real path of the folder or archive of a Python model's environment; None for the server's own environment.
    Blocks. Raises Problems if it does not exist or is no environment.
    """
    written = config.parameters.get(ENVIRONMENT, "")
    if config.backend != "python" or not written:
        return None
    path = Path(written.replace(MODEL_FOLDER, str(folder), 1))
    try:
        if path.is_dir():
            python_in(path)
        elif not path.exists():
            raise unusable(config, "there is no such file or folder", _where_it_may_be(written, folder))
        elif not (path.is_file() and _is_archive(path)):
            hint = "conda-pack writes one where the name of its output ends in .tar.gz"
            raise unusable(config, "it is neither a folder nor a tar archive", hint)
    except Invalid as error:
        raise error if isinstance(error, Problems) else unusable(config, str(error)) from None
    except OSError as error:
        raise unusable(config, f"it cannot be read: {error.strerror}") from None
    return Path(os.path.realpath(path))


def python_in(folder: Path) -> Path:
    """The Python executable of an environment. Raises Invalid if it has none."""
    found = [folder / name for name in PYTHONS]
    for python in found:
        if python.is_file():
            return python
    for python in found:
        if python.is_symlink():
            leads = os.path.realpath(python)
            raise Invalid(f"its {python.relative_to(folder)} leads to {leads}, which is not there")
    inside = next((one for one in folder.iterdir() if any((one / name).is_file() for name in PYTHONS)), None)
    there = f", but in {inside.name}/: it should be what is in that folder" if inside else ""
    raise Invalid(f"there is no {PYTHONS[0]} in it{there}")


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error, lzma.LZMAError):  # it only begins like an archive
        return False


def unusable(config: ModelConfig, why: str, hint: str = "") -> Problems:
    """The error of a model that cannot run in its environment, with the place of the parameter."""
    place = config.source.place(f"parameters[{ENVIRONMENT}]")
    text = f"model '{config.name}' cannot run in its environment '{config.parameters[ENVIRONMENT]}': {why}"
    return Problems([Problem(text, place, RULE, hint)])


def _where_it_may_be(written: str, folder: Path) -> str:
    """The hint for a relative path, which is relative to the server's working directory, as on Triton."""
    if os.path.isabs(written) or MODEL_FOLDER in written:
        return ""
    if (folder / written).exists():
        return f'did you mean "{MODEL_FOLDER}/{written}"?'
    return f"a path in the model's folder begins with {MODEL_FOLDER}/"
