"""Graphs as files: writes a graph built in Python as a repository, permanent or private, and reads a graph from one.

Decides the contents of each file. Both kinds of repository have the same configurations. The permanent one has copies
of the models' files and imports functions from their modules; the private one links to the user's files and refers to
the function objects. Decides also that an ensemble that is read becomes a graph whose steps are wired by name, any
other deployment a part that refers to its folder. Places in messages stay those of the files. The caller,
`authoring/graph`, passes the class of graphs.

Parts of a graph that are files are an ONNX file, or the folder of a deployment. Decides: such a model is read when it
is named, because its tensors must be known for wiring, and its errors are reported at that line of Python. A single
ONNX file gets a private folder for this process. Callers: user programs.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from flowserve.backends import registry
from flowserve.backends.functions import offer
from flowserve.config.convert import to_config
from flowserve.config.load import CONFIG_FILE, note_author
from flowserve.config.parse import config_fields, config_message, config_text, read_text
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ITEMS_MAX, EnsembleStep, SourceMap
from flowserve.errors import Invalid, Place, Problem, Problems
from flowserve.graph.builder import (
    DeclaredPart,
    GraphBuilder,
    GraphOutput,
    Items,
    Part,
    StepCall,
    Tensor,
    TensorTest,
    calling_line,
)
from flowserve.graph.function_model import FunctionModel
from flowserve.repository.layout import KEEP, is_model_folder, model_folder_at, scan
from flowserve.repository.override import PrivateFolder, check_name
from flowserve.repository.read import ReadModel, examine
from flowserve.runtime.loading.completion import complete
from flowserve.runtime.loading.reading import verify


class FolderModel(Part):
    """A model in a folder `path`, laid out as in a repository."""

    def __init__(self, path: Path, place: Place, private: PrivateFolder | None = None) -> None:
        self.name = path.name
        self.path = path
        self.place = place
        self._private = private  # owns the folder, which is removed with it
        self.read = self._read()
        config = self.read.config
        self.inputs, self.outputs, self.max_batch_size = config.inputs, config.outputs, config.max_batch_size

    def __repr__(self) -> str:
        return f"<model {self.name!r} of {self.read.config.backend}>"

    def _read(self) -> ReadModel:
        if not is_model_folder(self.path):
            text = f"'{self.path}' is no model's folder: neither {CONFIG_FILE} nor a version folder is in it"
            raise Problems([Problem(text, self.place, "B4")])
        try:
            read = examine(model_folder_at(self.path), registry.default_files(), complete).valid()
            verify(read)
        except Problems as problems:
            if self._private is None:
                raise
            # The place is in a generated file; report the user's call instead.
            raise Problems([replace(problem, place=self.place) for problem in problems.problems]) from None
        if self._private is not None:
            source = SourceMap(self.place.file, dict.fromkeys(read.config.json, self.place))
            read = replace(read, config=replace(read.config, source=source))
        if read.config.is_ensemble:
            text = f"'{self.path}' is the folder of a graph"
            raise Problems([Problem(text, self.place, "B4", "flowserve.Graph.load makes it a part of another")])
        return read


def onnx_model(
    file: str | Path,
    *,
    name: str = "",
    max_batch_size: int | None = None,
    max_queue_delay_us: int = 0,
    instances: int = 0,
) -> FolderModel:
    """The model of an ONNX file, with the file's tensors. Blocks while it is read. Raises Problems.

    `name` defaults to the file's name. `max_batch_size` None: as in a repository, 4 with the dynamic batcher if the
    first dimensions in the file vary, else 0; above 0: the dynamic batcher with batches of up to that many rows.
    `instances` 0: the default of onnxruntime models.
    """
    place, path = calling_line(), Path(file).resolve()
    if not path.is_file():
        hint = did_you_mean(path.name, [one.name for one in path.parent.glob("*.onnx")])
        if not hint and not Path(file).is_absolute():
            hint = f"a relative path starts at the current folder, {Path.cwd()}"
        raise Problems([Problem(f"there is no file '{file}'", place, "B4", hint)])
    try:
        config: dict[str, Any] = {"name": check_name(name or path.stem), "backend": "onnxruntime"}
    except Invalid as error:
        raise Problems([Problem(str(error), place, "B9")]) from None
    if max_batch_size is not None:
        config["max_batch_size"] = max_batch_size
    if max_batch_size:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": max_queue_delay_us} if max_queue_delay_us else {}
    if instances:
        config["instance_group"] = [{"count": instances}]
    private = PrivateFolder()
    home = private.path / config["name"]
    (home / "1").mkdir(parents=True)
    (home / CONFIG_FILE).write_text(config_text(config, home.name), encoding="utf-8")
    (home / "1" / "model.onnx").symlink_to(path)
    for beside in path.parent.glob(f"{path.name}?*"):  # external weights next to the file: net.onnx.data
        (home / "1" / beside.name).symlink_to(beside)
    return FolderModel(home, place, private)


def model_folder(path: str | Path) -> FolderModel:
    """The model in a folder laid out as in a repository: config.pbtxt, and 1/model.py, 1/model.onnx or another file.

    Its name is the folder's. Blocks while it is read. Raises Problems.
    """
    return FolderModel(Path(path).resolve(), calling_line())


SavedPart = FolderModel | DeclaredPart  # all kinds of parts
VERSION: Final = "1"
SCHEDULING: Final = "ensemble_scheduling"
# Fields of the configuration that a graph has in another form.
_WIRED: Final = frozenset({"name", "platform", "max_batch_size", "input", "output"})
G = TypeVar("G", bound=GraphBuilder)

# Writing


def write_private(parts: Sequence[SavedPart], private: PrivateFolder) -> None:
    """Write all parts into an empty folder, for this process only. Blocks."""
    for part in parts:
        home = private.path / part.name
        if isinstance(part, FolderModel):
            home.symlink_to(part.path)
        else:
            _write(home, part, offer)
            note_author(home, part.source(), private)


def write_to_keep(parts: Sequence[SavedPart], folder: Path) -> None:
    """Write all parts into a repository, which may hold other deployments. Blocks. Raises Problems before anything is
    written.
    """
    problems = [*_existing(parts, folder), *_not_importable(parts)]
    if problems:
        raise Problems(problems)
    for part in parts:
        home = folder / part.name
        if isinstance(part, FolderModel):
            shutil.copytree(part.path, home, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            _write(home, part, _import_of)


def _write(home: Path, part: DeclaredPart, program_of: Callable[[FunctionModel], str]) -> None:
    (home / VERSION).mkdir(parents=True)
    for path, content in _files(part, program_of):
        (home / path).write_bytes(content)


def contents(parts: Sequence[SavedPart]) -> dict[str, dict[str, bytes]]:
    """The files that would be saved: for each part, contents by path. Blocks while the models' files are read."""
    return {
        part.name: dict(_files_in(part.path) if isinstance(part, FolderModel) else _files(part, _import_or_name))
        for part in parts
    }


