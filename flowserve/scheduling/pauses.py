"""Models that stand in their send: which of them, and what each waits for.

Decided here: that a pause would never end where every slot that could end it belongs to steps which need an instance,
or a resource, that is kept for ever. Who keeps what for ever is decided in calls.py, where executions that wait in a
call are weighed together with those that wait here. Nothing here waits for time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from flowserve.errors import Unavailable
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.iterations import Iteration, Source
from flowserve.scheduling.router import Flow
from flowserve.scheduling.slots import Slots
from flowserve.scheduling.streams import UNREAD_MAX, StreamFlow

Words = list[str]


class Pauses:
    """The decoupled steps in whose send somebody stands. `can_start`: whether a batch of a queue could ever be started
    if some executions kept what they have for ever.
    """

    def __init__(self, can_start: Callable[[Any, Sequence[Any]], bool]) -> None:
        self._can_start = can_start
        self.waiting: dict[Source, None] = {}

    def begin(self, source: Source, holder: Any) -> None:
        """Somebody stands in its send, and keeps the instance of the batch `holder` meanwhile; None: keeps none."""
        source.is_waiting = True
        source.holder = holder
        self.waiting[source] = None

    def over(self, source: Source) -> None:
        """It goes on, or is over. Harmless where it did not wait."""
        source.is_waiting = False
        source.holder = None
        self.waiting.pop(source, None)

    def returned(self, batch: Any) -> None:
        """A batch keeps its instance no longer, whoever still waits in it."""
        for source in self.waiting:
            if source.holder is batch:
                source.holder = None

    def holders(self) -> dict[Any, Source]:
        """The executions that keep their instance while they wait, each with the step that it waits for."""
        return {source.holder: source for source in self.waiting if source.holder is not None}

    def queues_of(self, batch: Any) -> list[Any]:
        """The queues that what this execution waits for may have to pass; those of all steps of its request."""
        return [queue for holder, source in self.holders().items() if holder is batch for queue in source.flow.route]

    def circle(self, source: Source, kept_by: Collection[Any]) -> Words | None:
        """None: it may get a credit some day, even if these executions keep what they have for ever. Else what it waits
        for, in words.
        """
        return _Circle(self._can_start, kept_by).of(source, ())


class _Circle:
    """What somebody waits for, followed from one to the next. Each returns None where it will come to an end, else
    words; whoever is on the `path` is asked already.
    """

    def __init__(self, can_start: Callable[[Any, Sequence[Any]], bool], kept_by: Collection[Any]) -> None:
        self._can_start = can_start
        self._kept_by = kept_by

    def of(self, source: Source, path: tuple[object, ...]) -> Words | None:
        if source in path:
            return []
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        stream = iteration.stream
        slots = stream.slots
        path = (*path, source)
        begin = f"step '{source.node.name}' waits in its send until"
        if iteration.unread >= UNREAD_MAX:
            words = self._answer(stream, path)
            return None if words is None else [f"{begin} its answers can be taken", *words]
        for n in stream.nesting.firsts[iteration.depth]:
            if slots is not None and not slots.has_room(n):
                words = self._slots(stream, n, path)
                if words is not None:
                    return [f"{begin} a step '{stream.plan.nodes[n].name}' is over", *words]
        return None

    def _answer(self, stream: StreamFlow, path: tuple[object, ...]) -> Words | None:
        """None: the next answer is there, and its reader is waited for; or it will be there some day."""
        if stream.answers:
            return None
        first: Iteration = stream
        while first.children:
            first = first.children[0]
        if not first.steps:
            return self._above(first, stream.nesting.answer_late, path)
        for n, depth in enumerate(stream.nesting.depth):
            if depth == first.depth and n not in first.finished:
                words = self._step(first, n, path)
                if words is not None:
                    return words
        return None

    def _slots(self, stream: StreamFlow, n: int, path: tuple[object, ...]) -> Words | None:
        """None: a slot of node n may come free some day."""
        slots = stream.slots
        assert slots is not None
        if (slots, n) in path:
            return []
        if slots.promised[n]:
            return None  # somebody who has a credit is about to answer
        path = (*path, (slots, n))
        found: Words = []
        for words in chain(self._steps(stream, n, path), self._parked_behind(slots, n, path)):
            if words is None:
                return None
            found = found or words
        return found

    def _steps(self, stream: StreamFlow, n: int, path: tuple[object, ...]) -> Iterator[Words | None]:
        """What each step of node n that has a slot waits for."""
        assert stream.slots is not None
        for one in stream.slots.sharers or (stream,):
            for iteration in (one, *one.live):
                if _has_slot(iteration, n):
                    yield self._step(iteration, n, path)

    def _parked_behind(self, slots: Slots, n: int, path: tuple[object, ...]) -> Iterator[Words | None]:
        """What those wait for that keep a slot of node n until they have one of their own."""
        behind = {
            (iteration.stream, following.index): None
            for followers in slots.parked
            for iteration, following, hold in followers
            if hold is not None and hold.n == n
        }
        for stream, following in behind:
            yield self._slots(stream, following, path)

    def _step(self, iteration: Iteration, n: int, path: tuple[object, ...]) -> Words | None:
        """None: this step, which is not over, may be some day."""
        if (iteration, n) in path:
            return []
        path = (*path, (iteration, n))
        stream = iteration.stream
        node = stream.plan.nodes[n]
        if iteration.missing[n]:
            return self._unfinished(iteration, _makers(stream, n), path)
        if stream.slots is not None and any(entry[:2] == (iteration, node) for entry in stream.slots.parked[n]):
            return self._slots(stream, n, path)
        if (iteration, node) in stream.late:
            return self._above(iteration, stream.nesting.late[n], path)
        source = iteration.source
        if source is not None and source.node is node and source.sender is not None:
            return self.of(source, path) if source.is_waiting else None
        if iteration in self._running(node):
            return [f"which runs in model '{node.model.name}', and waits there itself"]
        return self._queue(stream, node)

    def _above(self, iteration: Iteration, makers: Sequence[int], path: tuple[object, ...]) -> Words | None:
        """None: these nodes of levels above will be over some day."""
        for maker in makers:
            above: Iteration | None = iteration
            while above is not None and above.depth != above.stream.nesting.depth[maker]:
                above = above.parent
            words = None if above is None else self._unfinished(above, [maker], path)
            if words is not None:
                return words
        return None

    def _unfinished(self, iteration: Iteration, nodes: Sequence[int], path: tuple[object, ...]) -> Words | None:
        for n in nodes:
            if n not in iteration.finished:
                words = self._step(iteration, n, path)
                if words is not None:
                    return [f"that reads what step '{iteration.plan.nodes[n].name}' writes", *words]
        return None

    def _running(self, node: PlanNode) -> set[Flow]:
        """Whose step of this node is run by somebody who keeps it for ever."""
        return {ticket.flow for batch in self._kept_by for ticket in batch.tickets if ticket.node is node}

    def _queue(self, stream: StreamFlow, node: PlanNode) -> Words | None:
        """None: an instance of the node's model may take its step some day."""
        queue = stream.route[node.index]
        if self._can_start(queue, [*self._kept_by]):
            return None
        model = queue.key.name
        if sum(batch.queue is queue for batch in self._kept_by) >= len(queue.instances):
            return [f"which needs an instance of model '{model}', and all of them are kept by steps that wait so"]
        keepers = [*dict.fromkeys(f"'{batch.queue.key.name}'" for batch in self._kept_by)]
        verb = "holds" if len(keepers) == 1 else "hold"
        return [f"for which model '{model}' needs resources that {', '.join(keepers)} {verb} until then"]


def deadlock(source: Source, circle: Words) -> Unavailable:
    """What the request of a pause that would never end fails with."""
    stream = source.flow.whole
    assert isinstance(stream, StreamFlow)
    limit = min(filter(None, stream.nesting.limits), default=0)
    what = f"max_inflight_requests {limit} can never be kept" if limit else "unexpected deadlock"
    return Unavailable(
        f"{what}: {', '.join(circle)}; give the model another instance, or more of the resource, or the graph a larger "
        "limit"
    )


def _has_slot(iteration: Iteration, n: int) -> bool:
    """Whether all that a step waits for on its level is there, and it is not parked, and not over."""
    stream = iteration.stream
    if iteration.depth != stream.nesting.depth[n] or iteration.missing[n] or n in iteration.finished:
        return False
    return stream.slots is None or all(entry[0] is not iteration for entry in stream.slots.parked[n])


def _makers(stream: StreamFlow, n: int) -> list[int]:
    """The nodes of its own level that node n reads what they write."""
    nesting = stream.nesting
    return [node.index for node in stream.plan.nodes if any(n in nesting.consumers[slot] for _, slot, _ in node.writes)]
