"""Sequences that ended early: the errors of requests that were waiting, and of requests that arrive later.

Decides that each request gets one error, with the reason, and how many reasons are kept. batcher.py decides when a
sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from flowserve.errors import FlowserveError
from flowserve.scheduling.flow import Ticket
from flowserve.scheduling.sequence.sequence import SequenceId

# The number of ended sequences whose reason is kept for the error of a late request.
ENDINGS_MAX: Final = 1024


class EndedSequences:
    """The ended sequences of one model: their orphaned requests, and the reasons of the last `ENDINGS_MAX`."""

    def __init__(self) -> None:
        self._orphans: list[tuple[Ticket, FlowserveError]] = []
        self._reasons: dict[SequenceId, str] = {}

    def orphaned(self, tickets: Iterable[Ticket], error: FlowserveError) -> None:
        """Add waiting requests of an ended sequence; they fail with `error`."""
        self._orphans += [(ticket, error) for ticket in tickets if not ticket.flow.done]

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Remove and return the orphaned requests, each with its error."""
        if not self._orphans:
            return ()
        orphans, self._orphans = self._orphans, []
        return orphans

    def withdraw(self) -> int:
        """Remove the orphaned requests whose flow is done. Returns their number."""
        before = len(self._orphans)
        self._orphans = [one for one in self._orphans if not one[0].flow.done]
        return before - len(self._orphans)

    def remember(self, sequence_id: SequenceId, reason: str) -> None:
        """Record why the last sequence of that id ended."""
        self._reasons.pop(sequence_id, None)
        self._reasons[sequence_id] = reason
        if len(self._reasons) > ENDINGS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def reason(self, sequence_id: SequenceId) -> str:
        """Why the last sequence of that id ended, "" if that is not known."""
        return self._reasons.get(sequence_id, "")

    def forget(self, sequence_id: SequenceId) -> None:
        """Remove the reason of that id: a new sequence has begun."""
        self._reasons.pop(sequence_id, None)

    def __len__(self) -> int:
        """The number of kept reasons."""
        return len(self._reasons)

    def check(self) -> None:
        assert not self._orphans, "an orphaned request was not refused"
