"""`flowserve bench --sweep`: measures a deployment under many configurations and recommends one.

Decides which variants are tried (instances, batch sizes and delays of all plain models of a deployment), how (an engine
in this process, so that only the models and their scheduling are compared), and the recommendation: most requests per
second among the variants whose p99 is within the bound. Does not print. Caller: `bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from flowserve.cli.client import MakeId
from flowserve.cli.inputs import generated_inputs
from flowserve.cli.load import LENGTH, Measured, measure, measure_sequences
from flowserve.config.load import CONFIG_FILE
from flowserve.config.parse import config_fields
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import SequenceBatching
from flowserve.errors import NotFound
from flowserve.graph.types import Graph
from flowserve.runtime.embedding.embedded import AsyncEngine, Embedding, RequestOptions
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.reading import read_repositories
from flowserve.values import DType

INSTANCES: Final = (1, 2, 4)
DELAYS_US: Final = (0, 500, 2000)
EXIT_TIMEOUT_S: Final = 30.0


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
    measured: Measured


class SweepTarget:
    """The measured deployment and its plain models. Blocks while it is read. Raises FlowserveError."""

    def __init__(self, repository: Path, name: str) -> None:
        reading = read_repositories([repository])
        if name in reading.resolution.failed:
            raise reading.resolution.failed[name]
        versions = reading.resolution.graphs.get(name)
        if not versions:
            known = reading.resolution.graphs
            hint = did_you_mean(name, known) or f"it has {', '.join(known)}"
            if not known:
                hint = "; ".join(warning.message for _, warning in reading.warnings) or "it is empty"
            raise NotFound(f"no deployment '{name}' in {repository} ({hint})")
        graph = versions[max(versions)]
        self.name = name
        self.is_decoupled = graph.is_decoupled
        self.models = sorted({node.model.name for node in graph.nodes})
        self.inputs = generated_inputs({"inputs": [*_described(graph)]})
        self._batching = [model for model in self.models if reading.configs[model].sequence is None]
        self.make_id = _make_id(reading.configs[model].sequence for model in self.models)
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
        return {model: self._config(self._fitted(variant, model), model) for model in self.models}

    def _config(self, variant: Variant, model: str) -> dict[str, Any]:
        file = self.repository / model / CONFIG_FILE
        fields, _ = config_fields(file.read_text() if file.is_file() else "", model)
        wanted = variant.fields()
        group = (fields.get("instance_group") or [{}])[0]  # keeps the device and the resources
        fields["instance_group"] = [{**group, **wanted.pop("instance_group")[0]}]
        if "sequence_batching" not in fields:
            fields.pop("dynamic_batching", None)
            fields |= wanted
        return fields

    def _fitted(self, variant: Variant, model: str) -> Variant:
        """The variant limited to the model's own `max_batch_size`."""
        return Variant(variant.instances, min(variant.batch, self._limits[model]), variant.delay_us)


async def sweep(
    target: SweepTarget,
    concurrency: int,
    seconds: float,
    report: Callable[[Variant, int, int], None],
    length: int = LENGTH,
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
                measured = await measure_sequences(senders, target.make_id, length, seconds)
            else:
                measured = await measure([partial(_ask, engine, target)] * concurrency, seconds)
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


def _make_id(batchings: Iterable[SequenceBatching | None]) -> MakeId | None:
    """As `client.sequence_ids`, from configurations."""
    for batching in batchings:
        if batching is not None and not batching.is_iterative:
            is_text = any(one.kind == "CORRID" and one.dtype is DType.BYTES for one in batching.controls)
            return str if is_text else int
    return None


def _described(graph: Graph) -> Iterator[Mapping[str, Any]]:
    batch = [-1] if graph.max_batch_size else []
    for spec in graph.inputs:
        yield {"name": spec.name, "datatype": spec.dtype.wire, "shape": [*batch, *spec.dims], "optional": spec.optional}
