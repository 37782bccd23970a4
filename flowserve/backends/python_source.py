"""A Python model's code: where it is, what can be told of it unrun, and how it is brought to life.

Decided here: which file it is, what `initialize` is told, and what failures become that are not `execute`'s: those of
the import, of `initialize`, `finalize` and `auto_complete_config`. Models import `triton_python_backend_utils`, which
is our module of that name. A model's own traceback goes to the log, never into an answer.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flowserve.backends import triton_python_backend_utils as pb_utils
from flowserve.backends.base import ModelFiles
from flowserve.backends.files import model_file, relative
from flowserve.backends.python_code import NO_CODE, Code
from flowserve.backends.python_import import PACKAGE, Owner, WorkingFor, import_model, raised_at
from flowserve.config.environments import ENVIRONMENT
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, ModelFailed, Place, Problem, Problems

log = logging.getLogger("flowserve.python")

CLASS: Final = "TritonPythonModel"
MODEL_FILE: Final = "model.py"
# What a model may raise without ending the thread it runs on: everything. Its sys.exit() and its asyncio.CancelledError
# are its own failure too, and behind a dead thread requests would wait for ever.
RAISED: Final = BaseException


class Source:
    """Where a model's code is, and how it is brought to life. `code`: as it was loaded; what is not in it is read."""

    def __init__(self, config: ModelConfig, files: ModelFiles, code: Code = NO_CODE) -> None:
        self.config = config
        self.files = files
        self.path: Path = model_file(config, files, MODEL_FILE)
        self.shown = relative(self.path, files)
        # Both, in this order, as on Triton.
        self.owner = Owner(config.name, [str(self.path.parent), str(files.folder)], code=code)

    def text(self) -> str:
        """The file, in whichever encoding it says that it has. Raises Problems where it is not Python, or cannot be
        read. What a model brings an environment for is Python where that says so, whose version may be another.
        """
        try:
            known = self.owner.code.get(str(self.path))
            raw = self.path.read_bytes() if known is None else known
            compile(raw, self.shown, "exec", dont_inherit=True)
        except SyntaxError as error:
            if self.config.parameters.get(ENVIRONMENT):
                return raw.decode(errors="replace")
            place = Place(self.shown, max(error.lineno or 1, 1), max(error.offset or 1, 1))
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            text = f"model '{self.config.name}' is not valid Python {version}: {error.msg}"
            raise Problems([Problem(text, place)]) from error
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            raise Problems([Problem(f"model '{self.config.name}' cannot be read: {why}", Place(self.shown))]) from error
        try:
            return decode_source(raw)
        except UnicodeDecodeError:  # in a comment, which Python's import does not decode
            return raw.decode(errors="replace")

    def mentions(self, name: str) -> bool:
        """Whether the name stands anywhere in the model's code, as far as that is known."""
        return any(name.encode() in text for text in self.owner.code.values() or [self.path.read_bytes()])

    def import_fresh(self) -> ModuleType:
        # Other people's models are written for a module of this name, wherever it comes from.
        sys.modules["triton_python_backend_utils"] = pb_utils
        with self.running("import"):
            return import_model(self.path, self.owner)

    def model_class(self, module: ModuleType) -> Any:
        found = getattr(module, CLASS, None)
        if found is None:
            raise self.no_class()
        return found

    def no_class(self) -> Problems:
        return Problems([Problem(f"model '{self.config.name}' has no class {CLASS}", Place(self.shown))])

    def arguments(self, instance: str, group: InstanceGroup) -> dict[str, str]:
        """What `initialize` gets, all strings, as on Triton."""
        return {
            "model_config": json.dumps(self.config.json),
            "model_instance_kind": group.kind.removeprefix("KIND_"),
            "model_instance_name": instance,
            "model_instance_device_id": str(group.gpus[0] if group.gpus else 0),
            "model_repository": str(self.files.folder),
            "model_version": str(self.files.version),
            "model_name": self.config.name,
        }

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Around a call into the model that is not `execute`: failures name it and keep their traceback to the log."""
        try:
            with WorkingFor(self.owner):
                yield
        except FlowserveError:
            raise
        except RAISED as error:
            log.error("model '%s': %s failed", self.config.name, what, exc_info=error)
            where, place = self.shown, Place(self.shown)
            if (line := raised_at(error, self.owner)) is not None:
                place = Place(relative(Path(line.filename), self.files), line.lineno or 1, 1)
                where = f"{place.file}:{place.line}"
            failed = ModelFailed(f"model '{self.config.name}' ({where}): {what} failed: {reason(error)}{_hint(error)}")
            failed.place = place
            raise failed from error


def _hint(error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f" (it is neither beside {MODEL_FILE} nor in the Python environment at {sys.prefix}: install it there)"


def reason(error: BaseException) -> str:
    """What a model raised, as clients and the log read it; what it wrote as `.helper` is told as that."""
    text = re.sub(PACKAGE + r"\d+\.", ".", str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
