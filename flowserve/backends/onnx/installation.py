"""Makes the backend, if exactly one build of onnxruntime is installed.

Decides which distributions contain the module `onnxruntime`, and that two of them at once are an error: pip lets each
overwrite files of the other, and which providers and bugs the result has depends on the order. The remedy is a command.
It does not import onnxruntime, which may fail then. A module that belongs to no distribution, such as a user's own
build, is accepted. Called by the registry.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from flowserve.errors import Unsupported

if TYPE_CHECKING:
    from flowserve.backends.onnx.backend import OnnxRuntime

BUILDS: Final = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-training",
)
_OURS: Final = re.compile(r"onnxruntime[\w-]*[^;\s]*")  # a requirement without its marker


def make_backend() -> OnnxRuntime:
    """The backend. Raises Unsupported, with the command that helps, if no build is installed, or several are."""
    if problem := _problem():
        raise Unsupported(problem)
    from flowserve.backends.onnx.backend import OnnxRuntime

    return OnnxRuntime()


def _problem() -> str:
    """The problem of the installation, "" for none."""
    installed = {name: version for name in BUILDS if (version := _version(name))}
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install {shlex.quote(_required())}"
    if len(installed) > 1:
        found = " and ".join(f"{name} {version}" for name, version in installed.items())
        remove = f"{python} -m pip uninstall -y {' '.join(installed)}"
        return (
            f"{found} are installed together, and each overwrites files of the other; keep one: {remove} && {install}"
        )
    if not installed and find_spec("onnxruntime") is None:
        return f"ONNX models need onnxruntime, which is not installed: {install}"
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _required() -> str:
    """The build that flowserve was installed with, as a requirement."""
    try:
        requirements = metadata.requires("flowserve") or []
    except metadata.PackageNotFoundError:
        requirements = []
    found = (_OURS.match(requirement) for requirement in requirements)
    return next((match[0] for match in found if match), BUILDS[0])
