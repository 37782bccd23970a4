"""`flowserve place`: proposes a placement file for a deployment, from measured times and bytes.

Decides what is read, measured and printed: a table of the models, the result that is expected with and without the
file, and the file. Does not know how models are measured (`step_figures`), where they are placed (`proposal`), or how a
result is expected (`expected`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flowserve.backends.cores import cores_allowed
from flowserve.cli.check import print_failure
from flowserve.cli.deployment import described_inputs, find_deployment
from flowserve.cli.elsewhere.expected import Expected, expect
from flowserve.cli.elsewhere.options import CPU, GPU
from flowserve.cli.elsewhere.proposal import ON_SERVER, LinkTimes, Proposal, file_text, needs_gpu, propose, rate_text
from flowserve.cli.elsewhere.step_figures import BatchTime, GraphFigures, MeasuredGraph, measure_graph
from flowserve.cli.serving.progress import output
from flowserve.cli.tensors import generated_inputs, read_inputs
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig
from flowserve.elsewhere.partition.costs import MachineKind
from flowserve.elsewhere.placement import misplaced, parse_placement
from flowserve.errors import FlowserveError, Invalid, NotFound, Problem, Problems
from flowserve.graph.types import Graph
from flowserve.memory.devices import devices
from flowserve.values import Array

KIB: Final = 1024


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, and print or write the proposal. Returns 0, or 1 if there is none."""
    try:
        _place(arguments)
    except Problems as error:
        print_failure("", error)
        return 1
    return 0


def _place(arguments: argparse.Namespace) -> None:
    """Raises FlowserveError."""
    if arguments.out is not None:
        _check_writable(arguments.out)
    reading, graph = find_deployment(arguments.repository, arguments.model)
    configs = {node.model.name: reading.configs[node.model.name] for node in graph.nodes}
    given = dict(arguments.takes)
    for name in given:
        if name not in configs:
            hint = did_you_mean(name, configs) or f"its models are {', '.join(configs)}"
            raise NotFound(f"--takes: '{graph.name}' has no model '{name}' ({hint})")
    inputs = _inputs(arguments.input, graph, reading.configs[graph.name])
    subject = MeasuredGraph(arguments.repository, graph, {**configs, graph.name: reading.configs[graph.name]}, inputs)
    kinds = _kinds(arguments)
    with _status(arguments):
        measured = _measured(subject, arguments)
    figures = _with_given(measured, given)
    link = LinkTimes(arguments.link_each_us / 1e6, arguments.link_mb_per_s * 1e6)
    proposal = propose(subject, figures, kinds, link, arguments.rate or measured.measured.requests_per_s)
    text = file_text(proposal, _title(arguments, proposal), kinds)
    parsed = parse_placement(text, str(arguments.out or "proposal"))
    if problems := [*misplaced(parsed, configs)]:
        raise Problems(problems)
    results = _results(arguments, subject, figures, proposal, kinds[0].cores)
    if arguments.out is not None:
        _write(arguments.out, text)
    if arguments.json:
        print(json.dumps(_document(graph.name, proposal, results, text)))
        return
    _print(proposal, results, text if arguments.out is None else "")
    for model in configs:
        if needs_gpu(configs[model]) and model not in given and not devices().gpus.ids:
            _warn(
                f"'{model}' was measured without a GPU: say --takes {model}=MS, as measured on a machine that has one"
            )
    for line in proposal.overloads:
        _warn(line)


def _inputs(words: Sequence[str], graph: Graph, config: ModelConfig) -> Mapping[str, Array]:
    """The given inputs, or generated ones. Raises Problems if a size is not known, Invalid for a wrong input."""
    if words:
        return read_inputs(words, described_inputs(graph))
    problems = [
        Problem(
            f"the dims of input '{spec.name}' vary, so that its size is not known",
            config.source.place(f"input[{number}].dims"),
            hint=f"give one as clients send it: --input {spec.name}=VALUE, or --input {spec.name}=@FILE",
        )
        for number, spec in enumerate(graph.inputs)
        if spec.is_variable and not spec.optional
    ]
    if problems:
        raise Problems(problems)
    return generated_inputs(described_inputs(graph))


def _kinds(arguments: argparse.Namespace) -> tuple[MachineKind, ...]:
    """The kinds of machines: the server's first, then the others."""
    cores = arguments.cores or cores_allowed()
    machines = arguments.machines
    others = (MachineKind(name, machines[name], cores, int(name == GPU)) for name in (CPU, GPU) if name in machines)
    return MachineKind(ON_SERVER, 1, cores, len(devices().gpus.ids)), *others


