"""Backpressure of decoupled models: the executions that are blocked in send(), and the detection of deadlocks.

Decides that a blocked send() would never return: every slot that could unblock it belongs to steps that need an
instance, or a resource, that is never freed. call_graph.py decides which executions never free theirs: it analyses
those blocked in BLS calls and those blocked in send() together. Does not know time. Called by the scheduler, credits.py
and call_graph.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from flowserve.errors import Unavailable
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.streaming.iterations import UNREAD_MAX, InflightSlots, Iteration, Source, StreamFlow

Explanation = list[str]


@dataclass(eq=False)
class BackpressureWaits:
    """The decoupled steps whose model is blocked in send(). `can_start`: whether a batch of a queue could ever start if
    some executions never freed their instances and resources.
    """

    _can_start: Callable[[Any, Sequence[Any]], bool]
    waiting: dict[Source, None] = field(default_factory=dict)
    _held: dict[Any, dict[Source, None]] = field(default_factory=dict)  # by the batch that holds the instance

    def begin(self, source: Source, holder: Any) -> None:
        """The model is blocked in send() and keeps the instance of the batch `holder`; None: it keeps none."""
        self._let_go(source)
        source.is_waiting = True
        source.holder = holder
        self.waiting[source] = None
        if holder is not None:
            self._held.setdefault(holder, {})[source] = None

    def over(self, source: Source) -> None:
        """The step continues or is over. No effect if it was not waiting."""
        self._let_go(source)
        source.is_waiting = False
        self.waiting.pop(source, None)

    def _let_go(self, source: Source) -> None:
        if source.holder is not None:
            sources = self._held[source.holder]
            del sources[source]
            if not sources:
                del self._held[source.holder]
            source.holder = None

    def returned(self, batch: Any) -> None:
        """A batch freed its instance; its steps may still wait."""
        for source in self._held.pop(batch, ()):
            source.holder = None

    def holders(self) -> dict[Any, Source]:
        """The executions that keep their instance while they wait, each with the last of its blocked steps."""
        return {holder: next(reversed(sources)) for holder, sources in self._held.items()}

    def deadlock_cycle(self, source: Source, kept_by: Collection[Any]) -> Explanation | None:
        """None: the step may get a credit even if the executions `kept_by` never free their instances. Otherwise the
        chain of causes, as text.
        """
        return _DeadlockDetector(self._can_start, kept_by).of(source, ())


@dataclass(frozen=True, eq=False)
class _DeadlockDetector:
    """Follows what a blocked step waits for. Each method returns None if the wait can end, else the chain of causes as
    text, [] for an element that is on the `path` already.
    """

    _can_start: Callable[[Any, Sequence[Any]], bool]
    _kept_by: Collection[Any]

    def of(self, source: Source, path: tuple[object, ...]) -> Explanation | None:
        if source in path:
            return []
        iteration = source.flow
        stream = iteration.stream
        slots = stream.slots
        path = (*path, source)
        begin = f"step '{source.node.name}' waits in its send until"
        if iteration.unread >= UNREAD_MAX:
            cause = self._answer(stream, path)
            return None if cause is None else [f"{begin} its answers can be taken", *cause]
        for n in stream.nesting.firsts[iteration.depth]:
            if not slots.has_room(n):
                cause = self._slots(stream, n, path)
                if cause is not None:
                    return [f"{begin} a step '{stream.plan.nodes[n].name}' is over", *cause]
        return None

    def _answer(self, stream: StreamFlow, path: tuple[object, ...]) -> Explanation | None:
        """None: the next response is complete and waits for its reader, or may still be completed."""
        if stream.answers:
            return None
        first: Iteration = stream
        while first.children:
            first = first.children[0]
        if not first.steps:
            return self._above(first, stream.nesting.answer_late, path)
        for n, depth in enumerate(stream.nesting.depth):
            if depth == first.depth and n not in first.finished:
                cause = self._step(first, n, path)
                if cause is not None:
                    return cause
        return None

    def _slots(self, stream: StreamFlow, n: int, path: tuple[object, ...]) -> Explanation | None:
        """None: a slot of node n may be freed."""
        slots = stream.slots
        if (slots, n) in path:
            return []
        if slots.promised[n]:
            return None  # a step with a credit may still respond
        path = (*path, (slots, n))
        found: Explanation = []
        for cause in chain(self._steps(stream, n, path), self._parked_behind(slots, n, path)):
            if cause is None:
                return None
            found = found or cause
        return found

    def _steps(self, stream: StreamFlow, n: int, path: tuple[object, ...]) -> Iterator[Explanation | None]:
        """What each step of node n that holds a slot waits for."""
        for one in stream.slots.sharers or (stream,):
            for iteration in (one, *one.live):
                if _has_slot(iteration, n):
                    yield self._step(iteration, n, path)

    def _parked_behind(self, slots: InflightSlots, n: int, path: tuple[object, ...]) -> Iterator[Explanation | None]:
        """What the parked steps that hold a slot of node n wait for; each frees it when it has its own slot."""
        behind = {
            (iteration.stream, following.index): None
            for followers in slots.parked
            for iteration, following, hold in followers
            if hold is not None and hold.n == n
        }
        for stream, following in behind:
            yield self._slots(stream, following, path)

    def _step(self, iteration: Iteration, n: int, path: tuple[object, ...]) -> Explanation | None:
        """None: this unfinished step may finish."""
        if (iteration, n) in path:
            return []
        path = (*path, (iteration, n))
        stream = iteration.stream
        node = stream.plan.nodes[n]
        if iteration.missing[n]:
            readers = stream.nesting.consumers  # of the same level, by slot
            makers = [one.index for one in stream.plan.nodes if any(n in readers[slot] for _, slot, _ in one.writes)]
            return self._unfinished(iteration, makers, path)
        if any(entry[:2] == (iteration, node) for entry in stream.slots.parked[n]):
            return self._slots(stream, n, path)
        if (iteration, node) in stream.late:
            return self._above(iteration, stream.nesting.late[n], path)
        source = iteration.source
        if source is not None and source.node is node and source.sender is not None:
            return self.of(source, path) if source.is_waiting else None
        if any(ticket.flow is iteration and ticket.node is node for batch in self._kept_by for ticket in batch.tickets):
            return [f"which runs in model '{node.model.name}', and waits there itself"]
        return self._queue(stream, node)

    def _above(self, iteration: Iteration, makers: Sequence[int], path: tuple[object, ...]) -> Explanation | None:
        """None: these nodes of levels above may finish."""
        for maker in makers:
            above = iteration.around(maker)
            cause = None if above is None else self._unfinished(above, [maker], path)
            if cause is not None:
                return cause
        return None

    def _unfinished(self, iteration: Iteration, nodes: Sequence[int], path: tuple[object, ...]) -> Explanation | None:
        for n in nodes:
            if n not in iteration.finished:
                cause = self._step(iteration, n, path)
                if cause is not None:
                    return [f"that reads what step '{iteration.plan.nodes[n].name}' writes", *cause]
        return None

    def _queue(self, stream: StreamFlow, node: PlanNode) -> Explanation | None:
        """None: an instance of the node's model may run the step."""
        queue = stream.queues[node.index]
        if self._can_start(queue, [*self._kept_by]):
            return None
        model = queue.key.name
        if sum(batch.queue is queue for batch in self._kept_by) >= len(queue.instances):
            return [f"which needs an instance of model '{model}', and all of them are kept by steps that wait so"]
        keepers = [*dict.fromkeys(f"'{batch.queue.key.name}'" for batch in self._kept_by)]
        verb = "holds" if len(keepers) == 1 else "hold"
        return [f"for which model '{model}' needs resources that {', '.join(keepers)} {verb} until then"]


def deadlock(source: Source, cycle: Explanation) -> Unavailable:
    """The error of a request that is deadlocked in send()."""
    limit = min(filter(None, source.flow.stream.nesting.limits), default=0)
    what = f"max_inflight_requests {limit} can never be kept" if limit else "unexpected deadlock"
    return Unavailable(
        f"{what}: {', '.join(cycle)}; give the model another instance, or more of the resource, or the graph a larger "
        "limit"
    )


def _has_slot(iteration: Iteration, n: int) -> bool:
    """Whether a step holds its slot: its inputs of this level are present, and it is neither parked nor over."""
    stream = iteration.stream
    if iteration.depth != stream.nesting.depth[n] or iteration.missing[n] or n in iteration.finished:
        return False
    return all(entry[0] is not iteration for entry in stream.slots.parked[n])
