"""flowserve's packages, built from a copy of the source: a build leaves its own files behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

OF_BUILDS = ("FLOWSERVE_ONNXRUNTIME", "FLOWSERVE_REPOSITORY_URL", "SOURCE_DATE_EPOCH")
Kind = Literal["wheel", "sdist", "editable"]


def copy_source(root: Path, folder: Path) -> Path:
    """Copy the files that a build reads."""
    ignored = shutil.ignore_patterns("__pycache__", "*_pb2.pyi")  # the build makes the stubs
    shutil.copytree(root / "flowserve", folder / "flowserve", ignore=ignored)
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(root / file, folder)
    return folder


def build(source: Path, folder: Path, kind: Kind = "wheel", environment: Mapping[str, str] | None = None) -> Path:
    """The built file, in `folder`. Raises AssertionError with the output of a build that fails. `environment`:
    variables in addition to the test's own, without those of builds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"
    kept = {name: value for name, value in os.environ.items() if name not in OF_BUILDS}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=source,
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.split()[-1]


def unpacked_in_environment(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new virtual environment in `folder` with this wheel only."""
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return folder / "bin/python"
