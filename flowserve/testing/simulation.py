"""Simulation of a deployment without running its models: which batches form when, and which requests are refused.

`simulate` chooses the deployment of a graph or a repository and checks the durations and counts it is given;
`SimulatedDeployment` drives the server's scheduler and admission control in simulated time. As in a server, requests
that arrive at one instant are scheduled together. A decoupled model sends its responses one after another, keeps its
instance meanwhile, and waits in send() while the in-flight limit is reached; callers take each response at once. Times
are integer nanoseconds.

Decides also the records that `simulate` takes and returns (`Arrival`, `Simulation`), and their text as a timeline.
Their times are milliseconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np

from flowserve.config.parameters import admission_options
from flowserve.config.suggest import did_you_mean
from flowserve.config.types import ModelConfig, instances_of
from flowserve.errors import FlowserveError, Invalid, NotFound, Unavailable, Unsupported
from flowserve.graph.types import Graph, ModelKey
from flowserve.observe.statistics import Statistics
from flowserve.runtime.admission.controller import AdmissionController, served_by
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.loading.reading import Reading, read_repositories
from flowserve.runtime.workers.policies import batcher_for, keeps_order, levels_of, needs_of
from flowserve.scheduling.batch import Batch, Grant, Notice, Responses, Stop
from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.rate_limit.limiter import Available, Limiter
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.spaces import SpaceFlow
from flowserve.scheduling.streaming.iterations import Source as StreamSource
from flowserve.scheduling.streaming.iterations import StreamFlow
from flowserve.testing.fakes import Source, folder_of
from flowserve.testing.simulated_rows import ItemCounts, RowPlan, SimulatedRows, SimulatedTensor, Taken
from flowserve.values import Array, DType, Request, TensorSpec


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `priority` and `timeout_ms` are its own parameters, 0 for none; `sequence_id` is the correlation id of
    its sequence, with the flags START and END.
    """

    at_ms: float
    rows: int = 1
    priority: int = 0
    timeout_ms: float = 0.0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


@dataclass(frozen=True, slots=True)
class Clients:
    """A closed loop: `count` clients, each of which sends its next request when the one before it has ended, until
    `requests` were sent. Each request has `rows` rows.
    """

    count: int
    requests: int = 1000
    rows: int = 1


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """A batch. `requests` are numbers of arrivals, in the order of the batch; a request may be in it several times if
    several of its steps run the model. `end_ms` is when the instance was free again.
    """

    model: str
    instance: str
    requests: tuple[int, ...]
    rows: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request. `error` None: it was answered. `answers_ms`: the time of each response; one, unless a model
    is decoupled.
    """

    request: int
    at_ms: float
    latency_ms: float
    error: Exception | None = None
    answers_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Simulation:
    """`batches` in the order of starting, `outcomes` in the order in which requests ended. `str()` is a timeline."""

    batches: tuple[FormedBatch, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second, from the first arrival to the last response."""
        answered = [one for one in self.outcomes if one.error is None]
        began_ms = min((one.at_ms - one.latency_ms for one in self.outcomes), default=0.0)
        took_ms = max((one.at_ms for one in answered), default=0.0) - began_ms
        return 1000 * len(answered) / took_ms if took_ms > 0 else 0.0

    @property
    def refused(self) -> tuple[int, ...]:
        """The requests refused by a full queue or by admission control, and those whose timeout passed in a queue."""
        return tuple(sorted(one.request for one in self.outcomes if isinstance(one.error, Unavailable)))

    def batches_of(self, model: str) -> tuple[FormedBatch, ...]:
        return tuple(batch for batch in self.batches if batch.model == model)

    def __str__(self) -> str:
        lines = [
            (one.start_ms, 0, f"{one.instance} runs {_listed(one.requests)} until {one.end_ms:g} ms")
            for one in self.batches
        ]
        lines += [(at_ms, 1, text) for one in self.outcomes for at_ms, text in _entries(one)]
        lines.sort(key=lambda line: line[:2])
        return "\n".join(f"{at:8.3f} ms  {text}" for at, _, text in lines)


