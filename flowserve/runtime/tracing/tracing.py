"""Records the steps of traced requests, and why each waited before its batch was formed.

Decides what a trace contains of each step, which tensors are copied into it, and the reason for the time in which a
ticket waited only because of its queue's rules (observe/trace.py has the texts). While a request made through a `Watch`
is in flight, this is one of the engine's observers and sees every batch begin and end; otherwise this module does no
work. observe/trace.py defines a trace. Changes no request or batch, except the trace contexts of batches.

A front end requests a `Watch`, makes the frame of a request through it, marks the points that the request reaches in
the front end, and closes it in any case. Tensors in device memory are recorded without their data, since a trace must
not cause a transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, InstanceDied, Invalid, told
from flowserve.memory.tensor import Tensor
from flowserve.observe import trace as reasons
from flowserve.observe.log_fields import of_request
from flowserve.observe.trace import (
    BACKEND_OUTPUT,
    QUEUE_INPUT,
    BusyPeriods,
    Execution,
    TensorSeen,
    Trace,
    TracedStep,
    Wait,
    add,
    divided,
    new_span_id,
    traceparent_of,
)
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.workers.base import Outcome, Passed
from flowserve.runtime.workers.streaming import ResponseStreams
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import RegionFrame, Source
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import Queue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import BY_NUMPY, Array, Request, TensorSpec

log = logging.getLogger("flowserve.runtime")

TRACED_STEPS_MAX: Final = 10_000  # of one request; later steps are only counted
TRACED_ELEMENTS_MAX: Final = 100_000  # a larger tensor is recorded without its data
_KEPT_MAX: Final = 1024

FrameFactory = Callable[..., Frame]
TraceSink = Callable[[Trace], None]


class Watch:
    """Created by `Tracing.watch`. `sinks` are called with the trace when it is closed."""

    __slots__ = ("_frame", "_has_tensors", "_marks", "_parent", "_sinks", "_trace_id", "_tracing", "trace")

    def __init__(
        self, tracing: Tracing, sinks: Sequence[TraceSink], parent: str, *, has_tensors: bool, trace_id: int
    ) -> None:
        self._tracing = tracing
        self._sinks = sinks
        self._parent = parent
        self._has_tensors = has_tensors
        self._trace_id = trace_id
        self._marks: list[tuple[str, int]] = []
        self._frame: Frame | None = None
        self.trace: Trace | None = None  # None until it is submitted

    def make(self, make: FrameFactory) -> FrameFactory:
        """A function that makes the frame of the traced request in place of `make`."""

        def traced(*facts: Any) -> Frame:
            frame = self._frame = make(*facts)
            trace_id = self._trace_id
            trace = self._tracing.begin(frame, self._parent, has_tensors=self._has_tensors, trace_id=trace_id)
            if trace_id:
                trace.span_id = new_span_id()
                frame.request.trace_context = traceparent_of(trace_id, trace.span_id)
            self.trace = trace
            return frame

        return traced

    @property
    def is_closed(self) -> bool:
        """Whether its trace is complete."""
        return not self._sinks

    def mark(self, name: str) -> None:
        """Record that the request has reached this point of the front end."""
        self._marks.append((name, self._tracing.clock()))

    def settle(self) -> None:
        """Complete the recording: the request is over or was never submitted. No effect if called again."""
        if self._frame is not None:
            self._tracing.end(self._frame)
            self._frame = None

    def close(self) -> None:
        """Pass the trace to the sinks: the front end has finished too. No effect if called again."""
        self.settle()
        sinks, self._sinks = self._sinks, ()
        if self.trace is None:
            return
        self.trace.marks += self._marks
        self._marks = []
        for one in sinks:
            one(self.trace)


@dataclass(slots=True, eq=False)
class _Live:
    """A trace in progress. `attempts`: the last step of each ticket. For decoupled steps, `over`: the end times of the
    nodes of each iteration, `begun`: the start time of each iteration, `paused`: since when models wait in a send.
    """

    trace: Trace
    would_wait: bool  # whether the request would wait for admission
    has_tensors: bool
    attempts: dict[Ticket, TracedStep] = field(default_factory=dict)
    held: list[TracedStep] = field(default_factory=list)  # steps whose responses waited for earlier requests
    over: dict[tuple[Frame, int], int] = field(default_factory=dict)
    begun: dict[Frame, int] = field(default_factory=dict)
    paused: dict[Ticket, int] = field(default_factory=dict)

    def forget(self, whole: RegionFrame) -> None:
        """Drop finished iterations once there are many, since their number is unbounded."""
        if len(self.over) + len(self.begun) > _KEPT_MAX:
            here: set[Frame] = {whole, *whole.stream.live}
            self.over = {key: ns for key, ns in self.over.items() if key[0] in here}
            self.begun = {one: ns for one, ns in self.begun.items() if one in here}
            self.attempts = {one: step for one, step in self.attempts.items() if one.frame in here}

    def ready_ns(self, frame: Frame, n: int, queued_ns: int) -> int:
        """When the inputs of a step of node n were complete: before `queued_ns` if steps in flight are limited."""
        if not isinstance(frame, RegionFrame):
            return queued_ns
        moments = [self.begun[frame]] if frame in self.begun else []
        for edge in frame.plan.graph.edges:
            at: RegionFrame | None = frame
            while edge.consumer == n and at is not None:
                if (at, edge.producer) in self.over:
                    moments.append(self.over[at, edge.producer])
                at = at.parent
        return min(max(moments, default=queued_ns), queued_ns)


@dataclass(slots=True, eq=False)
class _Running:
    """A traced batch that was started: the members that are traced, the execution of each stage, the span ids of the
    members there, and their steps in the first stage.
    """

    members: Sequence[tuple[int, _Live]]
    executions: Sequence[Execution]
    spans: Sequence[dict[int, int]]
    steps: list[tuple[int, _Live, Ticket, TracedStep]] = field(default_factory=list)


class Tracing:
    """Records the traces of an engine, on its event loop's thread. `observers`: the engine's list."""

    def __init__(self, scheduler: Scheduler, streams: ResponseStreams, observers: list[Any], clock: ClockNs) -> None:
        self.clock = clock
        self._scheduler = scheduler
        self._streams = streams
        self._observers = observers
        self._live: dict[Frame, _Live] = {}
        self._running: dict[Batch, _Running] = {}
        self._busy: dict[ModelQueue, BusyPeriods] = {}
        self._ended_ns = 0  # when the last batch completed
        self._numbers = count(1)
        self._execution_numbers = count(1)

    @property
    def is_live(self) -> bool:
        """Whether a traced request is in flight."""
        return bool(self._live)

    def is_traced(self, frame: Frame) -> bool:
        """Whether a request is in flight and has a trace."""
        return frame in self._live

    def watch(self, *sinks: TraceSink, parent: str = "", has_tensors: bool = False, trace_id: int = 0) -> Watch:
        """Trace a request that is about to be submitted; `sinks` receive its trace. `parent`: its `traceparent`.
        `trace_id`: that of its spans, which models may join; 0: they may not.
        """
        return Watch(self, sinks, parent, has_tensors=has_tensors, trace_id=trace_id)

    def begin(self, frame: Frame, parent: str = "", *, has_tensors: bool = False, trace_id: int = 0) -> Trace:
        """Start the trace of a request that will be submitted next."""
        graph, request, admission = frame.plan.graph, frame.request, frame.record.owner.admission
        rows = len(next(iter(request.inputs.values()), ())) if graph.max_batch_size else 1
        trace = Trace(next(self._numbers), graph, request.id, rows, frame.record.arrived_ns, parent, trace_id)
        if not self._live:
            self._observers.append(self)
            self._streams.observer = self
        would_wait = admission is not None and admission.would_wait(frame)
        self._live[frame] = _Live(trace, would_wait=would_wait, has_tensors=has_tensors)
        if has_tensors:
            trace.tensors += _traced_inputs(request)
        for queue in frame.queues:
            if queue not in self._busy:
                periods = self._busy[queue] = BusyPeriods()
                if not queue.free:
                    periods.begin(frame.record.arrived_ns)
        return trace

    def begin_call(self, batch: Batch, frame: Frame) -> None:
        """Start the trace of a call that a model makes during `batch`; `frame` is the call's."""
        for one, running in self._running.items():
            for i, execution in enumerate(running.executions):
                if one.stage(i) is batch:
                    has_tensors = any(live.has_tensors for _, live in running.members)
                    trace_id = next((found for _, live in running.members if (found := live.trace.trace_id)), 0)
                    execution.calls.append(self.begin(frame, has_tensors=has_tensors, trace_id=trace_id))
                    return

    def end(self, frame: Frame, *, has_left: bool = False) -> None:
        """Complete the trace of a request that is over or was never submitted. No effect if called again."""
        live = self._live.pop(frame, None)
        if live is None:
            return
        trace = live.trace
        trace.ended_ns = self.clock()
        if isinstance(frame, RegionFrame) and frame.regions.operations:
            trace.skipped += [frame.plan.graph.nodes[n] for n in frame.skipped]
        if (
            live.has_tensors
            and frame.record.done
            and frame.record.error is None
            and not has_left
            and not frame.record.owner.is_decoupled
        ):
            specs, slots = frame.record.owner.outputs, frame.record.owner.output_slot
            made = [frame.tensors[slots[name]] for name in frame.wanted]
            trace.tensors += _traced_tensors(BACKEND_OUTPUT, [specs[name] for name in frame.wanted], made)
        trace.error = _error(frame, has_left=has_left)
        if not trace.error and not trace.steps and not trace.skipped:
            trace.is_cached = True
            add(trace.waits, reasons.SAME_REQUEST, trace.arrived_ns, trace.ended_ns)
        for step in trace.steps:
            step.ended_ns = step.ended_ns or trace.ended_ns
        for step in live.held:
            step.held_back(_passed_on_ns(trace, step.node.index))
        if not self._live:
            self._observers.remove(self)
            self._streams.observer = None
            self._running.clear()
            self._busy.clear()

    # ------------------------------------------------------------------ as an observer of the engine

    def queued(self, frame: Frame) -> None:
        """Nothing to do: `begin` has recorded it."""

    def batched(self, batch: Batch, now_ns: int) -> None:
        stages = [batch] if batch.route is None else [batch.stage(i) for i in range(len(batch.route))]
        for stage in stages:
            if (periods := self._busy.get(stage.queue)) is not None:
                periods.end(now_ns)
        if batch.queue in self._busy:
            members = [
                (m, live)
                for m, ticket in enumerate(batch.tickets)
                if (live := self._live.get(ticket.frame.whole)) is not None
            ]
            if members:
                try:
                    self._start(batch, stages, members, now_ns)
                except Exception:
                    log.exception("a batch of model '%s' cannot be traced", batch.queue.key.name)
        for stage in stages:
            if (periods := self._busy.get(stage.queue)) is not None and not stage.queue.free:
                periods.begin(now_ns)

    def started(self, batch: Batch) -> None:
        """Nothing to do: a batch has its start time."""

    def computed(self, batch: Batch, outcome: Outcome, now_ns: int) -> None:
        self._ended_ns = now_ns
        for i in range(1 if batch.route is None else len(batch.route)):
            periods = self._busy.get(batch.stage(i).queue)
            if periods is not None and not isinstance(outcome, InstanceDied):
                periods.end(now_ns)
        running = self._running.pop(batch, None)
        if running is None:
            return
        try:
            if isinstance(outcome, Passed):
                self._note_stages(batch, running, outcome, now_ns)
            else:
                self._note(batch, running.executions[0], running.steps, outcome, now_ns)
        except Exception:
            log.exception("a batch of model '%s' cannot be traced", batch.queue.key.name)

    def finished(self, frame: Frame) -> None:
        try:
            self.end(frame)
        except Exception:  # the trace is lost, not the response
            name = frame.plan.graph.name
            log.exception("a request to '%s' cannot be traced", name, extra=of_request(frame.request, model=name))

    failed = finished

    # ------------------------------------------------------------------ steps

    def _start(self, batch: Batch, stages: Sequence[Batch], members: Sequence[tuple[int, _Live]], now_ns: int) -> None:
        """Record that a batch left its queue."""
        executions = [
            Execution(
                next(self._execution_numbers),
                stage.queue.key,
                stage.instance.name,
                len(batch.tickets),
                batch.rows,
                now_ns,
            )
            for stage in stages
        ]
        trace_ids = {m: live.trace.trace_id for m, live in members if live.trace.trace_id}  # that models may join
        spans = [{m: new_span_id() for m in trace_ids} for _ in stages]
        running = self._running[batch] = _Running(members, executions, spans)
        running.steps = self._take(batch, running, 0, now_ns)
        if trace_ids:
            places = range(len(batch.tickets))
            batch.contexts = [
                [traceparent_of(trace_ids[m], ids[m]) if m in ids else "" for m in places] for ids in spans
            ]
        batch.wants_outputs = any(live.has_tensors for _, live in members)

    def _take(
        self, stage: Batch, running: _Running, i: int, now_ns: int
    ) -> list[tuple[int, _Live, Ticket, TracedStep]]:
        """The steps of the traced members that are in stage i of a batch."""
        execution, spans = running.executions[i], running.spans[i]
        taken: list[tuple[int, _Live, Ticket, TracedStep]] = []
        for m, live in running.members:
            ticket = stage.tickets[m]
            if len(live.trace.steps) >= TRACED_STEPS_MAX:
                live.trace.omitted += 1
                continue
            execution.members.append(live.trace.number)
            node = ticket.frame.plan.graph.nodes[ticket.node.index]
            waits: list[Wait] = []
            before = live.attempts.get(ticket)
            if before is not None and before.error:
                became_ready = queued_ns = before.ended_ns
                add(waits, reasons.AGAIN, queued_ns, now_ns)
            else:
                became_ready, queued_ns = self._moments(live, ticket, before)
                add(waits, reasons.INFLIGHT, became_ready, queued_ns)
                if not i:
                    waits += waits_in_queue(self._scheduler, stage, queued_ns, now_ns, self._busy[stage.queue])
            if not live.trace.steps:
                add(
                    live.trace.waits,
                    reasons.ADMISSION if live.would_wait else reasons.TURN,
                    live.trace.arrived_ns,
                    became_ready,
                )
            step = live.attempts[ticket] = TracedStep(node, ticket.rows, became_ready, queued_ns, execution, waits)
            step.span_id = spans.get(m, 0)
            live.trace.steps.append(step)
            if live.has_tensors and not i:
                given = [ticket.tensors[slot] if slot >= 0 else None for slot in ticket.node.inputs]
                step.tensors += _traced_tensors(QUEUE_INPUT, node.inputs, given)
            taken.append((m, live, ticket, step))
        return taken

    def _moments(self, live: _Live, ticket: Ticket, before: TracedStep | None) -> tuple[int, int]:
        """The times at which a ticket was ready and queued."""
        if before is not None:  # it was rescheduled
            queued_ns = max(ticket.queued_ns, before.execution.ended_ns)
            return queued_ns, queued_ns
        frame, n = ticket.frame, ticket.node.index
        slots = None
        if isinstance(frame, RegionFrame) and frame.parent is None and frame.regions.is_shared:
            slots = frame.stream.slots
        if (
            slots is not None
            and slots.limits[n] > 0
            and not live.trace.steps
            and self._ended_ns > frame.record.arrived_ns
        ):
            live.begun[frame] = frame.record.arrived_ns  # it was admitted when another request's step ended
        return live.ready_ns(frame, n, ticket.queued_ns), ticket.queued_ns

    def _note_stages(self, batch: Batch, running: _Running, passed: Passed, now_ns: int) -> None:
        """Record the stages of a batch that completed a route."""
        route, made = batch.route, passed.made
        assert route is not None
        outcomes: list[Results | FlowserveError] = [*made, *([] if passed.error is None else [passed.error])]
        since_ns = batch.started_ns
        for i, outcome in enumerate(outcomes):
            stage, steps = batch.stage(i), running.steps
            if i:
                stage.begin_at(since_ns)
                running.executions[i].taken_ns = since_ns
                steps = self._take(stage, running, i, since_ns)
                given = [made[of].outputs[j] for of, j in route.reads[i - 1] if made[of].outputs]
                for m, live, _, step in steps:
                    if live.has_tensors and given:
                        step.tensors += _traced_tensors(QUEUE_INPUT, step.node.inputs, [column[m] for column in given])
            is_last = i == len(outcomes) - 1
            over_ns = now_ns if is_last or not isinstance(outcome, Results) else outcome.computed_ns
            self._note(stage, running.executions[i], steps, outcome, over_ns)
            if isinstance(outcome, Results):
                since_ns = outcome.computed_ns

    def _note(
        self,
        stage: Batch,
        execution: Execution,
        steps: Sequence[tuple[int, _Live, Ticket, TracedStep]],
        outcome: Outcome,
        now_ns: int,
    ) -> None:
        """Record a batch, or one stage of it, that was executed; the scheduler is notified afterwards."""
        if isinstance(outcome, FlowserveError):
            text = str(outcome)
            # The traces of all members have it, also of those that succeed when the batch runs again in halves.
            execution.error = told(outcome, text, len(stage.tickets)) if isinstance(outcome, Invalid) else text
            execution.ran(stage.started_ns, stage.started_ns, now_ns, now_ns)
        elif not isinstance(outcome, Passed):
            execution.ran(stage.started_ns, outcome.gathered_ns, outcome.computed_ns, now_ns)
        # The padding rows of sequences were removed from the tickets.
        places = {ticket: m for m, ticket in enumerate(stage.tickets)}
        order = stage.queue.order
        for _, live, ticket, step in steps:
            m = places.get(ticket, -1)
            add(step.waits, reasons.HANDOVER, execution.taken_ns, execution.started_ns)
            step.ended_ns = now_ns
            step.error = execution.error
            if isinstance(outcome, Results) and m in outcome.errors:
                step.error = str(outcome.errors[m])
            elif live.has_tensors and isinstance(outcome, Results) and m >= 0 and outcome.outputs:
                step.tensors += _traced_tensors(
                    BACKEND_OUTPUT, step.node.outputs, [column[m] for column in outcome.outputs]
                )
            if order is not None and any(one not in stage.tickets for one in order.ahead_of(ticket.frame.whole)):
                live.held.append(step)
            if isinstance(ticket.frame, RegionFrame):
                live.over[ticket.frame, ticket.node.index] = now_ns
                live.forget(ticket.frame.whole)

    # ------------------------------------------------------------------ as an observer of decoupled steps

    def answered(self, source: Source, now_ns: int) -> None:
        """As `StreamObserver.answered`."""
        live = self._live.get(source.frame.whole)
        if live is None or source not in live.attempts:
            return
        live.attempts[source].answers = source.count
        self._resumed(live, source, now_ns)
        assert isinstance(source.frame, RegionFrame)
        if source.frame.children:  # its iteration may have finished already
            live.begun.setdefault(source.frame.children[-1], now_ns)
            live.forget(source.frame.whole)

    def waits(self, source: Source) -> None:
        live = self._live.get(source.frame.whole)
        if live is not None and source.is_waiting:
            live.paused.setdefault(source, self.clock())

    def over(self, source: Source, error: FlowserveError | None, now_ns: int) -> None:
        live = self._live.get(source.frame.whole)
        if live is None or source not in live.attempts:
            return
        step = live.attempts[source]
        step.ended_ns = now_ns
        step.answers = source.count
        self._resumed(live, source, now_ns)
        live.over[source.frame, source.node.index] = now_ns
        if error is not None:
            step.error = str(error)

    def _resumed(self, live: _Live, source: Source, now_ns: int) -> None:
        since_ns = live.paused.pop(source, None)
        if since_ns is not None:
            add(live.attempts[source].pauses, reasons.SEND, since_ns, now_ns)


