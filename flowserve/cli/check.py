"""`flowserve check`: everything that can be said about a repository without serving it.

Decided here: how problems and graphs are printed, and the exit status. What is a problem is decided by the rooms that
read and compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from flowserve.cli.logs import escape
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.graph.advice import advise
from flowserve.render.facts import Facts
from flowserve.render.text import render_text
from flowserve.repository.resolve import Resolution
from flowserve.runtime.reading import read_apart

RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def check(repositories: Sequence[Path], out: TextIO, err: TextIO, color: bool, config_name: str = "") -> int:
    """Print all problems to `err` and return 1, or the compiled graphs to `out` and return 0.

    Warnings go to `err` in both cases.
    """
    printer = Printer(err, color)
    try:
        reading = read_apart(repositories, config_name)
    except FlowserveError as error:
        printer.failure("", error)
        return 1
    resolution = reading.resolution
    for warning in (*reading.warnings, *_advice(resolution, reading.configs)):
        printer.warning(warning)
    if resolution.failed:
        for name, failure in sorted(resolution.failed.items()):
            printer.failure(name, failure)
        printer.summary(len(resolution.graphs), len(resolution.failed))
        return 1
    _print_graphs(resolution, reading.facts(), out)
    return 0


def _advice(resolution: Resolution, configs: Mapping[str, ModelConfig]) -> Iterator[str]:
    for name in resolution.ensembles:
        # Versions of an ensemble have one configuration, and so one advice.
        yield from advise(next(iter(resolution.graphs[name].values())), configs)


def _print_graphs(resolution: Resolution, facts: Facts, out: TextIO) -> None:
    for name in sorted(resolution.graphs):
        for graph in resolution.graphs[name].values():
            out.writelines(f"{escape(line)}\n" for line in render_text(graph, facts).splitlines())
            out.write("\n")
    count = len(resolution.graphs)
    out.write(f"no problems in {count} deployment{_s(count)}\n")


class Printer:
    """Writes what is wrong as compilers do, `place: error: text`, which editors and terminals make links of."""

    def __init__(self, err: TextIO, color: bool) -> None:
        self._count = 0
        self._err = err
        self._color = color

    def warning(self, text: str) -> None:
        self._line(f"{self._tint(YELLOW, 'warning:')} {escape(text)}")

    def failure(self, name: str, error: FlowserveError) -> None:
        """Every problem of one deployment. `name` stands in for the place of what has none."""
        problems = error.problems if isinstance(error, Problems) else (Problem(str(error)),)
        for problem in problems:
            self._problem(problem, problem.place or (Place(name) if name else None))

    def summary(self, right: int, wrong: int) -> None:
        self._line(f"{self._count} problem{_s(self._count)}; {right} of {right + wrong} deployments are right")

    def _line(self, text: str) -> None:
        self._err.write(f"{text}\n")

    def _problem(self, problem: Problem, place: Place | None) -> None:
        self._count += 1
        where = f"{escape(str(place))}: " if place else ""
        rule = f" {self._tint(DIM, f'[{problem.rule}]')}" if problem.rule else ""
        self._line(f"{where}{self._tint(RED, 'error:')} {escape(problem.message)}{rule}")
        if problem.hint:
            self._line(f"    {escape(problem.hint)}")

    def _tint(self, tint: str, text: str) -> str:
        return f"{tint}{text}{PLAIN}" if self._color else text


def _s(count: int) -> str:
    return "" if count == 1 else "s"
