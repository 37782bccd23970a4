"""A model whose answers leave in the order their requests came (`preserve_ordering`), however many instances it has.

Decided here: what waits for what. Tickets stand in line from their start on; an outcome is held until everything that
was started before it is out, or has nobody waiting for it any more. A failure is an outcome like any other. What never
ran (refused by a full queue, expired, withdrawn) stands in no line and holds nobody back. Batches leave their queue in
the order of arrival (the rules of the configuration see to it), so the order of starting is the order of arrival; a
batch that is tried again by halves keeps its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from flowserve.errors import FlowserveError
from flowserve.scheduling.router import Facts, Flow, Ticket

# (m, ticket, outputs, errors): what `Dispatcher.batch_done` was told of the batch in which the ticket was the m-th.
Outcome = tuple[int, Ticket, Sequence[Sequence[Facts | None]], Mapping[int, FlowserveError]]


class Order:
    """The line of one model."""

    __slots__ = ("_held", "_line")

    def __init__(self) -> None:
        self._line: deque[Ticket] = deque()
        self._held: dict[Ticket, Outcome] = {}

    def started(self, tickets: Sequence[Ticket]) -> None:
        """These left the queue, in this order."""
        self._line.extend(tickets)

    def hold(
        self,
        tickets: Sequence[Ticket],
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
    ) -> None:
        """A batch of them is back."""
        for m, ticket in enumerate(tickets):
            if not ticket.flow.done:
                self._held[ticket] = (m, ticket, outputs, errors)

    def holds(self, flow: Flow) -> bool:
        """Whether what `flow` came to stands in line."""
        return any(ticket.flow is flow for ticket in self._held)

    def pop(self) -> Outcome | None:
        """The next outcome whose turn it is, or None."""
        line = self._line
        while line:
            outcome = self._held.pop(line[0], None)
            if outcome is None and not line[0].flow.done:
                return None
            line.popleft()
            if outcome is not None:
                return outcome
        return None

    def ahead_of(self, flow: Flow) -> Iterator[Ticket]:
        """Those in line before the first ticket of `flow`; all of them where it has none there."""
        return takewhile(lambda ticket: ticket.flow.whole is not flow, self._line)

    def check(self) -> None:
        """Assert that whoever could go has gone. For tests and simulation, between two calls of `pump`."""
        assert not self._line or not (self._line[0] in self._held or self._line[0].flow.done), "an answer stands first"
        assert self._held.keys() <= set(self._line), "an answer is held that stands in no line"
