"""Whether the code of a model calls other models, as far as its files show.

Decides it by the Python files in the model's folder: a call needs an `InferenceRequest(...)`, whatever the name of the
module is. Code outside of the folder is not examined. Does not import the model. Caller: runtime/remote/.
"""

from __future__ import annotations

import tokenize
from io import StringIO
from itertools import pairwise
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
        if _NAME not in text:
            return False
        # Tokens, not a syntax tree: in Python 3.11, two threads must not parse at once. Comments and texts, in which
        # examples name the class, are tokens of other kinds.
        tokens = [one.string for one in tokenize.generate_tokens(StringIO(text).readline)]
    except (OSError, ValueError, SyntaxError, tokenize.TokenError):
        return False  # it cannot be imported either
    return any(pair == (_NAME, "(") for pair in pairwise(tokens))
