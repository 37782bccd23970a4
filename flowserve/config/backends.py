"""Which backend a model is for, told from what its configuration and its folder already say.

Decided here: which names are those of versions, and the guess that Triton makes before anything else looks at a model,
in its order. It knows names of files, never their contents, and names of backends, not whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto

BACKEND_OF_PLATFORM: Final[Mapping[str, str]] = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
# The platform a backend's configuration is given where it names none.
PLATFORM_OF_BACKEND: Final[Mapping[str, str]] = {
    "onnxruntime": "onnxruntime_onnx",
    "tensorrt": "tensorrt_plan",
    "pytorch": "pytorch_libtorch",
    "tensorflow": "tensorflow_savedmodel",
}
BACKENDS_WITH_PLATFORMS: Final = frozenset(PLATFORM_OF_BACKEND)
# What Triton looks for in the first version's folder, in its order.
FILES: Final = (
    ("model.savedmodel", "tensorflow"),
    ("model.graphdef", "tensorflow"),
    ("model.plan", "tensorrt"),
    ("model.onnx", "onnxruntime"),
    ("model.xml", "openvino"),
    ("model.pt", "pytorch"),
    ("model.pt2", "pytorch"),
    ("model.py", "python"),
)


VERSION_MAX: Final = 2**63 - 1


def is_version(name: str) -> bool:
    """Whether a folder of that name is a version: a positive number without leading zeros."""
    # str.isdigit alone is true for the digits of every script, and int() takes "1_0".
    return (
        name.isascii() and name.isdigit() and not name.startswith("0") and len(name) < 20 and int(name) <= VERSION_MAX
    )


def fill_backend(message: ModelConfigProto, folder: Path, default_files: Mapping[str, str]) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` where they can be told; leave them empty where not."""
    if message.platform == "ensemble" or message.HasField("ensemble_scheduling"):
        return
    if not message.backend:
        message.backend = BACKEND_OF_PLATFORM.get(message.platform, "")
    if not message.backend and not message.platform:
        message.backend = _guess(message, folder, default_files)
    if message.backend and not message.platform:
        message.platform = PLATFORM_OF_BACKEND.get(message.backend, "")
    if message.backend and not message.default_model_filename:
        message.default_model_filename = _default_file(message.backend, default_files)


def _guess(message: ModelConfigProto, folder: Path, default_files: Mapping[str, str]) -> str:
    candidates = dict(FILES)
    candidates.update((file, backend) for backend, file in default_files.items())
    named = message.default_model_filename
    if named:
        return next((backend for file, backend in candidates.items() if Path(file).suffix == Path(named).suffix), "")
    present = set(_first_version(folder))
    for file, backend in candidates.items():
        if file in present:
            return backend
    return message.name.partition(".")[2]


def _first_version(folder: Path) -> Iterator[str]:
    """What lies in the first version's folder; the first in the order of their names, as on Triton."""
    try:
        versions = sorted(entry.name for entry in folder.iterdir() if is_version(entry.name) and entry.is_dir())
        if versions:
            yield from (entry.name for entry in (folder / versions[0]).iterdir())
    except OSError:  # unreadable here: the rule that wants a backend, or the backend itself, says so with its place
        return


def _default_file(backend: str, default_files: Mapping[str, str]) -> str:
    if backend in default_files:
        return default_files[backend]
    return next((file for file, known in FILES if known == backend), "")
