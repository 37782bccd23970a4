"""Simulation of a deployment without running its models: which batches form when, and which requests are refused.

`SimulatedDeployment` drives the server's scheduler and admission control in simulated time. As in a server, requests
that arrive at one instant are scheduled together. A decoupled model sends its responses one after another, keeps its
instance meanwhile, and waits in send() while the in-flight limit is reached; callers take each response at once. Times
are integer nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from flowserve.config.parameters import admission_options
from flowserve.config.types import ModelConfig, instances_of
from flowserve.errors import FlowserveError, Unsupported
from flowserve.graph.types import Graph, ModelKey
from flowserve.observe.statistics import Statistics
from flowserve.runtime.admission.controller import AdmissionController
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.workers.policies import batcher_for, keeps_order, levels_of, needs_of
from flowserve.scheduling.batch import Batch, Grant, Notice, Responses, Stop
from flowserve.scheduling.frames.borders import RegionFrame, region_frame
from flowserve.scheduling.frames.borders import Source as StreamSource
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.rate_limit.limiter import Available, Limiter
from flowserve.scheduling.scheduler import Scheduler
from flowserve.simulation.agenda import Agenda
from flowserve.simulation.records import Arrival, FormedBatch, Outcome, Simulation
from flowserve.simulation.rows import RowPlan, SimulatedRows, SimulatedTensor
from flowserve.values import Array, DType, Request, TensorSpec

MS_NS: Final = 1_000_000
TakesNs = Callable[[str, int], int]  # of a model's name and the rows of a batch
Answers = Callable[[str, int], int]  # of a model's name and the number of a request


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
                self.scheduler.models.add(queues[node.model])
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
                for frame in decisions.finished:
                    self._over(frame)
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
            deployment.admission = AdmissionController(
                options,
                None,
                deployment.output_slot,
                statistics,
                self.scheduler,
                lambda: self.now_ns,
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
            rows_of = SimulatedRows(self._row_plan, number)
            make = partial(region_frame, rows=rows_of, is_read_whole=not self._graph.is_decoupled)
        frame = make(
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
            self.scheduler.submit(frame)
            return
        try:
            deployment.admission.enter(frame)
        except FlowserveError as error:
            self._has_ended(Outcome(number, self.now_ns / MS_NS, 0.0, error))

    def _take(self, frame: Frame) -> None:
        while isinstance(frame, RegionFrame) and frame.take() is not None:
            self._answered_ns[frame.record.stamp].append(self.now_ns)

    def _over(self, frame: Frame) -> None:
        self._take(frame)
        if self._deployment.admission is not None:
            self._deployment.admission.leave(frame)
        if frame.record.error is None and not frame.is_stream:
            self._answered_ns[frame.record.stamp].append(self.now_ns)
        latency_ms = (self.now_ns - frame.record.arrived_ns) / MS_NS
        answers_ms = tuple(at_ns / MS_NS for at_ns in self._answered_ns.pop(frame.record.stamp))
        self._has_ended(Outcome(frame.record.stamp, self.now_ns / MS_NS, latency_ms, frame.record.error, answers_ms))

    # ------------------------------------------------------------------ models

    def _run(self, batch: Batch) -> None:
        config = self._configs[batch.queue.key.name]
        # The tickets without a sequence are fillers of strategy direct.
        batch.tickets = [ticket for ticket in batch.tickets if getattr(ticket, "sequence", ticket) is not None]
        rows = sum(ticket.rows for ticket in batch.tickets)
        took_ns = self.takes_ns(config.name, rows)
        numbers = tuple(ticket.frame.record.stamp for ticket in batch.tickets)
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
    """One step of the batch: implements `StreamSender` (scheduling/frames/stream.py)."""

    def __init__(self, execution: SimulatedExecution, source: StreamSource) -> None:
        self._execution = execution
        self._world = execution.world
        self._source = source
        self._left = self._world.answers(execution.config.name, source.frame.record.stamp)
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
