"""Finds backends by name.

Decides the built-in names, and that other packages add backends under the entry point group `flowserve.backends` (the
entry's name is the backend's; its object is a `Backend` or a callable that makes one). A backend is imported when its
first model is loaded: onnxruntime alone takes more time at start-up than all other imports. It does not know how a
backend works.

Callers: runtime/ and authoring/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from flowserve.backends.base import Backend
from flowserve.errors import Unsupported

log = logging.getLogger("flowserve.backends")

GROUP: Final = "flowserve.backends"

# name: module, class or function, default file
_BUILT_IN: Final = {
    # Before "python", the default for a model.py.
    "callable": ("flowserve.backends.functions", "CallableBackend", "model.py"),
    "onnxruntime": ("flowserve.backends.onnx.installation", "make_backend", "model.onnx"),
    "tensorrt": ("flowserve.backends.tensorrt.backend", "TensorRtBackend", "model.plan"),
    "python": ("flowserve.backends.python.backend", "PythonBackend", "model.py"),
    "remote": ("flowserve.elsewhere.kserve.make", "make_backend", ""),
    # Extras, which the core does not import.
    "fil": ("flowserve.backends.more.fil", "make_backend", "xgboost.json"),
    "openvino": ("flowserve.backends.more.openvino", "make_backend", "model.xml"),
    "pytorch": ("flowserve.backends.more.pytorch", "make_backend", "model.pt"),
    "tensorflow": ("flowserve.backends.more.tensorflow", "make_backend", "model.savedmodel"),
    # No default file: a model.json alone does not say that it is for vLLM.
    "vllm": ("flowserve.backends.more.vllm", "make_backend", ""),
}


@cache
def find(name: str) -> Backend:
    """The backend of that name. Raises Unsupported, with the names of all backends, if there is none."""
    built_in = _BUILT_IN.get(name)
    if built_in is not None:
        module, factory, _ = built_in
        return cast("Callable[[], Backend]", getattr(import_module(module), factory))()
    entry = _entries().get(name)
    if entry is None:
        known = ", ".join(sorted({*_BUILT_IN, *_entries()}))
        raise Unsupported(f"unable to find backend library for backend '{name}': flowserve has {known}")
    try:
        made = entry.load()
        return cast("Backend", made() if callable(made) else made)
    except Exception as error:
        raise Unsupported(f"backend '{name}' ({entry.value}) cannot be loaded: {error}") from error


@cache
def default_files() -> Mapping[str, str]:
    """The default model file of each backend that has one, by the backend's name. A backend that cannot be loaded is
    left out, with a warning.
    """
    files = {name: file for name, (_, _, file) in _BUILT_IN.items() if file}
    for name in _entries():
        if name in files:
            continue
        try:
            files[name] = find(name).default_filename
        except Unsupported as error:
            log.warning("%s", error)
    return files


@cache
def default_execution(name: str) -> str:
    """The default execution place of that backend's instances, if neither the model nor the operator sets it; "" for
    the server's default, and for an unknown backend.
    """
    try:
        return str(getattr(find(name), "default_execution", ""))
    except Unsupported:
        return ""


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
