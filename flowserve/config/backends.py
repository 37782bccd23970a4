"""Guesses a model's backend from its configuration and the file names in its folder.

Decides which folder names are versions, the guess, which is Triton's, in its order, and the hints about Triton's other
backends. Does not read model files, and does not know which backends are installed. Callers: `load`, `rules`,
`unsupported`, `repository`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flowserve.config import model_config_pb2 as pb
from flowserve.config.suggest import misnamed

REMOTE: Final = "remote"  # the backend, and the `execution`, of models that run on another server
BACKEND_OF_PLATFORM: Final[Mapping[str, str]] = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
GRAPH_DEF: Final = "tensorflow_graphdef"
_GRAPH_FILE: Final = "model.graphdef"
# The default platform of each backend; of TensorFlow's frozen graphs, GRAPH_DEF.
PLATFORM_OF_BACKEND: Final[Mapping[str, str]] = {
    "onnxruntime": "onnxruntime_onnx",
    "tensorrt": "tensorrt_plan",
    "pytorch": "pytorch_libtorch",
    "tensorflow": "tensorflow_savedmodel",
}

_TENSORRT_LLM: Final = (
    "its engines are no TensorRT plans: call TensorRT-LLM in a decoupled model.py, or run trtllm-serve beside"
    " this server"
)
# The alternative for each unsupported backend.
OTHER_BACKENDS: Final[Mapping[str, str]] = {
    "libtorch": 'write backend: "pytorch"',
    "tensorrtllm": _TENSORRT_LLM,
    "tensorrt_llm": _TENSORRT_LLM,
    "dali": "run the DALI pipeline, or the same steps with numpy and Pillow, in a model.py",
    "identity": "write a model.py that answers what it is given, or an ONNX file of Identity nodes",
}
# The files that Triton looks for in the first version's folder, in its order.
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


def is_version_folder(name: str) -> bool:
    """Whether a folder of that name is a version: a positive number without leading zeros."""
    # str.isdigit alone accepts the digits of every script, and int() accepts "1_0".
    return (
        name.isascii() and name.isdigit() and not name.startswith("0") and len(name) < 20 and int(name) <= VERSION_MAX
    )


def fill_backend(message: pb.ModelConfig, folder: Path, default_files: Mapping[str, str]) -> None:
    """Fill in `backend`, `platform` and `default_model_filename` if they can be derived, else leave them empty."""
    if message.platform == "ensemble" or message.HasField("ensemble_scheduling"):
        return
    if (
        not message.backend
        and "execution" in message.parameters
        and message.parameters["execution"].string_value == REMOTE
    ):
        message.backend = REMOTE
    if not message.backend:
        message.backend = BACKEND_OF_PLATFORM.get(message.platform, "")
    if not message.backend and not message.platform:
        message.backend = _guess(message, folder, default_files)
    if message.backend and not message.platform:
        message.platform = PLATFORM_OF_BACKEND.get(message.backend, "")
        if message.backend == "tensorflow" and _is_graph_def(message, folder):
            message.platform = GRAPH_DEF
    if message.backend and not message.default_model_filename:
        usual = next((file for file, backend in FILES if backend == message.backend), "")
        is_graph = message.platform == GRAPH_DEF
        message.default_model_filename = _GRAPH_FILE if is_graph else default_files.get(message.backend, usual)


def _is_graph_def(message: pb.ModelConfig, folder: Path) -> bool:
    """Whether a model of TensorFlow is a frozen graph, by its file."""
    if message.default_model_filename:
        return message.default_model_filename.endswith(".graphdef")
    names = _first_version(folder)[1]
    return _GRAPH_FILE in names and "model.savedmodel" not in names


def _guess(message: pb.ModelConfig, folder: Path, default_files: Mapping[str, str]) -> str:
    candidates = dict(FILES) | {file: backend for backend, file in default_files.items()}
    named = message.default_model_filename
    if named:
        return next((backend for file, backend in candidates.items() if Path(file).suffix == Path(named).suffix), "")
    present = set(_first_version(folder)[1])
    return next((backend for file, backend in candidates.items() if file in present), message.name.partition(".")[2])


def misnamed_model(folder: Path) -> str:
    """The hint about a file in the first version's folder that was probably meant as the model, "" if there is none."""
    version, names = _first_version(folder)
    found = misnamed(names, (file for file, _ in FILES))
    return f"{folder.name}/{version}/{found[0]} is not read; did you mean {found[1]}?" if found else ""


def _first_version(folder: Path) -> tuple[str, list[str]]:
    """The first version's folder, in the order of names as on Triton, and the names of the files in it."""
    try:
        versions = sorted(entry.name for entry in folder.iterdir() if is_version_folder(entry.name) and entry.is_dir())
        if versions:
            return versions[0], [entry.name for entry in (folder / versions[0]).iterdir()]
    except OSError:  # the rule that requires a backend, or the backend itself, reports an unreadable folder
        pass
    return "", []
