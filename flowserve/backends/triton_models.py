"""Models that a model loads, unloads, and asks after: Triton's `load_model`, `unload_model`, `is_model_ready`.

Decided here: what these functions take, and that whatever fails is a TritonModelException in Triton's words. What a
load means, and when it is allowed, is the server's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowserve.backends.base import IS_READY, LOAD, NO_FILES, UNLOAD
from flowserve.backends.triton_metrics import caller_of
from flowserve.backends.triton_objects import text_of
from flowserve.backends.triton_tensors import TritonModelException
from flowserve.errors import FlowserveError


def load_model(model_name: str | bytes, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model, or load it again, and wait until it serves. `config`: its configuration as JSON, in place of its
    own. `files`: "file:1/model.py" -> contents, in place of its folder; `config` must be there, too.
    """
    if files is not None and not isinstance(files, Mapping):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    contents = {name: _bytes(str(model_name), name, content) for name, content in (files or NO_FILES).items()}
    _ask("Failed to load model", LOAD, (text_of("model_name", model_name), config), contents)


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Serve a model no longer; it is closed after its last request, which is not waited for. `unload_dependents`: an
    ensemble's steps go with it, but for those that were loaded by name.
    """
    _ask("Failed to unload model", UNLOAD, (text_of("model_name", model_name), bool(unload_dependents)))


def is_model_ready(model_name: str | bytes, model_version: str = "") -> bool:
    """Whether a request for it would be taken: for this version, or for any. False where nobody knows the name."""
    return bool(
        _ask("Failed to check model readiness", IS_READY, (text_of("model_name", model_name), str(model_version)))
    )


def _ask(failed: str, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
    caller = caller_of(failed)
    try:
        return caller.ask(what, arguments, files)
    except FlowserveError as error:
        raise TritonModelException(f"{failed}: {error}") from None


def _bytes(model: str, name: Any, content: Any) -> bytes:
    if not isinstance(name, str):
        raise TritonModelException(f"failed to load model '{model}', the path of a file should be a string: {name!r}")
    if not isinstance(content, bytes | bytearray | memoryview):
        raise TritonModelException(f"failed to load model '{model}', the content of {name!r} should be bytes")
    return bytes(content)