def _entries(outcome: Outcome) -> Iterator[tuple[float, str]]:
    name, after = f"request {outcome.request}", f"after {outcome.latency_ms:g} ms"
    if outcome.error is None and outcome.answers_ms == (outcome.at_ms,):
        yield outcome.at_ms, f"{name} is answered, {after}"
        return
    arrived_ms = outcome.at_ms - outcome.latency_ms
    for number, at_ms in enumerate(outcome.answers_ms, 1):
        yield at_ms, f"{name} gets answer {number}, after {at_ms - arrived_ms:g} ms"
    if outcome.error is not None:
        yield outcome.at_ms, f"{name} is refused: {outcome.error}, {after}"
    else:
        yield outcome.at_ms, f"{name} is over, {after}, with {len(outcome.answers_ms)} answers"


def _listed(numbers: Sequence[int]) -> str:
    return f"request{'s' if len(set(numbers)) > 1 else ''} {', '.join(map(str, numbers))}"


Duration = float | Callable[[int], float]  # milliseconds of a batch, or a function of its rows
Count = int | Callable[[int], int]  # a number, or a function of the request's number
MS_NS: Final = 1_000_000
NOTHING_GIVEN: Final[Mapping[str, Any]] = {}
TakesNs = Callable[[str, int], int]  # of a model's name and the rows of a batch
Answers = Callable[[str, int], int]  # of a model's name and the number of a request


def simulate(
    source: Source,
    name: str = "",
    *,
    arrivals: Iterable[Arrival | float] | Clients,
    takes_ms: Duration | Mapping[str, Duration] = 1.0,
    answers: Count | Mapping[str, Count] = 1,
    rate_limit: Sequence[Available] | None = None,
    taken: Taken = NOTHING_GIVEN,
    items: ItemCounts = NOTHING_GIVEN,
) -> Simulation:
    """Send requests to a deployment of `source` (a graph, or a repository's folder) in simulated time.

    `name` may be left out for a graph, and where there is only one deployment that nothing else contains. An arrival
    that is a number is a request of one row at that millisecond; `Clients` are a closed loop. `takes_ms`: the duration
    of a batch, for all models or by name (default 1); for a decoupled model the duration of each response. `answers`:
    the number of responses of a decoupled model per step, likewise; its instance is busy until the last. `rate_limit`
    as `flowserve run --rate-limit`: the resources, None for off. `taken`: the share of rows that pass a condition, by
    its text (`{"kind = 0": 0.3}`), default 1; `items`: the items of each row, by the tensors that are taken apart
    (`{"crops": 5}`), default 1; both may be functions of the request's number. All tensors of one input or output have
    one shape, and callers read each response immediately. The response cache is off. Blocks while configurations are
    read.

    Raises Problems and NotFound for a graph that cannot be served, Invalid for a number out of range or for an unknown
    model, Unsupported for models of iterative sequences.
    """
    path, own_name, kept = folder_of(source)
    reading = read_repositories([path])
    graph = _graph(reading, name or own_name)
    models = {node.model.name for node in graph.nodes}
    took, count = _by_model("takes_ms", takes_ms, models, 1.0), _by_model("answers", answers, models, 1)
    _refuse_answers(answers, {node.model.name for node in graph.nodes if node.decoupled})
    clients: Clients | None = None
    if isinstance(arrivals, Clients):
        clients = arrivals
        for what, least in (("count", 1), ("requests", 1), ("rows", 1)):
            _whole(getattr(clients, what), least, f"{what} of the clients")
        arrivals = [Arrival(0, rows=clients.rows)] * clients.requests
    requests = [one if isinstance(one, Arrival) else Arrival(one) for one in arrivals]
    for number, one in enumerate(requests):
        _ns(one.at_ms, f"at_ms of arrival {number}")
        _ns(one.timeout_ms, f"timeout_ms of arrival {number}")
        _whole(one.rows, 1, f"rows of arrival {number}")
    world = SimulatedDeployment(
        graph,
        reading.configs,
        lambda model, rows: _ns(took(model, rows), f"takes_ms of '{model}'"),
        lambda model, number: _whole(count(model, number), 0, f"answers of '{model}'"),
        rate_limit,
        RowPlan(graph, taken, items),
    )
    del kept  # the configurations have been read
    return world.live(requests, len(requests) if clients is None else clients.count)


