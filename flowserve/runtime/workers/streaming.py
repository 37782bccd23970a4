"""Responses, waits and ends of decoupled models, from any thread or process.

Decides how what a decoupled model does reaches the scheduler (scheduling/streaming/credits.py), and how a step of one
is recorded in the statistics. What a model's thread reports is handed to the event loop in order; a thread that has
credits never waits. How processes report is decided in process_sink.py. Does not know queues or batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from flowserve.backends.base import Sent
from flowserve.backends.credit import CreditSender
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.devices import check_for_loss
from flowserve.observe.statistics import BACKEND, Statistics
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.workers.outcome import Returned
from flowserve.runtime.workers.parameters import request_after
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import longer
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.streaming.iterations import Sender, Source

log = logging.getLogger("flowserve.runtime")


class StreamObserver(Protocol):
    """The observer of decoupled steps while one of them is traced."""

    def answered(self, source: Source, now_ns: int) -> None:
        """It sent a response, and the scheduler knows it."""

    def waits(self, source: Source) -> None:
        """Its model waits in its send."""

    def over(self, source: Source, error: FlowserveError | None, now_ns: int) -> None:
        """There are no more responses; the scheduler does not know it yet."""


class ResponseStreams:
    """The decoupled steps of an engine. Everything but `post` is called on the event loop. `observer`: None while none
    of them is traced.
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

    def start(self, source: Source, sender: Sender, instance: object) -> int:
        """A step is about to run on an instance. Returns how many responses it may send before it must wait."""
        source.instance = instance
        source.last_ns = self._clock()
        return self._streams.start(source, sender, source.last_ns)

    def answered(self, source: Source, sent: Sent) -> None:
        """One response, for one credit."""
        try:
            outputs = source.instance.state.take(source, sent.outputs)
        except FlowserveError as error:
            self.over(source, error)
            return
        if source.flow.done or source.is_over:
            return
        now_ns = self._clock()
        request = None
        if sent.parameters:
            try:
                request = request_after(source.flow, source.node.model.name, sent.parameters)
            except FlowserveError as error:
                self.over(source, error)
                return
        infer_ns = min(sent.infer_ns, now_ns - source.last_ns)  # the model's code may have written it
        output_ns = min(sent.output_ns, now_ns - source.last_ns - infer_ns)
        statistics = _statistics(source)
        statistics.responses.answered(source.count, infer_ns, output_ns)
        if not source.count:
            statistics.first_answered(now_ns - source.queued_ns)
        source.count += 1
        source.last_ns = now_ns
        self._streams.answer(source, outputs, now_ns, sent.parameters or None, request)
        if self.observer is not None:
            self.observer.answered(source, now_ns)
        self._wake()

    def goes_on(self, source: Source) -> None:
        """A step that was started before is about to run again."""
        source.started_ns = self._clock()

    def waits(self, source: Source, holder: Batch | None) -> None:
        """A model waits in its send for a credit, and keeps the instance of `holder` meanwhile."""
        self._streams.wait(source, holder)
        if self.observer is not None:
            self.observer.waits(source)
        self._wake()

    def over(self, source: Source, error: FlowserveError | None = None, *, is_empty: bool = False) -> None:
        """There are no more responses. No effect if repeated. `is_empty`: the final flag came without a response."""
        if source.is_over:
            return
        now_ns = self._clock()
        statistics = _statistics(source)
        if self.observer is not None:
            self.observer.over(source, error, now_ns)
        source.is_counted = True
        if error is None:
            if is_empty:
                statistics.responses.was_empty(source.count, now_ns - source.last_ns)
            took_ns = now_ns - source.started_ns
            statistics.succeeded([source.queued_ns], source.started_ns, 0, took_ns, 0)
            flow = source.flow
            flow.took = longer(flow.took, source.started_ns - source.queued_ns, 0, took_ns, 0)
            self._streams.last(source, now_ns)
        else:
            statistics.failed(1, now_ns - source.queued_ns, BACKEND)
            statistics.responses.failed(source.count, now_ns - source.last_ns)
            self._streams.failed(source, source.located(error, source.instance))
            source.is_over = True
        self._wake()

    def cancelled(self, source: Source) -> None:
        """Its responses are not wanted any more. Harmless when it is over."""
        if not source.is_counted:
            source.is_counted = True
            _statistics(source).responses.cancelled(source.count, self._clock() - source.last_ns)

    def returned(self, batch: Batch, outcome: Returned) -> None:
        """A batch gave its instance back."""
        now_ns = self._clock()
        if not outcome.has_failed:
            started_ns = batch.started_ns
            statistics: Statistics = batch.queue.observer
            input_ns = max(outcome.gathered_ns - started_ns, 0)
            statistics.executed(batch.rows, input_ns, now_ns - started_ns - input_ns, 0, now_ns)
            for ticket in batch.tickets:
                ticket.flow.owner.traffic[ticket.node.index].ran(ticket.rows, ())
        self._scheduler.execute_returned(batch)
        self._wake()

    def post(self, what: Callable[[], None], source: Source | None = None) -> None:
        """Run `work` on the loop, after all earlier posts. On any thread. `source`: the step that it concerns, which
        fails if `work` raises an internal error.
        """
        self._posted.append((what, source))
        try:
            self._token.run_sync_soon(self._drain, idempotent=True)
        except trio.RunFinishedError:
            log.debug("an answer came after the server was gone")

    def catch_up(self) -> None:
        """Run the posted work now."""
        self._drain()

    def _drain(self) -> None:
        posted = self._posted
        while posted:
            what, source = posted.popleft()
            try:
                what()
            except Exception as error:  # raised further it would end the server
                log.exception("what a model's thread said cannot be taken in")
                if source is not None:
                    self._broke(source, error)

    def _broke(self, source: Source, error: Exception) -> None:
        what = f"what it said cannot be taken in: {type(error).__name__}: {error}"
        failed = Internal(f"model '{source.node.model.name}': {what}")
        self._streams.failed(source, source.located(failed, source.instance))
        self._wake()


class ThreadSender(CreditSender):
    """The sender through which a model on a thread responds to one request. `execution` is the batch of a thread, None
    for threads of the model's own.
    """

    def __init__(self, source: Source | None, streams: ResponseStreams, execution: Callable[[], Batch | None]) -> None:
        super().__init__()
        self._source = source  # None once it is over: a model may keep this sender for ever
        self._streams = streams
        self._execution = execution

    def withdraw(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._streams.cancelled(source)
        super().withdraw()

    def _tell_answer(self, sent: Sent) -> None:
        source = self._source
        if source is not None:
            self._streams.post(partial(self._streams.answered, source, sent), source)

    def _tell_over(self, error: FlowserveError | None, *, is_empty: bool = False) -> None:
        source, self._source = self._source, None
        if error is not None:
            check_for_loss()
        if source is not None:
            self._streams.post(partial(self._streams.over, source, error, is_empty=is_empty), source)

    def _tell_waits(self) -> None:
        source = self._source
        if source is not None:
            self._streams.post(partial(self._streams.waits, source, self._execution()), source)


def _statistics(source: Source) -> Statistics:
    statistics: Statistics = source.flow.queues[source.node.index].observer
    return statistics
