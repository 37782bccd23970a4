"""`flowserve check`: validates a repository without serving it.

Decides how problems and graphs are printed, as text and as JSON (docs/command-line.md describes each field), and the
exit status. Does not decide what a problem is: the packages that read and compile do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from flowserve.cli import options
from flowserve.cli.interrupts import run_until_ctrl_c
from flowserve.cli.logs import escape
from flowserve.cli.stores import open_mirrors
from flowserve.cli.target import find_graph, is_target, refuse_among
from flowserve.elsewhere.placement import PlacementFile, misplaced, read_placement
from flowserve.elsewhere.segments import broken_segments
from flowserve.errors import FlowserveError, Place, Problem, Problems, problems_of
from flowserve.graph.advice import advise
from flowserve.render.text import render_text
from flowserve.repository.layout import is_model_folder
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.runtime.loading.reading import Reading, read_apart, verify

RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
SCHEMA: Final = "flowserve.check/1"  # fields may be added; existing ones keep their name and meaning
Severity = Literal["error", "warning"]
TINTS: Final[dict[Severity, str]] = {"error": RED, "warning": YELLOW}


@dataclass(frozen=True, slots=True)
class How:
    """How a repository is read. `config_name`: the named configuration to use. `is_strict`: nothing completes a
    configuration. `load_timeout_s`: deployments are loaded too, and abandoned if none has loaded for so long; 0: they
    are not loaded.
    """

    config_name: str = ""
    is_strict: bool = False
    load_timeout_s: float = 0.0

    @property
    def is_loading(self) -> bool:
        return self.load_timeout_s > 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning. `deployment` "": it concerns no single deployment."""

    severity: Severity
    deployment: str
    problem: Problem


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The command: `check`, with standard output and error."""
    config_name = arguments.model_config_name or ""
    try:
        mirrors = open_mirrors(arguments)
    except FlowserveError as error:
        print_failure("", error)
        return 1
    repositories = arguments.repositories
    is_json, is_quiet = arguments.json, arguments.quiet
    color = _has_color()
    return check(
        repositories,
        sys.stdout,
        sys.stderr,
        color,
        config_name,
        mirrors,
        arguments.placement,
        is_strict=options.is_strict(arguments),
        load_timeout_s=arguments.load_timeout_secs if arguments.load else 0.0,
        as_json=is_json,
        is_quiet=is_quiet,
    )


def check(
    repositories: Sequence[Path],
    out: TextIO,
    err: TextIO,
    color: bool,
    config_name: str = "",
    mirrors: Sequence[RepositoryMirror] = (),
    placement: Path | None = None,
    *,
    is_strict: bool = False,
    load_timeout_s: float = 0.0,
    as_json: bool = False,
    is_quiet: bool = False,
) -> int:
    """Print all problems to `err` and return 1, or the compiled graphs to `out` and return 0. A single repository may
    also be one deployment's folder, or "module:graph". `mirrors`: those among the repositories that are in stores.
    `placement`: a placement file that is to fit them. The other parameters are those of `How`.

    Warnings go to `err` in both cases. `as_json`: only one line of JSON to `out`. `is_quiet`: only problems
    and warnings are printed.
    """
    reading: Reading | None = None
    try:
        for mirror in mirrors:
            mirror.update()
        with redirect_stdout(err):  # output of the user's own code does not belong to the result
            reading = _read(repositories, How(config_name, is_strict, load_timeout_s))
        not_fetched = {name: one for mirror in mirrors for name, one in mirror.problems.items()}
        findings = [Finding("error", name, problem) for name, one in not_fetched.items() for problem in one.problems]
        findings += _findings(reading)
        if placement is not None:
            findings += _placement_findings(placement, reading)
    except FlowserveError as error:
        findings = [Finding("error", "", problem) for problem in problems_of(error)]
    errors = sum(found.severity == "error" for found in findings)
    if as_json:
        print(json.dumps(_document(reading, findings)), file=out)
        return 1 if errors else 0
    for found in findings:
        _print_finding(found, err, color)
    if reading is not None and not is_quiet:
        _print_result(reading, errors, out, err)
    return 1 if errors else 0


def _read(repositories: Sequence[Path], how: How) -> Reading:
    refuse_among(repositories)
    if len(repositories) == 1 and is_target(repositories[0]):
        graph = find_graph(str(repositories[0]))
        private = graph.write_private() if how.is_loading else None
        return graph.reading() if private is None else _loaded([private.path], graph.reading(), how)
    apart = partial(
        read_apart,
        config_name=how.config_name,
        check=verify,
        is_strict=how.is_strict,
        patience_s=how.load_timeout_s or math.inf,
    )
    if len(repositories) == 1 and is_model_folder(path := Path(os.path.realpath(repositories[0]))):
        return _loaded([path.parent], apart([path.parent]).only(path.name), how)
    return _loaded(repositories, apart(repositories), how)


def _loaded(repositories: Sequence[Path], reading: Reading, how: How) -> Reading:
    """The reading, after its deployments were loaded, if they are to be."""
    if not how.is_loading:
        return reading
    from flowserve.memory.devices import devices  # imports what a server needs
    from flowserve.runtime.engine.options import EngineOptions
    from flowserve.runtime.loading.trial import load_all

    engine_options = EngineOptions(gpus=devices().gpus, model_config_name=how.config_name, strict_configs=how.is_strict)
    return run_until_ctrl_c(load_all, repositories, reading, engine_options, how.load_timeout_s)


def _findings(reading: Reading) -> Iterator[Finding]:
    for name, warning in reading.warnings:
        yield Finding("warning", name, warning)
    resolution = reading.resolution
    if not (resolution.graphs or resolution.failed):
        hint = "a repository is a folder of models' folders, each with a config.pbtxt or a numbered version folder"
        yield Finding("warning", "", Problem("there is no model here", rule="R11", hint=hint))
    for name in resolution.ensembles:
        # All versions of an ensemble share one configuration, so they share the advice.
        for advice in advise(next(iter(resolution.graphs[name].values())), reading.configs):
            yield Finding("warning", name, advice)
    shown: set[str] = set()
    for name in sorted(resolution.failed):
        yield from _failures(name, resolution.failed, shown)


def placement_problems(placement: PlacementFile, reading: Reading) -> list[Problem]:
    """What a placement file says that is impossible with these models and graphs."""
    graphs = [versions[max(versions)] for versions in reading.resolution.graphs.values()]
    return [*misplaced(placement, reading.configs), *broken_segments(placement, graphs)]


def _placement_findings(path: Path, reading: Reading) -> Iterator[Finding]:
    """The problems of a placement file; those of models with problems of their own are not known."""
    try:
        placement = read_placement(path)
        yield from (Finding("warning", "", warning) for warning in placement.warnings)
        problems = placement_problems(placement, reading)
    except Problems as error:
        problems = [*error.problems]
    for problem in problems:
        if not any(f"'{name}'" in problem.message for name in reading.resolution.failed):
            yield Finding("error", "", problem)


def _failures(name: str, failed: Mapping[str, FlowserveError], shown: set[str]) -> Iterator[Finding]:
    """The problems of one deployment, after those of the deployments that it depends on; each is reported once. `shown`
    are the deployments that were reported before.
    """
    if name in shown or name not in failed:
        return
    shown.add(name)
    problems = problems_of(failed[name])
    for problem in problems:
        yield from _failures(problem.depends_on, failed, shown)
    for problem in problems:
        if problem.depends_on in shown and problem.depends_on != name:
            text = f"ensemble '{name}' depends on '{problem.depends_on}' (above)"
            yield Finding("error", name, replace(problem, message=text))
        else:
            yield Finding("error", name, problem)


def _document(reading: Reading | None, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "right": sorted(reading.resolution.graphs) if reading else [],
        "wrong": sorted(reading.resolution.failed) if reading else [],
        "problems": [_entry(found) for found in findings],
    }


def _entry(found: Finding) -> dict[str, Any]:
    problem, place = found.problem, found.problem.place
    return {
        "severity": found.severity,
        "rule": problem.rule or None,
        "deployment": found.deployment or None,
        "file": place.file if place else None,
        "line": (place and place.line) or None,
        "column": (place and place.column) or None,
        "message": problem.message,
        "suggestion": problem.hint or None,
    }


def _print_result(reading: Reading, errors: int, out: TextIO, err: TextIO) -> None:
    """The compiled graphs, or the number of errors if a deployment is invalid."""
    graphs, wrong = reading.resolution.graphs, len(reading.resolution.failed)
    if wrong:
        valid = f"{len(graphs)} of {len(graphs) + wrong} deployments {'is' if len(graphs) == 1 else 'are'} valid"
        print(f"{errors} problem{_s(errors)}; {valid}", file=err)
        return
    if errors:
        print(f"{errors} problem{_s(errors)} in the placement file", file=err)
        return
    for name in sorted(graphs):
        for graph in graphs[name].values():
            out.writelines(f"{escape(line)}\n" for line in render_text(graph, reading.configs).splitlines())
            out.write("\n")
    out.write(f"no problems in {len(graphs)} deployment{_s(len(graphs))}\n")


def print_failure(deployment: str, error: FlowserveError) -> None:
    """Every problem of one deployment (or of none: "") on standard error."""
    for problem in problems_of(error):
        _print_finding(Finding("error", deployment, problem), sys.stderr, _has_color())


def _print_finding(found: Finding, err: TextIO, color: bool) -> None:
    """As compilers do, `place: error: text`, which editors and terminals turn into links; without a place, the
    deployment's name is printed instead.
    """

    def tinted(tint: str, text: str) -> str:
        return f"{tint}{text}{PLAIN}" if color else text

    problem, severity = found.problem, found.severity
    place = problem.place or (Place(found.deployment) if found.deployment else None)
    where = f"{escape(str(place))}: " if place else ""
    rule = f" {tinted(DIM, f'[{problem.rule}]')}" if problem.rule else ""
    print(f"{where}{tinted(TINTS[severity], f'{severity}:')} {escape(problem.message)}{rule}", file=err)
    if problem.hint:
        print(f"    {escape(problem.hint)}", file=err)


def _has_color() -> bool:
    """Whether messages may be coloured; follows https://no-color.org."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