def _files_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _files(part: DeclaredPart, program_of: Callable[[FunctionModel], str]) -> Iterator[tuple[str, bytes]]:
    """The configuration; the files next to that of a graph loaded from a folder (labels, a README); the program."""
    yield CONFIG_FILE, config_text(part.config(), part.name).encode()
    for path in sorted(part.folder.iterdir()) if part.folder is not None else ():
        if path.is_file() and path.name != CONFIG_FILE:
            yield path.name, path.read_bytes()
    if isinstance(part, FunctionModel):
        yield f"{VERSION}/model.py", program_of(part).encode()
    else:
        yield f"{VERSION}/{KEEP}", b""


def _existing(parts: Sequence[SavedPart], folder: Path) -> Iterator[Problem]:
    for part in parts:
        if (folder / part.name).exists():
            text = f"'{folder / part.name}' exists already"
            yield Problem(text, part.place, "B5", "nothing is overwritten; remove it, or save elsewhere")


def _not_importable(parts: Sequence[SavedPart]) -> Iterator[Problem]:
    for part in parts:
        if isinstance(part, FunctionModel) and (reason := _why_not_importable(part)):
            text = f"the function of model '{part.name}' cannot be saved: {reason}"
            hint = "a file can only import what has a name at the top of a module"
            yield Problem(text, part.place, "B6", hint)


def _why_not_importable(model: FunctionModel) -> str:
    module, name = model.function.__module__, model.function.__qualname__
    if "<lambda>" in name:
        return "it is a lambda"
    if "<locals>" in name:
        return f"it is defined inside {name.partition('.<locals>')[0]}()"
    if module == "__main__":
        return "it is defined in the script that was run, or in a notebook; move it into a module of its own"
    try:
        found: object = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        return f"{module}.{name} cannot be imported: {error}"
    return "" if found is model else f"{module}.{name} is something else"


def _import_of(model: FunctionModel) -> str:
    module, name = model.function.__module__, model.function.__qualname__
    return f"from {module} import {name.partition('.')[0]}\n\nfunction = {name}\n"


def _import_or_name(model: FunctionModel) -> str:
    return repr(model) if _why_not_importable(model) else _import_of(model)


# Reading


