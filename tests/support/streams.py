"""Decoupled graphs in simulated time: the real scheduler, simulated models and readers.

Decides the events (slow readers, failures, cancellations, models that call others), and the checks after every step.
The graphs, models, requests and the expected responses are in streams_world.py. One seed gives one history.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from flowserve.errors import ModelFailed, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.graph.regions import NO_SLOT
from flowserve.graph.types import Graph
from flowserve.scheduling.batch import Batch, Grant, Notice, Responses, Stop
from flowserve.scheduling.frames.borders import RegionFrame, Source, region_frame
from flowserve.scheduling.frames.frame import Facts, Frame, Ticket, request_frame
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.rate_limit.limiter import Limiter
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.streaming.credits import Streams
from flowserve.simulation.deployment import BatchResults
from tests.support.streams_world import Content, Model, StreamRequest, made_by, right_answers

STEPS_MAX = 50_000


@dataclass
class StreamSim:
    """Simulates requests to one graph. `most[n]`: the largest number of steps of node n that one request had under way.

    `overtaken_max`: with a limiter, which reserves resources for a batch overtaken so often; None: no limiter.
    """

    graph: Graph
    models: list[Model]
    requests: list[StreamRequest]
    seed: int = 0
    overtaken_max: int | None = None
    time: int = 0
    answers: dict[int, list[list[Content | None]]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)  # "" or the error
    most: Counter[int] = field(default_factory=Counter)
    most_live: int = 0
    finals: Counter[int] = field(default_factory=Counter)  # the responses with the final flag, by request
    started: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._by_key = {model.key: model for model in self.models}
        limiter = None if self.overtaken_max is None else Limiter()
        self.scheduler = Scheduler(limiter, OVERTAKEN_MAX if self.overtaken_max is None else self.overtaken_max)
        self.queues = {
            model.key: ModelQueue(
                model.key, _batcher(model), range(model.instances), needs=[model.needs] * model.instances
            )
            for model in self.models
        }
        for queue in self.queues.values():
            self.scheduler.models.add(queue)
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()
        self.plan = make_plan(self.graph)
        self.frames: dict[int, RegionFrame] = {}
        self._reading: set[int] = set()
        self.running: dict[Ticket, None] = {}  # started steps that are not over
        self._called: dict[Frame, Batch] = {}  # calls of models, each with the calling execution
        self.refused: list[str] = []  # the errors of refused calls
        regions = self.plan.regions
        self.shared = InflightSlots(regions.limits) if regions is not None and regions.is_shared else None
        for request in self.requests:
            self._at(request.arrives_ns, partial(self._arrive, request))

    @property
    def streams(self) -> Streams:
        return self.scheduler.streams

    def run(self) -> StreamSim:
        for _ in range(STEPS_MAX):
            if not self._agenda:
                self.check_end()
                return self
            self.time = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == self.time:
                heapq.heappop(self._agenda)[2]()
            while (decisions := self.scheduler.schedule(self.time)) is not None:
                for notice in decisions.notices:
                    self._carry_out(notice)
                for frame in decisions.finished:
                    self._over(frame)
                for batch in decisions.batches:
                    self._run(batch, decisions.finished)
            self.check()
        raise AssertionError("no end")

    def _carry_out(self, notice: Notice) -> None:
        if isinstance(notice, Responses):
            self._responses_ready(notice.stream)
        elif isinstance(notice, Grant):
            notice.sender.grant(notice.credits)
        elif isinstance(notice, Stop):
            notice.sender.withdraw()

    def _at(self, time: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._tie), act))

    def _arrive(self, request: StreamRequest) -> None:
        route = [self.queues[node.model] for node in self.plan.nodes]
        given = [Content((request.number,))]
        stream = region_frame(self.plan, route, given, self.time, request.number, request, shared=self.shared)
        self.frames[request.number] = stream
        self.answers[request.number] = []
        self.scheduler.submit(stream)
        if request.leaves_after_ns is not None:
            self._at(self.time + request.leaves_after_ns, partial(self._leave, request))

    def _leave(self, request: StreamRequest) -> None:
        stream = self.frames[request.number]
        if not stream.record.done:
            self.ended[request.number] = "left"
            self.scheduler.cancel(stream)
            self.scheduler.cancel(stream)

    def _run(self, batch: Batch, finished: Sequence[Frame]) -> None:
        """A request in `finished` may also be in the batch, if it failed after the batch was decided."""
        model = self._by_key[batch.queue.key]
        assert sum(ticket.rows for ticket in batch.tickets) <= max(model.max_batch_size, 1)
        assert all(ticket.frame.whole in finished for ticket in batch.tickets if ticket.frame.record.done)
        self.running.update(dict.fromkeys(batch.tickets))
        self.started += [(ticket.frame.record.stamp, ticket.node.name) for ticket in batch.tickets]
        if model.answers is None:
            do = self._return if model.calls is None else partial(self._call, model.calls)
            self._at(self.time + self._random.randint(*model.ns), partial(do, batch))
            return
        runs = [Running(self, batch, m, model) for m in range(len(batch.tickets))]
        if not model.keeps_instance:
            self.scheduler.execute_returned(batch)
        for one, following in zip(runs, [*runs[1:], None], strict=True):
            one.following = following if model.keeps_instance else None
        for one in runs[: 1 if model.keeps_instance else None]:
            one.go_on()

    def _call(self, graph: Graph, batch: Batch) -> None:
        """The calling model responds when its calls are answered."""
        plan = make_plan(graph)
        make = request_frame if plan.regions is None else region_frame
        route = [self.queues[node.model] for node in plan.nodes]
        frame = make(plan, route, [Content(("called",))], self.time, 1 << 40, StreamRequest(-1))
        try:
            self.scheduler.call(batch, frame)
        except Unavailable as error:
            self.refused.append(str(error))
            self._return(batch)
        else:
            self._called[frame] = batch

    def _return(self, batch: Batch) -> None:
        outputs: list[list[Facts | None]] = [[]]
        errors = {}
        for m, ticket in enumerate(batch.tickets):
            del self.running[ticket]
            if ticket.frame.record.done:
                outputs[0].append(None)
                continue
            made = made_by(self.graph.nodes[ticket.node.index], [ticket.tensors[s] for s in ticket.node.inputs])
            outputs[0].append(made)
            if made == ticket.frame.request.fails_at:
                errors[m] = ModelFailed("as it was told")
        self.scheduler.complete(batch, [BatchResults(outputs, errors)], None, self.time)

    def _responses_ready(self, stream: RegionFrame) -> None:
        if stream in self._called:
            while stream.take() is not None:
                pass
            return
        number = stream.record.stamp
        if number not in self._reading:
            self._reading.add(number)
            self._at(self.time + stream.request.reads_every_ns, partial(self._read, stream))

    def _read(self, stream: RegionFrame) -> None:
        self._reading.discard(stream.record.stamp)
        self._take(stream)
        if stream.stream.answers:
            self._responses_ready(stream)

    def _take(self, stream: RegionFrame) -> None:
        answer = stream.take()
        if answer is not None and self.ended.get(stream.record.stamp) != "left":
            assert not self.finals[stream.record.stamp], "a response follows the final one"
            self.finals[stream.record.stamp] += stream.stream.has_ended
            held = [answer.tensors[slot] if slot != NO_SLOT else None for slot in self.plan.output_slots]
            self.answers[stream.record.stamp].append(held)

    def _over(self, frame: Frame) -> None:
        if frame in self._called:
            batch = self._called.pop(frame)
            self.scheduler.calls.over(batch, frame)
            self._at(self.time, partial(self._return, batch))
            return
        assert isinstance(frame, RegionFrame)
        assert frame.record.stamp not in self.ended, "ended twice"
        self.ended[frame.record.stamp] = "" if frame.record.error is None else str(frame.record.error)
        while frame.stream.answers:
            self._take(frame)

    def check(self) -> None:
        self.scheduler.check()
        regions = self.plan.regions
        assert regions is not None
        together: Counter[int] = Counter()
        for stream in self.frames.values():
            stream.check()
            if stream.record.done:
                continue
            self.most_live = max(self.most_live, len(stream.stream.live))
            under_way = self._under_way(stream)
            together += under_way
            for n, steps in under_way.items():
                self.most[n] = max(self.most[n], steps)
                limit = regions.limits[n]
                assert not limit or steps <= limit, f"{steps} steps of node {n} are under way"
        if self.shared is not None:
            assert all(steps <= regions.limits[n] for n, steps in together.items() if regions.limits[n])

    def _under_way(self, stream: RegionFrame) -> Counter[int]:
        """The steps that wait in queues or run, counted from queues and batches, not from the stream's own counters."""
        queues = dict.fromkeys(stream.queues)
        tickets = [*self.running, *(ticket for queue in queues for ticket in _waiting(queue.batcher))]
        return Counter(
            ticket.node.index
            for ticket in tickets
            if isinstance(ticket.frame, RegionFrame) and ticket.frame.whole is stream
        )

    def check_end(self) -> None:
        for request in self.requests:
            right = right_answers(self.graph, self._by_key, request)
            ended, got = self.ended[request.number], self.answers[request.number]
            assert got == right[: len(got)], f"request {request.number}: {got} is not {right}"
            assert ended or len(got) == len(right), f"request {request.number} got {len(got)} of {len(right)}"
            stream = self.frames[request.number]
            if not ended:
                assert request.fails_at is None, "it failed without an error response"
                assert self.finals[request.number] + stream.stream.ends_empty == 1, "it has no final response, or two"
            assert stream.record.done
            assert not stream.stream.live
            slots = stream.stream.slots
            assert not any(slots.promised), f"{slots.promised} slots are reserved without a request"
            if stream.regions.is_shared or not ended:
                assert not any(slots.taken), f"{slots.taken} slots never came home"
        assert not self._called, "a call was not answered"
        for queue in self.queues.values():
            assert len(queue.free) == len(queue.instances), f"{queue.key}: an instance never came home"
            assert not len(queue.batcher)


