"""Routes in the server's own process, for random graphs: they save scheduling steps and change no response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from flowserve.backends.base import ClockNs, LoadedModel, Results, Work
from flowserve.config.types import ModelConfig, SourceMap
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.memory.column import scatter
from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.loaded import NewModel
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.workers.base import Outcome
from flowserve.runtime.workers.local import LocalWorker
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.routes import Routes
from flowserve.values import Array, DType, Request, TensorSpec
from tests.support.engine import FunctionModel


@dataclass
class SumInstance:
    """Adds its inputs and `number`. If it `refuses`, members with an odd sum fail."""

    number: int
    refuses: bool
    executions: int = 0
    batches: list[list[int]] = field(default_factory=list)

    def open(self) -> None: ...
    def close(self) -> None: ...

    def run(self, work: Work, clock: ClockNs) -> Results:
        self.executions += 1
        gathered_ns = clock()
        total = np.full((sum(work.rows), 2), self.number, np.float32)
        for column in work.inputs:
            total += np.concatenate([tensor.array for tensor in column if tensor is not None])
        errors: dict[int, FlowserveError] = {}
        made = [*scatter(total, work.rows)]
        if self.refuses:
            errors = {
                m: ModelFailed(f"model {self.number} refuses") for m, one in enumerate(made) if _is_odd(one.array)
            }
        return Results([made], errors=errors, gathered_ns=gathered_ns, computed_ns=clock())


def _is_odd(array: Array) -> bool:
    return bool(array[0, 1] % 2)


@dataclass
class Shape:
    """A graph: `reads[n]` are the nodes that node n reads, -1 for the input; and which models refuse."""

    reads: list[list[int]]
    refuses: list[bool]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Chains and diamonds: each node reads one or two of those before it."""
    count = draw(st.integers(2, 5))
    reads = [[-1]]
    for n in range(1, count):
        is_chain = draw(st.booleans())
        reads.append(
            [n - 1] if is_chain else draw(st.lists(st.integers(-1, n - 1), min_size=1, max_size=2, unique=True))
        )
    refuses = draw(st.integers(-3, count - 1))  # one at most: if two branches fail, either error may be reported
    return Shape(reads, [n == refuses for n in range(count)])


turns = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4), min_size=1, max_size=3
)


class Watch:
    """Counts the batches that took a route."""

    def __init__(self) -> None:
        self.routes = 0

    def batched(self, batch: Batch, now_ns: int) -> None:
        self.routes += batch.route is not None

    def queued(self, frame: Frame) -> None: ...
    def started(self, batch: Batch) -> None: ...
    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None: ...
    def finished(self, frame: Frame) -> None: ...
    def failed(self, frame: Frame) -> None: ...


async def served(shape: Shape, asked: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[object], list[int], int]:
    """The responses to requests (value, rows), sent in groups; each model's executions; and the routes taken."""
    async with open_engine(EngineOptions()) as engine:
        watch = Watch()
        engine.observers.append(watch)
        out = TensorSpec("OUT", DType.FP32, (2,))
        nodes: list[Node] = []
        edges: list[Edge] = []
        instances: list[SumInstance] = []
        for n, reads in enumerate(shape.reads):
            inputs = tuple(TensorSpec(f"IN{i}", DType.FP32, (2,)) for i in range(len(reads)))
            instance = SumInstance(n + 1, shape.refuses[n])
            worker = LocalWorker(f"m{n}_0", f"m{n}", instance, 1, engine.clock, always_inline=True)
            worker.open(engine.context)
            key = ModelKey(f"m{n}", 1)
            model: LoadedModel = FunctionModel([], is_pure=False)
            engine.add_model(NewModel(key, Queue(BatchPolicy.simple(16)), [worker], model))
            instances.append(instance)
            nodes.append(Node(n, f"m{n}", key, inputs, (out,), 16))
            edges += [
                Edge("IN", GRAPH, 0, n, i) if read < 0 else Edge(f"t{read}", read, 0, n, i)
                for i, read in enumerate(reads)
            ]
        last = len(nodes) - 1
        read_nodes = {read for reads in shape.reads for read in reads}
        ends = [n for n in range(last + 1) if n not in read_nodes]
        outputs = tuple(TensorSpec(f"OUT{n}", DType.FP32, (2,)) for n in ends)
        edges += [Edge(f"o{n}", n, 0, GRAPH, i) for i, n in enumerate(ends)]
        whole = TensorSpec("IN", DType.FP32, (2,))
        config = ModelConfig("graph", "", "ensemble", 16, (whole,), outputs, SourceMap("graph"))
        graph = Graph("graph", 1, (whole,), outputs, 16, tuple(nodes), tuple(edges), is_ensemble=True)
        engine.deployments.announce(config, graph)
        await wait_all_tasks_blocked()
        told: list[object] = []
        for group in asked:
            answers: dict[int, object] = {}

            async def ask(number: int, value: int, rows: int, answers: dict[int, object] = answers) -> None:
                request = Request({"IN": np.full((rows, 2), value, np.float32)}, stamp=engine.next_stamp())
                try:
                    response = await engine.infer(engine.deployments.find("graph"), request)
                except FlowserveError as error:
                    answers[number] = (type(error), str(error))
                else:
                    answers[number] = {name: array.tolist() for name, array in response.outputs.items()}

            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    for number, (value, rows) in enumerate(group):
                        nursery.start_soon(ask, number, value, rows)
            told += [answers[number] for number in range(len(group))]
        engine.scheduler.check()
        assert not engine.scheduler.in_flight
        assert not engine.scheduler.routes.running
        statistics = [engine.deployments.statistics_of(node.model) for node in nodes]
        for one, instance in zip(statistics, instances, strict=True):
            one.add_up()
            assert one.execution_count == instance.executions
        return told, [instance.executions for instance in instances], watch.routes


@settings(max_examples=40)
@given(shapes(), turns)
def test_property_routes_change_no_response_and_add_no_executions(
    shape: Shape, asked: list[list[tuple[int, int]]]
) -> None:
    told, executions, _ = trio.run(served, shape, asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routes, "choose", lambda *_: None)
        without, most, routes = trio.run(served, shape, asked)
    assert not routes
    assert told == without
    # If a branch fails, another may already have been run.
    assert any(shape.refuses) or all(count <= limit for count, limit in zip(executions, most, strict=True))


def test_chain_takes_its_route() -> None:
    told, executions, routes = trio.run(served, Shape([[-1], [0], [1]], [False] * 3), [[(1, 1), (2, 3)]])
    assert routes == 1
    assert executions == [1, 1, 1]
    assert told == [{"OUT2": [[7.0, 7.0]]}, {"OUT2": [[8.0, 8.0]] * 3}]


def test_diamond_takes_its_route() -> None:
    told, executions, routes = trio.run(served, Shape([[-1], [0], [0], [1, 2]], [False] * 4), [[(1, 2)]])
    assert routes == 1
    assert executions == [1, 1, 1, 1]
    assert told == [{"OUT3": [[13.0, 13.0]] * 2}]
