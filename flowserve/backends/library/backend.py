"""Makes a backend of a `Library`: completion, loading, and the place where instances run.

Decides which file of a version is used, whether its library is installed, that file and configuration are compared
before the first run, and that a library whose place is a worker process is not imported in the server: there a child
reads the signature of a file for the completion, and each instance opens the file in its own process. Elsewhere the
instances of a version share one open file. It does not know how a batch runs (instance.py).

Callers: the registry makes the backends; a worker process calls `signature_here` and `instance_here` by their entry
points.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

from flowserve.backends.base import ModelFiles, Remote
from flowserve.backends.cores import cores_allowed
from flowserve.backends.library.instance import LibraryInstance
from flowserve.backends.library.interface import Library, ModelSource, Program
from flowserve.backends.library.signature import Port, Signature, completion, file_disagreements, with_flat_controls
from flowserve.config.complete import RULE
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, Place, Problem, Problems, Unsupported
from flowserve.values import DType

log = logging.getLogger("flowserve.load")

T = TypeVar("T")

PROCESS: Final = "process"
PURE: Final = "pure"  # parameter: "false" for a file whose runs differ for the same inputs
_BY_WIRE: Final = {dtype.wire: dtype for dtype in DType}
_GIT_LFS: Final = b"version https://git-"


class LibraryBackend:
    """The backend of one library."""

    def __init__(self, library: Library) -> None:
        self.name = library.name
        self.default_filename = library.default_filename
        self.default_instance_count = library.instances
        self.default_execution = library.default_execution
        self._library = library

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        """As on Triton: no field for a configuration that names inputs and outputs, even if it lacks others."""
        return self.complete_by(config, files, lambda remote: remote.call())

    def complete_by(self, config: ModelConfig, files: ModelFiles, run: Callable[[Remote], Any]) -> Completion:
        """As `complete`, but the library is imported within `run`."""
        source = self._source(config, files, {})
        if config.inputs and config.outputs:
            return Completion()
        declared = run(Remote(f"{__name__}:signature_here", (self._library, source)))
        if "problems" in declared:
            raise Problems([Problem(text, Place(*where), "", hint) for text, where, hint in declared["problems"]])
        return completion(config, _decoded(declared), source.file)

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> LibraryModel:
        """Raises Invalid for a file that the library cannot open, Problems if file and configuration disagree;
        instances of a model that runs in processes raise these when they are opened.
        """
        source = self._source(config, files, options)
        for key, why in self._library.ignored.items():
            if key in config.parameters:
                log.warning("model '%s': parameter '%s' is not used: %s", config.name, key, why)
        is_apart = options.get("execution") == PROCESS
        opened = None if is_apart else open_program(self._library, source)
        return LibraryModel(self._library, source, opened)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        """Raises as `load`, for files that are read but not prepared for runs."""
        source = self._source(config, files, {})
        source.flag(PURE, True)
        _checked(source, _signature(self._library, source))

    def _source(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> ModelSource:
        """Raises Invalid if there is no file, Unsupported if the library is not installed."""
        library = self._library
        names = library.filenames(config)
        named = config.default_model_filename
        # The backend's default is filled in for a configuration that names no file.
        if not named or named == library.default_filename:
            named = next((name for name in names if (files.version_folder / name).exists()), names[0])
        try:
            path = files.model_file(replace(config, default_model_filename=named), library.default_filename)
        except Problems:
            raise
        except Invalid as missing:
            raise _at_file(files, files.version_folder / named, str(missing)) from None
        require_installed(library.modules(path), library.requirement, files, path)
        cores = cores_allowed()
        source = ModelSource(config, files, path, 1, options)
        instances = sum(group.count for group in config.instance_groups) or library.instances
        sharing = min(max(1, library.shares(source)), instances)
        # Instances that share a file have one set of threads.
        threads = max(1, sharing * cores // max(1, int(options.get("runs_at_once", "1"))))
        return replace(source, threads=min(threads, cores))


class LibraryModel:
    """One version of a model. `opened`: its open file and the configuration that its tensors follow; None if instances
    run in processes of their own.
    """

    def __init__(self, library: Library, source: ModelSource, opened: tuple[ModelConfig, Program] | None) -> None:
        self.is_pure = source.flag(PURE, True)
        self._shares = library.shares(source)
        self._secret = token_hex(16)
        self._numbers = count()  # numbers of instances in processes
        self.may_run_inline = opened is not None
        self._library = library
        self._source = source
        self._opened = opened

    def instance(self, name: str, group: InstanceGroup) -> LibraryInstance:
        return LibraryInstance(self._library, self._open)

    def remote(self, name: str, group: InstanceGroup) -> Remote:
        """Makes the instance in a worker process, which imports the library. Instances that share an open file are in
        one process, up to the number that the library allows.
        """
        if self._shares < 2:
            return Remote(f"{__name__}:instance_here", (self._library, self._source))
        secret = f"{self._secret}-{next(self._numbers) // self._shares}"
        return Remote(f"{__name__}:shared_instance_here", (self._library, self._source, secret), secret)

    def close(self) -> None:
        """The file is closed with its last reference."""
        self._opened = None

    def _open(self) -> tuple[ModelConfig, Program]:
        if self._opened is None:
            self._opened = open_program(self._library, self._source)
        return self._opened


def instance_here(library: Library, source: ModelSource) -> LibraryInstance:
    """The instance that `LibraryModel.instance` would make, in a process that runs this model only."""
    return LibraryInstance(library, partial(open_program, library, source))


def shared_instance_here(library: Library, source: ModelSource, secret: str) -> LibraryInstance:
    """As `instance_here`, for one of several instances of this process: those with the same secret share the file."""
    return LibraryInstance(library, partial(_shared.open, secret, partial(open_program, library, source)))


class _SharedPrograms:
    """The open files of this process, by secret. Used by its seats, each on a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, tuple[ModelConfig, Program]] = {}

    def open(self, secret: str, open_it: Callable[[], tuple[ModelConfig, Program]]) -> tuple[ModelConfig, Program]:
        with self._lock:
            if secret not in self._opened:
                self._opened[secret] = open_it()
            return self._opened[secret]


