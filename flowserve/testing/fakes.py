"""Fake models: a graph under test with some of its models replaced by functions.

Decides that a fake keeps its model's configuration (tensors, batching, queues, number of instances) and replaces only
the computation, so that a pipeline can be tested on a machine that cannot load its models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.backends import registry
from flowserve.backends.functions import CallableBackend, offer
from flowserve.cli.target import PythonGraph, is_graph
from flowserve.config.load import CONFIG_FILE, draft_of, finish
from flowserve.config.parse import Parsed, config_fields, config_message, config_text
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import Invalid, NotFound, Place
from flowserve.graph.function_model import BACKEND, FunctionModel
from flowserve.repository.layout import ModelFolder, find_models
from flowserve.repository.override import PrivateFolder
from flowserve.repository.read import examine
from flowserve.runtime.loading.completion import complete
from flowserve.runtime.loading.reading import Reading, read_repositories
from flowserve.values import Array, TensorSpec

Source = PythonGraph | str | Path  # a graph in Python, or a repository's folder

# Configuration fields that refer to model files, which a fake does not have.
_OF_THE_FILES: Final = ("platform", "default_model_filename", "cc_model_filenames", "optimization", "model_warmup")


class FakeModel:
    """The replacement of a model. `calls` contains the input arrays of every batch, in order.

    `answer`: a function as for `flowserve.model`; an exception, which is raised; or None for zeros (variable dims are
    1). For a decoupled model it is a generator function, and None sends one response. The function of a sequence model
    gets controls and states as further arrays, and returns the states after the outputs.
    """

    def __init__(self, answer: Callable[..., Any] | Exception | None = None) -> None:
        is_class = isinstance(answer, type) and issubclass(answer, BaseException)
        if is_class or not (answer is None or callable(answer) or isinstance(answer, Exception)):
            raise Invalid(f"a fake answers what a function says, or raises an exception that is made, not {answer!r}")
        self.calls: list[tuple[Any, ...]] = []
        self._answer = answer

    @property
    def rows(self) -> list[int]:
        """The number of rows of each batch."""
        return [_rows(arrays) for arrays in self.calls]

    def function(self, config: ModelConfig) -> Callable[..., Any]:
        """The function that replaces the model of that configuration."""

        def run(*arrays: Any) -> Any:
            self.calls.append(arrays)
            if isinstance(self._answer, Exception):
                raise self._answer
            if self._answer is not None:
                return self._answer(*arrays)
            zeros = _zeros(config, _rows(arrays) if config.max_batch_size else -1)
            return [zeros] if config.decoupled else zeros

        return run


class Faked:
    """`source` with the models in `fakes` replaced. `Engine` and `simulate` accept it like a graph."""

    def __init__(self, source: Source, fakes: Mapping[str, FakeModel]) -> None:
        for name, fake in fakes.items():
            if not isinstance(fake, FakeModel):
                raise Invalid(f"a fake for '{name}' is a FakeModel, as in FakeModel(function), not {fake!r}")
        self._folder, self.name, self._kept = folder_of(source)
        self._fakes = fakes
        self._offered: list[FunctionModel] = []  # references that keep the functions alive

    def reading(self) -> Reading:
        """The repository with its fakes, read without serving it. Blocks. Raises as `write_private`."""
        return read_repositories([self.write_private().path])

    def write_private(self) -> PrivateFolder:
        """The repository with its fakes. Blocks. Raises NotFound for a fake of an unknown model, Problems."""
        folders = find_models([self._folder]).folders
        names = sorted(folder.name for folder in folders)
        for name in self._fakes:
            if name not in names:
                hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
                raise NotFound(f"a fake for '{name}', and there is no such model ({hint})")
        private = PrivateFolder()
        for folder in folders:
            if folder.name in self._fakes:
                self._write(private.path / folder.name, folder)
            else:
                (private.path / folder.name).symlink_to(folder.path.resolve())
        return private

    def _write(self, home: Path, folder: ModelFolder) -> None:
        fields = _fields(folder)
        for name in _OF_THE_FILES:
            fields.pop(name, None)
        count = sum(int(group.get("count", 1)) for group in fields.get("instance_group", [])) or 1
        fields |= {"name": folder.name, "backend": BACKEND, "instance_group": [{"count": count, "kind": "KIND_CPU"}]}
        message = config_message({**fields, "parameters": {}}, folder.name)
        parsed = Parsed(message, SourceMap(folder.name))
        config = finish(draft_of(parsed, folder.path, registry.default_files()), None)
        model = FunctionModel(
            self._fakes[folder.name].function(config),
            name=folder.name,
            inputs=config.inputs,
            outputs=config.outputs,
            max_batch_size=config.max_batch_size,
            max_queue_delay_us=0,
            instances=count,
            execution="thread",
            is_pure=False,
            decoupled=config.decoupled,
            place=Place(folder.name),
        )
        self._offered.append(model)
        fields.pop("parameters", None)
        for version in folder.versions or (1,):
            (home / str(version)).mkdir(parents=True)
            (home / str(version) / CallableBackend.default_filename).write_text(offer(model), encoding="utf-8")
        (home / CONFIG_FILE).write_text(config_text(fields, folder.name), encoding="utf-8")


def folder_of(source: Source) -> tuple[Path, str, object]:
    """The repository, the name of its graph ("" if `source` is a folder), and the owner of a private folder, which the
    caller keeps. Blocks. Raises Problems.
    """
    if isinstance(source, str | Path):
        return Path(source), "", None
    if not is_graph(source):
        raise Invalid(f"models are in a repository's folder or in a graph, not in {source!r}")
    private = source.write_private()
    return private.path, source.name, private


def _fields(folder: ModelFolder) -> dict[str, Any]:
    """The fields of the configuration; the model's file is read only if the configuration has no tensors."""
    path = folder.path / CONFIG_FILE
    if path.is_file():
        fields, _ = config_fields(path.read_text(encoding="utf-8"), f"{folder.name}/{CONFIG_FILE}")
        if fields.get("input") and fields.get("output"):
            return fields
    return dict(examine(folder, registry.default_files(), complete).valid().config.json)


def _rows(arrays: Sequence[Any]) -> int:
    """The number of rows of a batch. An optional input may be missing, a ragged one is a list."""
    first = next((array for array in arrays if array is not None), ())
    return sum(map(len, first)) if isinstance(first, list) else len(first)


def _zeros(config: ModelConfig, rows: int) -> tuple[Array, ...]:
    batch = () if rows < 0 else (rows,)
    made = []
    listed = [spec.name for spec in config.outputs]
    states = config.sequence.states if config.sequence else ()
    for spec in (*config.outputs, *(TensorSpec(s.output, s.dtype, s.dims) for s in states if s.output not in listed)):
        shape = (*batch, *(max(dim, 1) for dim in spec.dims))
        made.append(np.full(shape, b"", np.object_) if not spec.dtype.itemsize else np.zeros(shape, spec.dtype.numpy))
    return tuple(made)