def _passed_on_ns(trace: Trace, n: int) -> int:
    """When the outputs of node n were passed on, to the steps that read them or to the caller."""
    readers = {edge.consumer for edge in trace.graph.edges if edge.producer == n}
    return min([step.ready_ns for step in trace.steps if step.node.index in readers], default=trace.ended_ns)


def waits_in_queue(
    scheduler: Scheduler, batch: Batch, queued_ns: int, taken_ns: int, periods: BusyPeriods
) -> list[Wait]:
    """Why a ticket waited in its queue between these times."""
    queue = batch.queue
    batcher = queue.batcher
    busy = periods.after(queued_ns)
    if queue.bound is not None:
        return divided(queued_ns, taken_ns, busy, reasons.SEQUENCE)
    otherwise = reasons.LIMITER if scheduler.rate_limit is not None and queue.needs else reasons.TURN
    if not (isinstance(batcher, Queue) and batcher.delay_ns):
        return divided(queued_ns, taken_ns, busy, otherwise)
    due_ns = min(ticket.queued_ns for ticket in batch.tickets) + batcher.delay_ns
    until_ns = max(min(due_ns, taken_ns), queued_ns)
    return [
        *divided(
            queued_ns,
            until_ns,
            busy,
            reasons.DELAYED if batch.started_ns >= due_ns else _why_complete(batch, len(batcher)),
        ),
        *divided(until_ns, taken_ns, busy, otherwise),
    ]


