"""A scheduler whose decisions are recorded, for tests that are timelines.

Decides the short names. `simple_model(0)` is model "a" with one input and output of varying width; a `Recorder` serves
such models and runs nothing: the test reports when a batch is done or has raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from flowserve.errors import FlowserveError, ModelFailed
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.scheduling.batch import Batch, Notice
from flowserve.scheduling.frames.frame import Frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import Batcher, BatchPolicy
from flowserve.scheduling.rate_limit.limiter import Limiter, Needs
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX
from flowserve.scheduling.scheduler import Scheduler
from flowserve.simulation.deployment import BatchResults
from flowserve.values import DType, TensorSpec
from tests.support.strategies import Handle, SimModel

PORT = (TensorSpec("X", DType.FP32, (-1,)),)
Started = list[tuple[str, list[object]]]


def simple_model(
    number: int, max_batch_size: int = 16, inputs: Sequence[TensorSpec] = PORT, outputs: Sequence[TensorSpec] = PORT
) -> SimModel:
    """Model "a", "b", ... with one instance; batches without a delay, unless `max_batch_size` is 0."""
    policy = BatchPolicy.simple(max_batch_size) if max_batch_size else None
    key = ModelKey("abcdefgh"[number], 1)
    return SimModel(number, key, tuple(inputs), tuple(outputs), max_batch_size, policy, 1, False, 0, 0)


def rows_of(rows: int = 1, width: int = 2) -> Handle:
    """An input of `rows` rows in a block of its own."""
    return Handle(0, width, 0, rows)


def step_graph(*edges: str) -> Graph:
    """`step_graph("ab", "ac")`: steps of models with these names; each pair is the producer of a tensor and its reader.
    Steps that read no other step read the request, and tensors that no step reads are in the response.
    """
    names = sorted({*"".join(edges)})
    nodes = []
    wires: list[Edge] = []
    for n, name in enumerate(names):
        read = [names.index(edge[0]) for edge in edges if edge[1] == name] or [GRAPH]
        inputs = tuple(TensorSpec(f"X{i}", DType.FP32, (-1,)) for i in range(len(read)))
        model = simple_model(n, inputs=inputs)
        nodes.append(Node(n, name, model.key, model.inputs, model.outputs, model.max_batch_size))
        wires += [Edge("in" if maker == GRAPH else names[maker], maker, 0, n, i) for i, maker in enumerate(read)]
    last = [n for n, name in enumerate(names) if not any(edge[0] == name for edge in edges)]
    wires += [Edge(names[n], n, 0, GRAPH, j) for j, n in enumerate(last)]
    outputs = tuple(TensorSpec(names[n], DType.FP32, (-1,)) for n in last)
    return Graph("graph", 1, PORT, outputs, nodes[0].max_batch_size, tuple(nodes), tuple(wires), is_ensemble=True)


@dataclass
class Recorder:
    """`running`: started batches that are not complete. `started`: every batch, as (model, its requests). `answers`:
    requests in the order in which they finished. `notices`: the scheduler's notices. With a `limiter`, each instance
    has the `needs` it is served with.
    """

    running: list[Batch] = field(default_factory=list)
    started: Started = field(default_factory=list)
    delivered: list[Frame] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    queues: dict[ModelKey, ModelQueue] = field(default_factory=dict)
    limiter: Limiter | None = None
    overtaken_max: int = OVERTAKEN_MAX

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limiter, self.overtaken_max)
        self._stamps = 0
        self._plans: dict[int, tuple[Graph, Plan, list[ModelQueue]]] = {}

    def serve(
        self,
        model: SimModel,
        batcher: Batcher | None = None,
        instances: int = 1,
        *,
        is_pure: bool = False,
        needs: Sequence[Needs] = (),
        keeps_order: bool = False,
        is_cached: bool = False,
        depth: int = 1,
        is_divided: bool = False,
        is_routed: bool = False,
        computes_apart: bool = False,
    ) -> ModelQueue:
        """`is_cached`: its steps in ensembles are looked up in an empty response cache, for which all steps are equal.
        `depth`: the batches that an instance takes at once. `is_divided`: an instance passes batches to instances of
        other such models with its number. `is_routed`: an instance passes batches to all instances of other such
        models. `computes_apart`: its instances can compute while those do.
        """
        chosen = model.batcher() if batcher is None else batcher  # an empty batcher is falsy
        cache = self if is_cached else None
        slots = [instance for instance in range(instances) for _ in range(depth)]
        queue = ModelQueue(
            model.key,
            chosen,
            slots,
            is_pure=is_pure,
            needs=needs,
            keeps_order=keeps_order,
            route_groups={one: one if is_divided else 0 for one in range(instances) if is_divided or is_routed},
            computes_apart=computes_apart,
            cache=cache,
        )
        self.queues[model.key] = queue
        self.scheduler.models.add(queue)
        return queue

    def submit(
        self,
        graph: Graph,
        request: object,
        inputs: Sequence[Handle | None] | None = None,
        stamp: int | None = None,
        priority: int = 0,
        timeout_ns: int = 0,
        *,
        is_held: bool = False,
    ) -> Frame:
        """Submit a request with the name `request`; one row in every input unless `inputs` are given."""
        self._stamps += 1
        _, plan, route = self._plans.get(id(graph), (None, None, None))
        queues = [self.queues[node.model] for node in graph.nodes]
        if plan is None or route != queues:  # requests of one deployment share these
            plan, route = make_plan(graph), queues
            self._plans[id(graph)] = graph, plan, route
        given = [rows_of() for _ in graph.inputs] if inputs is None else inputs
        stamp = self._stamps if stamp is None else stamp
        frame = request_frame(plan, route, given, 0, stamp, request, None, priority, timeout_ns)
        if is_held:
            self.scheduler.hold(frame)
        else:
            self.scheduler.submit(frame)
        return frame

    def turn(self, at: int = 0) -> Started:
        """One loop iteration; returns the started batches."""
        before = len(self.started)
        while (decisions := self.scheduler.schedule(at)) is not None:
            self.notices += decisions.notices
            for frame in decisions.finished:
                self.finished(frame)
            for batch in decisions.batches:
                self.run(batch)
            for _, ticket in decisions.lookups:
                self.scheduler.run_step(ticket, "equal", at)
        self.scheduler.check()
        return self.started[before:]

    def finished(self, frame: Frame) -> None:
        """Called with each finished request; tests may override it."""
        self.delivered.append(frame)

    def done(
        self,
        batch: Batch,
        *,
        errors: Mapping[int, FlowserveError] | None = None,
        at: int = 0,
    ) -> None:
        """Complete all stages of a batch: each output is one block with the rows of the inputs. The `errors` are those
        of the last stage.
        """
        self.running.remove(batch)
        stages = [batch.tickets[0].node] if batch.route is None else batch.route.nodes
        made = [BatchResults([self._column(batch) for _ in node.outputs]) for node in stages]
        made[-1] = made[-1]._replace(errors=errors or {})
        self.scheduler.complete(batch, made, None, at)

    @staticmethod
    def _column(batch: Batch) -> list[Handle]:
        """One output of a batch."""
        block = object()
        ends = accumulate(ticket.rows for ticket in batch.tickets)
        return [Handle(0, 2, end - ticket.rows, end, block) for ticket, end in zip(batch.tickets, ends, strict=True)]

    def raised(self, batch: Batch) -> bool:
        """Fail a batch; returns whether it is retried."""
        self.running.remove(batch)
        return self.scheduler.complete(batch, [], ModelFailed("boom"), 0)

    def waiting(self) -> dict[ModelKey, int]:
        """The number of waiting tickets of each model."""
        return {key: queue.waiting for key, queue in self.queues.items()}

    @property
    def live(self) -> int:
        """The number of live sequences."""
        return sum(one.live for one in self.scheduler.models.sequences)

    @property
    def answers(self) -> list[Frame]:
        for frame in self.scheduler.take_finished():
            self.finished(frame)
        return self.delivered

    def answered(self) -> list[object]:
        """The finished requests, in order; failed ones with the text of their error."""
        return [
            frame.request if frame.record.error is None else (frame.request, str(frame.record.error))
            for frame in self.answers
        ]

    def run(self, batch: Batch) -> None:
        """Called with each started batch; overridden by tests of batches that run inline."""
        self.running.append(batch)
        self.started.append((batch.queue.key.name, [ticket.frame.request for ticket in batch.tickets]))