def _refuse_answers(answers: Count | Mapping[str, Count], decoupled: Collection[str]) -> None:
    """Raise Invalid for a count that has no effect, which is a mistake in a test."""
    named = [name for name in answers if name not in decoupled] if isinstance(answers, Mapping) else []
    if named:
        raise Invalid(f"answers names '{named[0]}', which is not decoupled: it answers each step once")
    if not isinstance(answers, Mapping) and answers != 1 and not decoupled:
        raise Invalid("answers is given, and no model of the graph is decoupled: each answers a step once")


def _ns(milliseconds: Any, what: str) -> int:
    try:
        nanoseconds: int = round(milliseconds * MS_NS)
    except (TypeError, ValueError, OverflowError):  # not a finite number
        nanoseconds = -1
    if nanoseconds < 0:
        raise Invalid(f"{what} is a number of milliseconds from 0 on, not {milliseconds!r}")
    return nanoseconds


def _whole(number: Any, least: int, what: str) -> int:
    if not isinstance(number, int | np.integer) or number < least:
        raise Invalid(f"{what} is a whole number from {least} on, not {number!r}")
    return int(number)


def _by_model(what: str, given: Any, models: Collection[str], default: Any) -> Callable[[str, int], Any]:
    """The value for a model, and for a number of rows or the number of a request."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in models:
            hint = did_you_mean(name, models) or f"its models are {', '.join(sorted(models))}"
            raise Invalid(f"{what} names '{name}', which the graph does not have ({hint})")

    def value(model: str, number: int) -> Any:
        one = given.get(model, default) if isinstance(given, Mapping) else given
        return one(number) if callable(one) else one

    return value


def _graph(reading: Reading, name: str) -> Graph:
    resolution = reading.resolution
    contained = {node.model.name for graphs in resolution.graphs.values() for g in graphs.values() for node in g.nodes}
    alone = len(resolution.graphs) == 1
    roots = [one for one in (*resolution.graphs, *resolution.failed) if alone or one not in contained]
    name = name or (roots[0] if len(roots) == 1 else "")
    if name in resolution.failed:
        raise resolution.failed[name]
    if name not in resolution.graphs:
        there = sorted({*resolution.graphs, *resolution.failed})
        known = did_you_mean(name, there) or f"there are {', '.join(there) or 'none'}"
        raise NotFound(f"no deployment '{name}' to simulate ({known})" if name else f"which deployment? {known}")
    versions = resolution.graphs[name]
    return versions[max(versions)]


class Agenda:
    """Events in simulated time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()

    def at(self, at_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._tie), act))

    def advance(self, deadline_ns: int | None) -> bool:
        """Advance the time to the next event or the deadline, and run the events of that time. False: there is none."""
        instants = [self._events[0][0]] if self._events else []
        if deadline_ns is not None:
            instants.append(deadline_ns)
        if not instants:
            return False
        self.now_ns = max(self.now_ns, min(instants))
        while self._events and self._events[0][0] <= self.now_ns:
            heapq.heappop(self._events)[2]()
        return True


class BatchResults(NamedTuple):
    """The results of a batch, as `Scheduler.complete` expects them."""

    outputs: Sequence[Sequence[Any]]
    errors: Mapping[int, FlowserveError] = {}


