"""Sequences of one request each, which runs again and again until it is done: Triton's iterative sequences.

Decided here: that every request is a sequence (which one, where it does not say), that a request which its model gives
back is the next of its sequence whatever came in between, and that a sequence is over when its last request was not
given back. So a batch is whoever has a slot and something to do just then: requests come in and leave between any two
executions. Slots, backlog and batches are those of all sequences.

Always true after every call, besides what is true of the strategy (see `check`):
  (1) each sequence has a request that waits, or one that runs, or one that is about to be tried again.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from flowserve.errors import FlowserveError
from flowserve.scheduling.direct import Direct
from flowserve.scheduling.lines import Line, SequenceId, SequencePolicy, Shaped, without_start
from flowserve.scheduling.oldest import Oldest
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.sequences import Identify, Sequences


class Iterative(Sequences):
    """What it adds to a strategy."""

    def __init__(self, policy: SequencePolicy, identify: Identify, *arguments: Any) -> None:
        super().__init__(policy, self._named, *arguments)
        self._says = identify
        self._numbers = count(1)

    def reschedule(self, ticket: Ticket, now_ns: int) -> None:
        """A request that ran is to run again. Called before its instance is asked for its next batch; nothing happens
        where the request is over.
        """
        if ticket.flow.done:
            return
        self._now_ns = ticket.queued_ns = now_ns
        line: Line = ticket.line
        if isinstance(ticket.key, Shaped):
            ticket.key = ticket.key.going_on()
        if line.waiting:  # another of the same id
            self._left(line)
        line.waiting.appendleft(ticket)
        line.going_on = ticket
        self._count += 1
        self._leads(line)

    def withdraw(self, flow: Flow) -> int:
        """Drop the tickets of a flow that will not be answered. Others of the same id miss nothing by that."""
        gone = 0
        for line in [*self._lines]:
            left = sum(ticket.flow.done for ticket in line.waiting)
            if left:
                gone += left
                self._thin_out(line, left)
        for ticket in self._withdrawn_again():
            gone += 1
            self._end_where_done(ticket.line)
        return gone + self._endings.withdraw()

    def id_of(self, flow: Flow) -> SequenceId:
        return self._says(flow)[0]

    def _named(self, flow: Flow) -> tuple[SequenceId, bool, bool]:
        """What a request that names no sequence is called is for its model only."""
        sequence_id, is_start, _ = self._says(flow)
        if not sequence_id:
            return self._new_id(), True, False
        if not is_start and self.is_live(sequence_id):
            raise without_start(self.policy, sequence_id, "each of its requests is a sequence of its own")
        return sequence_id, is_start, False

    def _new_id(self) -> SequenceId:
        while True:
            number = next(self._numbers)
            sequence_id = str(number) if self.policy.id_type == "BYTES" else number
            if not self.is_live(sequence_id):
                return sequence_id

    def _thin_out(self, line: Line, gone: int) -> None:
        is_first = line.slot is not None and line.waiting[0].flow.done
        if is_first:
            self._left(line)
        rest = [ticket for ticket in line.waiting if not ticket.flow.done]
        line.waiting.clear()
        line.waiting.extend(rest)
        self._count -= gone
        if rest and is_first:
            self._leads(line)
        self._end_where_done(line)

    def _is_back(self, instance: Any) -> None:
        ran = [*self._ran[instance]]
        super()._is_back(instance)
        for line in ran:
            self._end_where_done(line)
            if line.waiting and line.waiting[0] is not line.going_on:
                line.going_on = None

    def _end_where_done(self, line: Line) -> None:
        if line in self._lines and not (line.waiting or line.is_running or line in self._lines_tried_again()):
            self._end(line, "")

    def _tried_again(self) -> list[Ticket]:
        """What is in parts of batches that raised."""
        return [ticket for parts in self._again.values() for part in parts for ticket in part]

    def _lines_tried_again(self) -> set[Line]:
        return {ticket.line for ticket in self._tried_again() if not ticket.flow.done}

    def _end(self, line: Line, why: str, error: FlowserveError | None = None) -> None:
        super()._end(line, "", error)  # nobody asks later what became of it: it had one request
        line.going_on = None  # or the two would hold each other, and what the request runs on

    def check(self) -> None:
        super().check()
        again = self._lines_tried_again()
        for line in self._lines:
            assert line.waiting or line.is_running or line in again, f"(1) {line} has nothing to do and is not over"


class IterativeDirect(Iterative, Direct):
    """Each request keeps its row in the batch until it is done."""


class IterativeOldest(Iterative, Oldest):
    """Requests are batched as they come, and come back."""
