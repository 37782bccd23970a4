"""`flowserve bench`: throughput and latency of a server, or the best configuration of a repository (`--sweep`).

Decides the output: a table with a bar plot, JSON for programs, progress on a terminal only; and for a sweep, which
variants are tried (instances, batch sizes and delays of all plain models of a deployment), how (an engine in this
process, so that only the models and their scheduling are compared), and the recommendation: most requests per second
among the variants whose p99 is within the bound. Does not know how load is generated (`load`, and
`engine_load` for a sweep).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flowserve.cli import engine_load, load
from flowserve.cli.client import Address, describe, id_maker, sequence_ids
from flowserve.cli.deployment import described_inputs, find_deployment
from flowserve.cli.interrupts import run_until_ctrl_c
from flowserve.cli.serving.progress import output
from flowserve.cli.tensors import InferBody, flat_body, generated_inputs, read_inputs
from flowserve.config.load import CONFIG_FILE
from flowserve.config.parse import config_fields, config_text
from flowserve.errors import Invalid, Unsupported
from flowserve.runtime.embedding.embedded import AsyncEngine, Embedding, RequestOptions
from flowserve.runtime.engine.options import EngineOptions

T = TypeVar("T")

BAR: Final = 24  # characters of the longest bar
INSTANCES: Final = (1, 2, 4)
DELAYS_US: Final = (0, 500, 2000)
EXIT_TIMEOUT_S: Final = 30.0


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure and print. Returns the exit status: 0, or 1 with a message on standard error if requests failed. Raises
    FlowserveError.
    """
    target = arguments.target
    _check_usage(arguments, parser)
    if arguments.sweep:
        return _sweep(arguments, target[0])
    address, model, parameters = Address.of(target[0]), target[1], dict(arguments.parameter)
    described, is_decoupled = describe(address, model)
    inputs = read_inputs(arguments.input, described) if arguments.input else generated_inputs(described)
    make_id = sequence_ids(address, model)
    length = arguments.sequence_length or (load.LENGTH if make_id else 0)
    measured: Sequence[load.Measured | load.StreamsMeasured]
    if is_decoupled:
        if length:
            raise Unsupported(
                f"'{model}' answers any number of times, and is asked over generate_stream:"
                " there are no sequences there"
            )
        path = address.path(model, "", "/generate_stream")
        body = flat_body(inputs, described, parameters)
        measured = streams = _each_level(arguments, partial(load.measure_streams, address, path, body))
        table = _streams(streams)
    else:
        path, infer_body = address.path(model, "", "/infer"), InferBody(inputs)
        measure_level = (
            partial(load.measure_server_sequences, address, path, infer_body, parameters, make_id or int, length)
            if length
            else partial(load.measure_server, address, path, *infer_body.of(parameters))
        )
        measured = levels = _each_level(arguments, measure_level)
        table = _levels(levels)
        table.caption = f"in sequences of {length} requests, each connection one after the other" if length else None
    if arguments.json:
        asked = {"model": model, **({"sequence_length": length} if length else {})}
        print(json.dumps({**asked, "levels": [asdict(one) for one in measured]}))
    else:
        output().print(table)
    return _status(arguments, measured)