def _measured(subject: MeasuredGraph, arguments: argparse.Namespace) -> GraphFigures:
    try:
        return measure_graph(subject, arguments.seconds, arguments.concurrency)
    except FlowserveError as error:
        if arguments.input or isinstance(error, Problems):
            raise
        raise Invalid(f"{error} (its inputs were made up: give real ones with --input NAME=VALUE)") from error


def _with_given(figures: GraphFigures, takes_ms: Mapping[str, float]) -> GraphFigures:
    """The figures, with the user's times per row in place of measured ones."""
    models = dict(figures.models)
    for name, ms in takes_ms.items():
        models[name] = replace(models[name], here=BatchTime(0.0, ms / 1000), compute=BatchTime(0.0, ms / 1000))
    return replace(figures, models=models)


def _results(
    arguments: argparse.Namespace, subject: MeasuredGraph, figures: GraphFigures, proposal: Proposal, cores: int
) -> dict[str, Expected]:
    """The measured and the expected results, by description."""
    here = {name: one.here for name, one in figures.models.items()}
    there = {one.model: one.takes for one in proposal.models}
    placed = {one.model: one.at_once for one in proposal.models if one.is_placed}
    at_a_time, measured = arguments.concurrency, figures.measured
    load = f"{at_a_time} at a time"
    found = {f"measured here, {load}": Expected(measured.requests_per_s, measured.p50_ms, measured.p99_ms)}
    loads = {load: 0.0} | ({f"{rate_text(arguments.rate)} per second": arguments.rate} if arguments.rate else {})
    for load, rate in loads.items():
        found[f"expected here, {load}"] = expect(subject, figures, here, {}, cores, at_a_time, rate)
        found[f"expected with the file, {load}"] = expect(subject, figures, there, placed, cores, at_a_time, rate)
    return found


def _title(arguments: argparse.Namespace, proposal: Proposal) -> str:
    machines = ",".join(f"{name}*{count}" for name, count in arguments.machines.items())
    return (
        f"Proposed for '{arguments.model}' at {rate_text(proposal.rate)} requests/s, with {machines} beside the server."
    )


def _check_writable(path: Path) -> None:
    """Before anything is measured. Raises Invalid."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Invalid(f"--out: '{path}' cannot be written")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"'{path}' cannot be written: {error.strerror}") from error


# ---------------------------------------------------------------------------------------------- output


def _status(arguments: argparse.Namespace) -> Any:
    """A line while it measures, on a terminal only, and not with --quiet."""
    console = Console(file=sys.stderr, markup=False)
    is_shown = console.is_terminal and not arguments.quiet
    return console.status(f"measuring {arguments.model}") if is_shown else nullcontext()


def _print(proposal: Proposal, results: Mapping[str, Expected], text: str) -> None:
    console = output()
    console.print(_models(proposal))
    hops = sum(one.hops for one in proposal.models)
    crossing = sum(one.crossing_bytes for one in proposal.models)
    console.print(f"hops of a request: {hops:.3g}, with {crossing / KIB:.1f} KiB\n")
    console.print(_expected(results))
    if text:
        console.print(text, end="", soft_wrap=True)


def _models(proposal: Proposal) -> Table:
    table = Table("model", "where", "instances", "ms a batch", "+ ms a row", "KiB a row", "why", box=SIMPLE)
    for one in proposal.models:
        lacks = "" if one.has >= one.instances else f" of {one.instances} needed"
        times = (f"{1000 * seconds:.2f}" for seconds in (one.takes.fixed_s, one.takes.row_s))
        table.add_row(one.model, one.where, f"{one.has}{lacks}", *times, f"{one.row_bytes / KIB:.1f}", one.why)
    return table


def _expected(results: Mapping[str, Expected]) -> Table:
    table = Table("", "requests/s", "p50 ms", "p99 ms", box=SIMPLE)
    for label, one in results.items():
        latencies = ("grows" if one.is_behind else f"{ms:.2f}" for ms in (one.p50_ms, one.p99_ms))
        table.add_row(label, f"{one.requests_per_s:.1f}", *latencies)
    return table


def _document(name: str, proposal: Proposal, results: Mapping[str, Expected], text: str) -> dict[str, Any]:
    return {
        "model": name,
        "rate": proposal.rate,
        "models": [asdict(one) for one in proposal.models],
        "results": {label: asdict(one) for label, one in results.items()},
        "overloads": [*proposal.overloads],
        "groups": [asdict(one) for one in proposal.groups],
        "placement": text,
    }


def _warn(message: str) -> None:
    print(f"flowserve: warning: {message}", file=sys.stderr)
