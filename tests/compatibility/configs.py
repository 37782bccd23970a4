"""Read a model's configuration as far as stand-ins need it, and change single fields of its text.

Decides how a template's values are filled, and that everything else in the text stays as its author wrote it, so that
both servers parse the original. Does not decide what is changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from flowserve.config.model_config_pb2 import ModelConfig
from flowserve.config.parse import parse
from flowserve.errors import Problems
from tests.compatibility.repositories import CONFIG

PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "ensemble",
}
MODEL_FILES = {
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.pt": "pytorch",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
    "model.py": "python",
}
FILES = {backend: file for file, backend in reversed(MODEL_FILES.items())}

_STRING = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_PLACEHOLDER = re.compile(rf"({_STRING}|\#[^\n]*)|\$\{{\w+\}}")
_BOOLEAN = re.compile(r"\b(decoupled|allow_ragged_batch|optional|preserve_ordering|enable)\s*:\s*\$\{\w+\}")
_TYPE = re.compile(r"\bdata_type\s*:\s*\$\{\w+\}")
_KIND = re.compile(r"\bkind\s*:\s*\$\{\w+\}")


def read_config(model: Path) -> ModelConfig | None:
    """The fields that parse; None if the file has a syntax error. An absent file is an empty configuration."""
    path = model / CONFIG
    if not path.is_file():
        return ModelConfig()
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"), CONFIG).message
    except Problems:
        return None


def backend_of(config: ModelConfig, model: Path) -> str:
    """The backend of a model, from its fields or its files; empty if neither tells."""
    if config.ensemble_scheduling.step:
        return "ensemble"
    if config.backend or config.platform:
        return config.backend or PLATFORMS.get(config.platform, config.platform)
    for file in [config.default_model_filename, *(path.name for path in model.glob("[0-9]*/*"))]:
        if file in MODEL_FILES:
            return MODEL_FILES[file]
        if file.endswith(".onnx"):
            return "onnxruntime"
    return ""


def fill_template(text: str) -> str:
    """Values for the `${NAME}`s outside of strings: false, a data type, a kind or 4, whichever the field takes."""
    text = _BOOLEAN.sub(r"\1: false", text)
    text = _TYPE.sub("data_type: TYPE_FP32", text)
    text = _KIND.sub("kind: KIND_CPU", text)
    return _PLACEHOLDER.sub(lambda found: found[1] or "4", text)


def without_gpus(text: str) -> str:
    """All instances on the CPU."""
    text = re.sub(r"\bKIND_(GPU|AUTO)\b", "KIND_CPU", text)
    return re.sub(r"\bgpus\s*:?\s*(\[[^\]]*\]|\d+)\s*[,;]?", "", text)


def with_backend(text: str, backend: str) -> str:
    """The text with this backend, and without a platform and without the name of a model file."""
    text = re.sub(rf"\b(backend|platform|default_model_filename)\s*:\s*({_STRING})\s*[,;]?", "", text)
    return f'{text}\nbackend: "{backend}"\n'
