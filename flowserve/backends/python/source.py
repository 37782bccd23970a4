"""The code of a Python model: its files, their import, and calls into it outside `execute`.

Decides which files are a model's code; that an instance that is restarted runs the code as it was when the model was
loaded (the files on disk may be half of the next version); the arguments of `initialize`; and how failures of the
import, of `initialize`, `finalize` and `auto_complete_config` are reported: with the line that raised in the message,
and the model's traceback in the log only. Other files, such as weights, are read by the model itself.

Each instance gets a new module, also for every file that it imports from its own folders: two models that both `import
helper` get different modules, two instances share none. `from .helper import x` and `import helper` both work, from the
version's folder and from the model's folder, as on Triton; installed packages have precedence, as there. `sys.path` is
not changed: import finders look in the folders of the thread's active model (pb_utils/context.py). In the server, such
modules leave `sys.modules` when the model's code returns, since another model may have a file of the same name; the
modules that imported them keep references. In a process that runs one model only they stay, as on Triton, so that a
module that is imported again or found by name (by pickle, by annotations) is the same object. Models import
`triton_python_backend_utils` and `c_python_backend_utils`, which are the modules of these names in pb_utils/.

Callers: backend.py and instance.py.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, module_from_spec, spec_from_file_location, spec_from_loader
from itertools import count
from pathlib import Path
from traceback import extract_tb
from types import CodeType, ModuleType
from typing import Any, Final

from flowserve.backends.base import ModelFiles
from flowserve.backends.python.pb_utils import c_python_backend_utils as c_pb_utils
from flowserve.backends.python.pb_utils import triton_python_backend_utils as pb_utils
from flowserve.backends.python.pb_utils.context import NO_CODE, Code, ModelContext, ModelScope, active
from flowserve.config.parameters import ENVIRONMENT, MARKS
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import NO_PERMISSION, FlowserveError, ModelFailed, Place, Problem, Problems

log = logging.getLogger("flowserve.python")

CLASS: Final = "TritonPythonModel"
NO_TEXT: Final = "<EMPTY MESSAGE>"  # Triton's, for an exception without a text
MODEL_FILE: Final = "model.py"
# All exceptions of a model are its own failures, including sys.exit() and asyncio.CancelledError: they must not end the
# thread that runs it, because requests would wait for that thread for ever.
RAISED: Final = BaseException

# A model with more files (an environment of its own, for example) is read from disk at each start.
_BYTES_MAX: Final = 8 << 20
_FILES_MAX: Final = 2000

# The package that a model's relative imports are relative to; a number follows.
_PACKAGE: Final = "_flowserve_model_"

_numbers = count()
_prefix = os.path.join(sys.prefix, "")  # of the Python environment
# One import at a time: while `helper` of one model is imported, its name is in sys.modules.
_importing = threading.RLock()


def code_in(folder: Path, version_folder: Path) -> Code:
    """The Python files of a version, and those that all versions of the model share. Blocks. A file that cannot be read
    is left out: its import reports it.
    """
    code: dict[str, bytes] = {}
    nbytes = 0
    for path in _files(folder, version_folder):
        try:
            code[path] = Path(path).read_bytes()
        except OSError:
            continue
        nbytes += len(code[path])
        if nbytes > _BYTES_MAX or len(code) > _FILES_MAX:
            return NO_CODE
    return code


def _files(folder: Path, version_folder: Path) -> Iterator[str]:
    for top in (version_folder, folder):
        for here, folders, files in os.walk(top):
            is_model = here == str(folder)
            if any(mark in folders or mark in files for mark in MARKS):
                folders.clear()  # a Python environment: thousands of files, but no code of the model
                continue
            folders[:] = [name for name in folders if name != "__pycache__" and not (is_model and name.isdecimal())]
            for name in files:
                if name.endswith(".py"):
                    yield os.path.join(here, name)


class ModelSource:
    """The code of one version. `code`: the files as they were when the model was loaded; others are read from disk.
    `strict_outputs`: its outputs must be those of the configuration.
    """

    def __init__(
        self, config: ModelConfig, files: ModelFiles, code: Code = NO_CODE, *, strict_outputs: bool = False
    ) -> None:
        self.config = config
        self.strict_outputs = strict_outputs
        self.files = files
        self.path: Path = files.model_file(config, MODEL_FILE)
        self.shown = files.shown(self.path)
        # Both folders are searched, in this order, as on Triton.
        self.context = ModelContext(config.name, (str(self.path.parent), str(files.folder)), code)

    def text(self) -> str:
        """The text of the model's file, in the encoding that it declares. Raises Problems if it is not valid Python, or
        cannot be read. The syntax is not checked for a model with an environment of its own, whose Python may be
        another version.
        """
        try:
            known = self.context.code.get(str(self.path))
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
            hint = NO_PERMISSION if isinstance(error, PermissionError) else ""
            text = f"model '{self.config.name}' cannot be read: {why}"
            raise Problems([Problem(text, Place(self.shown), hint=hint)]) from error
        try:
            return decode_source(raw)
        except UnicodeDecodeError:  # in a comment: Python's import does not decode comments
            return raw.decode(errors="replace")

    def import_fresh(self) -> ModuleType:
        # Models import the modules by these names.
        sys.modules["triton_python_backend_utils"] = pb_utils
        sys.modules["c_python_backend_utils"] = c_pb_utils
        with self.running("import"):
            return _import_model(self.path, self.context)

    def model_class(self, module: ModuleType) -> Any:
        found = getattr(module, CLASS, None)
        if found is None:
            raise self.no_class()
        return found

    def no_class(self) -> Problems:
        """The problem of a file without the class, with the line of the class that is probably meant to be it."""
        try:
            classes = [node for node in ast.parse(self.text()).body if isinstance(node, ast.ClassDef)]
        except SyntaxError:  # for the Python version of the model's own environment
            classes = []
        place, hint = Place(self.shown), f"write a class {CLASS} with a method execute"
        if len(classes) == 1:
            place = Place(self.shown, classes[0].lineno, classes[0].col_offset + 1)
            hint = f"call class {classes[0].name} {CLASS}"
        return Problems([Problem(f"model '{self.config.name}' has no class {CLASS}", place, hint=hint)])

    def check_execute(self, text: str) -> None:
        """Raises Problems if the class of the file, with this text, can have no `execute`: it neither defines nor
        mentions one, and inherits from nothing. Code for another version of Python is not examined.
        """
        try:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == CLASS]
        except SyntaxError:
            return
        if len(classes) == 1 and not (classes[0].bases or classes[0].keywords) and "execute" not in text:
            place = Place(self.shown, classes[0].lineno, classes[0].col_offset + 1)
            hint = "write def execute(self, requests), which returns a list with a response for each request"
            raise Problems(
                [Problem(f"model '{self.config.name}': class {CLASS} has no method execute", place, hint=hint)]
            )

    def arguments(self, instance: str, group: InstanceGroup) -> dict[str, str]:
        """The argument of `initialize`: all strings, as on Triton."""
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
        """Context manager around a call into the model other than `execute`. An exception of the model is logged with
        its traceback, and becomes ModelFailed with the name of the call and the line.
        """
        try:
            with ModelScope(self.context):
                yield
        except FlowserveError:
            raise
        except RAISED as error:
            log.error("model '%s': %s failed", self.config.name, what, exc_info=error)
            place = self.raised_at(error)
            hint = ""
            if isinstance(error, ModuleNotFoundError):
                where_not = f"neither beside {MODEL_FILE} nor in the Python environment at {sys.prefix}"
                hint = f" (it is {where_not}: install it there)"
            elif isinstance(error, FileNotFoundError) and error.filename and not os.path.isabs(error.filename):
                hint = " (a relative path starts at the server's folder; args['model_repository'] is the model's)"
            failed = ModelFailed(f"model '{self.config.name}' ({line_of(place)}): {what} failed: {reason(error)}{hint}")
            failed.place = place
            raise failed from error

    def raised_at(self, error: BaseException) -> Place:
        """The model's own line from which an exception came; the model's file if no line of it is in the traceback."""
        lines = reversed(extract_tb(error.__traceback__))
        line = next((one for one in lines if _is_own(self.context, one.filename)), None)
        if line is None:
            return Place(self.shown)
        return Place(self.files.shown(Path(line.filename)), line.lineno or 1, 1)


def line_of(place: Place) -> str:
    """The file and line of a place, without the column, which a traceback does not have."""
    return f"{place.file}:{place.line}" if place.line else place.file


def reason(error: BaseException) -> str:
    """The text of an exception that a model raised. Relative imports are shown as the model wrote them (`.helper`)."""
    try:
        text = re.sub(_PACKAGE + r"\d+\.", ".", str(error))
    except RAISED:  # a class of the model's own
        text = ""
    return f"{type(error).__name__}: {text or NO_TEXT}"


class _FreshLoader(SourceFileLoader):
    """Reads the source each time. Python's own cache would be written into the user's repository, and it compares files
    by whole seconds and length only: a reload could get the old code.
    """

    def __init__(self, fullname: str, path: str, code: Code) -> None:
        super().__init__(fullname, path)
        self._code = code

    def get_data(self, path: str) -> bytes:
        known = self._code.get(path)
        return super().get_data(path) if known is None else known

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _RelativeFinder:
    """Finds modules in packages of the active model. First of all finders, so that modules are read again for each
    instance.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        context = active.context
        if path is None or context is None or not any(_is_own(context, one) for one in path):
            return None
        return _spec_of(name, path, target, context)


