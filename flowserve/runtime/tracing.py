"""Where traces are taken: what is noticed about a traced request on its way.

Decided here: while any flow that was made through a `Watch` (watch.py) is under way, tracing stands between the
dispatcher and the engine, and sees every batch begin and end; while there is none it stands nowhere, and requests pay
nothing. What a trace holds is decided in observe/trace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.observe.trace import BACKEND_OUTPUT, QUEUE_INPUT, Execution, Step, TensorSeen, Trace
from flowserve.observe.waits import (
    AGAIN,
    CLOSED,
    DELAYED,
    FULL,
    GATE,
    HANDOVER,
    INFLIGHT,
    LIMITER,
    SAME_ANSWER,
    SEQUENCE,
    SIZED,
    TURN,
    Spells,
    Wait,
    add,
    divided,
)
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import Completions, Outcome
from flowserve.runtime.watch import Told, Watch
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import DynamicBatcher
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.queues import PolicyBatcher
from flowserve.scheduling.router import Flow, Ticket


class _Live:
    """A trace under way. `attempts`: the last step of each ticket. `over`: when the nodes of each iteration were."""

    __slots__ = ("attempts", "has_tensors", "over", "trace", "would_wait")

    def __init__(self, trace: Trace, *, would_wait: bool, has_tensors: bool) -> None:
        self.trace = trace
        self.would_wait = would_wait  # at the gate
        self.has_tensors = has_tensors
        self.attempts: dict[Ticket, Step] = {}
        self.over: dict[tuple[Flow, int], int] = {}


class Tracing:
    """One for an engine, touched only on its loop. The callables are the engine's own."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        completions: Completions,
        clock: ClockNs,
        start: Callable[[Batch], None],
        finished: Callable[[Batch, Outcome], None],
        answered: Callable[[Flow], None],
    ) -> None:
        self.clock = clock
        self._dispatcher = dispatcher
        self._completions = completions
        self._start = start
        self._finished = finished
        self._returned = completions.finished
        self._answered = answered
        self._live: dict[Flow, _Live] = {}
        self._running: dict[Batch, tuple[Execution, list[tuple[int, _Live, Ticket, Step]]]] = {}
        self._spells: dict[ModelQueue, Spells] = {}
        self._numbers = count(1)
        self._execution_numbers = count(1)

    @property
    def is_live(self) -> bool:
        """Whether anything that is traced is under way."""
        return bool(self._live)

    def watch(self, *told: Told, parent: str = "", has_tensors: bool = False) -> Watch:
        """Trace a request that is about to be submitted. `parent`: the `traceparent` that it came with."""
        return Watch(self, told, parent, has_tensors=has_tensors)

    def begin(self, flow: Flow, parent: str = "", *, has_tensors: bool = False) -> Trace:
        """A flow that is traced was made, and will be submitted next."""
        graph, request, gate = flow.plan.graph, flow.request, flow.owner.gate
        rows = len(next(iter(request.inputs.values()), ())) if graph.max_batch_size else 1
        trace = Trace(next(self._numbers), graph, request.id, rows, flow.arrived_ns, parent)
        if not self._live:
            self._dispatcher.tell(self._run, self._over)
            self._completions.finished = self._came_back
        would_wait = gate is not None and gate.would_wait(flow)
        self._live[flow] = _Live(trace, would_wait=would_wait, has_tensors=has_tensors)
        if has_tensors:
            trace.tensors += [_seen(QUEUE_INPUT, name, array) for name, array in request.inputs.items()]
        for queue in flow.route:
            if queue not in self._spells:
                spells = self._spells[queue] = Spells()
                if not queue.free:
                    spells.begin(flow.arrived_ns)
        return trace

    def begin_call(self, batch: Batch, flow: Flow) -> None:
        """A model makes a request in the execution of `batch`, and the flow for it was made."""
        running = self._running.get(batch)
        if running is not None:
            execution, taken = running
            execution.calls.append(self.begin(flow, has_tensors=any(live.has_tensors for _, live, _, _ in taken)))

    def end(self, flow: Flow, *, has_left: bool = False) -> None:
        """It is over, or never began. Harmless afterwards."""
        live = self._live.pop(flow, None)
        if live is None:
            return
        trace = live.trace
        trace.ended_ns = self.clock()
        if live.has_tensors and flow.done and flow.error is None and not has_left and not flow.owner.is_decoupled:
            slots = flow.owner.output_slot
            made = [(name, flow.tensors[slots[name]]) for name in flow.wanted]
            trace.tensors += [_seen(BACKEND_OUTPUT, name, one.array) for name, one in made if one is not None]
        if flow.error is not None:
            trace.error = str(flow.error)
        elif has_left:
            trace.error = "its caller left"
        elif flow.done and not trace.steps:
            trace.is_cached = True
            add(trace.waits, SAME_ANSWER, trace.arrived_ns, trace.ended_ns)
        elif not flow.done:
            trace.error = "it was refused"
        for step in trace.steps:
            step.ended_ns = step.ended_ns or trace.ended_ns
        if not self._live:
            self._dispatcher.tell(self._start, self._answered)
            self._completions.finished = self._returned
            self._running.clear()
            self._spells.clear()

    # ------------------------------------------------------------------ between the dispatcher and the engine

    def _over(self, flow: Flow) -> None:
        self.end(flow)
        self._answered(flow)

    def _run(self, batch: Batch) -> None:
        now_ns = self.clock()  # later than when the pump began, where batches ran inline in between
        queue = batch.queue
        spells = self._spells.get(queue)
        if spells is not None:
            spells.end(now_ns)
            members = [
                (m, live, ticket)
                for m, ticket in enumerate(batch.tickets)
                if (live := self._live.get(ticket.flow.whole)) is not None
            ]
            if members:
                self._take(batch, members, spells, now_ns)
            if not queue.free:
                spells.begin(now_ns)
        outcome = batch.instance.start(batch)
        if outcome is not None:
            self._note(batch, outcome)
            self._finished(batch, outcome)

    def _came_back(self, batch: Batch, outcome: Outcome) -> None:
        self._note(batch, outcome)
        self._returned(batch, outcome)

    # ------------------------------------------------------------------ what is noticed

    def _take(self, batch: Batch, members: Sequence[tuple[int, _Live, Ticket]], spells: Spells, now_ns: int) -> None:
        """A batch left its queue."""
        queue = batch.queue
        execution = Execution(
            next(self._execution_numbers), queue.key, batch.instance.name, len(batch.tickets), batch.rows, now_ns
        )
        taken: list[tuple[int, _Live, Ticket, Step]] = []
        for m, live, ticket in members:
            execution.members.append(live.trace.number)
            node = ticket.flow.plan.graph.nodes[ticket.node.index]
            waits: list[Wait] = []
            before = live.attempts.get(ticket)
            if before is not None:
                ready_ns = queued_ns = before.ended_ns
                add(waits, AGAIN, queued_ns, now_ns)
            else:
                queued_ns = ticket.queued_ns
                ready_ns = self._ready(live, ticket, queued_ns)
                add(waits, INFLIGHT, ready_ns, queued_ns)
                waits += _queued(self._dispatcher, batch, queued_ns, now_ns, spells)
            if not live.trace.steps:
                add(live.trace.waits, GATE if live.would_wait else TURN, live.trace.arrived_ns, queued_ns)
            step = live.attempts[ticket] = Step(node, ticket.rows, ready_ns, queued_ns, execution, waits)
            live.trace.steps.append(step)
            if live.has_tensors:
                inputs = zip(node.inputs, ticket.node.inputs, strict=True)
                given = [(spec.name, ticket.flow.tensors[slot]) for spec, slot in inputs if slot >= 0]
                step.tensors += [_seen(QUEUE_INPUT, name, one.array) for name, one in given if one is not None]
            taken.append((m, live, ticket, step))
        self._running[batch] = execution, taken

    def _ready(self, live: _Live, ticket: Ticket, queued_ns: int) -> int:
        return queued_ns

    def _note(self, batch: Batch, outcome: Outcome) -> None:
        """A batch came back; what follows from it is not known yet."""
        now_ns = self.clock()
        spells = self._spells.get(batch.queue)
        if spells is not None and not isinstance(outcome, InstanceDied):
            spells.end(now_ns)
        running = self._running.pop(batch, None)
        if running is None:
            return
        execution, taken = running
        if isinstance(outcome, FlowserveError):
            execution.error = str(outcome)
            execution.ran(batch.started_ns, now_ns, now_ns, now_ns)
        else:
            execution.ran(batch.started_ns, outcome.gathered_ns, outcome.computed_ns, now_ns)
        for m, live, ticket, step in taken:
            add(step.waits, HANDOVER, execution.taken_ns, execution.started_ns)
            step.ended_ns = now_ns
            step.error = execution.error
            if isinstance(outcome, Results) and m in outcome.errors:
                step.error = str(outcome.errors[m])
            elif live.has_tensors and isinstance(outcome, Results):
                given = [
                    (spec.name, column[m]) for spec, column in zip(step.node.outputs, outcome.outputs, strict=True)
                ]
                step.tensors += [_seen(BACKEND_OUTPUT, name, one.array) for name, one in given if one is not None]
            live.over[ticket.flow, ticket.node.index] = now_ns


