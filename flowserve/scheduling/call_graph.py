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
from itertools import islice

from flowserve.errors import Unavailable
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.streaming.backpressure import BackpressureWaits

# Whether a batch of a queue could ever start if these executions never freed their instances and resources.
CanStart = Callable[[ModelQueue, Sequence[Batch]], bool]


class _OpenCalls:
    """The open calls of one execution. `by_queue`: those with a step at that queue, in the order in which they began;
    calls whose steps there are over may be missing.
    """

    __slots__ = ("by_queue", "frames")

    def __init__(self) -> None:
        self.frames: dict[Frame, None] = {}
        self.by_queue: dict[ModelQueue, dict[Frame, None]] = {}

    def add(self, frame: Frame) -> None:
        self.frames[frame] = None
        for node in _pending(frame):
            self.by_queue.setdefault(frame.queues[node.index], {})[frame] = None

    def discard(self, frame: Frame) -> None:
        """Remove a call. No effect if it is not open."""
        if frame not in self.frames:
            return
        del self.frames[frame]
        for queue in frame.queues:
            calls = self.by_queue.get(queue)
            if calls is not None:
                calls.pop(frame, None)
                if not calls:
                    del self.by_queue[queue]

    def queues(self) -> list[ModelQueue]:
        """The queues of the unfinished steps."""
        return [queue for queue in [*self.by_queue] if any(True for _ in self.steps_at(queue))]

    def steps_at(self, queue: ModelQueue) -> Iterator[tuple[Frame, PlanNode]]:
        """The unfinished steps at a queue, those of the latest call first: these have waited least, so they are the
        most likely to be blocked. Calls without such a step are removed from `by_queue`, because a finished step never
        becomes unfinished again.
        """
        calls = self.by_queue[queue]
        over: list[Frame] = []
        try:
            for frame in reversed(calls):
                steps = [(frame, node) for node in _pending(frame) if frame.queues[node.index] is queue]
                if not steps:
                    over.append(frame)
                yield from steps
        finally:
            for frame in over:
                calls.pop(frame, None)


@dataclass(eq=False)
class CallGraph:
    """The executions that wait, by their batches: for BLS calls, and in send() (`send_waits`). The cost of a call grows
    with the number of these executions, not with the number of their calls.
    """

    _can_start: CanStart
    _send_waits: BackpressureWaits
    _open_calls: dict[Batch, _OpenCalls] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._open_calls or self._send_waits.waiting)

    def begin(self, batch: Batch, frame: Frame) -> None:
        """Record that the execution of `batch` waits for `frame`, which is submitted next. Raises Unavailable if that
        would deadlock.
        """
        if batch not in self._open_calls:
            self._open_calls[batch] = _OpenCalls()
        self._open_calls[batch].add(frame)
        analysis = self._analyse()
        if not analysis.is_deadlocked(frame):  # it can be served even if no waiting execution ever continues
            return
        analysis.shrink()
        if analysis.is_deadlocked(frame):
            text = analysis.explanation(frame, batch)
            self.over(batch, frame)
            raise Unavailable(
                text
            )  # not assigned to a name: that would hold this frame and the request in a reference cycle

    def over(self, batch: Batch, frame: Frame) -> None:
        """The execution no longer waits for `frame`. A repeated call has no effect."""
        calls = self._open_calls.get(batch)
        if calls is not None:
            calls.discard(frame)
            if not calls.frames:
                del self._open_calls[batch]

    def batch_over(self, batch: Batch) -> None:
        """The execution has ended and waits for no call."""
        self._open_calls.pop(batch, None)

    def includes(self, frame: Frame) -> bool:
        """Whether an execution waits for this request."""
        return any(frame in calls.frames for calls in self._open_calls.values())

    def stuck(self) -> Collection[Batch]:
        """The deadlocked executions, in a call or in send()."""
        analysis = self._analyse()
        analysis.shrink()
        return analysis.stuck

    def waiting_for(self, queue: ModelQueue) -> set[Batch]:
        """The executions that cannot end before a batch of this queue runs, directly or through others that they wait
        for.
        """
        found: set[Batch] = set()
        new = {batch for batch, calls in self._open_calls.items() if queue in calls.queues()}
        new.update(batch for batch, source in self._send_waits.holders().items() if queue in source.frame.queues)
        while new:
            found |= new
            served = {ticket.frame.whole for batch in new for ticket in batch.tickets}
            new = {batch for batch, calls in self._open_calls.items() if served & calls.frames.keys()} - found
        return found

    def queues_of(self, batch: Batch) -> list[ModelQueue]:
        """The queues of the steps that this execution waits for; in send(), those of all steps of its request."""
        source = self._send_waits.holders().get(batch)
        called = self._open_calls[batch].queues() if batch in self._open_calls else ()
        return [*called, *(source.frame.queues if source is not None else ())]

    def _analyse(self) -> _DeadlockAnalysis:
        return _DeadlockAnalysis(self._open_calls, self._send_waits, self._can_start)

    def __iter__(self) -> Iterator[Batch]:
        return iter({**dict.fromkeys(self._open_calls), **self._send_waits.holders()})


