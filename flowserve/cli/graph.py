"""`flowserve graph`: draws one deployment, or prints all of a repository as text.

Decides which deployment is selected, and where the picture is written. Does not know its appearance (`render`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowserve.cli.check import placement_problems, print_failure
from flowserve.cli.logs import escape
from flowserve.cli.target import find_graph, is_target
from flowserve.config.suggest import did_you_mean
from flowserve.elsewhere.placement import placed_configs, read_placement
from flowserve.errors import FlowserveError, Invalid, NotFound, Problems
from flowserve.graph.types import Graph
from flowserve.render.formats import format_of, render
from flowserve.render.labels import Configs
from flowserve.repository.layout import is_model_folder
from flowserve.runtime.loading.reading import Reading, read_apart


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the picture to its file or to standard output. Returns 0, or 1 if it cannot be drawn."""
    output = arguments.output
    try:
        picture = arguments.format or (format_of(output) if output else "text")
        with redirect_stdout(sys.stderr):  # output of the user's own code does not belong to the picture
            reading, model = _read(arguments.repository, arguments.model)
        failed = {n: error for n, error in reading.resolution.failed.items() if model in ("", n)}
        for name, error in sorted(failed.items()):
            print_failure(name, error)
        if failed:
            return 1
        if arguments.placement is not None:
            reading = _placed(reading, arguments.placement)
        draw = partial(render, picture=picture, direction=arguments.direction, fold=arguments.fold)
        _write(_draw(reading, model, draw, picture), picture, output)
    except FlowserveError as error:
        print_failure("", error)
        return 1
    return 0


def _read(given: Path, model: str) -> tuple[Reading, str]:
    """The reading, and the selected deployment: "" for the only one, or for all of them as text."""
    if is_target(given):
        graph = find_graph(str(given))
        return graph.reading(), model or graph.name
    path = Path(os.path.realpath(given))  # a circular link stays unchanged
    if not is_model_folder(path):
        return read_apart([given]), model
    if model not in ("", path.name):
        raise Invalid(f"'{given}' is the folder of deployment '{path.name}'; it does not hold '{model}'")
    return read_apart([path.parent]), path.name


def _placed(reading: Reading, path: Path) -> Reading:
    """With the places of its models. Raises Problems."""
    placement = read_placement(path)
    if problems := placement_problems(placement, reading):
        raise Problems(problems)
    return replace(reading, configs=placed_configs(placement, reading.configs))


def _draw(reading: Reading, model: str, draw: Callable[[Graph, Configs], bytes], picture: str) -> bytes:
    graphs, configs = reading.resolution.graphs, reading.configs
    if not graphs:
        raise NotFound("there is no model here, and so nothing to draw")
    if model and model not in graphs:
        hint = did_you_mean(model, graphs) or f"there is {', '.join(sorted(graphs))}"
        raise NotFound(f"no deployment is called '{model}' ({hint})")
    if model or len(graphs) == 1:
        versions = graphs[model or next(iter(graphs))]
        return draw(versions[max(versions)], configs)
    if picture == "text":
        every = [graph for name in sorted(graphs) for graph in graphs[name].values()]
        return b"\n".join(draw(graph, configs) for graph in every)
    names = ", ".join([*reading.resolution.ensembles, *reading.resolution.models])
    raise Invalid(f"which deployment shall be drawn? Name one of: {names}")


def _write(drawn: bytes, picture: str, output: Path | None) -> None:
    if output:
        try:
            output.write_bytes(drawn)
        except OSError as error:
            why = f"{error.strerror}" if output.parent.exists() else f"there is no folder '{output.parent}'"
            raise Invalid(f"'{output}' cannot be written: {why}") from error
        return
    if picture == "png" and sys.stdout.isatty():
        raise Invalid("a PNG cannot be shown on a terminal; add -o FILE, or redirect the output")
    if picture == "text":  # names come from users, and terminals interpret control characters
        drawn = "".join(f"{escape(line)}\n" for line in drawn.decode().splitlines()).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(drawn)
    sys.stdout.buffer.flush()
