"""Whether the code of a model calls other models, as far as its files show.

Decides it by the Python files in the model's folder: a call needs an `InferenceRequest(...)`, whatever the name of the
module is. Code outside of the folder is not examined. Does not import the model. Caller: runtime/remote/.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from flowserve.backends.base import ModelFiles

_NAME: Final = "InferenceRequest"


def calls_models(files: ModelFiles) -> bool:
    """Whether a file of the model, or of this version of it, makes a request to another model. Blocks."""
    folder = files.folder
    paths = [path for path in folder.rglob("*.py") if _is_of_version(path.relative_to(folder), files.version)]
    return any(map(_makes_requests, paths))


def _is_of_version(path: Path, version: int) -> bool:
    first = path.parts[0]
    return not first.isdecimal() or first == str(version)


def _makes_requests(path: Path) -> bool:
    try:
        text = path.read_text()
        return _NAME in text and any(map(_is_request, ast.walk(ast.parse(text))))
    except (OSError, ValueError, SyntaxError):
        return False  # it cannot be imported either


def _is_request(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name == _NAME
