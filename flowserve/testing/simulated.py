"""A deployment in simulated time: the scheduling machines of a server, and models that only take their time.

Decided here: what happens when. Turns are as in a server: what comes at one instant is looked at together. A model with
many answers sends them one after the other, keeps its instance meanwhile, and stands in its send while nothing more
may be under way; whoever reads answers takes each at once. Times are integer nanoseconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from flowserve.config.gate import gate_options
from flowserve.config.instances import instances_of
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Unsupported
from flowserve.graph.types import Graph, ModelKey
from flowserve.observe.statistics import Statistics
from flowserve.runtime.batchers import batcher_for, keeps_order
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.gate import Gate
from flowserve.runtime.limits import needs_of
from flowserve.runtime.streaming import sources
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.iterations import Source
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.limiter import Available, Limiter, Needs
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow
from flowserve.testing.history import Arrival, FormedBatch, Outcome, Simulation
from flowserve.values import Array, DType, Request, TensorSpec

MS_NS: Final = 1_000_000
TakesNs = Callable[[str, int], int]  # by a model's name and the rows of a batch
Answers = Callable[[str, int], int]  # by a model's name and the number of a request


class Handle:
    """What the machines see of a tensor: rows and a shape. What varies is taken to be 1."""

    __slots__ = ("shape", "start", "stop")

    def __init__(self, spec: TensorSpec, rows: int) -> None:
        """`rows` -1: without a batch dimension."""
        self.start, self.stop = 0, rows
        self.shape = _shape(spec, rows)

    def converted(self, conversion: object) -> Handle:
        """All tensors of one kind have one shape here, whatever it is."""
        return self


@dataclass(frozen=True, slots=True)
class Instance:
    name: str


class World:
    """`World(...).live(requests)` lives until nothing can happen any more. `takes_ns` is how long a batch takes, or
    for a model with many answers each of them; `answers` how many those are. `rate_limit` None: there is no limiter.
    """

    def __init__(
        self,
        graph: Graph,
        configs: Mapping[str, ModelConfig],
        takes_ns: TakesNs,
        answers: Answers,
        rate_limit: Sequence[Available] | None,
    ) -> None:
        self.takes_ns = takes_ns
        self.answers = answers
        self.now_ns = 0
        self._graph = graph
        self._configs = configs
        self._tie = count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._batches: list[FormedBatch] = []
        self._outcomes: list[Outcome] = []
        self._answered_ns: dict[int, list[int]] = {}  # of each request
        if rate_limit is None:
            self.dispatcher = Dispatcher(self._run, self._over, told=self._told)
        else:
            limiter = Limiter(tuple(rate_limit))
            self.dispatcher = LimitedDispatcher(self._run, self._over, limiter, told=self._told)
        queues: dict[ModelKey, ModelQueue] = {}
        for node in graph.nodes:
            if node.model not in queues:
                queues[node.model] = _queue(node.model, configs[node.model.name])
                self.dispatcher.add(queues[node.model])
        self._deployment = self._serve(tuple(queues[node.model] for node in graph.nodes))

    def live(self, requests: Sequence[Arrival]) -> Simulation:
        for number, request in enumerate(requests):
            self.at(round(request.at_ms * MS_NS), partial(self._arrive, number, request))
        while self._step():
            self.dispatcher.wake(self.now_ns)
            self.dispatcher.pump(self.now_ns)
        return Simulation(tuple(self._batches), tuple(self._outcomes))

    def at(self, at_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_ns, next(self._tie), act))

    def _step(self) -> bool:
        """Jump to the next instant at which something can happen, and let it. False: nothing ever will."""
        instants = [self._agenda[0][0]] if self._agenda else []
        deadline_ns = self.dispatcher.next_deadline()
        if deadline_ns is not None:
            instants.append(deadline_ns)
        if not instants:
            return False
        self.now_ns = max(self.now_ns, min(instants))
        while self._agenda and self._agenda[0][0] <= self.now_ns:
            heapq.heappop(self._agenda)[2]()
        return True

    # ------------------------------------------------------------------ requests

    def _serve(self, route: tuple[ModelQueue, ...]) -> Deployment:
        graph, config = self._graph, self._configs[self._graph.name]
        statistics = Statistics(graph.name, graph.version)
        deployment = Deployment(config, graph, statistics, [graph.version], route)
        options = gate_options(config.parameters)
        if not options.is_open:
            key, clock = ModelKey(graph.name, graph.version), lambda: self.now_ns
            deployment.gate = Gate(options, None, key, deployment.output_slot, statistics, self.dispatcher, clock)
        return deployment

    def _arrive(self, number: int, said: Arrival) -> None:
        deployment = self._deployment
        rows = said.rows if self._graph.max_batch_size else -1
        request = Request(
            {spec.name: _weightless(spec, rows) for spec in self._graph.inputs},
            sequence_id=said.sequence_id,
            sequence_start=said.sequence_start,
            sequence_end=said.sequence_end,
        )
        flow = deployment.make_stream(
            deployment.plan,
            deployment.route,
            [Handle(spec, rows) for spec in self._graph.inputs],
            self.now_ns,
            number,
            request,
            deployment,
            said.priority,
            round(said.timeout_ms * MS_NS),
        )
        self._answered_ns[number] = []
        if deployment.gate is None:
            self.dispatcher.submit(flow)
            return
        try:
            deployment.gate.enter(flow)
        except FlowserveError as error:
            self._outcomes.append(Outcome(number, self.now_ns / MS_NS, 0.0, error))

    def _told(self, stream: StreamFlow) -> None:
        """It has answers to take, or is over."""
        self.at(self.now_ns, partial(self._take, stream))

    def _take(self, flow: Flow) -> None:
        while isinstance(flow, StreamFlow) and flow.take() is not None:
            self._answered_ns[flow.stamp].append(self.now_ns)

    def _over(self, flow: Flow) -> None:
        self._take(flow)
        if self._deployment.gate is not None:
            self._deployment.gate.leave(flow)
        if flow.error is None and not isinstance(flow, StreamFlow):
            self._answered_ns[flow.stamp].append(self.now_ns)
        latency_ms = (self.now_ns - flow.arrived_ns) / MS_NS
        answers_ms = tuple(at_ns / MS_NS for at_ns in self._answered_ns.pop(flow.stamp))
        self._outcomes.append(Outcome(flow.stamp, self.now_ns / MS_NS, latency_ms, flow.error, answers_ms))

    # ------------------------------------------------------------------ models

    def _run(self, batch: Batch) -> None:
        config = self._configs[batch.queue.key.name]
        # Where a model keeps sequences in their places, somebody of no sequence stands in for those that have nothing.
        batch.tickets = [ticket for ticket in batch.tickets if getattr(ticket, "line", ticket) is not None]
        rows = sum(ticket.rows for ticket in batch.tickets)
        took_ns = self.takes_ns(config.name, rows)
        numbers = tuple(ticket.flow.stamp for ticket in batch.tickets)
        instance: Instance = batch.instance
        self._batches.append(FormedBatch(config.name, instance.name, numbers, rows, self.now_ns / MS_NS, 0.0))
        position = len(self._batches) - 1
        if config.decoupled:
            Execution(self, batch, config, took_ns, partial(self._ended, position))
        else:
            self.at(self.now_ns + took_ns, partial(self._return, batch, config, position))

    def _return(self, batch: Batch, config: ModelConfig, position: int) -> None:
        self._ended(position)
        made = [outputs_of(config, ticket) for ticket in batch.tickets]
        self.dispatcher.batch_done(batch, [[*column] for column in zip(*made, strict=True)], {}, self.now_ns)

    def _ended(self, position: int) -> None:
        self._batches[position] = replace(self._batches[position], end_ms=self.now_ns / MS_NS)


class Execution:
    """A batch of a model with many answers: its requests are answered one after the other."""

    def __init__(
        self, world: World, batch: Batch, config: ModelConfig, took_ns: int, ended: Callable[[], None]
    ) -> None:
        self.world = world
        self.batch = batch
        self.config = config
        self.took_ns = took_ns
        self._ended = ended
        self._left = deque(Sending(self, source) for source in sources(batch))
        self.go_on()

    def go_on(self) -> None:
        if self._left:
            self._left.popleft().go_on()
        else:
            self._ended()
            self.world.dispatcher.execute_returned(self.batch)


class Sending:
    """One of its steps: the other side of what scheduling calls a sender (scheduling/streams.py)."""

    def __init__(self, execution: Execution, source: Source) -> None:
        self._execution = execution
        self._world = execution.world
        self._source = source
        self._left = self._world.answers(execution.config.name, source.flow.stamp)
        self._is_withdrawn = False
        self._is_waiting = False
        self._credits = self._world.dispatcher.streams.start(source, self, self._world.now_ns)

    def grant(self, count: int) -> None:
        self._credits += count
        self._wake()

    def withdraw(self) -> None:
        self._is_withdrawn = True
        self._wake()

    def go_on(self) -> None:
        """Make the next answer; or say that there is none."""
        if self._is_withdrawn or not self._left:
            self._world.dispatcher.streams.last(self._source, self._world.now_ns)
            self._execution.go_on()
        else:
            self._world.at(self._world.now_ns + self._execution.took_ns, self._send)

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._world.at(self._world.now_ns, self._send)

    def _send(self) -> None:
        streams = self._world.dispatcher.streams
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


def outputs_of(config: ModelConfig, ticket: Ticket) -> list[Handle]:
    rows = ticket.rows if config.max_batch_size else -1
    return [Handle(spec, rows) for spec in config.outputs]


def _shape(spec: TensorSpec, rows: int) -> tuple[int, ...]:
    return (*(() if rows < 0 else (rows,)), *(max(dim, 1) for dim in spec.dims))


def _weightless(spec: TensorSpec, rows: int) -> Array:
    """An input for who only asks how large it is; BYTES weigh nothing. It takes no memory, however large it is."""
    zero = np.array(b"" if spec.dtype is DType.BYTES else 0, spec.dtype.numpy)
    return np.broadcast_to(zero, _shape(spec, rows))


def _queue(key: ModelKey, config: ModelConfig) -> ModelQueue:
    """Raises Unsupported."""
    if config.sequence is not None and config.sequence.is_iterative:
        raise Unsupported(f"model '{config.name}' says itself how often a request runs; that is not simulated")
    instances: list[Instance] = []
    needs: list[Needs] = []
    for name, group in instances_of(config):
        if not group.passive:
            instances.append(Instance(name))
            needs.append(needs_of(group))
    return ModelQueue(key, batcher_for(config), instances, needs=needs, keeps_order=keeps_order(config))