def load_graph(folder: Path, name: str, make: type[G]) -> G:
    """`folder` is a graph's own, or a repository; `name` "": its only graph that no other graph contains. `make`
    creates an empty graph from a name and `max_batch_size`. Raises Problems.
    """
    folder = folder.resolve()
    if is_model_folder(folder):
        folder, name = folder.parent, folder.name
    if name and not is_model_folder(folder / name):
        known = [found.name for found in scan(folder)]
        hint = did_you_mean(name, known) or f"it has {', '.join(known) or 'none'}"
        raise Problems([Problem(f"there is no graph '{name}' in '{folder}'", rule="B8", hint=hint)])
    return _Loader(folder, make).graph(name or _outermost(folder))


class _Loader(Generic[G]):
    """Reads one repository, each deployment once."""

    def __init__(self, folder: Path, make: type[G]) -> None:
        self._folder = folder
        self._make = make
        self._parts: dict[str, G | FolderModel] = {}
        self._around: list[str] = []  # the graphs that are being read, outermost first

    def graph(self, name: str) -> G:
        home = self._folder / name
        fields, source = _fields(home)
        if SCHEDULING not in fields:
            text = f"'{name}' is a model and no graph"
            raise Problems([Problem(text, Place(source.file), "B8", "flowserve.model_folder makes it a part of one")])
        for side in ("input", "output"):
            for number, one in enumerate(fields.get(side, ())):
                if "data_type" not in one:
                    text = f"tensor '{one.get('name', '')}' has no data type"
                    raise Problems([Problem(text, source.place(f"{side}[{number}]"), "B8")])
        config = to_config(config_message(fields, source.file), source)
        graph = self._make(name, max_batch_size=config.max_batch_size)
        graph.place, graph.folder = source.place(""), home
        for number, spec in enumerate(config.inputs):
            graph.declared_inputs[spec.name] = (spec, source.place(f"input[{number}]"))
        for number, spec in enumerate(config.outputs):
            graph.declared_outputs.append(GraphOutput(spec.name, None, spec, source.place(f"output[{number}]")))
        self._around.append(name)
        graph.calls = [self._call(step, source) for step in config.steps]
        self._around.pop()
        fields[SCHEDULING].pop("step", None)
        graph.options = {key: value for key, value in fields.items() if key not in _WIRED}
        return graph

    def _call(self, step: EnsembleStep, source: SourceMap) -> StepCall:
        if step.model not in self._parts:
            self._parts[step.model] = self._part(step.model, source.place(f"{step.path}.model_name"))
        inputs: dict[str, Tensor | str] = {**step.input_map}
        call = StepCall(self._parts[step.model], inputs, {**step.output_map}, source.place(step.path), step.version)
        call.when = tuple(
            TensorTest(one.tensor, one.negate, one.above, one.below, one.equals, one.otherwise) for one in step.when
        )
        if step.each is not None:
            at_most = step.each.at_most if step.each.at_most != ITEMS_MAX else 0
            call.each = Items(step.each.tensors, step.each.count, at_most)
        call.name = step.name
        return call

    def _part(self, name: str, place: Place) -> G | FolderModel:
        home = self._folder / name
        if name in self._around:
            circle = " -> ".join([*self._around[self._around.index(name) :], name])
            raise Problems([Problem(f"circular dependency between ensembles: {circle}", place, "G1")])
        if not name or not is_model_folder(home):
            text = f"ensemble {self._around[-1]} contains models that are not available or ambiguous: {name}"
            hint = did_you_mean(name, [folder.name for folder in scan(self._folder)])
            raise Problems([Problem(text, place, "G2", hint)])
        return self.graph(name) if _is_graph(home) else FolderModel(home, place)


def _fields(home: Path) -> tuple[dict[str, Any], SourceMap]:
    file = f"{home.name}/{CONFIG_FILE}"
    return config_fields(read_text(home / CONFIG_FILE, file), file)


def _is_graph(home: Path) -> bool:
    return (home / CONFIG_FILE).exists() and SCHEDULING in _fields(home)[0]


def _outermost(folder: Path) -> str:
    """The only graph of a repository that no other graph contains. Raises Problems if there is not exactly one."""
    graphs = {}
    for found in scan(folder):
        if _is_graph(found.path):
            steps = _fields(found.path)[0][SCHEDULING].get("step", ())
            graphs[found.name] = {step.get("model_name") for step in steps}
    inside = set().union(*graphs.values())
    outermost = [name for name in graphs if name not in inside]
    if len(outermost) != 1:
        found_ones = f"one of {', '.join(outermost)}" if outermost else "there is none"
        raise Problems([Problem(f"which graph of '{folder}' shall be loaded? Name it: {found_ones}", rule="B8")])
    return outermost[0]
