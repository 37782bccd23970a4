"""Streams among the other machines: who may answer again, and what an answer sets going.

Decided here: when a decoupled step gets credits, and that a stream is over. A step whose slots nobody else can take
gets its credits in advance, a good part of them at a time, so that a model which answers fast does not ask each time;
others get one when they stand in their send and there is room. Nothing here waits for time.

A model that waits in its send keeps its instance. Where everything it waits for needs that very instance, or one kept
by somebody who waits for ever, too, its request fails, and the error names the circle (pauses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowserve.errors import FlowserveError, Unavailable
from flowserve.scheduling.iterations import Iteration, Sender, Source
from flowserve.scheduling.lineage import traced
from flowserve.scheduling.pauses import Pauses, deadlock
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.slots import Slots
from flowserve.scheduling.streams import UNREAD_MAX, StreamFlow


class Streams:
    """The part of a dispatcher that knows streams. `put` queues a ticket (or raises), `fail` and `end` end a flow;
    `told` is called with a stream that has answers for its reader. `stuck`: the executions that keep their instances
    for ever.
    """

    def __init__(
        self,
        put: Callable[[Ticket, int], None],
        fail: Callable[[Flow, FlowserveError], None],
        end: Callable[[Flow], None],
        told: Callable[[StreamFlow], None],
        pauses: Pauses,
        stuck: Callable[[], Collection[Any]],
    ) -> None:
        self._put = put
        self._fail = fail
        self._end = end
        self._told = told
        self._pauses = pauses
        self._stuck = stuck
        self.is_due = False  # whether `settle` has anything to do
        self._changed: dict[StreamFlow, None] = {}
        self._freed: list[Ticket] = []  # steps that got slots which somebody who has ended had
        self._answering: dict[StreamFlow, None] = {}  # whose decoupled steps were started
        self.ending = ""

    def start(self, source: Source, sender: Sender, now_ns: int) -> int:
        """A decoupled step is about to run. Returns the credits that it has from the beginning."""
        self._answering[_stream(source)] = None
        source.sender = sender
        source.started_ns = now_ns
        if source.flow.done:
            sender.withdraw()
            return 0
        granted = self._credits(source)
        _stream(source).promise(source, granted)
        return granted

    def answer(
        self, source: Source, outputs: Sequence[Facts | None], now_ns: int, said: Any = None, request: Any = None
    ) -> None:
        """It answered; `outputs[j]` is its model's j-th, in exchange for one credit. `said` and `request`, where given,
        are the runtime's: what the answer says besides, and the request as it is from here on.
        """
        iteration = source.flow
        if iteration.done or source.is_over:
            return
        assert isinstance(iteration, Iteration)
        assert source.credit > 0, f"{source!r} answered without a credit"
        iteration.stream.promise(source, -1)
        try:
            if self.ending:
                raise Unavailable(self.ending)
            self.put(iteration.answer_begins(source.node, outputs, said, request), now_ns)
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
            self._pauses.begin(source, holder)
            self.note(_stream(source))

    def stop(self, reason: str) -> None:
        """The server is going away: whatever still answers is told so, and whoever stands in a send is sent home."""
        self.ending = reason
        for stream in [*self._answering]:
            if not stream.done:
                self._fail(stream, Unavailable(reason))

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
        self._answering.pop(stream, None)
        slots = stream.slots
        for iteration in stream.live:
            iteration.done = True
            iteration.tensors = []
            iteration.children.clear()
        if slots is not None and stream.nesting.is_shared:
            slots.sharers.pop(stream, None)
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
            if stream.refusal is not None:
                self._fail(stream, stream.refusal)
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
        self._end_pauses()

    def _end_pauses(self) -> None:
        """Fail whoever waits for ever, one by one: with each of them others may go on."""
        while self._pauses.holders() and (stuck := self._stuck()):
            for holder, source in self._pauses.holders().items():
                circle = self._pauses.circle(source, stuck) if holder in stuck else None
                if circle is not None:
                    self._fail(source.flow, traced(deadlock(source, circle), source, source.instance))
                    break
            else:
                return

    def _wake_sharers(self, slots: Slots) -> None:
        for source in [*self._pauses.waiting]:
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
            self._pauses.over(source)
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
        depth = source.flow.depth  # type: ignore[attr-defined]  # an iteration
        limits = [stream.slots.limits[n] for n in stream.nesting.firsts[depth]]
        return min([UNREAD_MAX, *filter(None, limits)])

    def _forget(self, source: Source) -> None:
        """It is over: what it was promised comes home, and nothing holds anything in a circle."""
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        iteration.source = None
        source.sender = None
        source.is_over = True
        self._pauses.over(source)
        _stream(source).promise(source, -source.credit)


def _stream(source: Source) -> StreamFlow:
    assert isinstance(source.flow, Iteration)
    return source.flow.stream
