"""`flowserve.Graph`: a graph written in Python, equivalent to its files and its pictures.

Decides the operations on such a graph besides wiring (`graph/builder`): check, save and load, draw, serve. All of them
use the same configurations and rules as files. Callers: user programs, `authoring/engine`, the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from flowserve.authoring.files import FolderModel, SavedPart, contents, load_graph, write_private, write_to_keep
from flowserve.backends import registry
from flowserve.config.load import draft_of, finish
from flowserve.config.parse import Parsed, config_message
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problem, Problems
from flowserve.graph.builder import DeclaredPart, GraphBuilder, Part
from flowserve.render.formats import format_of, render
from flowserve.render.layout import Direction
from flowserve.repository.override import PrivateFolder, check_name
from flowserve.repository.resolve import resolve
from flowserve.runtime.loading.reading import Reading

# Hints in terms of Python, in place of those of the rules for files.
_HINTS: Final = {
    "M33": "graph.output(name, tensor) says what it answers",
    "M83": "a model that is called on tensors of the graph is a step",
    "M84": "its outputs have no reader",
}
# Rules that are broken as a consequence if an input is used directly as the only output.
_FOLLOWING: Final = frozenset({"M33", "M83"})


class Graph(GraphBuilder):
    """A graph of models, written step by step. Calling a part on tensors wires it; nothing is computed.

        graph = Graph("shout")
        graph.output("LOUD", louder(graph.input("TEXT", "BYTES[1]")))

    `max_batch_size` None: the minimum of its models. `max_inflight_requests` limits the concurrent executions of one
    step for one request; 0: no limit. Graphs are equal if they would be saved as the same files.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self.name == other.name and contents(self._parts()) == contents(other._parts())

    __hash__ = None  # type: ignore[assignment]  # a graph is mutable

    def __repr__(self) -> str:
        return f"<graph {self.name!r} of {len(self.calls)} steps>"

    # Checking

    def check(self) -> None:
        """Raise Problems with every mistake of this graph and the graphs in it, each with its line. Blocks."""
        self.reading()

    def reading(self) -> Reading:
        """The compiled graph with the configurations of all parts, as `flowserve check` has it. Blocks. Raises
        Problems.
        """
        parts = self._parts()
        problems = [problem for part in parts if isinstance(part, Graph) for problem in part.problems]
        problems += [*_misnamed(parts), *_ambiguous([self])]
        configs: dict[str, ModelConfig] = {}
        failed: dict[str, FlowserveError] = {}
        for part in parts:
            try:
                configs[part.name] = part.read.config if isinstance(part, FolderModel) else _config(part)
            except FlowserveError as error:
                failed[part.name] = error
        versions = {part.name: part.read.versions if isinstance(part, FolderModel) else (1,) for part in parts}
        resolution = resolve(configs, versions, failed)
        for part in parts:
            problems += _problems_of(resolution.failed.get(part.name), part)
        if problems:
            raise Problems(sorted(problems, key=lambda problem: problem.place or self.place))
        warnings = [(part.name, text) for part in parts if isinstance(part, FolderModel) for text in part.read.warnings]
        return Reading(configs, resolution, tuple(warnings))

    def _parts(self) -> list[SavedPart]:
        """All parts of this graph, each once, the graph itself last."""
        found: dict[str, SavedPart] = {}
        for part in _walk(self):
            found.setdefault(part.name, part)
        return list(found.values())

    # Files

    def save(self, folder: str | Path) -> None:
        """Write a repository with a folder for this graph and each of its parts. Blocks.

        Raises Problems and writes nothing if the graph has mistakes, a folder exists, or a function cannot be imported
        from a module.
        """
        self.check()
        write_to_keep(self._parts(), Path(folder))

    @classmethod
    def load(cls, folder: str | Path, name: str = "") -> Graph:
        """Read a graph from its own folder, or from a repository that has one graph, or one called `name`. Blocks.

        Raises Problems if the files cannot be read; mistakes in them are reported by `check`.
        """
        return load_graph(Path(folder), name, Graph)

    def write_private(self) -> PrivateFolder:
        """A repository of this graph for this process only. It exists as long as the returned object. Blocks.

        Functions need not be importable. Raises Problems.
        """
        return write_private_repository([self])

    # Pictures. `direction` "TB" or "LR": top to bottom or left to right; None: left to right unless that is too wide.
    # `fold`: each nested ensemble is one box. All of them block, and raise Problems for a graph with mistakes.

    def to_text(self) -> str:
        return self._draw("text").decode()

    def to_dot(self, *, direction: Direction | None = None, fold: bool = False) -> str:
        return self._draw("dot", direction=direction, fold=fold).decode()

    def to_mermaid(self, *, direction: Direction | None = None, fold: bool = False) -> str:
        return self._draw("mermaid", direction=direction, fold=fold).decode()

    def to_svg(self, *, direction: Direction | None = None, fold: bool = False) -> str:
        return self._draw("svg", direction=direction, fold=fold).decode()

    def to_html(self, *, direction: Direction | None = None, fold: bool = False) -> str:
        return self._draw("html", direction=direction, fold=fold).decode()

    def to_json(self) -> str:
        """The graph as JSON; docs/pictures.md describes the fields."""
        return self._draw("json").decode()

    def to_png(self, *, direction: Direction | None = None, fold: bool = False) -> bytes:
        """Raises Unsupported if resvg is not installed."""
        return self._draw("png", direction=direction, fold=fold)

    def draw(self, file: str | Path, *, direction: Direction | None = None, fold: bool = False) -> None:
        """Write a picture in the format of the file's suffix, as `flowserve graph -o` does. Blocks."""
        Path(file).write_bytes(self._draw(format_of(Path(file)), direction=direction, fold=fold))

    def _draw(self, picture: str, *, direction: Direction | None = None, fold: bool = False) -> bytes:
        """Raises Problems: a graph with mistakes cannot be drawn."""
        reading = self.reading()
        graph = reading.resolution.graphs[self.name][1]
        return render(graph, reading.configs, picture, direction=direction, fold=fold)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The representation in notebooks: the picture, or the mistakes."""
        try:
            return {"image/svg+xml": self.to_svg(), "text/vnd.mermaid": self.to_mermaid(), "text/plain": repr(self)}
        except Problems as problems:
            return {"text/plain": f"{self!r}\n{problems}"}

    # Serving

    def serve(self, *, http_address: str = "127.0.0.1", http_port: int = 8000) -> int:
        """Serve over HTTP until SIGTERM or Ctrl-C, as `flowserve run` does; returns its status. Raises Problems."""
        from flowserve.cli.options import run_arguments
        from flowserve.cli.run import run

        private = self.write_private()
        return run(run_arguments(str(private.path), f"--http-address={http_address}", f"--http-port={http_port}"))


def write_private_repository(graphs: Sequence[Graph]) -> PrivateFolder:
    """A repository of several graphs for this process only; shared parts are in it once. Blocks. Raises Problems."""
    problems: list[Problem] = []
    for graph in graphs:
        try:
            graph.check()
        except Problems as found:
            problems += found.problems
    problems = problems or [*_ambiguous(graphs)]
    if problems:
        raise Problems(problems)
    private = PrivateFolder()
    write_private(list({part.name: part for graph in graphs for part in _walk(graph)}.values()), private)
    return private


def _walk(graph: Graph, seen: set[int] | None = None) -> Iterator[SavedPart]:
    """Every part of every nested graph, each once, inner ones first. `seen`: ids of the parts already visited."""
    seen = set() if seen is None else seen
    for part in graph.parts():
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Graph):
            yield from _walk(part, seen)
        elif isinstance(part, SavedPart):
            yield part
    yield graph


def _misnamed(parts: Sequence[SavedPart]) -> Iterator[Problem]:
    """Names that are not valid folder names."""
    for part in parts:
        try:
            check_name(part.name)
        except FlowserveError as error:
            yield Problem(str(error), part.place, "B9")


def _ambiguous(graphs: Sequence[Graph]) -> Iterator[Problem]:
    whole = " and ".join(f"graph '{graph.name}'" for graph in graphs)
    first: dict[str, SavedPart] = {}
    for part in {id(part): part for graph in graphs for part in _walk(graph)}.values():
        if first.setdefault(part.name, part) is not part:
            text = f"two parts of {whole} are called '{part.name}'; the first is at {first[part.name].place}"
            yield Problem(text, part.place, "B7", "give one of them another name")


def _config(part: DeclaredPart) -> ModelConfig:
    source = part.source()
    try:
        message = config_message(part.config(), part.place.file)
    except Problems as wrong:  # values of a wrong type; their places are fields of a generated text, not lines
        moved = [replace(one, place=source.place(one.place.path if one.place else "")) for one in wrong.problems]
        raise Problems(moved) from None
    parsed = Parsed(message, source)
    return finish(draft_of(parsed, Path(part.folder or part.name), registry.default_files()), None)


def _problems_of(error: FlowserveError | None, part: Part) -> list[Problem]:
    if error is None:
        return []
    problems = error.problems if isinstance(error, Problems) else [Problem(str(error), part.place)]
    hints = _HINTS if isinstance(part, Graph) else {}
    if isinstance(part, Graph) and part.outputs_an_input:
        problems = [problem for problem in problems if problem.rule not in _FOLLOWING]
    return [replace(problem, hint=hints.get(problem.rule, problem.hint)) for problem in problems]
