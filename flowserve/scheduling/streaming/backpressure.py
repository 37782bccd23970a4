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
from flowserve.scheduling.frames.borders import RegionFrame, Source
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.scheduling.frames.stream import UNREAD_MAX

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
        frame: RegionFrame = source.frame
        slots = frame.stream.slots
        path = (*path, source)
        begin = f"step '{source.node.name}' waits in its send until"
        if frame.unread >= UNREAD_MAX:
            cause = self._answer(frame.whole, path)
            return None if cause is None else [f"{begin} its answers can be taken", *cause]
        regions, depth = frame.regions, frame.depth
        taken = [n for n in regions.firsts[depth] if not slots.has_room(n)]
        parked = [n for n in regions.chosen[depth] if slots.parked[n]]
        for n in (*taken, *parked):
            cause = self._slots(frame.whole, n, path)
            if cause is not None:
                return [f"{begin} a step '{frame.plan.nodes[n].name}' is over", *cause]
        return None

    def _answer(self, whole: RegionFrame, path: tuple[object, ...]) -> Explanation | None:
        """None: the next response is complete and waits for its reader, or may still be completed."""
        if whole.stream.answers:
            return None
        first = whole
        while first.children:
            first = first.children[0]
        regions = first.regions
        if not first.steps:
            return self._above(first, regions.answer_late, path)
        for node in first.plan.nodes:
            if regions.depth[node.index] == first.depth and first.is_pending(node):
                cause = self._step(first, node.index, path)
                if cause is not None:
                    return cause
        return None

    def _slots(self, whole: RegionFrame, n: int, path: tuple[object, ...]) -> Explanation | None:
        """None: a slot of node n may be freed."""
        slots = whole.stream.slots
        if (slots, n) in path:
            return []
        if slots.promised[n]:
            return None  # a step with a credit may still respond
        path = (*path, (slots, n))
        found: Explanation = []
        for cause in chain(self._steps(whole, n, path), self._parked_behind(slots, n, path)):
            if cause is None:
                return None
            found = found or cause
        return found

    def _steps(self, whole: RegionFrame, n: int, path: tuple[object, ...]) -> Iterator[Explanation | None]:
        """What each step of node n that holds a slot waits for."""
        for one in whole.stream.slots.sharers or (whole,):
            assert isinstance(one, RegionFrame)
            for frame in (one, *one.stream.live):
                if _has_slot(frame, n):
                    yield self._step(frame, n, path)

    def _parked_behind(self, slots: InflightSlots, n: int, path: tuple[object, ...]) -> Iterator[Explanation | None]:
        """What the parked steps that hold a slot of node n wait for; each frees it when it has its own slot."""
        behind = {
            (one.frame.whole, one.n): None
            for followers in slots.parked
            for one in followers
            if one.hold is not None and one.hold.n == n
        }
        for whole, following in behind:
            yield self._slots(whole, following, path)

    def _step(self, frame: RegionFrame, n: int, path: tuple[object, ...]) -> Explanation | None:
        """None: this unfinished step, or operation, may finish."""
        if (frame, n) in path:
            return []
        path = (*path, (frame, n))
        plan, regions, stream = frame.plan, frame.regions, frame.stream
        if frame.missing[n]:
            written = [(node.index, slot) for node in plan.nodes for _, slot, _ in node.writes]
            written += [(one.index, one.slot) for one in regions.operations]
            makers = [maker for maker, slot in written if n in regions.consumers[slot]]
            return self._unfinished(frame, [one for one in makers if regions.depth[one] == frame.depth], path)
        if (frame, n) in stream.late:
            return self._above(frame, regions.late[n], path)
        if n >= len(plan.nodes):
            return None
        node = plan.nodes[n]
        if any(one.frame is frame for one in stream.slots.parked[n]) and n not in frame.parted:
            return self._slots(frame.whole, n, path)
        sources = [source for source in frame.sources if source.node is node and source.sender is not None]
        if sources:  # it is over when all its parts are
            causes = [self.of(source, path) for source in sources if source.is_waiting]
            return next((cause for cause in causes if cause is not None), None)
        if any(ticket.frame is frame and ticket.node is node for batch in self._kept_by for ticket in batch.tickets):
            return [f"which runs in model '{node.model.name}', and waits there itself"]
        return self._queue(frame, node)

    def _above(self, frame: RegionFrame, makers: Sequence[int], path: tuple[object, ...]) -> Explanation | None:
        """None: these nodes and operations of levels above may finish."""
        for maker in makers:
            above = frame.around(maker)
            cause = None if above is None else self._unfinished(above, [maker], path)
            if cause is not None:
                return cause
        return None

    def _unfinished(self, frame: RegionFrame, makers: Sequence[int], path: tuple[object, ...]) -> Explanation | None:
        nodes = frame.plan.nodes
        for n in makers:
            if not frame.is_over(n):
                cause = self._step(frame, n, path)
                if cause is not None:
                    return [f"that reads what step '{nodes[n].name}' writes", *cause] if n < len(nodes) else cause
        return None

    def _queue(self, frame: RegionFrame, node: PlanNode) -> Explanation | None:
        """None: an instance of the node's model may run the step."""
        queue = frame.queues[node.index]
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
    limit = min(filter(None, source.frame.regions.limits), default=0)
    what = f"max_inflight_requests {limit} can never be kept" if limit else "unexpected deadlock"
    return Unavailable(
        f"{what}: {', '.join(cycle)}; give the model another instance, or more of the resource, or the graph a larger "
        "limit"
    )


def _has_slot(frame: RegionFrame, n: int) -> bool:
    """Whether a step holds its slot: its inputs of this level are present, and it is neither parked nor over."""
    if frame.depth != frame.regions.depth[n] or frame.missing[n]:
        return False
    return n in frame.parted or all(one.frame is not frame for one in frame.stream.slots.parked[n])