class Running:
    """One step of a decoupled model, as a thread that sends and waits: the model's side of `Streams`."""

    def __init__(self, sim: StreamSim, batch: Batch, m: int, model: Model) -> None:
        self.sim, self.batch, self.model = sim, batch, model
        source = batch.tickets[m]
        assert isinstance(source, Source)
        self.source = source
        self.following: Running | None = None
        self.is_cancelled = False
        self.is_waiting = False
        made = made_by(sim.graph.nodes[source.node.index], [source.frame.tensors[slot] for slot in source.node.inputs])
        self.made, self.sent, self.credit = made, 0, 0
        assert model.answers is not None
        self.total = model.answers(made)
        self.credit += sim.streams.start(source, self, sim.time)

    def grant(self, count: int) -> None:
        self.credit += count
        if self.is_waiting:
            self.is_waiting = False
            self.sim._at(self.sim.time, self._send)

    def withdraw(self) -> None:
        self.is_cancelled = True
        if self.is_waiting:
            self.is_waiting = False
            self.sim._at(self.sim.time, self._end)

    def go_on(self) -> None:
        if self.is_cancelled or self.sent == self.total:
            self.sim._at(self.sim.time, self._end)
        else:
            self.sim._at(self.sim.time + self.sim._random.randint(*self.model.ns), self._send)

    def _send(self) -> None:
        if self.is_cancelled:
            self._end()
            return
        if not self.credit:
            self.is_waiting = True
            self.sim.streams.wait(self.source, self.batch if self.model.keeps_instance else None)
            return
        self.credit -= 1
        answer = Content((*self.made.made_of, self.sent))
        self.sent += 1
        is_last = self.sent == self.total and len(self.made.made_of) % 2 == self.source.frame.record.stamp % 2
        if answer == self.source.frame.request.fails_at:
            self.sim.streams.failed(self.source, ModelFailed("as it was told"))
        else:
            self.sim.streams.answer(self.source, [answer], self.sim.time, is_last=is_last)
        if is_last:
            self._end()
        else:
            self.go_on()

    def _end(self) -> None:
        self.sim.running.pop(self.source)
        self.sim.streams.last(self.source, self.sim.time)  # no effect if the last response carried the final flag
        if self.following is not None:
            self.following.go_on()
        elif self.model.keeps_instance:
            self.sim.scheduler.execute_returned(self.batch)


def _batcher(model: Model) -> Batcher:
    if model.waiting_max:
        return Queue(BatchPolicy.simple(model.max_batch_size), Levels(policy=LevelPolicy(model.waiting_max)))
    return Queue(BatchPolicy.simple(model.max_batch_size)) if model.max_batch_size else Queue(BatchPolicy.single())


def _waiting(batcher: Any) -> Iterator[Ticket]:
    return iter(batcher.tickets())
