"""Public API of flowserve: re-exports only.

Names are imported on first access, so that a command that neither draws nor serves starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowserve.version import __version__

if TYPE_CHECKING:
    from flowserve.authoring.engine import Engine
    from flowserve.authoring.files import model_folder, onnx_model
    from flowserve.authoring.graph import Graph
    from flowserve.errors import FlowserveError, Invalid, Problems
    from flowserve.graph.builder import Tensor
    from flowserve.graph.function_model import model

_WHERE = {
    "Engine": "flowserve.authoring.engine",
    "Graph": "flowserve.authoring.graph",
    "FlowserveError": "flowserve.errors",
    "Invalid": "flowserve.errors",
    "Problems": "flowserve.errors",
    "Tensor": "flowserve.graph.builder",
    "model": "flowserve.graph.function_model",
    "model_folder": "flowserve.authoring.files",
    "onnx_model": "flowserve.authoring.files",
}

__all__ = [
    "Engine",
    "Graph",
    "Tensor",
    "model",
    "onnx_model",
    "model_folder",
    "FlowserveError",
    "Invalid",
    "Problems",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'flowserve' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