class _SiblingFinder:
    """Finds top-level modules in the folders of the active model. Last of all finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        context = active.context
        if path is not None or context is None:
            return None
        spec = _spec_of(name, context.folders, target, context)
        if spec is not None and not active.owns_process:
            active.siblings.append(name)
        return spec


def _is_own(context: ModelContext, path: str) -> bool:
    """Whether a file is the model's own code. Files of a Python environment inside its folder are not."""
    return path.startswith(context.folders) and not (_prefix.startswith(context.folders) and path.startswith(_prefix))


def _spec_of(name: str, path: Sequence[str], target: ModuleType | None, context: ModelContext) -> ModuleSpec | None:
    """The module among the files that were read when the model was loaded, since files on disk may have changed; else
    the one on disk.
    """
    last = name.rpartition(".")[2]
    for folder in path:
        for file, inside in ((f"{folder}/{last}/__init__.py", [f"{folder}/{last}"]), (f"{folder}/{last}.py", None)):
            if file in context.code:
                loader = _FreshLoader(name, file, context.code)
                return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)
    spec = PathFinder.find_spec(name, path, target)
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _FreshLoader(spec.loader.name, spec.loader.path, context.code)
    return spec


def _import_model(file: Path, context: ModelContext) -> ModuleType:
    """Import `file` as a new module. Raises what its code raises."""
    if _SiblingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _RelativeFinder)
        sys.meta_path.append(_SiblingFinder)
    package = f"{_PACKAGE}{next(_numbers)}"
    # The package that relative imports of the file are relative to.
    sys.modules[package] = parent = ModuleType(package)
    parent.__path__ = list(context.folders)
    name = f"{package}.{file.stem}"
    loader = _FreshLoader(name, str(file), context.code)
    spec = spec_from_loader(name, loader)
    assert spec is not None  # a loader that knows its file always has one
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing, ModelScope(context):
            loader.exec_module(module)
    except BaseException:
        forget_model(module)
        raise
    return module


def forget_model(module: ModuleType) -> None:
    """Remove the module, its package and its relative imports from sys.modules."""
    package = module.__name__.partition(".")[0]
    for name in list(sys.modules):  # a copy: other threads change it meanwhile
        if name == package or name.startswith(f"{package}."):
            sys.modules.pop(name, None)