def _seen(activity: str, name: str, array: Any) -> TensorSeen:
    """A copy: what lies there now is somebody else's in a moment."""
    return TensorSeen(activity, name, np.array(array))


def _queued(dispatcher: Dispatcher, batch: Batch, queued_ns: int, taken_ns: int, spells: Spells) -> list[Wait]:
    """Why a ticket waited in its queue between these moments."""
    queue = batch.queue
    batcher = queue.batcher
    busy = spells.after(queued_ns)
    if queue.bound is not None:
        return divided(queued_ns, taken_ns, busy, SEQUENCE)
    otherwise = LIMITER if isinstance(dispatcher, LimitedDispatcher) and queue.needs else TURN
    if not (isinstance(batcher, DynamicBatcher | PolicyBatcher) and batcher.delay_ns):
        return divided(queued_ns, taken_ns, busy, otherwise)
    due_ns = min(ticket.queued_ns for ticket in batch.tickets) + batcher.delay_ns
    until_ns = max(min(due_ns, taken_ns), queued_ns)
    return [
        *divided(
            queued_ns, until_ns, busy, DELAYED if batch.started_ns >= due_ns else _why_complete(batch, len(batcher))
        ),
        *divided(until_ns, taken_ns, busy, otherwise),
    ]


def _why_complete(batch: Batch, left: int) -> str:
    """Why a batch left before its delay was over."""
    if batch.rows >= batch.tickets[0].node.max_batch_size:
        return FULL
    return CLOSED if left else SIZED
