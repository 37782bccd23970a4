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
from flowserve.scheduling.frames.borders import RegionFrame, Source
from flowserve.scheduling.frames.frame import Facts, Frame, Ticket
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.scheduling.frames.stream import UNREAD_MAX, StreamSender
from flowserve.scheduling.streaming.backpressure import BackpressureWaits, deadlock


@dataclass(eq=False)
class Streams:
    """The streams of the scheduler. `put` queues a ticket (or raises), `fail` and `end` end a request, `notify` adds to
    the scheduler's decisions, `drop_tensors` releases the tensors of a request that is over. `stuck` returns the
    deadlocked executions.
    """

    _put: Callable[[Ticket, int], None]
    _fail: Callable[[Frame, FlowserveError], None]
    _end: Callable[[Frame], None]
    _notify: Callable[[Notice], None]
    _drop_tensors: Callable[[Frame], None]
    _send_waits: BackpressureWaits
    _stuck: Callable[[], Collection[Any]]
    is_due: bool = False  # whether `settle` has work
    ending: str = ""
    _changed: dict[RegionFrame, None] = field(default_factory=dict)
    _freed: list[Ticket] = field(default_factory=list)  # steps that got slots of an ended stream
    _answering: dict[RegionFrame, None] = field(default_factory=dict)  # streams with a started decoupled step

    def start(self, source: Source, sender: StreamSender, now_ns: int) -> int:
        """A decoupled step is about to run. Returns its initial credits."""
        self._answering[source.frame.whole] = None
        source.sender = sender
        source.started_ns = now_ns
        if source.frame.record.done:
            self._notify(Stop(sender))
            return 0
        granted = self._credits(source)
        source.frame.promise(source, granted)
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
        frame = source.frame
        if frame.record.done or source.is_over:
            return
        assert source.credit > 0, f"{source!r} answered without a credit"
        frame.promise(source, -1)
        if is_last:
            self._forget(source)
        try:
            if self.ending:
                raise Unavailable(self.ending)
            self.put(frame.respond(source, outputs, parameters, request, is_last=is_last), now_ns)
        except FlowserveError as error:
            self._fail(frame, error)
            return
        self.mark_due(frame.whole)

    def last(self, source: Source, now_ns: int) -> None:
        """The step sends no further response: the final flag came alone."""
        frame = source.frame
        if frame.record.done or source.is_over:
            return
        self._forget(source)
        try:
            self.put(frame.end_responses(source), now_ns)
        except FlowserveError as error:
            self._fail(frame, error)
            return
        self.mark_due(frame.whole)

    def failed(self, source: Source, error: FlowserveError) -> None:
        """The step responded with an error: its request is over."""
        if not source.frame.record.done:
            self._fail(source.frame, error)

    def wait(self, source: Source, holder: Any) -> None:
        """The model is blocked in send() without a credit. `holder` is the batch whose instance it keeps, None if it
        keeps none.
        """
        if (
            not source.frame.record.done and not source.is_over and not source.credit
        ):  # else the notice of its credit is under way
            if self.ending:
                self._fail(source.frame, Unavailable(self.ending))
                return
            self._send_waits.begin(source, holder)
            self.mark_due(source.frame.whole)

    def stop(self, reason: str) -> None:
        """The server stops: fail the streams whose steps still respond, blocked ones included."""
        self.ending = reason
        for stream in [*self._answering]:
            if not stream.record.done:
                self._fail(stream, Unavailable(reason))

    def put(self, tickets: Sequence[Ticket], now_ns: int) -> None:
        """Queue tickets that became ready, perhaps of several requests. A refused ticket fails its own request."""
        for ticket in tickets:
            if ticket.frame.record.done:
                continue
            try:
                self._put(ticket, now_ns)
            except FlowserveError as error:
                if not ticket.frame.record.done:
                    self._fail(ticket.frame, error)

    def hold_back(self, ticket: Ticket) -> bool:
        """The queue of a part of a step is full. Returns whether the part waits for another of its frame."""
        frame = ticket.frame
        assert isinstance(frame, RegionFrame)
        is_held = frame.hold_back(ticket, self._freed)
        self.is_due = self.is_due or bool(self._freed)
        return is_held

    def ended(self, whole: RegionFrame) -> None:
        """A request is over: notify its senders, free its slots, release its tensors."""
        for source in [*whole.all_sources()]:
            sender = source.sender
            self._forget(source)
            if sender is not None:
                self._notify(Stop(sender))
        self._answering.pop(whole, None)
        stream = whole.stream
        for frame in stream.live:
            self._drop_tensors(frame)
            frame.forget()
        if whole.regions.is_shared:
            whole.release_all(self._freed)
            self._wake_sharers(stream.slots)
            self.is_due = True
        else:
            stream.slots.forget_parked()
        stream.live.clear()
        stream.late.clear()
        whole.forget()
        if not stream.is_over:
            self._drop_tensors(whole)

    def mark_due(self, whole: RegionFrame) -> None:
        """The request changed; `settle` examines it."""
        if not whole.record.done:
            self._changed[whole] = None
            self.is_due = True

    def settle(self, now_ns: int) -> None:
        """Process the changed requests: notify readers, grant credits, end requests that are over."""
        self.is_due = False
        changed, self._changed = self._changed, {}
        freed, self._freed = self._freed, []
        self.put(freed, now_ns)
        for whole in changed:
            stream = whole.stream
            if whole.record.done:
                continue
            if stream.refusal is not None:
                self._fail(whole, stream.refusal)
                continue
            if stream.is_over:
                self._end(whole)
                continue
            if stream.answers:
                self._notify(Responses(whole))
            for source in whole.all_sources():
                if source.sender is not None:
                    self._grant(source)
            if whole.regions.is_shared:
                self._wake_sharers(stream.slots)
        self._fail_deadlocked()

    def _fail_deadlocked(self) -> None:
        """Fail the deadlocked requests one by one: each failure may unblock others."""
        while self._send_waits.holders() and (stuck := self._stuck()):
            for holder, source in self._send_waits.holders().items():
                cycle = self._send_waits.deadlock_cycle(source, stuck) if holder in stuck else None
                if cycle is not None:
                    self._fail(source.frame, source.copy_located(deadlock(source, cycle), source.instance))
                    break
            else:
                return

    def _wake_sharers(self, slots: InflightSlots) -> None:
        for source in [*self._send_waits.waiting]:
            if source.frame.stream.slots is slots:
                self._grant(source)

    def _credits(self, source: Source) -> int:
        """The number of credits to grant now."""
        frame = source.frame
        regions, slots, depth = frame.regions, frame.stream.slots, frame.depth
        room = frame.room(source)
        if not room:
            return 0
        limits = [limit for n in regions.firsts[depth] if (limit := slots.limits[n])]
        if limits and (
            depth or source.part is not None or regions.is_shared
        ):  # other steps may take the slots that its responses need
            return 1 if source.is_waiting and not source.credit else 0
        return room if source.is_waiting or 2 * room >= min([UNREAD_MAX, *limits]) else 0

    def _grant(self, source: Source) -> None:
        granted = self._credits(source)
        if granted:
            source.frame.promise(source, granted)
            self._send_waits.over(source)
            assert source.sender is not None
            self._notify(Grant(source.sender, granted))

    def _forget(self, source: Source) -> None:
        """The step is over: take back its credits, and break its reference cycles."""
        source.frame.sources.pop(source, None)
        source.sender = None
        source.is_over = True
        self._send_waits.over(source)
        source.frame.promise(source, -source.credit)
