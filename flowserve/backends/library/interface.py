"""The interface that a library implements, so that backend.py can make a backend of it; and how it reads a model's
parameters.

A `Library` reads files of its formats: `signature` declares the tensors of a file, `open` prepares it for runs. Both
are called where the library runs, which may be a worker process, and are the only functions that import it. Everything
else about a `Library` is known without importing it. An object of such a class is pickled into worker processes: it has
no state of its own.

Errors of a library are turned into flowserve's by backend.py and instance.py, with `explain` for their text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flowserve.backends.base import ModelFiles
from flowserve.backends.library.run import Execute
from flowserve.backends.library.signature import Signature
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems

_OPENMP: Final = "OMP_WAIT_POLICY"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One version of a model for a library. `path`: its file or folder. `threads`: the instance's share of the cores,
    at least 1. `operator`: the operator's settings of this backend, which apply if the model has no parameter.
    """

    config: ModelConfig
    files: ModelFiles
    path: Path
    threads: int
    operator: Mapping[str, str]

    @property
    def file(self) -> str:
        """The path as messages show it."""
        return self.files.shown(self.path)

    def text(self, key: str, default: str = "") -> str:
        """The model's parameter of that name, else the operator's, else `default`."""
        return self.config.parameters.get(key, self.operator.get(key, default))

    def integer(self, key: str, default: int, minimum: int = 0) -> int:
        """A parameter that is a whole number. Raises Problems."""
        text = self.text(key, str(default)).strip()
        if text.removeprefix("-").isdecimal() and text.isascii() and int(text) >= minimum:
            return int(text)
        raise self.wrong(key, f"must be a whole number from {minimum} on, found '{text}'")

    def number(self, key: str, default: float) -> float:
        """A parameter that is a number. Raises Problems."""
        text = self.text(key, str(default))
        try:
            return float(text)
        except ValueError:
            raise self.wrong(key, f"must be a number, found '{text}'") from None

    def flag(self, key: str, default: bool) -> bool:
        """A parameter that is true or false. Raises Problems."""
        text = self.text(key, str(default)).strip().lower()
        if text in ("true", "1", "false", "0"):
            return text in ("true", "1")
        raise self.wrong(key, f"must be true or false, found '{text}'")

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        """A parameter with one of these values. Raises Problems."""
        text = self.text(key, default)
        if text in choices:
            return text
        hint = did_you_mean(text, choices) or f"it is one of {', '.join(choices)}"
        raise self.wrong(key, f"is '{text}'", hint)

    def wrong(self, key: str, what: str, hint: str = "") -> Problems:
        """The error for a parameter."""
        text = f"parameter '{key}' of model '{self.config.name}' {what}"
        return Problems([Problem(text, self.config.source.place(f"parameters[{key}]"), hint=hint)])


@contextmanager
def waiting_without_spinning() -> Iterator[None]:
    """A context for the first import of a library that uses OpenMP: its threads then sleep until there is work.
    Spinning threads would take the cores from other models and the server for some milliseconds after each run.
    """
    before = os.environ.get(_OPENMP)
    os.environ.setdefault(_OPENMP, "PASSIVE")  # OpenMP reads it when it is loaded
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OPENMP]  # models' processes inherit the environment


class Program(Protocol):
    """An open file, shared by the instances of one version in one process. Freed with its last reference."""

    signature: Signature

    def session(self) -> Execute:
        """The function that runs it for one instance. It takes names of outputs and the inputs by name, and returns the
        arrays of these outputs. It blocks, must not write to its inputs, and never writes to an array that it has
        returned; an output may be an input itself. Sessions of one program may run at the same time.
        """


class Library(Protocol):
    """A library that runs files. `name`: the backend's name; `title`: the library's, in messages. `requirement`:
    what to install for it. `default_execution`: "process" for a library that is not imported in the server, else
    "auto". `strings_are_text`: as in ModelTensors. `ignored`: parameters of Triton without effect here, each with the
    reason. `instances`: the default number of instances of a group.
    """

    name: str
    title: str
    requirement: str
    default_filename: str
    default_execution: str
    strings_are_text: bool
    ignored: Mapping[str, str]
    instances: int

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        """The files that a version may be, if its configuration does not name one; the first that exists is used. May
        raise Problems for a parameter that decides it.
        """

    def modules(self, path: Path) -> Sequence[str]:
        """The modules for this file in the order of preference; one of them is needed."""

    def shares(self, source: ModelSource) -> int:
        """How many instances in processes may share an open file, and so a process; 1 for a process for each. May raise
        Problems.
        """

    def signature(self, source: ModelSource) -> Signature:
        """The tensors of a file. Raises Problems for parameters; any error of the library for a file that it cannot
        read.
        """

    def open(self, source: ModelSource) -> Program:
        """The file, ready to run. Raises as `signature`."""

    def explain(self, error: Exception) -> str:
        """The text of one of the library's errors, on one line."""
