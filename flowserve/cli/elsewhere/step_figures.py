"""How long each model of a graph takes, and how many bytes its tensors have: measured by running the graph here.

Decides how it is measured, in an engine of this process, for a bounded time: requests one at a time, of as many rows
as given and of more, traced, so that the time of a batch is known by its rows; then several at a time, for the size of
the batches that form. Does not know machines, or what the figures are for. Caller: `place`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from flowserve.cli import engine_load
from flowserve.cli.client import MakeId, id_maker
from flowserve.cli.interrupts import run_until_ctrl_c
from flowserve.cli.load import Measured
from flowserve.config.types import OFF, ModelConfig
from flowserve.errors import Invalid
from flowserve.graph.types import Graph
from flowserve.memory.devices import devices
from flowserve.memory.raw import bytes_in
from flowserve.observe.trace import BACKEND_OUTPUT, QUEUE_INPUT, Execution, TensorSeen, Trace
from flowserve.runtime.clock import SECOND_NS, running_clock
from flowserve.runtime.embedding.embedded import AsyncEngine, Embedding, RequestOptions, engine_of, new_request, prepare
from flowserve.runtime.engine.options import EngineOptions
from flowserve.values import BY_WIRE, Array, DType

ROWS_MAX: Final = 8  # of the larger requests, as a multiple of the given ones
REQUESTS_MIN: Final = 3  # of each size, also where they take longer than the time given
EXIT_TIMEOUT_S: Final = 5.0  # a request runs at the end only where Ctrl-C ended the measurements
Port = tuple[int, int]  # of a node, and one of its inputs or outputs


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The time of a batch by its rows: a fixed part, and one for each row. Seconds."""

    fixed_s: float
    row_s: float

    def of(self, rows: float) -> float:
        return self.fixed_s + self.row_s * rows

    @classmethod
    def fitted(cls, seconds: Mapping[int, Sequence[float]]) -> BatchTime:
        """The line through the medians of the fewest and of the most rows; neither part is below 0. `seconds`: of
        batches, by their rows. If all have as many rows, all of their time belongs to the rows.
        """
        few, many = min(seconds), max(seconds)
        shortest, longest = median(seconds[few]), median(seconds[many])
        if few == many:
            return cls(0.0, shortest / few)
        row_s = max(0.0, (longest - shortest) / (many - few))
        if shortest < row_s * few:  # more rows cost more than in proportion
            return cls(0.0, longest / many)
        return cls(shortest - row_s * few, row_s)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One model, over all steps that run it, for one request of the given rows: its `rows` and `batches`. `here`: how
    long an instance in the server is busy with a batch, `compute`: the model alone. `batch_rows`: the rows of its
    batches under load. `answers`: the responses of a step. `calls`: it calls other models.
    """

    rows: float
    batches: float
    here: BatchTime
    compute: BatchTime
    batch_rows: float
    answers: int
    calls: bool


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """`models` by name. `input_bytes`, `output_bytes`: of each port of each node, for one request of `rows` rows.
    `shares`: by space, the rows of it for each row around it. `measured`: the load, several requests at a time.
    """

    rows: int
    models: Mapping[str, StepFigures]
    input_bytes: Mapping[Port, float]
    output_bytes: Mapping[Port, float]
    shares: Mapping[str, float]
    measured: Measured


@dataclass(frozen=True, slots=True)
class MeasuredGraph:
    """What is measured: a deployment of the repository `path`, with these inputs."""

    path: Path
    graph: Graph
    configs: Mapping[str, ModelConfig]
    inputs: Mapping[str, Array]

    @property
    def rows(self) -> int:
        """The rows of one request."""
        return len(next(iter(self.inputs.values()))) if self.graph.max_batch_size and self.inputs else 1

    @property
    def times(self) -> int:
        """How many times the rows the larger requests have. A request of a sequence has one row."""
        return 1 if self.make_id else max(1, min(ROWS_MAX, self.graph.max_batch_size // self.rows))

    @property
    def make_id(self) -> MakeId | None:
        """Makes the id of a sequence; None if no model has sequences."""
        configs = (self.configs[node.model.name].json for node in self.graph.nodes)
        return next(filter(None, map(id_maker, configs)), None)

    def repeated(self, times: int) -> dict[str, Array]:
        """The inputs with as many times the rows."""
        return {name: np.concatenate([array] * times) if times > 1 else array for name, array in self.inputs.items()}


def measure_graph(subject: MeasuredGraph, seconds: float, concurrency: int) -> GraphFigures:
    """Load the deployment, measure it three times for `seconds`, and unload it. Blocks. Raises FlowserveError if a
    model cannot be loaded or a request fails.
    """
    return run_until_ctrl_c(_measure, subject, seconds, concurrency)


async def _measure(subject: MeasuredGraph, seconds: float, concurrency: int) -> GraphFigures:
    gpus = devices().gpus
    options = EngineOptions(gpus=gpus if gpus.ids else OFF)
    name = subject.graph.name
    async with Embedding(lambda: ([subject.path], None), options, (name,), EXIT_TIMEOUT_S) as engine:
        sender = _Sender(engine, subject)
        await sender.send(subject.repeated(1), has_tensors=False)  # the first one is slow
        few = await sender.send_many(subject.repeated(1), seconds)
        times = subject.times
        many = await sender.send_many(subject.repeated(times), seconds) if times > 1 else []
        before = _counted(engine, subject.graph)
        measured = await engine_load.measure([sender.send_untraced] * concurrency, seconds)
        after = _counted(engine, subject.graph)
        shares = _shares(engine, subject.graph)
    batch_rows = {
        model: max(1.0, (rows - before[model][1]) / max(1, batches - before[model][0]))
        for model, (batches, rows) in after.items()
    }
    if measured.failed:
        raise Invalid(f"{measured.failed} requests failed, {concurrency} at a time: {measured.why}")
    return _figures(subject, few, many, batch_rows, shares, measured)


class _Sender:
    """Sends requests to the deployment that is measured."""

    def __init__(self, engine: AsyncEngine, subject: MeasuredGraph) -> None:
        self._engine = engine
        self._subject = subject
        self._make_id = subject.make_id
        self._sent = 0

    async def send_many(self, inputs: Mapping[str, Array], seconds: float) -> list[Trace]:
        """One request after the other. The first ones have tensors in their traces."""
        clock = running_clock()
        end_ns = clock() + round(seconds * SECOND_NS)
        traces: list[Trace] = []
        while len(traces) < REQUESTS_MIN or clock() < end_ns:
            traces.append(await self.send(inputs, has_tensors=len(traces) < REQUESTS_MIN))
        return traces

    async def send(self, inputs: Mapping[str, Array], *, has_tensors: bool) -> Trace:
        """One request, all of whose responses are taken. Raises FlowserveError."""
        engine = engine_of(self._engine)
        request = new_request(inputs, self._options())
        traces: list[Trace] = []
        watch = engine.tracing.watch(traces.append, has_tensors=has_tensors)
        deployment = prepare(engine, self._subject.graph.name, 0, request)
        try:
            async with engine.stream(deployment, request, watch) as answers:
                async for _ in answers:
                    pass
        finally:
            watch.close()
        return traces[0]

    async def send_untraced(self) -> None:
        """One request of the given inputs. Raises FlowserveError."""
        async with self._engine.stream(self._subject.graph.name, self._subject.inputs, **self._options()) as answers:
            async for _ in answers:
                pass

    def _options(self) -> RequestOptions:
        """Each request is a sequence of its own."""
        if self._make_id is None:
            return {}
        self._sent += 1
        return {"sequence_id": self._make_id(self._sent), "sequence_start": True, "sequence_end": True}


def _counted(engine: AsyncEngine, graph: Graph) -> dict[str, tuple[int, int]]:
    """The batches of each model so far, and their rows."""
    found = {}
    for node in graph.nodes:
        (row,) = engine.statistics(node.model.name, node.model.version)
        found[node.model.name] = row["execution_count"], row["inference_count"]
    return found


def _shares(engine: AsyncEngine, graph: Graph) -> dict[str, float]:
    (row,) = engine.graph_statistics(graph.name, graph.version)
    spaces = row.get("spaces", ())
    return {one["name"]: one["rows"] / max(1, one["parent_rows"]) for one in spaces}


def _figures(
    subject: MeasuredGraph,
    few: Sequence[Trace],
    many: Sequence[Trace],
    batch_rows: Mapping[str, float],
    shares: Mapping[str, float],
    measured: Measured,
) -> GraphFigures:
    seen = [trace for trace in few if trace.tensors][:REQUESTS_MIN]
    models = {}
    for model in dict.fromkeys(node.model.name for node in subject.graph.nodes):
        runs = [_executions(trace, model) for trace in few]
        every = [one for executions in (*runs, *(_executions(trace, model) for trace in many)) for one in executions]
        answers = [step.answers for trace in few for step in trace.steps if step.node.model.name == model]
        models[model] = StepFigures(
            rows=_mean([sum(max(one.rows, 1) for one in executions) for executions in runs]),
            batches=_mean([len(executions) for executions in runs]),
            here=_batch_time(every, from_start=True),
            compute=_batch_time(every, from_start=False),
            batch_rows=batch_rows[model],
            answers=max(1, round(_mean(answers))),
            calls=any(one.calls for one in every),
        )
    return GraphFigures(
        subject.rows,
        models,
        _port_bytes(seen, QUEUE_INPUT),
        _port_bytes(seen, BACKEND_OUTPUT),
        shares,
        measured,
    )


def _executions(trace: Trace, model: str) -> list[Execution]:
    """The batches of a model in a traced request, each once."""
    found = {step.execution.number: step.execution for step in trace.steps if step.node.model.name == model}
    return [*found.values()]


def _batch_time(executions: Sequence[Execution], *, from_start: bool) -> BatchTime:
    """The time of a model's batches: with its inputs and outputs, or its computation alone. Zero for a model that was
    skipped in all requests.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for one in executions:
        ns = one.ended_ns - one.started_ns if from_start else one.computed_ns - one.gathered_ns
        seconds[max(one.rows, 1)].append(ns / SECOND_NS)
    return BatchTime.fitted(seconds or {1: [0.0]})


def _port_bytes(traces: Sequence[Trace], activity: str) -> dict[Port, float]:
    """The mean bytes of each input or output of each node for a request."""
    found: Counter[Port] = Counter()
    for trace in traces:
        for step in trace.steps:
            specs = step.node.inputs if activity == QUEUE_INPUT else step.node.outputs
            ports = {spec.name: number for number, spec in enumerate(specs)}
            for tensor in step.tensors:
                if tensor.activity == activity and tensor.name in ports:
                    found[step.node.index, ports[tensor.name]] += _bytes_of(tensor)
    return {port: nbytes / len(traces) for port, nbytes in found.items()}


def _bytes_of(tensor: TensorSeen) -> int:
    if tensor.array is not None and tensor.dtype == DType.BYTES.wire:
        return bytes_in(tensor.array)
    return prod(tensor.shape) * BY_WIRE[tensor.dtype].itemsize


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