class SimulatedDeployment(Agenda):
    """`SimulatedDeployment(...).live(requests)` runs until no event is left.

    `takes_ns`: the duration of a batch, or of each response of a decoupled model. `answers`: the number of responses
    that a decoupled model sends for a request. `rate_limit`: the resources, None for no rate limiter. `row_plan`: the
    rows of spaces.
    """

    def __init__(
        self,
        graph: Graph,
        configs: Mapping[str, ModelConfig],
        takes_ns: TakesNs,
        answers: Answers,
        rate_limit: Sequence[Available] | None,
        row_plan: RowPlan,
    ) -> None:
        super().__init__()
        self._row_plan = row_plan
        self.takes_ns = takes_ns
        self.answers = answers
        self._graph = graph
        self._configs = configs
        self._batches: list[FormedBatch] = []
        self._outcomes: list[Outcome] = []
        self._to_come: deque[tuple[int, Arrival]] = deque()
        self._answered_ns: dict[int, list[int]] = {}  # of each request
        self.scheduler = Scheduler(None if rate_limit is None else Limiter(tuple(rate_limit)))
        queues: dict[ModelKey, ModelQueue] = {}
        for node in graph.nodes:
            if node.model not in queues:
                queues[node.model] = _queue(node.model, configs[node.model.name])
                self.scheduler.add(queues[node.model])
        self._deployment = self._serve(tuple(queues[node.model] for node in graph.nodes))

    def live(self, requests: Sequence[Arrival], at_once: int) -> Simulation:
        """Run these requests to their end. Those after the first `at_once` arrive as others end."""
        self._to_come = deque(enumerate(requests))
        for _ in range(min(at_once, len(requests))):
            self._next_arrives()
        while self.advance(self.scheduler.next_deadline()):
            while (decisions := self.scheduler.schedule(self.now_ns)) is not None:
                for notice in decisions.notices:
                    self._carry_out(notice)
                for flow in decisions.finished:
                    self._over(flow)
                for batch in decisions.batches:
                    self._run(batch)
        return Simulation(tuple(self._batches), tuple(self._outcomes))

    def _carry_out(self, notice: Notice) -> None:
        if isinstance(notice, Responses):
            self.at(self.now_ns, partial(self._take, notice.stream))  # it has responses to read, or is over
        elif isinstance(notice, Grant):
            notice.sender.grant(notice.credits)
        elif isinstance(notice, Stop):
            notice.sender.withdraw()

    # ------------------------------------------------------------------ requests

    def _next_arrives(self) -> None:
        number, request = self._to_come.popleft()
        self.at(max(round(request.at_ms * MS_NS), self.now_ns), partial(self._arrive, number, request))

    def _has_ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if self._to_come:
            self._next_arrives()

    def _serve(self, queues: tuple[ModelQueue, ...]) -> Deployment:
        graph, config = self._graph, self._configs[self._graph.name]
        statistics = Statistics(graph.name, graph.version)
        deployment = Deployment(config, graph, statistics, [graph.version], queues)
        options = admission_options(config.parameters)
        if not options.is_unlimited:
            key, clock = ModelKey(graph.name, graph.version), lambda: self.now_ns
            deployment.admission = AdmissionController(
                options,
                None,
                served_by(key),
                deployment.output_slot,
                statistics,
                self.scheduler,
                clock,
                levels=levels_of(config),
            )
        return deployment

    def _arrive(self, number: int, arrival: Arrival) -> None:
        deployment = self._deployment
        rows = arrival.rows if self._graph.max_batch_size else -1
        request = Request(
            {spec.name: _input_array(spec, rows) for spec in self._graph.inputs},
            sequence_id=arrival.sequence_id,
            sequence_start=arrival.sequence_start,
            sequence_end=arrival.sequence_end,
        )
        make = deployment.make_stream
        if self._graph.spaces:
            make = partial(SpaceFlow, SimulatedRows(self._row_plan, number))
        flow = make(
            deployment.plan,
            deployment.queues,
            [SimulatedTensor(spec, rows) for spec in self._graph.inputs],
            self.now_ns,
            number,
            request,
            deployment,
            arrival.priority,
            round(arrival.timeout_ms * MS_NS),
        )
        self._answered_ns[number] = []
        if deployment.admission is None:
            self.scheduler.submit(flow)
            return
        try:
            deployment.admission.enter(flow)
        except FlowserveError as error:
            self._has_ended(Outcome(number, self.now_ns / MS_NS, 0.0, error))

    def _take(self, flow: Flow) -> None:
        while isinstance(flow, StreamFlow) and flow.take() is not None:
            self._answered_ns[flow.stamp].append(self.now_ns)

    def _over(self, flow: Flow) -> None:
        self._take(flow)
        if self._deployment.admission is not None:
            self._deployment.admission.leave(flow)
        if flow.error is None and not isinstance(flow, StreamFlow):
            self._answered_ns[flow.stamp].append(self.now_ns)
        latency_ms = (self.now_ns - flow.arrived_ns) / MS_NS
        answers_ms = tuple(at_ns / MS_NS for at_ns in self._answered_ns.pop(flow.stamp))
        self._has_ended(Outcome(flow.stamp, self.now_ns / MS_NS, latency_ms, flow.error, answers_ms))

    # ------------------------------------------------------------------ models

    def _run(self, batch: Batch) -> None:
        config = self._configs[batch.queue.key.name]
        # The tickets without a sequence are fillers of strategy direct.
        batch.tickets = [ticket for ticket in batch.tickets if getattr(ticket, "sequence", ticket) is not None]
        rows = sum(ticket.rows for ticket in batch.tickets)
        took_ns = self.takes_ns(config.name, rows)
        numbers = tuple(ticket.flow.stamp for ticket in batch.tickets)
        self._batches.append(FormedBatch(config.name, batch.instance, numbers, rows, self.now_ns / MS_NS, 0.0))
        position = len(self._batches) - 1
        if config.decoupled:
            SimulatedExecution(self, batch, config, took_ns, partial(self._ended, position))
        else:
            self.at(self.now_ns + took_ns, partial(self._return, batch, config, position))

    def _return(self, batch: Batch, config: ModelConfig, position: int) -> None:
        self._ended(position)
        made = [outputs_of(config, ticket) for ticket in batch.tickets]
        results = BatchResults([[*column] for column in zip(*made, strict=True)])
        self.scheduler.complete(batch, [results], None, self.now_ns)

    def _ended(self, position: int) -> None:
        self._batches[position] = replace(self._batches[position], end_ms=self.now_ns / MS_NS)


