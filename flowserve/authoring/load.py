"""Reads a graph from files into Python objects.

Decides: an ensemble becomes a graph whose steps are wired by name, any other deployment a part that refers to its
folder. Places in messages stay those of the files. The caller, `authoring/graph`, passes the class of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from flowserve.authoring.parts import FolderModel
from flowserve.config.load import CONFIG_FILE
from flowserve.config.parse import config_fields, read_text
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import SourceMap
from flowserve.errors import Place, Problem, Problems
from flowserve.graph.builder import GraphBuilder, GraphOutput, StepCall
from flowserve.repository.layout import is_model_folder, scan
from flowserve.values import DType, TensorSpec

SCHEDULING: Final = "ensemble_scheduling"
BY_CONFIG_NAME: Final = {dtype.config_name: dtype for dtype in DType}


class _BuiltGraph(Protocol):
    """The attributes of a graph that the loader fills."""

    place: Place
    folder: Path | None

    @property
    def builder(self) -> GraphBuilder: ...


G = TypeVar("G", bound=_BuiltGraph)


def load_graph(folder: Path, name: str, make: Callable[..., G]) -> G:
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

    def __init__(self, folder: Path, make: Callable[..., G]) -> None:
        self._folder = folder
        self._make = make
        self._parts: dict[str, Any] = {}  # parts; a graph is one, which its class says and the protocol does not
        self._around: list[str] = []  # the graphs that are being read, outermost first

    def graph(self, name: str) -> G:
        home, file = self._folder / name, f"{name}/{CONFIG_FILE}"
        fields, source = config_fields(read_text(home / CONFIG_FILE, file), file)
        if SCHEDULING not in fields:
            text = f"'{name}' is a model and no graph"
            raise Problems([Problem(text, Place(file), "B8", "flowserve.model_folder makes it a part of one")])
        graph = self._make(name, max_batch_size=int(fields.pop("max_batch_size", 0)))
        graph.place, graph.folder = source.place(""), home
        builder = graph.builder
        builder.place = graph.place
        for number, one in enumerate(fields.pop("input", ())):
            place = source.place(f"input[{number}]")
            builder.declared_inputs[one.get("name", "")] = (_spec(one, place), place)
        for number, one in enumerate(fields.pop("output", ())):
            place = source.place(f"output[{number}]")
            builder.declared_outputs.append(GraphOutput(one.get("name", ""), None, _spec(one, place), place))
        self._around.append(name)
        for number, step in enumerate(fields[SCHEDULING].pop("step", ())):
            builder.calls.append(self._call(step, source, f"{SCHEDULING}.step[{number}]"))
        self._around.pop()
        builder.options = {key: value for key, value in fields.items() if key not in ("name", "platform")}
        return graph

    def _call(self, step: dict[str, Any], source: SourceMap, path: str) -> StepCall:
        name, place = step.get("model_name", ""), source.place(path)
        if name not in self._parts:
            self._parts[name] = self._part(name, source.place(f"{path}.model_name"))
        inputs, outputs = (dict(step.get(side, {})) for side in ("input_map", "output_map"))
        return StepCall(self._parts[name], inputs, outputs, place, int(step.get("model_version", 0)))

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


def _is_graph(home: Path) -> bool:
    file = home / CONFIG_FILE
    return file.exists() and SCHEDULING in config_fields(read_text(file, f"{home.name}/{CONFIG_FILE}"), home.name)[0]


def _outermost(folder: Path) -> str:
    """The only graph of a repository that no other graph contains. Raises Problems if there is not exactly one."""
    graphs = {}
    for found in scan(folder):
        if _is_graph(found.path):
            text = read_text(found.path / CONFIG_FILE, f"{found.name}/{CONFIG_FILE}")
            steps = config_fields(text, found.name)[0][SCHEDULING].get("step", ())
            graphs[found.name] = {step.get("model_name") for step in steps}
    inside = set().union(*graphs.values())
    outermost = [name for name in graphs if name not in inside]
    if len(outermost) != 1:
        found_ones = f"one of {', '.join(outermost)}" if outermost else "there is none"
        raise Problems([Problem(f"which graph of '{folder}' shall be loaded? Name it: {found_ones}", rule="B8")])
    return outermost[0]


def _spec(written: dict[str, Any], place: Place) -> TensorSpec:
    dtype = BY_CONFIG_NAME.get(written.get("data_type", ""))
    if dtype is None:
        raise Problems([Problem(f"tensor '{written.get('name', '')}' has no data type", place, "B8")])
    dims = tuple(int(dim) for dim in written.get("dims", ()))
    shape = written["reshape"].get("shape", ()) if "reshape" in written else None
    return TensorSpec(
        written.get("name", ""),
        dtype,
        dims,
        optional=bool(written.get("optional")),
        ragged=bool(written.get("allow_ragged_batch")),
        reshape=None if shape is None else tuple(int(dim) for dim in shape),
        labels=written.get("label_filename", ""),
    )
