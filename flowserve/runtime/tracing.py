"""Where traces are taken: what is noticed about a traced request on its way.

Decided here: while any flow that was made through a `Watch` (watch.py) is under way, tracing stands between the
dispatcher and the engine, and sees every batch begin and end; while there is none it stands nowhere, and requests pay
nothing. What a trace holds is decided in observe/trace.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError, InstanceDied
from flowserve.observe.context import context_of, new_span_id
from flowserve.observe.trace import BACKEND_OUTPUT, QUEUE_INPUT, Execution, Step, Trace
from flowserve.observe.waits import (
    AGAIN,
    GATE,
    HANDOVER,
    INFLIGHT,
    SAME_ANSWER,
    SEND,
    TURN,
    Spells,
    Wait,
    add,
)
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.instance import Completions, Host, Outcome, cannot_start, start_within
from flowserve.runtime.reasons import is_held, passed_on_ns, ready_ns, shares_slots, waits_in_queue
from flowserve.runtime.seen import seen, seen_of_request
from flowserve.runtime.streaming import Streaming
from flowserve.runtime.watch import Told, Watch
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.iterations import Iteration, Source
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow

log = logging.getLogger("flowserve.runtime")

STEPS_MAX: Final = 10_000  # of a request are told
_KEPT_MAX: Final = 1024


class _Live:
    """A trace under way. `attempts`: the last step of each ticket. Where steps may answer many times, `over`: when the
    nodes of each iteration were, `begun`: when each iteration did, `paused`: since when steps stand in their send.
    """

    __slots__ = ("attempts", "begun", "has_tensors", "held", "over", "paused", "trace", "would_wait")

    def __init__(self, trace: Trace, *, would_wait: bool, has_tensors: bool) -> None:
        self.trace = trace
        self.would_wait = would_wait  # at the gate
        self.has_tensors = has_tensors
        self.attempts: dict[Ticket, Step] = {}
        self.held: list[Step] = []  # whose answers had to wait for others'
        self.over: dict[tuple[Flow, int], int] = {}
        self.begun: dict[Flow, int] = {}
        self.paused: dict[Ticket, int] = {}

    def forget(self, stream: StreamFlow) -> None:
        """Let go of iterations that are over, once there are many: a request may have any number of them."""
        if len(self.over) + len(self.begun) > _KEPT_MAX:
            here = {stream, *stream.live}
            self.over = {key: ns for key, ns in self.over.items() if key[0] in here}
            self.begun = {one: ns for one, ns in self.begun.items() if one in here}
            self.attempts = {one: step for one, step in self.attempts.items() if one.flow in here}


class Tracing:
    """One for an engine, touched only on its loop. The callables are the engine's own."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        completions: Completions,
        streaming: Streaming,
        clock: ClockNs,
        start: Callable[[Batch], None],
        finished: Callable[[Batch, Outcome], None],
        answered: Callable[[Flow], None],
    ) -> None:
        self.clock = clock
        self._dispatcher = dispatcher
        self._completions = completions
        self._streaming = streaming
        self._start = start
        self._finished = finished
        self._returned = completions.finished
        self._answered = answered
        self._live: dict[Flow, _Live] = {}
        self._running: dict[Batch, tuple[Execution, list[tuple[int, _Live, Ticket, Step]]]] = {}
        self._spells: dict[ModelQueue, Spells] = {}
        self._ended_ns = 0  # when a batch came back last
        self._numbers = count(1)
        self._execution_numbers = count(1)

    @property
    def is_live(self) -> bool:
        """Whether anything that is traced is under way."""
        return bool(self._live)

    def watch(self, *told: Told, parent: str = "", has_tensors: bool = False, trace_id: int = 0) -> Watch:
        """Trace a request that is about to be submitted. `parent`: the `traceparent` that it came with. `trace_id`:
        that of the spans it becomes, which models may join; 0: they may not.
        """
        return Watch(self, told, parent, has_tensors=has_tensors, trace_id=trace_id)

    def begin(self, flow: Flow, parent: str = "", *, has_tensors: bool = False, trace_id: int = 0) -> Trace:
        """A flow that is traced was made, and will be submitted next."""
        graph, request, gate = flow.plan.graph, flow.request, flow.owner.gate
        rows = len(next(iter(request.inputs.values()), ())) if graph.max_batch_size else 1
        trace = Trace(next(self._numbers), graph, request.id, rows, flow.arrived_ns, parent, trace_id)
        if not self._live:
            self._dispatcher.tell(self._run, self._over)
            self._completions.finished = self._came_back
            self._streaming.notes = self
        would_wait = gate is not None and gate.would_wait(flow)
        self._live[flow] = _Live(trace, would_wait=would_wait, has_tensors=has_tensors)
        if has_tensors:
            trace.tensors += seen_of_request(request)
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
            has_tensors = any(live.has_tensors for _, live, _, _ in taken)
            trace_id = next((one for _, live, _, _ in taken if (one := live.trace.trace_id)), 0)
            execution.calls.append(self.begin(flow, has_tensors=has_tensors, trace_id=trace_id))

    def end(self, flow: Flow, *, has_left: bool = False) -> None:
        """It is over, or never began. Harmless afterwards."""
        live = self._live.pop(flow, None)
        if live is None:
            return
        trace = live.trace
        trace.ended_ns = self.clock()
        if live.has_tensors and flow.done and flow.error is None and not has_left and not flow.owner.is_decoupled:
            specs, slots = flow.owner.outputs, flow.owner.output_slot
            made = [flow.tensors[slots[name]] for name in flow.wanted]
            trace.tensors += seen(BACKEND_OUTPUT, [specs[name] for name in flow.wanted], made)
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
        for step in live.held:
            step.held_back(passed_on_ns(trace, step.node.index))
        if not self._live:
            self._dispatcher.tell(self._start, self._answered)
            self._completions.finished = self._returned
            self._streaming.notes = None
            self._running.clear()
            self._spells.clear()

    # ------------------------------------------------------------------ between the dispatcher and the engine

    def _over(self, flow: Flow) -> None:
        try:
            self.end(flow)
        except Exception:  # a trace is lost, and not who waits for the answer
            log.exception("a request to '%s' cannot be traced", flow.plan.graph.name)
        self._answered(flow)

    def _run(self, batch: Batch) -> None:
        now_ns = self.clock()  # later than when the pump began, where batches ran inline in between
        queue = batch.queue
        contexts: Sequence[str] = ()
        spells = self._spells.get(queue)
        if spells is not None:
            spells.end(now_ns)
            members = [
                (m, live, ticket)
                for m, ticket in enumerate(batch.tickets)
                if (live := self._live.get(ticket.flow.whole)) is not None
            ]
            if members:
                try:
                    self._take(batch, members, spells, now_ns)
                    contexts = self._contexts(batch)
                except Exception:
                    log.exception("a batch of model '%s' cannot be traced", queue.key.name)
            if not queue.free:
                spells.begin(now_ns)
        host: Host = batch.instance
        try:
            outcome = host.start(batch) if not contexts else start_within(host, batch, contexts)
        except Exception as error:
            outcome = cannot_start(host, batch, error)
        if outcome is not None:
            try:
                self._note(batch, outcome)
                self._finished(batch, outcome)
            except Exception as error:
                self._completions.broke(batch, error)

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
            if len(live.trace.steps) >= STEPS_MAX:
                live.trace.omitted += 1
                continue
            execution.members.append(live.trace.number)
            node = ticket.flow.plan.graph.nodes[ticket.node.index]
            waits: list[Wait] = []
            before = live.attempts.get(ticket)
            if before is not None and before.error:
                became_ready = queued_ns = before.ended_ns
                add(waits, AGAIN, queued_ns, now_ns)
            else:
                became_ready, queued_ns = self._moments(live, ticket, before)
                add(waits, INFLIGHT, became_ready, queued_ns)
                waits += waits_in_queue(self._dispatcher, batch, queued_ns, now_ns, spells)
            if not live.trace.steps:
                add(live.trace.waits, GATE if live.would_wait else TURN, live.trace.arrived_ns, became_ready)
            step = live.attempts[ticket] = Step(node, ticket.rows, became_ready, queued_ns, execution, waits)
            live.trace.steps.append(step)
            if live.has_tensors:
                given = [ticket.flow.tensors[slot] if slot >= 0 else None for slot in ticket.node.inputs]
                step.tensors += seen(QUEUE_INPUT, node.inputs, given)
            taken.append((m, live, ticket, step))
        self._running[batch] = execution, taken

    def _contexts(self, batch: Batch) -> Sequence[str]:
        """The context of the span that each member runs in, where a model may add to it; () where there is none."""
        joined = [(m, live, step) for m, live, _, step in self._running[batch][1] if live.trace.trace_id]
        if not joined:
            return ()
        contexts = [""] * len(batch.tickets)
        for m, live, step in joined:
            step.span_id = new_span_id()
            contexts[m] = context_of(live.trace.trace_id, step.span_id)
        return contexts

    def _moments(self, live: _Live, ticket: Ticket, before: Step | None) -> tuple[int, int]:
        """When it was ready, and queued."""
        if before is not None:  # it asked to be run again
            queued_ns = max(ticket.queued_ns, before.execution.ended_ns)
            return queued_ns, queued_ns
        flow, n = ticket.flow, ticket.node.index
        if not live.trace.steps and shares_slots(flow, n) and self._ended_ns > flow.arrived_ns:
            live.begun[flow] = flow.arrived_ns  # it was let in when a step of somebody else was over
        return ready_ns(live.begun, live.over, flow, n, ticket.queued_ns), ticket.queued_ns

    def _note(self, batch: Batch, outcome: Outcome) -> None:
        """A batch came back; what follows from it is not known yet."""
        now_ns = self._ended_ns = self.clock()
        spells = self._spells.get(batch.queue)
        if spells is not None and not isinstance(outcome, InstanceDied):
            spells.end(now_ns)
        running = self._running.pop(batch, None)
        if running is None:
            return
        execution, taken = running
        if isinstance(outcome, FlowserveError):
            execution.error = str(outcome)
            execution.ran(batch.started_ns, batch.started_ns, now_ns, now_ns)
        else:
            execution.ran(batch.started_ns, outcome.gathered_ns, outcome.computed_ns, now_ns)
        # Members that stood for empty slots of sequences are gone from it by now.
        places = {ticket: m for m, ticket in enumerate(batch.tickets)}
        for _, live, ticket, step in taken:
            m = places[ticket]
            add(step.waits, HANDOVER, execution.taken_ns, execution.started_ns)
            step.ended_ns = now_ns
            step.error = execution.error
            if isinstance(outcome, Results) and m in outcome.errors:
                step.error = str(outcome.errors[m])
            elif live.has_tensors and isinstance(outcome, Results):
                step.tensors += seen(BACKEND_OUTPUT, step.node.outputs, [column[m] for column in outcome.outputs])
            if is_held(batch, ticket):
                live.held.append(step)
            if isinstance(ticket.flow, Iteration):
                live.over[ticket.flow, ticket.node.index] = now_ns
                live.forget(ticket.flow.stream)

    # ------------------------------------------------------------------ steps that answer many times

    def answered(self, source: Source, now_ns: int) -> None:
        """As `Notes` has it."""
        live = self._live.get(source.flow.whole)
        if live is None or source not in live.attempts:
            return
        live.attempts[source].answers = source.count
        self._resumed(live, source, now_ns)
        assert isinstance(source.flow, Iteration)
        if source.flow.children:  # what the answer began may be over already, and then nothing of it waits
            live.begun.setdefault(source.flow.children[-1], now_ns)
            live.forget(source.flow.stream)

    def waits(self, source: Source) -> None:
        live = self._live.get(source.flow.whole)
        if live is not None and source.is_waiting:
            live.paused.setdefault(source, self.clock())

    def over(self, source: Source, error: FlowserveError | None, now_ns: int) -> None:
        live = self._live.get(source.flow.whole)
        if live is None or source not in live.attempts:
            return
        step = live.attempts[source]
        step.ended_ns = now_ns
        step.answers = source.count
        self._resumed(live, source, now_ns)
        live.over[source.flow, source.node.index] = now_ns
        if error is not None:
            step.error = str(error)

    def _resumed(self, live: _Live, source: Source, now_ns: int) -> None:
        since_ns = live.paused.pop(source, None)
        if since_ns is not None:
            add(live.attempts[source].pauses, SEND, since_ns, now_ns)
