"""Models that call other models: who waits for whom, and calls that nobody could ever answer.

Decided here: which executions wait for which requests, and that a call is refused where only executions that wait for
it could serve it. An execution that has called keeps its instance, and its resources, until it has its answers. A call
can be served where each of its steps can: by the execution that has it, or by any instance that some execution which
is able to finish has, or that nobody has. What is refused is named as the circle it is; nothing here waits for time.

Always true: of the calls that were let through, each can be served some day. A call never makes another one of them
hopeless, because then it would be hopeless itself: the circle goes through it.

Requests that call nobody never come here. This file does not know how an execution calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Union

from flowserve.errors import Unavailable
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.pauses import Pauses
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.sequences import Sequences
from flowserve.scheduling.streams import StreamFlow

if TYPE_CHECKING:
    from flowserve.scheduling.batch import Batch, ModelQueue

Called = Union["CalledFlow", StreamFlow]
# Whether a batch of a queue could ever be started if these executions kept what they have for ever.
CanStart = Callable[["ModelQueue", Sequence["Batch"]], bool]


class CalledFlow(Flow):
    """A request that a model made. `finished`: the steps that are over."""

    __slots__ = ("finished",)

    def __init__(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.finished: set[int] = set()

    def finish_step(self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int) -> list[Ticket]:
        self.finished.add(node.index)
        return super().finish_step(node, outputs, m)

    def pass_over(self, first: PlanNode, nodes: Sequence[PlanNode], inner: Iterable[tuple[int, int]]) -> None:
        self.finished.update(node.index for node in nodes[:-1])
        super().pass_over(first, nodes, inner)


class Calls:
    """The executions of a server that wait for others, by their batches: in calls, and in their send (`pauses`)."""

    def __init__(self, can_start: CanStart, pauses: Pauses) -> None:
        self._can_start = can_start
        self._pauses = pauses
        self._made: dict[Batch, list[Called]] = {}

    def __bool__(self) -> bool:
        return bool(self._made or self._pauses.waiting)

    def begin(self, batch: Batch, flow: Called) -> None:
        """The execution of `batch` calls, and waits; `flow` is submitted next. Raises Unavailable where it would wait
        for ever.
        """
        self._made.setdefault(batch, []).append(flow)
        hopeless = _Hopeless(self._made, self._pauses, self._can_start)
        if hopeless.is_hopeless(flow):
            words = hopeless.words(flow, batch)
            self.over(batch, flow)
            raise Unavailable(words)  # kept in no name: it would hold this frame, and the flow, in a circle

    def over(self, batch: Batch, flow: Called) -> None:
        """The execution has its answer, or does not wait for it any more. Harmless afterwards."""
        flows = self._made.get(batch, [])
        if flow in flows:
            flows.remove(flow)
            if not flows:
                del self._made[batch]

    def batch_over(self, batch: Batch) -> None:
        """The execution has ended: whatever it did not wait for keeps nobody any more."""
        self._made.pop(batch, None)

    def stuck(self) -> Collection[Batch]:
        """The executions that keep their instances for ever, in a call or in a send, if nothing is done about it."""
        return _Hopeless(self._made, self._pauses, self._can_start).stuck

    def waiting_for(self, queue: ModelQueue) -> set[Batch]:
        """The executions that cannot end before this queue's turn comes, directly or through others that they wait
        for.
        """
        found: set[Batch] = set()
        new = {batch for batch, flows in self._made.items() if any(_reaches(flow, queue) for flow in flows)}
        new.update(batch for batch, source in self._pauses.holders().items() if queue in source.flow.route)
        while new:
            found |= new
            served = {ticket.flow.whole for batch in new for ticket in batch.tickets}
            new = {batch for batch, flows in self._made.items() if not served.isdisjoint(flows)} - found
        return found

    def queues_of(self, batch: Batch) -> list[ModelQueue]:
        """The queues on the way of what this execution waits for."""
        called = [flow.route[node.index] for flow in self._made.get(batch, ()) for node in _pending(flow)]
        return called + self._pauses.queues_of(batch)

    def __iter__(self) -> Iterator[Batch]:
        return iter({**dict.fromkeys(self._made), **self._pauses.holders()})


class _Hopeless:
    """The executions that would wait for ever if nothing were done about it. `stuck` shrinks to them."""

    def __init__(self, made: dict[Batch, list[Called]], pauses: Pauses, can_start: CanStart) -> None:
        self._made = made
        self._pauses = pauses
        self._paused = pauses.holders()
        self._can_start = can_start
        self._running: dict[tuple[Flow, int], list[Batch]] = {}
        self.stuck: dict[Batch, None] = dict.fromkeys([*made, *self._paused])
        for batch in self.stuck:
            for ticket in batch.tickets:
                self._running.setdefault((ticket.flow.whole, ticket.node.index), []).append(batch)
        while able := [batch for batch in self.stuck if not self._is_stuck(batch)]:
            for batch in able:
                del self.stuck[batch]

    def _is_stuck(self, batch: Batch) -> bool:
        """Whether it cannot go on while those that are `stuck` do not."""
        if any(map(self.is_hopeless, self._made.get(batch, ()))):
            return True
        source = self._paused.get(batch)
        return source is not None and self._pauses.circle(source, self.stuck) is not None

    def is_hopeless(self, flow: Called) -> bool:
        return any(self._blocks(flow, node) for node in _pending(flow))

    def words(self, flow: Called, caller: Batch) -> str:
        """Why nobody can ever answer a call that is hopeless."""
        blocked = [*self._blocked(flow)]
        pause = self._pause_before(flow, blocked)
        if pause:
            return f"model '{caller.queue.key.name}' -> {pause}"
        path = self._path(flow, caller)
        queue = next((queue for queue, blockers in blocked if path[0] in blockers), blocked[0][0])
        names = [*(batch.queue.key.name for batch in path), queue.key.name]
        circle = " -> ".join(f"'{name}'" for name in names)
        why = "whoever could answer it waits for it"
        hint = "give one of these models another instance (instance_group count), or join them in an ensemble"
        if names[0] != names[-1] or sum(batch.queue is queue for batch in self.stuck) < len(queue.instances):
            why = f"'{names[-1]}' needs resources that '{names[0]}' holds until then"
            hint = "there must be more of them (--rate-limit-resource), or the models must ask for less"
        return f"model {circle}: this call can never be answered, because {why}; {hint}"

    def _pause_before(self, flow: Called, blocked: Sequence[tuple[ModelQueue, list[Batch]]]) -> str:
        """The same, of a call that waits for a step which stands in its send, or for its own sequence; else ""."""
        for queue, blockers in blocked:
            text = f"'{queue.key.name}': this call can never be answered, because"
            for batch in blockers:
                circle = self._pauses.circle(self._paused[batch], self.stuck) if batch in self._paused else None
                if circle:
                    return f"{text} {', '.join(circle)}"
            if isinstance(queue.bound, Sequences) and blockers:
                sequence = queue.bound.id_of(flow)
                why = f"sequence {sequence} goes on in an instance that waits for it, directly or through others"
                return f"{text} {why}; answer first, or call with another sequence"
        return ""

    def _path(self, flow: Called, caller: Batch) -> list[Batch]:
        """The shortest chain of executions from one that could have served `flow` to its caller, each of which waits
        for the next; the caller alone where others were stuck already (a resource became scarcer meanwhile).
        """
        came_from: dict[Batch, Batch | None] = {}
        edge: deque[tuple[Batch | None, Called]] = deque([(None, flow)])
        while caller not in came_from and edge:
            batch, called = edge.popleft()
            for blocker in chain.from_iterable(blockers for _, blockers in self._blocked(called)):
                if blocker not in came_from:
                    came_from[blocker] = batch
                    edge.extend((blocker, each) for each in self._made.get(blocker, ()))
        path = [caller]
        while (before := came_from.get(path[0])) is not None:
            path.insert(0, before)
        return path

    def _blocked(self, flow: Called) -> Iterator[tuple[ModelQueue, list[Batch]]]:
        """The queues of the steps that can never run, each with whoever keeps them from it."""
        for node in _pending(flow):
            if self._blocks(flow, node):
                queue = flow.route[node.index]
                here = [*self._ahead(flow, queue), *self._running.get((flow, node.index), ())]
                here = here or [batch for batch in self.stuck if batch.queue is queue]
                # Where none of them has an instance of the model, it is resources that they have.
                yield queue, [batch for batch in here or self.stuck if batch in self.stuck]

    def _blocks(self, flow: Called, node: PlanNode) -> bool:
        queue: ModelQueue = flow.route[node.index]
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
        """The stuck executions before whose answers this one's cannot go, because the model keeps their order."""
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
    """Whether it is a decoupled step that has been started: it goes on without an instance."""
    return isinstance(flow, StreamFlow) and any(
        source.node is node and source.sender is not None for source in flow.sources()
    )


def _reaches(flow: Called, queue: ModelQueue) -> bool:
    return any(flow.route[node.index] is queue for node in _pending(flow))
