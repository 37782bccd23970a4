"""A model.py in a namespace of its own.

Decided here: how the file of a Python model becomes a module. Each instance gets a fresh one, and so does every file
that it imports from beside itself: two models that both `import helper` get their own, two instances share nothing.
`from .helper import x` and `import helper` both work, from the version's folder and from the model's folder, as on
Triton; installed packages come first, as there. `sys.path` is left alone.

Files beside a model are found while the model is imported, initialised, or run, by a finder that asks which model
this thread works for. They leave `sys.modules` again afterwards, since another model's may have the same name: whoever
imported them holds them. In a process that is one model's they stay, as on Triton: what is imported again, or looked up
by its module's name (pickles, types written as text), is the same thing. This file does not know what a model's class
looks like.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from itertools import count
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Final

from flowserve.backends.python_code import NO_CODE, Code

if TYPE_CHECKING:
    from flowserve.backends.base import Caller
    from flowserve.backends.python_calls import ModelCalls

# What a model's relative imports are relative to, before its number.
PACKAGE: Final = "_flowserve_model_"

_numbers = count()
_prefix = os.path.join(sys.prefix, "")  # of the environment that this Python is
# Two models may not look for a `helper` at the same time: the name stands in sys.modules while it is imported.
_importing = threading.RLock()


class Owner:
    """The model that a thread works for: its name, the folders that its imports look in, what it calls other models
    through, where it may, its files as they were when it was loaded (python_code.py), and how it reaches the server,
    where it can.
    """

    __slots__ = ("caller", "calls", "code", "folders", "model")

    def __init__(
        self,
        model: str,
        folders: Sequence[str],
        calls: ModelCalls | None = None,
        code: Code = NO_CODE,
        caller: Caller | None = None,
    ) -> None:
        self.model = model
        self.folders = tuple(folders)
        self.calls = calls
        self.code = code
        self.caller = caller

    def has(self, path: str) -> bool:
        """Whether a file is the model's own code: a Python environment that lies in its folder is not."""
        return path.startswith(self.folders) and not (_prefix.startswith(self.folders) and path.startswith(_prefix))


class _Scope(threading.local):
    """What this thread does just now. On threads that a model starts itself: nobody's work, but in a process that is
    one model's (`adopt`).
    """

    owner: Owner | None = None
    keeps = False  # whether there is nobody else whose modules might have the same names (`adopt`)

    def __init__(self) -> None:
        self.found: list[str] = []  # modules that were found beside the owner, to be forgotten

    @property
    def model(self) -> str:
        """The owner's name, or ""."""
        return "" if self.owner is None else self.owner.model


scope = _Scope()


def adopt(owner: Owner) -> None:
    """This process is one model's: all its threads work for it, and what it has imported stays so."""
    _Scope.owner = owner
    _Scope.keeps = True


class WorkingFor:
    """Around code of a model: log messages carry its name, imports find the files beside it."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._before = scope.owner
        scope.owner = self._owner

    def __exit__(self, *_: object) -> None:
        scope.owner = self._before
        if scope.found:
            _forget_siblings()


class _FreshLoader(SourceFileLoader):
    """Reads the source every time. Python's own cache would be written into the user's repository, and it tells an
    edited file from the old one by whole seconds and length only: a reload could bring the old code back.
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
    """Finds what lies in packages of this thread's model: first of all, so that it is read fresh."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        owner = scope.owner
        if path is None or owner is None or not any(map(owner.has, path)):
            return None
        return _known(name, path, owner) or _fresh(PathFinder.find_spec(name, path, target), owner)


class _SiblingFinder:
    """Finds top-level modules in the folders of this thread's model, after everything else failed to."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        owner = scope.owner
        if path is not None or owner is None:
            return None
        spec = _known(name, owner.folders, owner) or _fresh(PathFinder.find_spec(name, owner.folders, target), owner)
        if spec is not None and not scope.keeps:
            scope.found.append(name)
        return spec


def _known(name: str, path: Sequence[str], owner: Owner) -> ModuleSpec | None:
    """Of the files that the model was loaded with, whatever lies on disk by now."""
    last = name.rpartition(".")[2]
    for folder in path:
        for file, inside in ((f"{folder}/{last}/__init__.py", [f"{folder}/{last}"]), (f"{folder}/{last}.py", None)):
            if file in owner.code:
                loader = _FreshLoader(name, file, owner.code)
                return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)
    return None


def _fresh(spec: ModuleSpec | None, owner: Owner) -> ModuleSpec | None:
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _FreshLoader(spec.loader.name, spec.loader.path, owner.code)
    return spec


def import_model(file: Path, owner: Owner) -> ModuleType:
    """Run `file` as a new module. Raises whatever it raises."""
    if _SiblingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _RelativeFinder)
        sys.meta_path.append(_SiblingFinder)
    package = f"{PACKAGE}{next(_numbers)}"
    # A package around the file, so that relative imports have something to be relative to.
    sys.modules[package] = parent = ModuleType(package)
    parent.__path__ = list(owner.folders)
    name = f"{package}.{file.stem}"
    loader = _FreshLoader(name, str(file), owner.code)
    spec = spec_from_loader(name, loader)
    assert spec is not None  # a loader that knows its file always has one
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing, WorkingFor(owner):
            loader.exec_module(module)
    except BaseException:
        forget_model(module)
        raise
    return module


def raised_at(error: BaseException, owner: Owner) -> FrameSummary | None:
    """The innermost line of the model's own files that an exception came through; None where there is none."""
    lines = reversed(extract_tb(error.__traceback__))
    return next((line for line in lines if owner.has(line.filename)), None)


def forget_model(module: ModuleType) -> None:
    """Take the module and its relatives out of sys.modules."""
    package = module.__name__.partition(".")[0]
    for name in list(sys.modules):  # in one go: other threads import and forget theirs meanwhile
        if name == package or name.startswith(f"{package}."):
            sys.modules.pop(name, None)


def _forget_siblings() -> None:
    found = tuple(scope.found)
    scope.found.clear()
    for name in list(sys.modules):
        if name.partition(".")[0] in found:
            sys.modules.pop(name, None)
