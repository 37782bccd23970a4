"""Streams among the other machines: who may answer again, what an answer sets going, and pauses that would never end.

Decided here: when a decoupled step gets credits, and that a stream is over. A step whose slots nobody else can take
gets its credits in advance, a good part of them at a time, so that a model which answers fast does not ask each time;
others get one when they stand in their send and there is room. Nothing here waits for time.

A model that waits in its send keeps its instance. Where everything it waits for needs that very instance, or one kept
by somebody who waits in the same way, it would wait for ever: then its request fails, and the error names the circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowserve.errors import FlowserveError, Unavailable
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.slots import Slots
from flowserve.scheduling.streams import UNREAD_MAX, Iteration, Sender, Source, StreamFlow


class Streams:
    """The part of a dispatcher that knows streams. `put` queues a ticket (or raises), `fail` and `end` end a flow;
    `told` is called with a stream that has answers for its reader.
    """

    def __init__(
        self,
        put: Callable[[Ticket, int], None],
        fail: Callable[[Flow, FlowserveError], None],
        end: Callable[[Flow], None],
        told: Callable[[StreamFlow], None],
        can_start: Callable[[Any, Sequence[Any]], bool],
    ) -> None:
        self._put = put
        self._fail = fail
        self._end = end
        self._told = told
        self._can_start = can_start
        self.is_due = False  # whether `settle` has anything to do
        self._changed: dict[StreamFlow, None] = {}
        self._freed: list[Ticket] = []  # steps that got slots which somebody who has ended had
        self._waiting: dict[Source, None] = {}  # in whose send somebody stands
        self.ending = ""

    def start(self, source: Source, sender: Sender, now_ns: int) -> int:
        """A decoupled step is about to run. Returns the credits that it has from the beginning."""
        source.sender = sender
        source.started_ns = now_ns
        if source.flow.done:
            sender.withdraw()
            return 0
        granted = self._credits(source)
        _stream(source).promise(source, granted)
        return granted

    def answer(self, source: Source, outputs: Sequence[Facts | None], now_ns: int) -> None:
        """It answered; `outputs[j]` is its model's j-th, in exchange for one credit."""
        iteration = source.flow
        if iteration.done or source.is_over:
            return
        assert isinstance(iteration, Iteration)
        assert source.credit > 0, f"{source!r} answered without a credit"
        iteration.stream.promise(source, -1)
        try:
            if self.ending:
                raise Unavailable(self.ending)
            self.put(iteration.answer_begins(source.node, outputs), now_ns)
        except FlowserveError as error:
            self._fail(iteration, error)
            return
        self.note(iteration.stream)

    def last(self, source: Source, now_ns: int) -> None:
        """It will not answer again."""
        iteration = source.flow
        if iteration.done or source.is_over:
            return
        assert isinstance(iteration, Iteration)
        self._forget(source)
        try:
            self.put(iteration.last_answer(source.node), now_ns)
        except FlowserveError as error:
            self._fail(iteration, error)
            return
        self.note(iteration.stream)

    def failed(self, source: Source, error: FlowserveError) -> None:
        """It answered with an error: its request is over."""
        if not source.flow.done:
            self._fail(source.flow, error)

    def wait(self, source: Source, holder: Any) -> None:
        """Its model stands in its send and has no credit. `holder` is the batch whose instance is kept meanwhile, None
        where none is.
        """
        if not source.flow.done and not source.is_over and not source.credit:  # else it is about to hear of its credit
            if self.ending:
                self._fail(source.flow, Unavailable(self.ending))
                return
            source.is_waiting = True
            source.holder = holder
            self._waiting[source] = None
            self.note(_stream(source))

    def stop(self, reason: str) -> None:
        """The server is going away: whoever stands in a send, or comes to, is sent home, for nobody will read on."""
        self.ending = reason
        for source in [*self._waiting]:
            if not source.flow.done:
                self._fail(source.flow, Unavailable(reason))

    def returned(self, batch: Any) -> None:
        """A batch keeps its instance no longer, whoever still waits in it."""
        for source in self._waiting:
            if source.holder is batch:
                source.holder = None

    def put(self, tickets: Sequence[Ticket], now_ns: int) -> None:
        """Queue what became ready; it may belong to several requests. A refusal fails the one it concerns."""
        for ticket in tickets:
            if ticket.flow.done:
                continue
            try:
                self._put(ticket, now_ns)
            except FlowserveError as error:
                if not ticket.flow.done:
                    self._fail(ticket.flow, error)

    def ended(self, stream: StreamFlow) -> None:
        """A stream is done, for whatever reason: senders hear of it, slots come home, tensors go."""
        for source in [*stream.sources()]:
            sender = source.sender
            self._forget(source)
            if sender is not None:
                sender.withdraw()
        slots = stream.slots
        for iteration in stream.live:
            iteration.done = True
            iteration.tensors = []
            iteration.children.clear()
        if slots is not None and stream.nesting.is_shared:
            for parked in slots.parked:
                others = [entry for entry in parked if entry[0].stream is not stream]
                parked.clear()
                parked.extend(others)
            for n, count in enumerate(stream.held):
                for _ in range(count):
                    stream.release(n, self._freed)
            self._wake_sharers(slots)
            self.is_due = True
        stream.live.clear()
        stream.late.clear()
        stream.children.clear()
        if not stream.is_over:
            stream.tensors = []

    def note(self, stream: StreamFlow) -> None:
        """Something about it changed that `settle` will look at."""
        if not stream.done:
            self._changed[stream] = None
            self.is_due = True

    def settle(self, now_ns: int) -> None:
        """What the changes since the last time mean: who is told, who may answer again, what is over."""
        self.is_due = False
        changed, self._changed = self._changed, {}
        freed, self._freed = self._freed, []
        self.put(freed, now_ns)
        for stream in changed:
            if stream.done:
                continue
            if stream.is_over:
                self._end(stream)
                continue
            if stream.answers:
                self._told(stream)
            for source in stream.sources():
                if source.sender is not None:
                    self._grant(source)
            if stream.nesting.is_shared and stream.slots is not None:
                self._wake_sharers(stream.slots)
        for source in [source for source in self._waiting if source.holder is not None]:
            if source in self._waiting:
                circle = self._circle(source)
                if circle:
                    self._fail(source.flow, _deadlock(source, circle))

    def _wake_sharers(self, slots: Slots) -> None:
        for source in [*self._waiting]:
            if _stream(source).slots is slots:
                self._grant(source)

    def _credits(self, source: Source) -> int:
        """How many credits it gets now."""
        stream = _stream(source)
        room = stream.room(source)
        if not room:
            return 0
        if self._shares_slots(source):
            return 1 if source.is_waiting and not source.credit else 0
        if source.is_waiting or 2 * room >= self._capacity(source):
            return room
        return 0

    def _grant(self, source: Source) -> None:
        granted = self._credits(source)
        if granted:
            _stream(source).promise(source, granted)
            source.is_waiting = False
            source.holder = None
            self._waiting.pop(source, None)
            assert source.sender is not None
            source.sender.grant(granted)

    def _shares_slots(self, source: Source) -> bool:
        """Whether somebody else may take the slots that its answers need."""
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        stream = iteration.stream
        if stream.slots is None or (not iteration.depth and not stream.nesting.is_shared):
            return False
        return any(stream.slots.limits[n] for n in stream.nesting.firsts[iteration.depth])

    def _capacity(self, source: Source) -> int:
        stream = _stream(source)
        if stream.slots is None:
            return UNREAD_MAX
        limits = [stream.slots.limits[n] for n in stream.nesting.firsts[source.flow.depth]]  # type: ignore[attr-defined]
        return min([UNREAD_MAX, *filter(None, limits)])

    def _forget(self, source: Source) -> None:
        """It is over: what it was promised comes home, and nothing holds anything in a circle."""
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        iteration.source = None
        source.sender = None
        source.is_over = True
        source.is_waiting = False
        source.holder = None
        self._waiting.pop(source, None)
        _stream(source).promise(source, -source.credit)

    # ------------------------------------------------------------------------------------ pauses that never end

    def _circle(self, source: Source) -> list[str]:
        """Why nothing that this waiting step waits for can ever happen, in words; empty where something can."""
        return self._pause(source, ()) or []

    def _pause(self, source: Source, path: tuple[object, ...]) -> list[str] | None:
        """None: it may get a credit some day. Else what it waits for. Whoever is on the `path` is asked already."""
        if source in path:
            return []
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        stream = iteration.stream
        slots = stream.slots
        if slots is None or iteration.unread >= UNREAD_MAX:
            return None  # a reader is waited for
        path = (*path, source)
        for n in stream.nesting.firsts[iteration.depth]:
            if not slots.has_room(n):
                words = self._slots_of(stream, n, path)
                if words is not None:
                    return [
                        f"step '{source.node.name}' waits in its send until a step '{_name(stream, n)}' is over",
                        *words,
                    ]
        return None

    def _slots_of(self, stream: StreamFlow, n: int, path: tuple[object, ...]) -> list[str] | None:
        """None: a slot of node n may come free some day."""
        if (stream, n) in path:
            return []
        if stream.nesting.is_shared:
            return None  # other requests have them too
        path = (*path, (stream, n))
        node = stream.plan.nodes[n]
        found: list[str] = []
        is_kept = False
        waiting_late = {(iteration, late.index) for iteration, late in stream.late}
        is_queued = False
        for iteration in stream.live:
            if iteration.depth != stream.nesting.depth[n] or n in iteration.finished or not self._is_in(iteration, n):
                continue
            if (iteration, n) in waiting_late:
                words = self._from_above(iteration, n, path)
            elif iteration.source is not None and iteration.source.node is node and iteration.source.is_waiting:
                words = self._pause(iteration.source, path)
            else:
                is_queued = True
                continue
            if words is None:
                return None
            is_kept, found = True, found or words
        for followers in stream.slots.parked if stream.slots is not None else ():
            for _, following, hold in followers:
                if hold is not None and hold.n == n:
                    words = self._slots_of(stream, following.index, path)
                    if words is None:
                        return None
                    is_kept, found = True, found or words
        if is_queued:
            words = self._queue(stream, node, path)
            if words is None:
                return None
            is_kept, found = True, found or words
        return found if is_kept else None  # kept by nobody: behind a credit, whose owner is about to answer

    def _is_in(self, iteration: Iteration, n: int) -> bool:
        """Whether the step has its slot: all it waits for on its level is there, and it is not parked."""
        slots = iteration.stream.slots
        if iteration.missing[n]:
            return False
        return slots is None or all(entry[0] is not iteration for entry in slots.parked[n])

    def _from_above(self, iteration: Iteration, n: int, path: tuple[object, ...]) -> list[str] | None:
        stream = iteration.stream
        for maker in stream.nesting.late[n]:
            if stream.nesting.depth[maker] == 0 and maker not in stream.finished:
                words = self._queue(stream, stream.plan.nodes[maker], path)
                if words is not None:
                    return [f"that reads what step '{_name(stream, maker)}' writes", *words]
        return None

    def _queue(self, stream: StreamFlow, node: PlanNode, path: tuple[object, ...]) -> list[str] | None:
        """None: an instance of the node's model may take its step some day."""
        queue = stream.route[node.index]
        if queue in path:
            return []
        path = (*path, queue)
        holders: dict[Any, Source] = {one.holder: one for one in self._waiting if one.holder is not None}
        if not holders or self._can_start(queue, [*holders]):
            return None
        for one in holders.values():
            words = self._pause(one, path)
            if words is None:
                return None
        return [f"which needs an instance of model '{queue.key.name}', and all of them are kept by steps that wait so"]


def _stream(source: Source) -> StreamFlow:
    assert isinstance(source.flow, Iteration)
    return source.flow.stream


def _name(stream: StreamFlow, n: int) -> str:
    return stream.plan.nodes[n].name


def _deadlock(source: Source, circle: list[str]) -> Unavailable:
    limit = min(filter(None, _stream(source).nesting.limits), default=0)
    return Unavailable(
        f"max_inflight_requests {limit} can never be kept: {', '.join(circle)}; give the model another instance, or "
        f"the graph a larger limit"
    )
