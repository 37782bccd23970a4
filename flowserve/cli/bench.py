"""`flowserve bench`: throughput and latency of a server, or the best configuration of a repository (`--sweep`).

Decides the output: a table with a bar plot, JSON for programs, progress on a terminal only. Does not know how load is
generated (`load`) or which configurations are tried (`sweep`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TextIO, TypeVar

import trio
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flowserve.cli.client import Address, MakeId, describe, sequence_ids
from flowserve.cli.inputs import generated_inputs, read_inputs
from flowserve.cli.load import (
    LENGTH,
    Measured,
    StreamsMeasured,
    measure_server,
    measure_server_sequences,
    measure_streams,
)
from flowserve.cli.sweep import SweepTarget, Trial, Variant, recommended, sweep
from flowserve.cli.tensors import InferBody, Parameters, flat_body
from flowserve.cli.terminal import output
from flowserve.config.parse import config_text
from flowserve.errors import Invalid, Unsupported

T = TypeVar("T")

BAR: Final = 24  # characters of the longest bar


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`sweep` None: measure the server at `url`. `p99_ms`: the bound of a recommendation. `inputs` (): generated.
    `sequence_length`: requests per sequence, 0 for the default if the model has sequences, else none.
    """

    url: str
    model: str
    concurrency: Sequence[int]
    seconds: float
    inputs: Sequence[str]
    sweep: Path | None
    p99_ms: float | None
    as_json: bool
    parameters: Parameters
    sequence_length: int


def bench(options: BenchOptions, err: TextIO) -> int:
    """Measure and print. Returns the exit status: 0, or 1 with a message on `err` if requests failed. Raises
    FlowserveError.
    """
    if options.sweep is not None:
        return _sweep(options, options.sweep, err)
    address = Address.of(options.url)
    described, is_decoupled = describe(address, options.model)
    inputs = read_inputs(options.inputs, described) if options.inputs else generated_inputs(described)
    make_id = sequence_ids(address, options.model)
    length = options.sequence_length or (LENGTH if make_id else 0)
    measured: Sequence[Measured | StreamsMeasured]
    if is_decoupled:
        if length:
            raise Unsupported(
                f"'{options.model}' answers any number of times, and is asked over generate_stream:"
                " there are no sequences there"
            )
        path = address.path(options.model, "", "/generate_stream")
        body = flat_body(inputs, described, options.parameters)
        measured = streams = _each_level(options, err, partial(measure_streams, address, path, body))
        table = _streams(streams)
    else:
        measure = _measuring(options, address, InferBody(inputs), make_id or int, length)
        measured = levels = _each_level(options, err, measure)
        table = _levels(levels)
        table.caption = f"in sequences of {length} requests, each connection one after the other" if length else None
    if options.as_json:
        asked = {"model": options.model, **({"sequence_length": length} if length else {})}
        print(json.dumps({**asked, "levels": [asdict(one) for one in measured]}))
    else:
        output().print(table)
    unfinished = next((one for one in measured if not one.requests_per_s), None)
    if unfinished is not None:
        at = f"at {unfinished.concurrency} at a time"
        print(f"flowserve: no request ended within {options.seconds:g} s {at}; give it more --seconds", file=err)
    failed = next((one for one in measured if one.failed), None)
    if failed is None:
        return 0
    print(f"flowserve: {failed.failed} requests failed at {failed.concurrency} at a time: {failed.why}", file=err)
    return 1


def _measuring(
    options: BenchOptions, address: Address, body: InferBody, make_id: MakeId, length: int
) -> Callable[[int, float], Awaitable[Measured]]:
    """The function that measures one level of a model with one response per request."""
    path = address.path(options.model, "", "/infer")
    if length:
        return partial(measure_server_sequences, address, path, body, options.parameters, make_id, length)
    return partial(measure_server, address, path, *body.of(options.parameters))


def _each_level(options: BenchOptions, err: TextIO, measure: Callable[[int, float], Awaitable[T]]) -> list[T]:
    measured = []
    with _progress(err) as progress:
        task = progress.add_task("measuring", total=len(options.concurrency))
        for level in options.concurrency:
            progress.update(task, description=f"{level} at a time")
            measured.append(trio.run(measure, level, options.seconds))
            progress.advance(task)
    return measured


def _sweep(options: BenchOptions, repository: Path, err: TextIO) -> int:
    target = SweepTarget(repository, options.model)
    if options.sequence_length and target.make_id is None:
        raise Invalid(f"--sequence-length: '{target.name}' has no sequences")
    with _progress(err) as progress:
        task = progress.add_task("reading", total=None)

        def report(variant: Variant, number: int, total: int) -> None:
            progress.update(task, description=str(variant), completed=number, total=total)

        trials = trio.run(
            sweep, target, max(options.concurrency), options.seconds, report, options.sequence_length or LENGTH
        )
    best = recommended(trials, options.p99_ms)
    if options.as_json:
        rows = [{**asdict(one.variant), **asdict(one.measured)} for one in trials]
        print(json.dumps({"model": options.model, "tried": rows, "recommended": best and asdict(best.variant)}))
    else:
        output().print(_variants(trials, best))
        if best is not None:
            print(f"recommended for {', '.join(target.models)}: {best.variant}\n")
            print(config_text(best.variant.fields(), options.model))
    if best is None:
        print(f"flowserve: nothing keeps p99 within {options.p99_ms:g} ms at {max(options.concurrency)}", file=err)
        return 1
    return 0


def _progress(err: TextIO) -> Progress:
    """A progress bar, visible on a terminal only."""
    console = Console(file=err, markup=False)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _levels(measured: Sequence[Measured]) -> Table:
    table = Table("at a time", "requests/s", "", "p50 ms", "p90 ms", "p99 ms", "failed", box=SIMPLE)
    most = max(one.requests_per_s for one in measured)
    for one in measured:
        table.add_row(str(one.concurrency), *_figures(one, most))
    return table


def _streams(measured: Sequence[StreamsMeasured]) -> Table:
    columns = ("first p50 ms", "p99 ms", "between p50 ms", "p99 ms")
    table = Table("at a time", "requests/s", "responses/s", "", *columns, "failed", box=SIMPLE)
    most = max(one.responses_per_s for one in measured)
    for one in measured:
        times = (one.first_p50_ms, one.first_p99_ms, one.between_p50_ms, one.between_p99_ms)
        rates = (f"{one.requests_per_s:.1f}", f"{one.responses_per_s:.0f}", _bar(one.responses_per_s, most, BAR // 2))
        shown = ("-" if ms is None else f"{ms:.2f}" for ms in times)
        table.add_row(str(one.concurrency), *rates, *shown, str(one.failed))
    return table


def _variants(trials: Sequence[Trial], best: Trial | None) -> Table:
    table = Table("", "configuration", "requests/s", "", "p50 ms", "p90 ms", "p99 ms", "failed", box=SIMPLE)
    most = max(one.measured.requests_per_s for one in trials)
    for one in trials:
        table.add_row("*" if one is best else "", str(one.variant), *_figures(one.measured, most))
    return table


def _figures(one: Measured, most: float) -> list[str]:
    latencies = [f"{ms:.2f}" for ms in (one.p50_ms, one.p90_ms, one.p99_ms)]
    return [f"{one.requests_per_s:.0f}", _bar(one.requests_per_s, most), *latencies, str(one.failed)]


def _bar(rate: float, most: float, longest: int = BAR) -> str:
    return "█" * max(1, round(longest * rate / most)) if most else ""
