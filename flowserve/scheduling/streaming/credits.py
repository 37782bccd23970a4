"""Credits of decoupled steps: how many responses each may send.

Decides when a decoupled step gets credits, and that a stream is over. A step that is the only user of its slots gets
its credits in advance, at least half of them at a time, so that a fast model does not wait for each; other steps get
one credit when they are blocked in send() and a slot is free. Does not know time. Called by the scheduler, and by the
runtime for the responses of decoupled models.

A model that is blocked in send() keeps its instance. If everything that it waits for needs this instance, or one that
is never freed, its request fails, and the error names the cycle (backpressure.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowserve.errors import FlowserveError, Unavailable
from flowserve.scheduling.batch import Grant, Notice, Responses, Stop
from flowserve.scheduling.flow import Facts, Flow, Ticket
from flowserve.scheduling.streaming.backpressure import BackpressureWaits, deadlock
from flowserve.scheduling.streaming.iterations import (
    UNREAD_MAX,
    InflightSlots,
    Source,
    StreamFlow,
    StreamSender,
)


@dataclass(eq=False)
class Streams:
    """The streams of the scheduler. `put` queues a ticket (or raises), `fail` and `end` end a flow, `notify` adds to
    the scheduler's decisions, `drop_tensors` releases the tensors of a flow that is over. `stuck` returns the
    deadlocked executions.
    """

    _put: Callable[[Ticket, int], None]
    _fail: Callable[[Flow, FlowserveError], None]
    _end: Callable[[Flow], None]
    _notify: Callable[[Notice], None]
    _drop_tensors: Callable[[Flow], None]
    _send_waits: BackpressureWaits
    _stuck: Callable[[], Collection[Any]]
    is_due: bool = False  # whether `settle` has work
    ending: str = ""
    _changed: dict[StreamFlow, None] = field(default_factory=dict)
    _freed: list[Ticket] = field(default_factory=list)  # steps that got slots of an ended stream
    _answering: dict[StreamFlow, None] = field(default_factory=dict)  # streams with a started decoupled step

    def start(self, source: Source, sender: StreamSender, now_ns: int) -> int:
        """A decoupled step is about to run. Returns its initial credits."""
        self._answering[source.flow.stream] = None
        source.sender = sender
        source.started_ns = now_ns
        if source.flow.done:
            self._notify(Stop(sender))
            return 0
        granted = self._credits(source)
        source.flow.stream.promise(source, granted)
        return granted

    def answer(
        self,
        source: Source,
        outputs: Sequence[Facts | None],
        now_ns: int,
        parameters: Any = None,
        request: Any = None,
        *,
        is_last: bool = False,
    ) -> None:
        """A step sent a response in exchange for one credit; `outputs[j]` is its model's j-th output. `parameters` and
        `request`, if given, are the runtime's: the parameters of the response, and the request from here on. `is_last`:
        the final flag came with the response.
        """
        iteration = source.flow
        if iteration.done or source.is_over:
            return
        assert source.credit > 0, f"{source!r} answered without a credit"
        iteration.stream.promise(source, -1)
        if is_last:
            self._forget(source)
        try:
            if self.ending:
                raise Unavailable(self.ending)
            self.put(iteration.begin_iteration(source.node, outputs, parameters, request, is_last=is_last), now_ns)
        except FlowserveError as error:
            self._fail(iteration, error)
            return
        self.mark_due(iteration.stream)

    def last(self, source: Source, now_ns: int) -> None:
        """The step sends no further response: the final flag came alone."""
        iteration = source.flow
        if iteration.done or source.is_over:
            return
        self._forget(source)
        try:
            self.put(iteration.end_responses(source.node), now_ns)
        except FlowserveError as error:
            self._fail(iteration, error)
            return
        self.mark_due(iteration.stream)

    def failed(self, source: Source, error: FlowserveError) -> None:
        """The step responded with an error: its request is over."""
        if not source.flow.done:
            self._fail(source.flow, error)

    def wait(self, source: Source, holder: Any) -> None:
        """The model is blocked in send() without a credit. `holder` is the batch whose instance it keeps, None if it
        keeps none.
        """
        if (
            not source.flow.done and not source.is_over and not source.credit
        ):  # else the notice of its credit is under way
            if self.ending:
                self._fail(source.flow, Unavailable(self.ending))
                return
            self._send_waits.begin(source, holder)
            self.mark_due(source.flow.stream)

    def stop(self, reason: str) -> None:
        """The server stops: fail the streams whose steps still respond, blocked ones included."""
        self.ending = reason
        for stream in [*self._answering]:
            if not stream.done:
                self._fail(stream, Unavailable(reason))

    def put(self, tickets: Sequence[Ticket], now_ns: int) -> None:
        """Queue tickets that became ready, perhaps of several requests. A refused ticket fails its own request."""
        for ticket in tickets:
            if ticket.flow.done:
                continue
            try:
                self._put(ticket, now_ns)
            except FlowserveError as error:
                if not ticket.flow.done:
                    self._fail(ticket.flow, error)

    def ended(self, stream: StreamFlow) -> None:
        """A stream is done: notify its senders, free its slots, release its tensors."""
        for source in [*stream.sources()]:
            sender = source.sender
            self._forget(source)
            if sender is not None:
                self._notify(Stop(sender))
        self._answering.pop(stream, None)
        slots = stream.slots
        for iteration in stream.live:
            iteration.done = True
            self._drop_tensors(iteration)
            iteration.children.clear()
        if stream.nesting.is_shared:
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
            self._drop_tensors(stream)

    def mark_due(self, stream: StreamFlow) -> None:
        """The stream changed; `settle` examines it."""
        if not stream.done:
            self._changed[stream] = None
            self.is_due = True

    def settle(self, now_ns: int) -> None:
        """Process the changed streams: notify readers, grant credits, end streams that are over."""
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
                self._notify(Responses(stream))
            for source in stream.sources():
                if source.sender is not None:
                    self._grant(source)
            if stream.nesting.is_shared:
                self._wake_sharers(stream.slots)
        self._fail_deadlocked()

    def _fail_deadlocked(self) -> None:
        """Fail the deadlocked requests one by one: each failure may unblock others."""
        while self._send_waits.holders() and (stuck := self._stuck()):
            for holder, source in self._send_waits.holders().items():
                cycle = self._send_waits.deadlock_cycle(source, stuck) if holder in stuck else None
                if cycle is not None:
                    self._fail(source.flow, source.located(deadlock(source, cycle), source.instance))
                    break
            else:
                return

    def _wake_sharers(self, slots: InflightSlots) -> None:
        for source in [*self._send_waits.waiting]:
            if source.flow.stream.slots is slots:
                self._grant(source)

    def _credits(self, source: Source) -> int:
        """The number of credits to grant now."""
        stream, depth = source.flow.stream, source.flow.depth
        room = stream.room(source)
        if not room:
            return 0
        limits = [limit for n in stream.nesting.firsts[depth] if (limit := stream.slots.limits[n])]
        if limits and (depth or stream.nesting.is_shared):  # other steps may take the slots that its responses need
            return 1 if source.is_waiting and not source.credit else 0
        return room if source.is_waiting or 2 * room >= min([UNREAD_MAX, *limits]) else 0

    def _grant(self, source: Source) -> None:
        granted = self._credits(source)
        if granted:
            source.flow.stream.promise(source, granted)
            self._send_waits.over(source)
            assert source.sender is not None
            self._notify(Grant(source.sender, granted))

    def _forget(self, source: Source) -> None:
        """The step is over: take back its credits, and break its reference cycles."""
        source.flow.source = None
        source.sender = None
        source.is_over = True
        self._send_waits.over(source)
        source.flow.stream.promise(source, -source.credit)
