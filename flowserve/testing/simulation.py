"""What would happen to these requests, without running anything: which batches form when, and who is refused.

Decided here: how a deployment's own configuration (its batchers, priorities, queue limits, instances, resources) is
put into the scheduling machines on a simulated clock, with models that only take their time. Turns are as in a server:
what arrives at one instant is looked at together. Times go in and out as milliseconds, inside they are integer
nanoseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from flowserve.config.instances import instances_of
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig
from flowserve.errors import Invalid, NotFound, Unavailable, Unsupported
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.types import Graph, ModelKey
from flowserve.runtime.batchers import batcher_for, keeps_order
from flowserve.runtime.limits import needs_of
from flowserve.runtime.reading import Reading, read_repositories
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Available, Limiter, Needs
from flowserve.scheduling.router import Flow
from flowserve.testing.sources import Source, folder_of
from flowserve.values import TensorSpec

MS_NS: Final = 1_000_000
Duration = float | Callable[[int], float]  # milliseconds of a batch, or those of a batch of so many rows


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `priority` and `timeout_ms` are what it says itself, 0 for nothing."""

    at_ms: float
    rows: int = 1
    priority: int = 0
    timeout_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """What ran together. `requests` are numbers of arrivals, in the order they stand in the batch."""

    model: str
    instance: str
    requests: tuple[int, ...]
    rows: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, and when. `error` None: it was answered."""

    request: int
    at_ms: float
    latency_ms: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """`batches` in the order they started, `outcomes` in the order requests ended. `str()` of it is a timeline."""

    batches: tuple[FormedBatch, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def refused(self) -> tuple[int, ...]:
        """The requests that a full queue did not take, or whose time was over while they waited."""
        return tuple(sorted(one.request for one in self.outcomes if isinstance(one.error, Unavailable)))

    def batches_of(self, model: str) -> tuple[FormedBatch, ...]:
        return tuple(batch for batch in self.batches if batch.model == model)

    def __str__(self) -> str:
        lines = [
            (one.start_ms, 0, f"{one.instance} runs {_listed(one.requests)} until {one.end_ms:g} ms")
            for one in self.batches
        ]
        for one in self.outcomes:
            how = "is answered" if one.error is None else f"is refused: {one.error}"
            lines.append((one.at_ms, 1, f"request {one.request} {how}, after {one.latency_ms:g} ms"))
        lines.sort(key=lambda line: line[:2])
        return "\n".join(f"{at:8.3f} ms  {text}" for at, _, text in lines)


def simulate(
    source: Source,
    name: str = "",
    *,
    arrivals: Iterable[Arrival | float],
    takes_ms: Duration | Mapping[str, Duration] = 1.0,
    rate_limit: Sequence[Available] | None = None,
) -> Simulation:
    """Send requests to a deployment of `source` (a graph, or a repository's folder) in simulated time.

    `name` may be left out for a graph, and where there is only one deployment that nothing else contains. An arrival
    that is a number is a request of one row at that millisecond. `takes_ms`: how long a batch takes, for all models or
    by name (1 where nothing is said). `rate_limit` as `flowserve run --rate-limit`: the resources given, None for off.
    All tensors of one kind are taken to be of one shape. Deadlines and admission limits of whole graphs are not
    simulated. Blocks while configurations are read.

    Raises Problems and NotFound for what cannot be served, Invalid for a duration of a model that is not there,
    Unsupported for models with sequences or many answers.
    """
    path, own_name, kept = folder_of(source)
    reading = read_repositories([path])
    graph = _graph(reading, name or own_name)
    if isinstance(takes_ms, Mapping):
        _refuse_strangers(takes_ms, {node.model.name for node in graph.nodes})
    requests = [one if isinstance(one, Arrival) else Arrival(one) for one in arrivals]
    world = _World(graph, reading.configs, takes_ms, rate_limit)
    del kept  # nothing is read any more
    return world.live(requests)


class _Handle:
    """What the machines see of a tensor: rows and a shape. What varies is taken to be 1."""

    __slots__ = ("shape", "start", "stop")

    def __init__(self, spec: TensorSpec, rows: int) -> None:
        """`rows` -1: without a batch dimension."""
        self.start, self.stop = 0, rows
        self.shape = (*(() if rows < 0 else (rows,)), *(max(dim, 1) for dim in spec.dims))

    def converted(self, conversion: object) -> _Handle:
        """All tensors of one kind have one shape here, whatever it is."""
        return self


@dataclass(frozen=True, slots=True)
class _Instance:
    name: str


@dataclass
class _World:
    graph: Graph
    configs: Mapping[str, ModelConfig]
    takes_ms: Duration | Mapping[str, Duration]
    rate_limit: Sequence[Available] | None
    now_ns: int = 0
    batches: list[FormedBatch] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    agenda: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tie = count()
        self._plan: Plan = make_plan(self.graph)
        if self.rate_limit is None:
            self._dispatcher = Dispatcher(self._run, self._answered)
        else:
            self._dispatcher = LimitedDispatcher(self._run, self._answered, Limiter(tuple(self.rate_limit)))
        queues: dict[ModelKey, ModelQueue] = {}
        for node in self._plan.nodes:
            if node.model not in queues:
                queues[node.model] = _queue(node.model, self.configs[node.model.name])
                self._dispatcher.add(queues[node.model])
        self._route = [queues[node.model] for node in self._plan.nodes]

    def live(self, requests: Sequence[Arrival]) -> Simulation:
        """Until nothing can happen any more."""
        for number, request in enumerate(requests):
            self._at(round(request.at_ms * MS_NS), partial(self._arrive, number, request))
        while self._step():
            self._dispatcher.wake(self.now_ns)
            self._dispatcher.pump(self.now_ns)
        return Simulation(tuple(self.batches), tuple(self.outcomes))

    def _step(self) -> bool:
        """Jump to the next instant at which something can happen, and let it. False: nothing ever will."""
        instants = [self.agenda[0][0]] if self.agenda else []
        deadline_ns = self._dispatcher.next_deadline()
        if deadline_ns is not None:
            instants.append(deadline_ns)
        if not instants:
            return False
        self.now_ns = max(self.now_ns, min(instants))
        while self.agenda and self.agenda[0][0] <= self.now_ns:
            heapq.heappop(self.agenda)[2]()
        return True

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (at_ns, next(self._tie), act))

    def _arrive(self, number: int, request: Arrival) -> None:
        rows = request.rows if self.graph.max_batch_size else -1
        inputs = [_Handle(spec, rows) for spec in self.graph.inputs]
        timeout_ns = round(request.timeout_ms * MS_NS)
        flow = Flow(self._plan, self._route, inputs, self.now_ns, number, number, None, request.priority, timeout_ns)
        self._dispatcher.submit(flow)

    def _run(self, batch: Batch) -> None:
        model = batch.queue.key.name
        duration = self.takes_ms if not isinstance(self.takes_ms, Mapping) else self.takes_ms.get(model, 1.0)
        took_ms = duration(batch.rows) if callable(duration) else duration
        end_ns = self.now_ns + round(took_ms * MS_NS)
        numbers = tuple(ticket.flow.request for ticket in batch.tickets)
        instance: _Instance = batch.instance
        formed = FormedBatch(model, instance.name, numbers, batch.rows, self.now_ns / MS_NS, end_ns / MS_NS)
        self.batches.append(formed)
        self._at(end_ns, partial(self._return, batch))

    def _return(self, batch: Batch) -> None:
        config = self.configs[batch.queue.key.name]
        rows = [ticket.rows if config.max_batch_size else -1 for ticket in batch.tickets]
        outputs = [[_Handle(spec, own) for own in rows] for spec in config.outputs]
        self._dispatcher.batch_done(batch, outputs, {}, self.now_ns)

    def _answered(self, flow: Flow) -> None:
        latency_ms = (self.now_ns - flow.arrived_ns) / MS_NS
        self.outcomes.append(Outcome(flow.request, self.now_ns / MS_NS, latency_ms, flow.error))


def _queue(key: ModelKey, config: ModelConfig) -> ModelQueue:
    if config.sequence is not None or config.decoupled:
        what = "keeps sequences apart" if config.sequence is not None else "may answer any number of times"
        raise Unsupported(f"model '{key.name}' {what}; only models that answer each request once are simulated")
    instances: list[_Instance] = []
    needs: list[Needs] = []
    for name, group in instances_of(config):
        if not group.passive:
            instances.append(_Instance(name))
            needs.append(needs_of(group))
    return ModelQueue(key, batcher_for(config), instances, needs=needs, keeps_order=keeps_order(config))


def _graph(reading: Reading, name: str) -> Graph:
    resolution = reading.resolution
    contained = {node.model.name for graphs in resolution.graphs.values() for g in graphs.values() for node in g.nodes}
    alone = len(resolution.graphs) == 1
    roots = [one for one in (*resolution.graphs, *resolution.failed) if alone or one not in contained]
    name = name or (roots[0] if len(roots) == 1 else "")
    if name in resolution.failed:
        raise resolution.failed[name]
    if name not in resolution.graphs:
        known = did_you_mean(name, resolution.graphs) or f"there are {', '.join(sorted(resolution.graphs))}"
        raise NotFound(f"no deployment '{name}' to simulate ({known})" if name else f"which deployment? {known}")
    versions = resolution.graphs[name]
    return versions[max(versions)]


def _refuse_strangers(takes_ms: Mapping[str, Duration], models: Collection[str]) -> None:
    for name in takes_ms:
        if name not in models:
            hint = did_you_mean(name, models) or f"its models are {', '.join(sorted(models))}"
            raise Invalid(f"takes_ms names '{name}', which the graph does not have ({hint})")


def _listed(numbers: Sequence[int]) -> str:
    return f"request{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