_shared = _SharedPrograms()


def signature_here(library: Library, source: ModelSource) -> dict[str, Any]:
    """The signature of a file as JSON values: name, data type or None, shape, is_optional and type of each of the
    "inputs" and "outputs"; or the "problems" of reading it, each with its text, place and hint.
    """
    try:
        signature = _signature(library, source)
    except Problems as wrong:  # an error of a task loses its places
        places = [one.place or Place(source.file) for one in wrong.problems]
        told = [
            [one.message, [at.file, at.line, at.column], one.hint]
            for one, at in zip(wrong.problems, places, strict=True)
        ]
        return {"problems": told}
    return {
        side: [[port.name, port.dtype and port.dtype.wire, port.shape, port.is_optional, port.type] for port in ports]
        for side, ports in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }


def _decoded(declared: Mapping[str, Any]) -> Signature:
    def ports(side: str) -> tuple[Port, ...]:
        return tuple(
            Port(name, _BY_WIRE.get(wire), tuple(shape), is_optional, kind)
            for name, wire, shape, is_optional, kind in declared[side]
        )

    return Signature(ports("inputs"), ports("outputs"))


def open_program(library: Library, source: ModelSource) -> tuple[ModelConfig, Program]:
    """The open file, and the configuration that its tensors follow. Raises Invalid, Problems or Unsupported."""
    program = _asked(library, source, library.open)
    return _checked(source, program.signature), program


def _signature(library: Library, source: ModelSource) -> Signature:
    return _asked(library, source, library.signature)


def _asked(library: Library, source: ModelSource, ask: Callable[[ModelSource], T]) -> T:
    """The result of asking the library about a file. Raises its errors as Problems at the file, or as Unsupported."""
    failed = f"failed to load '{source.config.name}' version {source.files.version}"
    try:
        return ask(source)
    except FlowserveError:
        raise
    except ImportError as error:  # it is installed, but incomplete, or not for this machine
        raise Unsupported(f"{failed}: {library.title} is installed and cannot be imported: {error}") from error
    except Exception as error:
        if not os.access(source.path, os.R_OK):
            why = "it cannot be read by the user that flowserve runs as"
        else:
            text = library.explain(error).replace(f"{source.files.repository}/", "")
            why = f"{library.title} cannot run it: {text}{_what_it_is(source.path)}"
        raise _at_file(source.files, source.path, f"{failed}: {why}") from error


def _at_file(files: ModelFiles, path: Path, text: str) -> Problems:
    return Problems([Problem(text, Place(files.shown(path)))])


def _what_it_is(path: Path) -> str:
    """A hint about a file that cannot be read, "" for none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        begins = file.read(20)
    if begins == _GIT_LFS:
        return "; it is a pointer of Git LFS: `git lfs pull` fetches the file itself"
    return f"; it has {path.stat().st_size} bytes, which begin with {begins!r}: copy or export it again"


def _checked(source: ModelSource, signature: Signature) -> ModelConfig:
    """The configuration that the file's inputs follow. Raises Problems with every disagreement."""
    config = with_flat_controls(source.config, signature)
    problems = [replace(problem, rule=RULE) for problem in file_disagreements(config, signature, source.file)]
    if problems:
        raise Problems(problems)
    return config


def require_installed(modules: Sequence[str], requirement: str, files: ModelFiles, path: Path) -> None:
    """Raises Unsupported, with the command that helps, if none of these modules is installed for a model's file."""
    if any(_is_installed(module) for module in modules):
        return
    install = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(requirement)}"
    what = f"{' or '.join(modules)}, which {'is' if len(modules) == 1 else 'are'} not installed"
    missing = Unsupported(f"{path.name} needs {what}: {install}")
    missing.place = Place(files.shown(path))
    raise missing


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # the module was replaced by one without a specification
        return False
