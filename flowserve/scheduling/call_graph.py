"""BLS calls that wait for each other: which executions wait for which requests, and which calls would deadlock.

Decides that a call is refused if only executions that wait for it could serve it. A calling execution keeps its
instance and its resources until its calls are answered. A call can be served if each of its steps can: by the execution
that runs it, or by an instance that is free or held by an execution that can finish. A refused call fails with an error
that names the cycle. Does not know how an execution calls, nor time; requests without calls never reach this module.

Always true: each accepted call can be served eventually. An accepted call never makes an earlier one deadlock, because
the cycle would contain the new call, which would then have been refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from flowserve.errors import Unavailable
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.flow import Facts, Flow, Ticket
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.streaming.backpressure import BackpressureWaits
from flowserve.scheduling.streaming.iterations import StreamFlow

# Whether a batch of a queue could ever start if these executions never freed their instances and resources.
CanStart = Callable[[ModelQueue, Sequence[Batch]], bool]


class CalledFlow(Flow):
    """The flow of a BLS request. `finished`: the steps that are over."""

    __slots__ = ("finished",)

    def __init__(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.finished: set[int] = set()

    def finish_step(self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int) -> list[Ticket]:
        self.finished.add(node.index)
        return super().finish_step(node, outputs, m)

    def skip_to(self, nodes: Sequence[PlanNode], inner: Sequence[tuple[int, int]]) -> None:
        self.finished.update(node.index for node in nodes[:-1])
        super().skip_to(nodes, inner)


Called = CalledFlow | StreamFlow


@dataclass(eq=False)
class CallGraph:
    """The executions that wait, by their batches: for BLS calls, and in send() (`send_waits`)."""

    _can_start: CanStart
    _send_waits: BackpressureWaits
    _open_calls: dict[Batch, list[Called]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._open_calls or self._send_waits.waiting)

    def begin(self, batch: Batch, flow: Called) -> None:
        """Record that the execution of `batch` waits for `flow`, which is submitted next. Raises Unavailable if that
        would deadlock.
        """
        self._open_calls.setdefault(batch, []).append(flow)
        analysis = _DeadlockAnalysis(self._open_calls, self._send_waits, self._can_start)
        if analysis.is_deadlocked(flow):
            text = analysis.explanation(flow, batch)
            self.over(batch, flow)
            raise Unavailable(
                text
            )  # not assigned to a name: that would hold this frame and the flow in a reference cycle

    def over(self, batch: Batch, flow: Called) -> None:
        """The execution no longer waits for `flow`. A repeated call has no effect."""
        flows = self._open_calls.get(batch, [])
        if flow in flows:
            flows.remove(flow)
            if not flows:
                del self._open_calls[batch]

    def batch_over(self, batch: Batch) -> None:
        """The execution has ended and waits for no call."""
        self._open_calls.pop(batch, None)

    def stuck(self) -> Collection[Batch]:
        """The deadlocked executions, in a call or in send()."""
        return _DeadlockAnalysis(self._open_calls, self._send_waits, self._can_start).stuck

    def waiting_for(self, queue: ModelQueue) -> set[Batch]:
        """The executions that cannot end before a batch of this queue runs, directly or through others that they wait
        for.
        """
        found: set[Batch] = set()
        new = {batch for batch in self._open_calls if queue in self._called_queues(batch)}
        new.update(batch for batch, source in self._send_waits.holders().items() if queue in source.flow.queues)
        while new:
            found |= new
            served = {ticket.flow.whole for batch in new for ticket in batch.tickets}
            new = {batch for batch, flows in self._open_calls.items() if not served.isdisjoint(flows)} - found
        return found

    def queues_of(self, batch: Batch) -> list[ModelQueue]:
        """The queues of the steps that this execution waits for; in send(), those of all steps of its request."""
        source = self._send_waits.holders().get(batch)
        return [*self._called_queues(batch), *(source.flow.queues if source is not None else ())]

    def _called_queues(self, batch: Batch) -> list[ModelQueue]:
        return [flow.queues[node.index] for flow in self._open_calls.get(batch, ()) for node in _pending(flow)]

    def __iter__(self) -> Iterator[Batch]:
        return iter({**dict.fromkeys(self._open_calls), **self._send_waits.holders()})


class _DeadlockAnalysis:
    """Computes the deadlocked executions: `stuck` begins with all waiting ones and shrinks to a fixed point."""

    def __init__(self, made: dict[Batch, list[Called]], send_waits: BackpressureWaits, can_start: CanStart) -> None:
        self._open_calls = made
        self._send_waits = send_waits
        self._blocked_sends = send_waits.holders()
        self._can_start = can_start
        self._running: dict[tuple[Flow, int], list[Batch]] = {}
        self.stuck: dict[Batch, None] = dict.fromkeys([*made, *self._blocked_sends])
        for batch in self.stuck:
            for ticket in batch.tickets:
                self._running.setdefault((ticket.flow.whole, ticket.node.index), []).append(batch)
        while able := [batch for batch in self.stuck if not self._is_stuck(batch)]:
            for batch in able:
                del self.stuck[batch]

    def _is_stuck(self, batch: Batch) -> bool:
        """Whether an execution cannot continue unless one of `stuck` does."""
        if any(map(self.is_deadlocked, self._open_calls.get(batch, ()))):
            return True
        source = self._blocked_sends.get(batch)
        return source is not None and self._send_waits.deadlock_cycle(source, self.stuck) is not None

    def is_deadlocked(self, flow: Called) -> bool:
        return any(self._blocks(flow, node) for node in _pending(flow))

    def explanation(self, flow: Called, caller: Batch) -> str:
        """The error message of a deadlocked call."""
        blocked = [*self._blocked(flow)]
        pause = self._send_cause(flow, blocked)
        if pause:
            return f"model '{caller.queue.key.name}' -> {pause}"
        path = self._path(flow, caller)
        queue = next((queue for queue, blockers in blocked if path[0] in blockers), blocked[0][0])
        names = [*(batch.queue.key.name for batch in path), queue.key.name]
        cycle = " -> ".join(f"'{name}'" for name in names)
        why = "whoever could answer it waits for it"
        hint = "give one of these models another instance (instance_group count), or join them in an ensemble"
        if names[0] != names[-1] or sum(batch.queue is queue for batch in self.stuck) < len(queue.instances):
            why = f"'{names[-1]}' needs resources that '{names[0]}' holds until then"
            hint = "there must be more of them (--rate-limit-resource), or the models must ask for less"
        return f"model {cycle}: this call can never be answered, because {why}; {hint}"

    def _send_cause(self, flow: Called, blocked: Sequence[tuple[ModelQueue, list[Batch]]]) -> str:
        """The message of a call that waits for a step blocked in send(), or for its own sequence; else ""."""
        for queue, blockers in blocked:
            text = f"'{queue.key.name}': this call can never be answered, because"
            for batch in blockers:
                source = self._blocked_sends.get(batch)
                if source and (cycle := self._send_waits.deadlock_cycle(source, self.stuck)):
                    return f"{text} {', '.join(cycle)}"
            if isinstance(queue.bound, Sequences) and blockers:
                sequence = queue.bound.id_of(flow)
                why = f"sequence {sequence} goes on in an instance that waits for it, directly or through others"
                return f"{text} {why}; answer first, or call with another sequence"
        return ""

    def _path(self, flow: Called, caller: Batch) -> list[Batch]:
        """The shortest chain of executions from one that could have served `flow` to its caller, each waiting for the
        next; only the caller if others were deadlocked before (a resource became scarcer meanwhile).
        """
        came_from: dict[Batch, Batch | None] = {}
        edge: deque[tuple[Batch | None, Called]] = deque([(None, flow)])
        while caller not in came_from and edge:
            batch, called = edge.popleft()
            for blocker in chain.from_iterable(blockers for _, blockers in self._blocked(called)):
                if blocker not in came_from:
                    came_from[blocker] = batch
                    edge.extend((blocker, each) for each in self._open_calls.get(blocker, ()))
        path = [caller]
        while (before := came_from.get(path[0])) is not None:
            path.insert(0, before)
        return path

    def _blocked(self, flow: Called) -> Iterator[tuple[ModelQueue, list[Batch]]]:
        """The queues of the steps that can never run, each with the executions that block them."""
        for node in _pending(flow):
            if self._blocks(flow, node):
                queue = flow.queues[node.index]
                here = [*self._ahead(flow, queue), *self._running.get((flow, node.index), ())]
                here = here or [batch for batch in self.stuck if batch.queue is queue]
                # If none of them holds an instance of the model, they hold its resources.
                yield queue, [batch for batch in here or self.stuck if batch in self.stuck]

    def _blocks(self, flow: Called, node: PlanNode) -> bool:
        queue: ModelQueue = flow.queues[node.index]
        if self._ahead(flow, queue):
            return True
        running = self._running.get((flow, node.index))
        if running is not None:
            return any(batch in self.stuck for batch in running)
        if _answers(flow, node):
            return False
        if isinstance(queue.bound, Sequences) and not queue.bound.can_take(
            flow, [one for one in self.stuck if one.queue is queue]
        ):
            return True
        return not self._can_start(queue, [*self.stuck])

    def _ahead(self, flow: Called, queue: ModelQueue) -> list[Batch]:
        """The deadlocked executions whose responses must leave before those of `flow`, if the model keeps order."""
        if queue.order is None:
            return []
        ahead = {id(ticket) for ticket in queue.order.ahead_of(flow)}
        here = [batch for batch in self.stuck if batch.queue is queue]
        return [batch for batch in here if any(id(ticket) in ahead for ticket in batch.tickets)]


def _pending(flow: Called) -> Iterator[PlanNode]:
    if not flow.done:
        for node in flow.plan.nodes:
            if node.writes and node.index not in flow.finished:
                yield node


def _answers(flow: Called, node: PlanNode) -> bool:
    """Whether this is a started decoupled step, which continues without an instance."""
    return isinstance(flow, StreamFlow) and any(
        source.node is node and source.sender is not None for source in flow.sources()
    )