class SimulatedExecution:
    """A batch of a decoupled model, which responds to its requests one after the other."""

    def __init__(
        self, world: SimulatedDeployment, batch: Batch, config: ModelConfig, took_ns: int, ended: Callable[[], None]
    ) -> None:
        self.world = world
        self.batch = batch
        self.config = config
        self.took_ns = took_ns
        self._ended = ended
        self._left = deque(Sending(self, source) for source in batch.tickets if isinstance(source, StreamSource))
        self.go_on()

    def go_on(self) -> None:
        if self._left:
            self._left.popleft().go_on()
        else:
            self._ended()
            self.world.scheduler.execute_returned(self.batch)


class Sending:
    """One step of the batch: implements `StreamSender` (scheduling/streaming/iterations.py)."""

    def __init__(self, execution: SimulatedExecution, source: StreamSource) -> None:
        self._execution = execution
        self._world = execution.world
        self._source = source
        self._left = self._world.answers(execution.config.name, source.flow.stamp)
        self._is_withdrawn = False
        self._is_waiting = False
        self._credits = self._world.scheduler.streams.start(source, self, self._world.now_ns)

    def grant(self, count: int) -> None:
        self._credits += count
        self._wake()

    def withdraw(self) -> None:
        self._is_withdrawn = True
        self._wake()

    def go_on(self) -> None:
        """Compute the next response, or end the step after the last."""
        if self._is_withdrawn or not self._left:
            self._world.scheduler.streams.last(self._source, self._world.now_ns)
            self._execution.go_on()
        else:
            self._world.at(self._world.now_ns + self._execution.took_ns, self._send)

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._world.at(self._world.now_ns, self._send)

    def _send(self) -> None:
        streams = self._world.scheduler.streams
        if self._is_withdrawn:
            self.go_on()
        elif not self._credits:
            self._is_waiting = True
            streams.wait(self._source, self._execution.batch)
        else:
            self._credits -= 1
            self._left -= 1
            streams.answer(self._source, outputs_of(self._execution.config, self._source), self._world.now_ns)
            self.go_on()


def outputs_of(config: ModelConfig, ticket: Ticket) -> list[SimulatedTensor]:
    rows = ticket.rows if config.max_batch_size else -1
    return [SimulatedTensor(spec, rows) for spec in config.outputs]


def _shape(spec: TensorSpec, rows: int) -> tuple[int, ...]:
    return (*(() if rows < 0 else (rows,)), *(max(dim, 1) for dim in spec.dims))


def _input_array(spec: TensorSpec, rows: int) -> Array:
    """An input with the right shape and size; its elements share one value, so it takes no memory."""
    zero = np.array(b"" if spec.dtype is DType.BYTES else 0, spec.dtype.numpy)
    return np.broadcast_to(zero, _shape(spec, rows))


def _queue(key: ModelKey, config: ModelConfig) -> ModelQueue:
    """Raises Unsupported."""
    if config.sequence is not None and config.sequence.is_iterative:
        raise Unsupported(f"model '{config.name}' says itself how often a request runs; that is not simulated")
    groups = {name: group for name, group in instances_of(config) if not group.passive}
    needs = [*map(needs_of, groups.values())]
    return ModelQueue(key, batcher_for(config), [*groups], needs=needs, keeps_order=keeps_order(config))
