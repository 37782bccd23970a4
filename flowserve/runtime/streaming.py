"""Where models that answer many times meet the loop: answers, waits and ends, from whatever thread or process.

Decided here: how what a decoupled model does reaches the machines that decide (scheduling/credits.py), and what a step
of one is written down as. What a thread of a model says is handed to the loop in the order in which it was said; a
thread that has credits waits for nothing. How a process says it is decided in stream_link.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from flowserve.backends.base import Sent
from flowserve.backends.credit import CreditSender
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.devices import look_for_loss
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import BACKEND, Statistics
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.parameters import request_after
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.iterations import Sender, Source
from flowserve.scheduling.lineage import traced
from flowserve.scheduling.router import longer

log = logging.getLogger("flowserve.runtime")

# Given a step and the outputs of one of its answers, returns those that are the answer.
Take = Callable[[Source, Sequence[Tensor | None]], Sequence[Tensor | None]]


@dataclass(slots=True, eq=False)
class Returned:
    """What the run of a decoupled model's batch came to: its instance is free. Its answers come by themselves, and so
    does why it `has_failed`. `rescheduled`: as in `Results`.
    """

    gathered_ns: int = 0
    computed_ns: int = 0
    has_failed: bool = False
    rescheduled: Sequence[int] = ()


class Notes(Protocol):
    """Who takes notes of decoupled steps while any of them is traced."""

    def answered(self, source: Source, now_ns: int) -> None:
        """It answered, and what follows from that was made."""

    def waits(self, source: Source) -> None:
        """Its model stands in its send."""

    def over(self, source: Source, error: FlowserveError | None, now_ns: int) -> None:
        """There are no more answers; what follows from that is not known yet."""


class Streaming:
    """The engine's ear for decoupled models. Everything but `post` is called on the loop. `notes`: None where nobody
    takes any.
    """

    def __init__(
        self, token: trio.lowlevel.TrioToken, dispatcher: Dispatcher, clock: ClockNs, poke: Callable[[], None]
    ) -> None:
        self._poke = poke
        self._token = token
        self._streams = dispatcher.streams
        self._dispatcher = dispatcher
        self._clock = clock
        self._posted: deque[tuple[Callable[[], None], Source | None]] = deque()
        self.notes: Notes | None = None

    def start(self, source: Source, sender: Sender, instance: object) -> int:
        """A step is about to run on an instance; how many answers it may send before it must wait."""
        source.instance = instance
        source.last_ns = self._clock()
        return self._streams.start(source, sender, source.last_ns)

    def answered(self, source: Source, sent: Sent) -> None:
        """One answer, for one credit."""
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
        infer_ns = min(sent.infer_ns, now_ns - source.last_ns)  # other people's code may have written it
        output_ns = min(sent.output_ns, now_ns - source.last_ns - infer_ns)
        statistics = _observer(source)
        statistics.responses.answered(source.count, infer_ns, output_ns)
        if not source.count:
            statistics.first_answered(now_ns - source.queued_ns)
        source.count += 1
        source.last_ns = now_ns
        self._streams.answer(source, sent.outputs, now_ns, sent.parameters or None, request)
        if self.notes is not None:
            self.notes.answered(source, now_ns)
        self._poke()

    def goes_on(self, source: Source) -> None:
        """A step that was started before is about to run again."""
        source.started_ns = self._clock()

    def waits(self, source: Source, holder: Batch | None) -> None:
        """Somebody stands in its send without a credit, and keeps the instance of `holder` meanwhile."""
        self._streams.wait(source, holder)
        if self.notes is not None:
            self.notes.waits(source)
        self._poke()

    def over(self, source: Source, error: FlowserveError | None = None, *, is_empty: bool = False) -> None:
        """There are no more answers. Harmless when it was said before. `is_empty`: it was said by itself."""
        if source.is_over:
            return
        now_ns = self._clock()
        statistics = _observer(source)
        if self.notes is not None:
            self.notes.over(source, error, now_ns)
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
            self._streams.failed(source, traced(error, source, source.instance))
            source.is_over = True
        self._poke()

    def cancelled(self, source: Source) -> None:
        """Nobody wants its answers any more. Harmless when it is over."""
        if not source.is_counted:
            source.is_counted = True
            _observer(source).responses.cancelled(source.count, self._clock() - source.last_ns)

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
        self._dispatcher.execute_returned(batch)
        self._poke()

    def post(self, what: Callable[[], None], source: Source | None = None) -> None:
        """Do this on the loop, after what was posted before. On any thread. `source`: the step that it is about, which
        fails with it where that is a mistake of ours.
        """
        self._posted.append((what, source))
        try:
            self._token.run_sync_soon(self._drain, idempotent=True)
        except trio.RunFinishedError:
            log.debug("an answer came after the server was gone")

    def catch_up(self) -> None:
        """Do now what was posted so far."""
        self._drain()

    def keeping(self, take: Take) -> Streaming:
        """The same for a model whose answers are looked at first, by `take`."""
        return _Keeping(take, self._token, self._dispatcher, self._clock, self._poke)

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
        self._streams.failed(source, traced(failed, source, source.instance))
        self._poke()


class _Keeping(Streaming):
    """`take` is given every answer's step and outputs, and returns the outputs that are the answer."""

    def __init__(self, take: Take, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._take = take

    def answered(self, source: Source, sent: Sent) -> None:
        try:
            sent.outputs = self._take(source, sent.outputs)
        except FlowserveError as error:
            self.over(source, error)
            return
        super().answered(source, sent)


class ThreadSender(CreditSender):
    """Where a model on a thread sends its answers to one request. `execution` says which batch a thread executes, None
    for threads of the model's own.
    """

    def __init__(self, source: Source | None, streaming: Streaming, execution: Callable[[], Batch | None]) -> None:
        super().__init__()
        self._source = source  # None once it is over: a model may keep what it was given for ever
        self._streaming = streaming
        self._execution = execution

    def withdraw(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            self._streaming.cancelled(source)
        super().withdraw()

    def _tell_answer(self, sent: Sent) -> None:
        source = self._source
        if source is not None:
            self._streaming.post(partial(self._streaming.answered, source, sent), source)

    def _tell_over(self, error: FlowserveError | None, *, is_empty: bool = False) -> None:
        source, self._source = self._source, None
        if error is not None:
            look_for_loss()
        if source is not None:
            self._streaming.post(partial(self._streaming.over, source, error, is_empty=is_empty), source)

    def _tell_waits(self) -> None:
        source = self._source
        if source is not None:
            self._streaming.post(partial(self._streaming.waits, source, self._execution()), source)


def _observer(source: Source) -> Statistics:
    statistics: Statistics = source.flow.route[source.node.index].observer
    return statistics


def sources(batch: Batch) -> list[Source]:
    """The steps of a decoupled model's batch."""
    return [ticket for ticket in batch.tickets if isinstance(ticket, Source)]