class _DeadlockAnalysis:
    """Computes the deadlocked executions: `stuck` begins with all waiting ones, and `shrink` reduces it to a fixed
    point. Facts that depend on `stuck` only are computed once for each queue, so that the number of calls matters
    little.
    """

    def __init__(self, made: dict[Batch, _OpenCalls], send_waits: BackpressureWaits, can_start: CanStart) -> None:
        self._open_calls = made
        self._send_waits = send_waits
        self._blocked_sends = send_waits.holders()
        self._can_start = can_start
        self.stuck: dict[Batch, None] = dict.fromkeys([*made, *self._blocked_sends])
        self._waiting_at = _by_queue(self.stuck)
        self._running: dict[ModelQueue, dict[tuple[Frame, int], list[Batch]]] = {}  # the steps in `_waiting_at`
        self._renew()

    def shrink(self) -> None:
        """Remove the executions that can continue, until none is left that can."""
        while able := [batch for batch in self.stuck if not self._is_stuck(batch)]:
            for batch in able:
                del self.stuck[batch]
            self._renew()

    def _renew(self) -> None:
        """Forget what depends on `stuck`."""
        self._stuck_at = _by_queue(self.stuck)
        self._startable: dict[ModelQueue, bool] = {}
        # At models that keep order: the requests up to the first of `stuck`; None if none of `stuck` has started there.
        self._not_behind: dict[ModelQueue, set[Frame] | None] = {}

    def _is_stuck(self, batch: Batch) -> bool:
        """Whether an execution cannot continue unless one of `stuck` does."""
        calls = self._open_calls.get(batch)
        if calls is not None and any(self._blocks_any(calls, queue) for queue in [*calls.by_queue]):
            return True
        source = self._blocked_sends.get(batch)
        return source is not None and self._send_waits.deadlock_cycle(source, self.stuck) is not None

    def _blocks_any(self, calls: _OpenCalls, queue: ModelQueue) -> bool:
        """Whether a step at this queue of one of these calls is blocked."""
        if self._is_startable(queue):
            stuck = self._stuck_at.get(queue, ())
            if not stuck:
                return False
            if queue.order is None and not isinstance(queue.bound, Sequences):  # then only what `stuck` runs is blocked
                return any(
                    (frame := ticket.frame.whole) in calls.frames and frame.is_pending(ticket.node)
                    for batch in stuck
                    for ticket in batch.tickets
                )
        return any(self._blocks(frame, node) for frame, node in calls.steps_at(queue))

    def is_deadlocked(self, frame: Frame) -> bool:
        return any(self._blocks(frame, node) for node in _pending(frame))

    def explanation(self, frame: Frame, caller: Batch) -> str:
        """The error message of a deadlocked call."""
        blocked = [*self._blocked(frame)]
        pause = self._send_cause(frame, blocked)
        if pause:
            return f"model '{caller.queue.key.name}' -> {pause}"
        path = self._path(frame, caller)
        queue = next((queue for queue, blockers in blocked if path[0] in blockers), blocked[0][0])
        names = [*(batch.queue.key.name for batch in path), queue.key.name]
        cycle = " -> ".join(f"'{name}'" for name in names)
        why = "each instance that could answer it waits for it"
        hint = "give one of these models another instance (instance_group count), or join them in an ensemble"
        if names[0] != names[-1] or len(self._stuck_at.get(queue, ())) < len(queue.instances):
            why = f"'{names[-1]}' needs resources that '{names[0]}' holds until then"
            hint = "there must be more of them (--rate-limit-resource), or the models must ask for less"
        return f"model {cycle}: this call can never be answered, because {why}; {hint}"

    def _send_cause(self, frame: Frame, blocked: Sequence[tuple[ModelQueue, list[Batch]]]) -> str:
        """The message of a call that waits for a step blocked in send(), or for its own sequence; else ""."""
        for queue, blockers in blocked:
            text = f"'{queue.key.name}': this call can never be answered, because"
            for batch in blockers:
                source = self._blocked_sends.get(batch)
                if source and (cycle := self._send_waits.deadlock_cycle(source, self.stuck)):
                    return f"{text} {', '.join(cycle)}"
            if isinstance(queue.bound, Sequences) and blockers:
                sequence = queue.bound.id_of(frame)
                why = f"sequence {sequence} goes on in an instance that waits for it, directly or through others"
                return f"{text} {why}; answer first, or call with another sequence"
        return ""

    def _path(self, frame: Frame, caller: Batch) -> list[Batch]:
        """The shortest chain of executions from one that could have served `frame` to its caller, each waiting for the
        next; only the caller if others were deadlocked before (a resource became scarcer meanwhile).
        """
        came_from: dict[Batch, Batch | None] = {}
        for _, blockers in self._blocked(frame):
            came_from.update(dict.fromkeys(blockers))
        edge = deque(came_from)
        while caller not in came_from and edge:
            batch = edge.popleft()
            for blocker in self._blockers_of(batch):
                if blocker not in came_from:
                    came_from[blocker] = batch
                    edge.append(blocker)
        path = [caller]
        while (before := came_from.get(path[0])) is not None:
            path.insert(0, before)
        return path

    def _blocked(self, frame: Frame) -> Iterator[tuple[ModelQueue, list[Batch]]]:
        """The queues of the steps that can never run, each with the executions that block them."""
        for node in _pending(frame):
            if self._blocks(frame, node):
                yield frame.queues[node.index], self._blockers(frame, node)

    def _blockers(self, frame: Frame, node: PlanNode) -> list[Batch]:
        """The executions that block a step. If none of them holds an instance of its model, they hold its resources."""
        queue: ModelQueue = frame.queues[node.index]
        here = [*self._ahead(frame, queue), *self._running_at(queue).get((frame, node.index), ())]
        return [batch for batch in here or self._stuck_at.get(queue) or self.stuck if batch in self.stuck]

    def _blockers_of(self, batch: Batch) -> Iterator[Batch]:
        """The executions that block the calls of one. The steps of its calls at one queue have the same blockers,
        except those that run.
        """
        calls = self._open_calls.get(batch)
        if calls is None:
            return
        for queue in [*calls.by_queue]:
            if self._blocks_any(calls, queue):
                running = self._running_at(queue)
                steps = [(frame, frame.plan.nodes[n]) for frame, n in running if frame in calls.frames]
                others = (step for step in calls.steps_at(queue) if (step[0], step[1].index) not in running)
                steps += islice((step for step in others if self._blocks(*step)), 1)
                for frame, node in steps:
                    if frame.is_pending(node) and self._blocks(frame, node):
                        yield from self._blockers(frame, node)

    def _blocks(self, frame: Frame, node: PlanNode) -> bool:
        queue: ModelQueue = frame.queues[node.index]
        if self._is_behind(frame, queue):
            return True
        running = self._running_at(queue).get((frame, node.index))
        if running is not None:
            return any(batch in self.stuck for batch in running)
        if _answers(frame, node):
            return False
        if isinstance(queue.bound, Sequences) and not queue.bound.can_take(frame, self._stuck_at.get(queue, ())):
            return True
        return not self._is_startable(queue)

    def _is_startable(self, queue: ModelQueue) -> bool:
        startable = self._startable.get(queue)
        if startable is None:
            startable = self._startable[queue] = self._can_start(queue, [*self.stuck])
        return startable

    def _running_at(self, queue: ModelQueue) -> dict[tuple[Frame, int], list[Batch]]:
        """The steps that waiting executions of this queue run, each with these executions."""
        steps = self._running.get(queue)
        if steps is None:
            steps = self._running[queue] = {}
            for batch in self._waiting_at.get(queue, ()):
                for ticket in batch.tickets:
                    steps.setdefault((ticket.frame.whole, ticket.node.index), []).append(batch)
        return steps

    def _is_behind(self, frame: Frame, queue: ModelQueue) -> bool:
        """Whether a deadlocked execution's response must leave before those of `frame`, if the model keeps order."""
        if queue.order is None or queue not in self._stuck_at:
            return False
        if queue not in self._not_behind:
            stuck = {id(ticket) for batch in self._stuck_at[queue] for ticket in batch.tickets}
            not_behind: set[Frame] = set()
            for ticket in queue.order:
                not_behind.add(ticket.frame.whole)
                if id(ticket) in stuck:
                    self._not_behind[queue] = not_behind
                    break
            else:
                self._not_behind[queue] = None
        first = self._not_behind[queue]
        return first is not None and frame not in first

    def _ahead(self, frame: Frame, queue: ModelQueue) -> list[Batch]:
        """The deadlocked executions whose responses must leave before those of `frame`, if the model keeps order."""
        if queue.order is None:
            return []
        ahead = {id(ticket) for ticket in queue.order.ahead_of(frame)}
        here = self._stuck_at.get(queue, [])
        return [batch for batch in here if any(id(ticket) in ahead for ticket in batch.tickets)]


def _by_queue(batches: Collection[Batch]) -> dict[ModelQueue, list[Batch]]:
    found: dict[ModelQueue, list[Batch]] = {}
    for batch in batches:
        found.setdefault(batch.queue, []).append(batch)
    return found


def _pending(frame: Frame) -> Iterator[PlanNode]:
    for node in frame.plan.nodes:
        if frame.is_pending(node):
            yield node


def _answers(frame: Frame, node: PlanNode) -> bool:
    """Whether this is a started decoupled step, which continues without an instance."""
    return isinstance(frame, RegionFrame) and any(
        source.node is node and source.sender is not None for source in frame.all_sources()
    )
