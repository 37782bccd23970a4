"""Models of the tests that run on flowserve and on Triton: one folder each, written as a user writes them."""

from __future__ import annotations

from pathlib import Path

IMPORTS = """\
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def respond(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


"""


def spec(name: str, data_type: str, dims: str, *more: str) -> str:
    """One input or output of a configuration: `spec("X", "FP32", "-1, 2", "optional: true")`."""
    return f'{{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {" ".join(more)} }}'


def python_config(inputs: list[str], outputs: list[str], *more: str) -> str:
    """A configuration of a Python model, its tensors as from `spec`."""
    lines = ['backend: "python"', f"input [ {', '.join(inputs)} ]", f"output [ {', '.join(outputs)} ]", *more]
    return "\n".join([*lines, ""])


def write_model(
    repository: Path, name: str, config: str, body: str = "", *, versions: tuple[str, ...] = ("1",), **files: str
) -> None:
    """A model's folder. `body`: the members of its class in model.py; without one there is no file, as in ensembles."""
    for version in versions:
        (repository / name / version).mkdir(parents=True, exist_ok=True)
        if body:
            members = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").split("\n"))
            code = f"{IMPORTS}class TritonPythonModel:\n{members}"
            (repository / name / version / "model.py").write_text(code)
    (repository / name / "config.pbtxt").write_text(config)
    for file, text in files.items():
        (repository / name / file.replace("__", ".")).write_text(text)


def write_source(folder: Path, name: str, config: str, source: str = "") -> None:
    """A model's folder with a whole model.py. An ensemble has none; it has a version folder, which Triton requires."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)
    if source:
        (version / "model.py").write_text(source)
