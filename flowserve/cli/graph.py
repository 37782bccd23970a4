"""`flowserve graph`: draws one deployment, or prints all of a repository as text.

Decides which deployment is selected, and where the picture is written. Does not know its appearance (`render`).
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flowserve.cli.check import Printer
from flowserve.cli.logs import escape
from flowserve.cli.target import find_graph, is_target
from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError, Invalid, NotFound
from flowserve.graph.types import Graph
from flowserve.render.formats import format_of, render
from flowserve.render.text import render_text
from flowserve.repository.layout import is_model_folder
from flowserve.runtime.loading.reading import Reading, read_apart


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """`model` "": the only deployment, or all of them as text. `picture` "": the format by the name of `output`."""

    path: Path
    model: str = ""
    picture: str = ""
    output: Path | None = None


def draw(options: GraphOptions, err: TextIO, *, color: bool) -> int:
    """Write the picture to its file or to standard output. Returns 0, or 1 if it cannot be drawn."""
    printer = Printer(err, color)
    try:
        picture = options.picture or (format_of(options.output) if options.output else "text")
        with redirect_stdout(err):  # output of the user's own code does not belong to the picture
            reading, model = _read(options)
        failed = {n: error for n, error in reading.resolution.failed.items() if model in ("", n)}
        for name, error in sorted(failed.items()):
            printer.failure(name, error)
        if failed:
            return 1
        _write(_draw(reading, model, picture), picture, options.output)
    except FlowserveError as error:
        printer.failure("", error)
        return 1
    return 0


def _read(options: GraphOptions) -> tuple[Reading, str]:
    """The reading, and the selected deployment, "" for any."""
    if is_target(options.path):
        graph = find_graph(str(options.path))
        return graph.reading(), options.model or graph.name
    repository, model = _which(options)
    return read_apart([repository]), model


def _which(options: GraphOptions) -> tuple[Path, str]:
    """The repository, and the selected deployment."""
    path = Path(os.path.realpath(options.path))  # a circular link stays unchanged
    if not is_model_folder(path):
        return options.path, options.model
    if options.model not in ("", path.name):
        raise Invalid(f"'{options.path}' is the folder of deployment '{path.name}'; it does not hold '{options.model}'")
    return path.parent, path.name


def _draw(reading: Reading, model: str, picture: str) -> bytes:
    graphs, facts = reading.resolution.graphs, reading.facts()
    if not graphs:
        raise NotFound("there is no model here, and so nothing to draw")
    if model:
        return render(_latest(reading, model), facts, picture)
    if len(graphs) == 1:
        return render(_latest(reading, next(iter(graphs))), facts, picture)
    if picture == "text":
        every = [graph for name in sorted(graphs) for graph in graphs[name].values()]
        return "\n".join(render_text(graph, facts) for graph in every).encode()
    names = ", ".join([*reading.resolution.ensembles, *reading.resolution.models])
    raise Invalid(f"which deployment shall be drawn? Name one of: {names}")


def _latest(reading: Reading, model: str) -> Graph:
    graphs = reading.resolution.graphs
    if model not in graphs:
        hint = did_you_mean(model, graphs) or f"there is {', '.join(sorted(graphs)) or 'none'}"
        raise NotFound(f"no deployment is called '{model}' ({hint})")
    return graphs[model][max(graphs[model])]


def _write(drawn: bytes, picture: str, output: Path | None) -> None:
    if output:
        try:
            output.write_bytes(drawn)
        except OSError as error:
            raise Invalid(f"'{output}' cannot be written: {error.strerror}") from error
        return
    if picture == "png" and sys.stdout.isatty():
        raise Invalid("a PNG cannot be shown on a terminal; add -o FILE, or redirect the output")
    if picture == "text":  # names come from users, and terminals interpret control characters
        drawn = "".join(f"{escape(line)}\n" for line in drawn.decode().splitlines()).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(drawn)
    sys.stdout.buffer.flush()
