"""A library without a package: its files are JSON with an expression for each output.

Decides what such a file declares, and that expressions can use the inputs by name (None for a missing one), `np`, `os`
and `time`. It records nothing: tests observe it through the backend template only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from flowserve.backends.library.backend import LibraryBackend
from flowserve.backends.library.interface import ModelSource
from flowserve.backends.library.run import Execute, Feed
from flowserve.backends.library.signature import Port, Signature
from flowserve.config.types import ModelConfig
from flowserve.values import BY_WIRE, DType

# Set by tests: how the outputs are exported by DLPack; None: they are arrays.
EXPORTS: Callable[[Any], Any] | None = None


class FakeLibrary:
    name = "fake"
    title = "Fake"
    requirement = "flowserve[fake]"
    default_filename = "model.fake"
    default_execution = "auto"
    strings_are_text = False
    instances = 1
    needed: Sequence[str] = ("json",)
    ignored: Mapping[str, str] = MappingProxyType({"HINT": "it is one"})

    def filenames(self, config: ModelConfig) -> Sequence[str]:
        return ["model.fake", "model.other"]

    def modules(self, path: Path) -> Sequence[str]:
        return self.needed

    def shares(self, source: ModelSource) -> int:
        return source.integer("SHARES", 1, 1)

    def signature(self, source: ModelSource) -> Signature:
        return self.open(source).signature

    def open(self, source: ModelSource) -> FakeProgram:
        source.integer("SEATS", 1, 1)
        return FakeProgram(source)

    def explain(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"


class ProcessLibrary(FakeLibrary):
    """The same library, imported in worker processes only."""

    name = "fake_process"
    default_execution = "process"


class MissingLibrary(FakeLibrary):
    name = "missing"
    needed = ("no_such_module_1", "no_such_module_2")


class FakeProgram:
    def __init__(self, source: ModelSource) -> None:
        declared = json.loads(source.path.read_text())
        self.threads = source.threads
        self._expressions = {name: compile(text, name, "eval") for name, text in declared["expressions"].items()}
        self._inputs = [name for name, *_ in declared["inputs"]]
        self.signature = Signature(*(tuple(map(_port, declared[side])) for side in ("inputs", "outputs")))

    def session(self) -> Execute:
        def run(names: list[str], feed: Feed) -> Sequence[Any]:
            if EXPORTS is not None:  # a library that takes its inputs by DLPack
                feed = {name: np.from_dlpack(array) for name, array in feed.items()}
            known = {
                "np": np,
                "os": os,
                "time": time,
                "bfloat16": DType.BF16.numpy,
                **dict.fromkeys(self._inputs),
                **feed,
            }
            made = [np.asarray(eval(self._expressions[name], known)) for name in names]
            return made if EXPORTS is None else [EXPORTS(array) for array in made]

        return run


def _port(declared: Sequence[Any]) -> Port:
    name, wire, shape, *optional = declared
    return Port(name, BY_WIRE.get(wire), tuple(shape), bool(optional), wire)


def fake_file(
    inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]], expressions: Mapping[str, str]
) -> str:
    """The text of a file: data type and shape of each tensor, a third element for an optional input."""
    sides = {"inputs": inputs, "outputs": outputs}
    declared = {side: [[name, *one] for name, one in tensors.items()] for side, tensors in sides.items()}
    return json.dumps({**declared, "expressions": dict(expressions)})


def make_fake() -> LibraryBackend:
    return LibraryBackend(FakeLibrary())


def make_process() -> LibraryBackend:
    return LibraryBackend(ProcessLibrary())


def make_missing() -> LibraryBackend:
    return LibraryBackend(MissingLibrary())
