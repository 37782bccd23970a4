"""`flowserve bench`: how many requests a server answers, how fast; or which configuration of a repository is best.

Decided here: what is shown: a table with a plot in it for people, JSON for programs, progress on a terminal only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TextIO

import trio
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flowserve.cli.client import Address, metadata
from flowserve.cli.load import Measured, measure_server
from flowserve.cli.sweep import Subject, Tried, Variant, recommended, sweep
from flowserve.cli.tensors import infer_body, made_up, read_inputs
from flowserve.cli.terminal import output
from flowserve.config.write import text_of
from flowserve.errors import FlowserveError

INTERRUPTED: Final = 130  # as shells say it
BAR: Final = 24  # characters of the longest bar


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`sweep` None: a server at `url` is measured. `p99_ms`: the bound of a recommendation. `inputs` (): made up."""

    url: str
    model: str
    concurrency: Sequence[int]
    seconds: float
    inputs: Sequence[str]
    sweep: Path | None
    p99_ms: float | None
    as_json: bool


def bench(options: BenchOptions, err: TextIO) -> int:
    """Measure and print. Returns the exit status: 0, 1 with a sentence on `err` (also where requests failed), or 130
    after Ctrl-C.
    """
    try:
        return _sweep(options, err) if options.sweep is not None else _bench(options, err)
    except FlowserveError as error:
        print(f"flowserve: {error}", file=err)
        return 1
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # which trio puts into a group
        if isinstance(error, BaseExceptionGroup) and not error.subgroup(KeyboardInterrupt):
            raise
        return INTERRUPTED


def _bench(options: BenchOptions, err: TextIO) -> int:
    address = Address.of(options.url)
    described = metadata(address, options.model)
    inputs = read_inputs(options.inputs, described) if options.inputs else made_up(described)
    body, headers = infer_body(inputs, ())
    path = address.path(options.model, "", "/infer")
    measured: list[Measured] = []
    with _progress(err) as progress:
        task = progress.add_task("measuring", total=len(options.concurrency))
        for level in options.concurrency:
            progress.update(task, description=f"{level} at a time")
            measured.append(trio.run(measure_server, address, path, body, headers, level, options.seconds))
            progress.advance(task)
    if options.as_json:
        print(json.dumps({"model": options.model, "levels": [asdict(one) for one in measured]}))
    else:
        output().print(_levels(measured))
    failed = next((one for one in measured if one.failed), None)
    if failed is None:
        return 0
    print(f"flowserve: {failed.failed} requests failed at {failed.concurrency} at a time: {failed.why}", file=err)
    return 1


def _sweep(options: BenchOptions, err: TextIO) -> int:
    assert options.sweep is not None
    subject = Subject(options.sweep, options.model)
    with _progress(err) as progress:
        task = progress.add_task("reading", total=None)

        def tell(variant: Variant, number: int, total: int) -> None:
            progress.update(task, description=str(variant), completed=number, total=total)

        tried = trio.run(sweep, subject, max(options.concurrency), options.seconds, tell)
    best = recommended(tried, options.p99_ms)
    if options.as_json:
        rows = [{**asdict(one.variant), **asdict(one.measured)} for one in tried]
        print(json.dumps({"model": options.model, "tried": rows, "recommended": best and asdict(best.variant)}))
    else:
        output().print(_variants(tried, best))
        if best is not None:
            print(f"recommended for {', '.join(subject.models)}: {best.variant}\n")
            print(text_of(best.variant.fields(), options.model))
    if best is None:
        print(f"flowserve: nothing keeps p99 within {options.p99_ms:g} ms at {max(options.concurrency)}", file=err)
        return 1
    return 0


def _progress(err: TextIO) -> Progress:
    """On a terminal a bar, elsewhere nothing."""
    console = Console(file=err, markup=False)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _levels(measured: Sequence[Measured]) -> Table:
    table = Table("at a time", "requests/s", "", "p50 ms", "p90 ms", "p99 ms", "failed", box=SIMPLE)
    most = max(one.requests_per_s for one in measured)
    for one in measured:
        table.add_row(str(one.concurrency), *_figures(one, most))
    return table


def _variants(tried: Sequence[Tried], best: Tried | None) -> Table:
    table = Table("", "configuration", "requests/s", "", "p50 ms", "p90 ms", "p99 ms", "failed", box=SIMPLE)
    most = max(one.measured.requests_per_s for one in tried)
    for one in tried:
        table.add_row("*" if one is best else "", str(one.variant), *_figures(one.measured, most))
    return table


def _figures(one: Measured, most: float) -> list[str]:
    bar = "█" * max(1, round(BAR * one.requests_per_s / most))
    latencies = [f"{ms:.2f}" for ms in (one.p50_ms, one.p90_ms, one.p99_ms)]
    return [f"{one.requests_per_s:.0f}", bar, *latencies, str(one.failed)]
