"""Responses, waits and ends of decoupled models, from any thread.

Decides how the responses, waits and ends of a decoupled model are reported to the scheduler
(scheduling/streaming/credits.py), and how its steps are recorded in the statistics (`ResponseStreams`). Reports of a
model's thread are passed to the event loop in order; a thread with credits never waits.

Decides which sender each request of a batch gets: a request that runs again keeps its sender, and a padding row has one
whose responses are ignored.

Does not know queues, nor how batches run. Called by local.py, and by remote/ for models in other processes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeGuard

import trio

from flowserve.backends.base import Sent
from flowserve.backends.credit import CreditSender
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.devices import check_for_loss
from flowserve.observe.log_fields import of_request
from flowserve.observe.statistics import BACKEND, CANCELED, RAN, Statistics
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.workers.base import Outcome, Returned, log_unnoticed
from flowserve.runtime.workers.outputs import in_order, record_notes, unusable_output
from flowserve.runtime.workers.parameters import request_after
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import Source
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.frames.request import longer
from flowserve.scheduling.frames.stream import StreamSender
from flowserve.scheduling.scheduler import Scheduler

log = logging.getLogger("flowserve.runtime")
_PORTION: Final = 64  # posts that are executed without a pause


class StreamObserver(Protocol):
    """The observer of decoupled steps while one of them is traced."""

    def answered(self, source: Source, now_ns: int) -> None:
        """A step sent a response, of which the scheduler was notified."""

    def waits(self, source: Source) -> None:
        """The model of a step is blocked in send()."""

    def over(self, source: Source, error: FlowserveError | None, now_ns: int) -> None:
        """A step sends no more responses; the scheduler is notified afterwards."""


class ResponseStreams:
    """The decoupled steps of an engine. All methods except `post` are called on the event loop. `observer`: None while
    no step is traced.
    """

    def __init__(
        self, token: trio.lowlevel.TrioToken, scheduler: Scheduler, clock: ClockNs, wake: Callable[[], None]
    ) -> None:
        self._wake = wake
        self._token = token
        self._streams = scheduler.streams
        self._scheduler = scheduler
        self._clock = clock
        self._posted: deque[tuple[Callable[[], None], Source | None]] = deque()
        self.observer: StreamObserver | None = None

    def start(self, source: Source, sender: StreamSender, instance: object) -> int:
        """A step is about to run on an instance. Returns how many responses it may send before it must wait."""
        source.instance = instance
        source.last_ns = self._clock()
        return self._streams.start(source, sender, source.last_ns)

    def answered(self, source: Source, sent: Sent) -> None:
        """Process one response, which uses one credit."""
        try:
            outputs = source.instance.state.take(source, sent.outputs)
        except FlowserveError as error:
            self.over(source, error)
            return
        if source.frame.record.done or source.is_over:
            return
        now_ns = self._clock()
        request = None
        if sent.parameters:
            try:
                request = request_after(source.frame, source.node.model.name, sent.parameters)
            except FlowserveError as error:
                self.over(source, error)
                return
        whole = source.frame.whole
        wanted = whole.wanted
        if sent.notes is not None:
            record_notes(sent.notes, source.node.model.name, _statistics(source))
            refused = unusable_output(source, outputs, sent.notes.unlike)
            if refused is not None:
                self.over(source, refused)
                return
            if sent.notes.orders:
                whole.wanted = in_order(source, wanted, sent.notes.orders[0])
        infer_ns = min(sent.infer_ns, now_ns - source.last_ns)  # the time may have been written by the model's code
        output_ns = min(sent.output_ns, now_ns - source.last_ns - infer_ns)
        statistics = _statistics(source)
        statistics.responses.answered(source.count, infer_ns, output_ns)
        if not source.count:
            statistics.first_answered(now_ns - source.queued_ns)
        source.count += 1
        source.last_ns = now_ns
        if sent.is_last:
            self._succeeded(source, now_ns)
        self._streams.answer(source, outputs, now_ns, sent.parameters or None, request, is_last=sent.is_last)
        whole.wanted = wanted
        if self.observer is not None:
            self.observer.answered(source, now_ns)
        self._wake()

    def goes_on(self, source: Source) -> None:
        """A step that was started before is about to run again."""
        source.started_ns = self._clock()

    def waits(self, source: Source, holder: Batch | None) -> None:
        """A model is blocked in send() without a credit, and keeps the instance of `holder` meanwhile."""
        self._streams.wait(source, holder)
        if self.observer is not None:
            self.observer.waits(source)
        self._wake()

    def over(self, source: Source, error: FlowserveError | None = None) -> None:
        """There are no more responses: an error, or the final flag without a response. No effect if repeated."""
        if source.is_over:
            return
        now_ns = self._clock()
        statistics = _statistics(source)
        if error is None:
            statistics.responses.was_empty(source.count, now_ns - source.last_ns)
            self._succeeded(source, now_ns)
            self._streams.last(source, now_ns)
        else:
            if self.observer is not None:
                self.observer.over(source, error, now_ns)
            _decide(source, BACKEND)
            statistics.failed(1, now_ns - source.queued_ns, BACKEND)
            statistics.responses.failed(source.count, now_ns - source.last_ns)
            self._streams.failed(source, source.copy_located(error, source.instance))
            source.is_over = True
        self._wake()

    def _succeeded(self, source: Source, now_ns: int) -> None:
        """Record that a step ended without an error. The scheduler is notified afterwards."""
        if self.observer is not None:
            self.observer.over(source, None, now_ns)
        _decide(source, RAN)
        took_ns = now_ns - source.started_ns
        _statistics(source).succeeded([source.queued_ns], source.started_ns, 0, took_ns, 0)
        record = source.frame.record
        record.took = longer(record.took, source.started_ns - source.queued_ns, 0, took_ns, 0)

    def cancelled(self, source: Source) -> None:
        """The responses of a step are no longer needed. No effect if it is over."""
        if not source.outcome:
            source.outcome = CANCELED
            _statistics(source).responses.cancelled(source.count, self._clock() - source.last_ns)

    def returned(self, batch: Batch, outcome: Returned) -> None:
        """A batch freed its instance."""
        now_ns = self._clock()
        if outcome.error is not None:
            log_unnoticed(outcome.error, batch)
        else:
            started_ns = batch.started_ns
            statistics: Statistics = batch.queue.statistics
            input_ns = max(outcome.gathered_ns - started_ns, 0)
            statistics.executed(batch.rows, input_ns, now_ns - started_ns - input_ns, 0, now_ns)
            for ticket in batch.tickets:
                ticket.frame.record.owner.traffic[ticket.node.index].ran(ticket.rows, ())
        self._scheduler.execute_returned(batch)
        self._wake()

    def post(self, work: Callable[[], None], source: Source | None = None) -> None:
        """Run `work` on the loop, after all earlier posts. On any thread. `source`: the step that it concerns, which
        fails if `work` raises an internal error.
        """
        self._posted.append((work, source))
        try:
            self._token.run_sync_soon(self._drain_portion, idempotent=True)
        except trio.RunFinishedError:
            log.debug("an answer came after the server was gone")

    def finish(self, batch: Batch, outcome: Outcome) -> None:
        """Process the responses that a batch's model has sent, before the outcome of the batch. A warm-up of an
        iterative model runs once, even if the model reschedules it.
        """
        self._drain()
        if batch.queue.bound is None and isinstance(outcome, Returned):
            for m in outcome.rescheduled:
                ticket = batch.tickets[m]
                if isinstance(ticket, Source):
                    self.over(ticket)

    def _drain_portion(self) -> None:
        """Run some of the posted functions; the rest of the server runs before the next ones."""
        self._drain(_PORTION)
        if self._posted:
            self._token.run_sync_soon(self._drain_portion, idempotent=True)

    def _drain(self, count: int | None = None) -> None:
        """Run all posted functions, or `count` of them."""
        posted = self._posted
        for _ in range(len(posted) if count is None else min(count, len(posted))):
            work, source = posted.popleft()
            try:
                work()
            except Exception as error:  # if it propagated, it would end the server
                extra = {} if source is None else of_request(source.frame.whole.request, model=source.node.model.name)
                log.exception("a response of a model's thread cannot be processed", extra=extra)
                if source is not None:
                    what = f"a response cannot be processed: {type(error).__name__}: {error}"
                    failed = Internal(f"model '{source.node.model.name}': {what}")
                    self._streams.failed(source, source.copy_located(failed, source.instance))
                    self._wake()


class ThreadSender(CreditSender):
    """The sender through which a model on a thread responds to one request. `execution` is the batch of a thread, None
    for threads of the model's own.
    """

    def __init__(self, source: Source | None, streams: ResponseStreams, execution: Callable[[], Batch | None]) -> None:
        super().__init__()
        self._source = source  # None once it is over, because a model may keep this sender
        self._streams = streams
        self._execution = execution

    def withdraw(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._streams.cancelled(source)
        super().withdraw()

    def _tell_answer(self, sent: Sent) -> None:
        source = self._source
        if sent.is_last:
            self._source = None
        if source is not None:
            self._streams.post(partial(self._streams.answered, source, sent), source)

    def _tell_over(self, error: FlowserveError | None) -> None:
        source, self._source = self._source, None
        if error is not None:
            check_for_loss()
        if source is not None:
            self._streams.post(partial(self._streams.over, source, error), source)

    def _tell_waits(self) -> None:
        source = self._source
        if source is not None:
            self._streams.post(partial(self._streams.waits, source, self._execution()), source)


def thread_senders(
    batch: Batch, streams: ResponseStreams, executed_here: Callable[[], Batch | None]
) -> list[ThreadSender]:
    """A sender for each member of a batch that is about to start. On the event loop. `executed_here`: the batch that
    the calling thread executes; None for threads of the model's own.
    """
    senders: list[ThreadSender] = []
    for ticket in batch.tickets:
        if not is_wanted(ticket):
            sender = ThreadSender(None, streams, executed_here)
            sender.withdraw()
        elif isinstance(ticket.sender, ThreadSender):
            streams.goes_on(ticket)
            sender = ticket.sender
        else:
            sender = ThreadSender(ticket, streams, executed_here)
            sender.grant(streams.start(ticket, sender, batch.instance))
        senders.append(sender)
    return senders


def is_wanted(ticket: Ticket) -> TypeGuard[Source]:
    """Whether a member of a decoupled model's batch has a caller that takes responses."""
    is_padding = getattr(ticket, "sequence", ticket) is None
    return not is_padding and isinstance(ticket, Source) and not ticket.is_over


def _decide(source: Source, outcome: str) -> None:
    """Write the outcome of a step; it is the outcome of a request to the model itself."""
    source.outcome = outcome
    frame = source.frame
    if not frame.plan.graph.is_ensemble:
        frame.record.outcome = outcome


def _statistics(source: Source) -> Statistics:
    statistics: Statistics = source.frame.queues[source.node.index].statistics
    return statistics