def _check_usage(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    target = arguments.target
    if len(target) != (1 if arguments.sweep else 2):
        parser.error(f"say {'MODEL' if arguments.sweep else 'URL MODEL'}, got {' '.join(target) or 'nothing'}")
    for name in ("input", "parameter") if arguments.sweep else ():
        if getattr(arguments, name):
            parser.error(f"--{name} has no effect with --sweep, which generates its requests")
    if arguments.p99_ms and not arguments.sweep:
        parser.error("--p99-ms is the bound of a recommendation, which --sweep makes")


def _status(arguments: argparse.Namespace, measured: Sequence[load.Measured | load.StreamsMeasured]) -> int:
    """The exit status; prints why it is not 0."""
    unfinished = next((one for one in measured if not one.requests_per_s), None)
    if unfinished is not None:
        at = f"at {unfinished.concurrency} at a time"
        _say(f"no request ended within {arguments.seconds:g} s {at}; give it more --seconds")
    failed = next((one for one in measured if one.failed), None)
    if failed is None:
        return 0
    _say(f"{failed.failed} requests failed at {failed.concurrency} at a time: {failed.why}")
    return 1


def _each_level(arguments: argparse.Namespace, measure_level: Callable[[int, float], T]) -> list[T]:
    measured = []
    with _progress(arguments) as progress:
        task = progress.add_task("measuring", total=len(arguments.concurrency))
        for level in arguments.concurrency:
            progress.update(task, description=f"{level} at a time")
            measured.append(measure_level(level, arguments.seconds))
            progress.advance(task)
    return measured


def _sweep(arguments: argparse.Namespace, model: str) -> int:
    target = SweepTarget(arguments.sweep, model)
    if arguments.sequence_length and target.make_id is None:
        raise Invalid(f"--sequence-length: '{target.name}' has no sequences")
    with _progress(arguments) as progress:
        task = progress.add_task("reading", total=None)

        def report(variant: Variant, number: int, total: int) -> None:
            progress.update(task, description=str(variant), completed=number, total=total)

        trials = run_until_ctrl_c(
            sweep,
            target,
            max(arguments.concurrency),
            arguments.seconds,
            report,
            arguments.sequence_length or load.LENGTH,
        )
    best = recommended(trials, arguments.p99_ms)
    if arguments.json:
        rows = [{**asdict(one.variant), **asdict(one.measured)} for one in trials]
        print(json.dumps({"model": model, "tried": rows, "recommended": best and asdict(best.variant)}))
    else:
        output().print(_variants(trials, best))
        if best is not None:
            print(f"recommended for {', '.join(target.models)}: {best.variant}\n")
            print(config_text(best.variant.fields(), model))
    if best is None:
        _say(f"nothing keeps p99 within {arguments.p99_ms:g} ms at {max(arguments.concurrency)}")
        return 1
    return 0


# ---------------------------------------------------------------------------------------------- sweep


@dataclass(frozen=True, slots=True)
class Variant:
    """The setting of every plain model of the deployment. `batch` 0: no dynamic batching."""

    instances: int
    batch: int
    delay_us: int

    def fields(self) -> dict[str, Any]:
        """The variant as fields of a config.pbtxt."""
        made: dict[str, Any] = {"instance_group": [{"count": self.instances}]}
        if self.batch:
            delay = {"max_queue_delay_microseconds": self.delay_us} if self.delay_us else {}
            made["dynamic_batching"] = {"preferred_batch_size": [self.batch], **delay}
        return made

    def __str__(self) -> str:
        batching = f"batches of {self.batch}, delay {self.delay_us} us" if self.batch else "no dynamic batching"
        return f"{self.instances} instance{'s' if self.instances > 1 else ''}, {batching}"


@dataclass(frozen=True, slots=True)
class Trial:
    variant: Variant
    measured: load.Measured


class SweepTarget:
    """The measured deployment and its plain models. Blocks while it is read. Raises FlowserveError."""

    def __init__(self, repository: Path, name: str) -> None:
        reading, graph = find_deployment(repository, name)
        self.name = name
        self.is_decoupled = graph.is_decoupled
        self.models = sorted({node.model.name for node in graph.nodes})
        self.inputs = generated_inputs(described_inputs(graph))
        self._batching = [model for model in self.models if reading.configs[model].sequence is None]
        self.make_id = next(filter(None, (id_maker(reading.configs[model].json) for model in self.models)), None)
        self._limits = {model: reading.configs[model].max_batch_size for model in self.models}
        self.repository = repository

    def variants(self) -> list[Variant]:
        """All variants, simplest first. Batch sizes go up to the largest `max_batch_size` of its models; models with
        sequences are left out, because their batching has its own options.
        """
        widest = max((self._limits[model] for model in self._batching), default=0)
        sizes = [size for size in (8, 32, 128) if size < widest] + ([widest] if widest else [])
        plain = [Variant(instances, 0, 0) for instances in INSTANCES]
        return plain + [Variant(*chosen) for chosen in product(INSTANCES, sizes, DELAYS_US)]

    def configs(self, variant: Variant) -> dict[str, dict[str, Any]]:
        """The configuration of each model in a variant. Blocks."""
        return {model: self._config(variant, model) for model in self.models}

    def _config(self, variant: Variant, model: str) -> dict[str, Any]:
        file = self.repository / model / CONFIG_FILE
        fields, _ = config_fields(file.read_text() if file.is_file() else "", model)
        wanted = replace(variant, batch=min(variant.batch, self._limits[model])).fields()  # the model's own limit
        group = (fields.get("instance_group") or [{}])[0]  # keeps the device and the resources
        fields["instance_group"] = [{**group, **wanted.pop("instance_group")[0]}]
        if "sequence_batching" not in fields:
            fields.pop("dynamic_batching", None)
            fields |= wanted
        return fields


async def sweep(
    target: SweepTarget,
    concurrency: int,
    seconds: float,
    report: Callable[[Variant, int, int], None],
    length: int = load.LENGTH,
) -> list[Trial]:
    """Measure every variant under the same load. `report` is called before each one, with its number and the total.
    `length` is the number of requests of a sequence, if a model has sequences. Raises FlowserveError if a variant
    cannot be served.
    """
    variants = target.variants()
    tried = []
    found = [target.repository], None
    async with Embedding(lambda: found, EngineOptions(), (target.name,), EXIT_TIMEOUT_S) as engine:
        for number, variant in enumerate(variants):
            report(variant, number, len(variants))
            # The previous variant is unloaded completely before this one is measured.
            await engine.unload(target.name, dependents=True)
            for model in target.models:
                await engine.unload(model)
            for model, config in target.configs(variant).items():
                await engine.load(model, config=config)
            if target.name not in target.models:
                await engine.load(target.name)
            if target.make_id is not None:
                senders = [partial(_ask, engine, target)] * concurrency
                measured = await engine_load.measure_sequences(senders, target.make_id, length, seconds)
            else:
                measured = await engine_load.measure([partial(_ask, engine, target)] * concurrency, seconds)
            tried.append(Trial(variant, measured))
    return tried


def recommended(tried: list[Trial], p99_ms: float | None) -> Trial | None:
    """The fastest trial within the bound; of equals (within 2 %) the simplest. None if no trial is within the bound."""
    good = [one for one in tried if p99_ms is None or one.measured.p99_ms <= p99_ms]
    if not good:
        return None
    best = max(one.measured.requests_per_s for one in good)
    return next(one for one in good if one.measured.requests_per_s >= 0.98 * best)


async def _ask(
    engine: AsyncEngine, target: SweepTarget, sequence_id: int | str = 0, start: bool = False, end: bool = False
) -> None:
    place: RequestOptions = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
    if target.is_decoupled:
        async with engine.stream(target.name, target.inputs, **place) as answers:
            async for _ in answers:
                pass
    else:
        await engine.infer(target.name, target.inputs, **place)


# ---------------------------------------------------------------------------------------------- output


def _progress(arguments: argparse.Namespace) -> Progress:
    """A progress bar, visible on a terminal only, and not with --quiet."""
    console = Console(file=sys.stderr, markup=False)
    return Progress(console=console, transient=True, disable=arguments.quiet or not console.is_terminal)


def _say(message: str) -> None:
    print(f"flowserve: {message}", file=sys.stderr)


def _levels(measured: Sequence[load.Measured]) -> Table:
    table = Table("at a time", "requests/s", "", "p50 ms", "p90 ms", "p99 ms", "failed", box=SIMPLE)
    most = max(one.requests_per_s for one in measured)
    for one in measured:
        table.add_row(str(one.concurrency), *_figures(one, most))
    return table


def _streams(measured: Sequence[load.StreamsMeasured]) -> Table:
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


def _figures(one: load.Measured, most: float) -> list[str]:
    latencies = [f"{ms:.2f}" for ms in (one.p50_ms, one.p90_ms, one.p99_ms)]
    return [f"{one.requests_per_s:.0f}", _bar(one.requests_per_s, most), *latencies, str(one.failed)]


def _bar(rate: float, most: float, longest: int = BAR) -> str:
    return "█" * max(1, round(longest * rate / most)) if most else ""