def _why_complete(batch: Batch, left: int) -> str:
    """Why a batch was formed before its delay was over."""
    if batch.rows >= batch.tickets[0].node.max_batch_size:
        return reasons.FULL
    return reasons.CLOSED if left else reasons.SIZED


def _error(frame: Frame, *, has_left: bool) -> str:
    """Why a request that is over has no response, "" if it has one. `has_left`: its caller does not wait for it."""
    if frame.record.error is not None:
        return str(frame.record.error)
    if has_left:
        return "its caller left"
    return "" if frame.record.done else "it was refused"


def _traced_tensors(
    activity: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor | None]
) -> Iterator[TensorSeen]:
    """The tensors that are present, each with the name of its spec."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor is not None:
            array = None if tensor.place.is_gpu else _copy(tensor.array)
            wire = BY_NUMPY.get(tensor.block.dtype, spec.dtype).wire  # a model may return another type than configured
            yield TensorSeen(activity, spec.name, wire, tensor.shape, array)


def _traced_inputs(request: Request) -> Iterator[TensorSeen]:
    """The inputs of a request."""
    for name, array in request.inputs.items():
        if isinstance(array, np.ndarray):
            wire = BY_NUMPY[array.dtype].wire
            yield TensorSeen(QUEUE_INPUT, name, wire, array.shape, _copy(array))


def _copy(array: Any) -> Array | None:
    """A copy, since the memory is reused after the batch; None for a large array."""
    return np.array(array) if array.size <= TRACED_ELEMENTS_MAX else None
