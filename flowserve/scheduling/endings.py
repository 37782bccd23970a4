"""What those are told whose sequence ended before its time: requests that still waited, and those that come too late.

Decided here: that each is told once, with the reason, and how long reasons are remembered. Why and when a sequence
ends is decided in sequences.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from flowserve.errors import FlowserveError
from flowserve.scheduling.lines import SequenceId
from flowserve.scheduling.router import Ticket

# So many ended sequences are remembered, so that a request that comes too late can be told what became of its own.
ENDINGS_MAX: Final = 1024


class Endings:
    """Of the sequences of one model."""

    def __init__(self) -> None:
        self._orphans: list[tuple[Ticket, FlowserveError]] = []
        self._reasons: dict[SequenceId, str] = {}

    def orphaned(self, tickets: Iterable[Ticket], error: FlowserveError) -> None:
        """These waited, and are to be told."""
        self._orphans += [(ticket, error) for ticket in tickets if not ticket.flow.done]

    def orphans(self) -> Sequence[tuple[Ticket, FlowserveError]]:
        """Whoever is to be told, each with the reason; they are given out once."""
        if not self._orphans:
            return ()
        orphans, self._orphans = self._orphans, []
        return orphans

    def withdraw(self) -> int:
        """Nobody who is done is to be told any more. Returns how many there were."""
        before = len(self._orphans)
        self._orphans = [one for one in self._orphans if not one[0].flow.done]
        return before - len(self._orphans)

    def remember(self, sequence_id: SequenceId, why: str) -> None:
        """The last sequence of that id ended, because of this."""
        self._reasons.pop(sequence_id, None)
        self._reasons[sequence_id] = why
        if len(self._reasons) > ENDINGS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def why(self, sequence_id: SequenceId) -> str:
        """What became of the last sequence of that id, "" where that is not known."""
        return self._reasons.get(sequence_id, "")

    def forget(self, sequence_id: SequenceId) -> None:
        """Another sequence of that id has begun."""
        self._reasons.pop(sequence_id, None)

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._reasons)

    def check(self) -> None:
        assert not self._orphans, "an orphan was not told"
