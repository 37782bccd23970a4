"""Response order of a model with `preserve_ordering`: outcomes leave in the order in which their requests started.

Decides which outcome may leave: an outcome is held until every ticket that started before it has left or belongs to a
finished flow. A failure is an outcome too. A ticket that never ran (refused, expired, cancelled) is not in the order
and delays no other. The configuration rules ensure that batches leave their queue in order of arrival, so the order of
starting is the order of arrival; a failed batch that is retried in halves keeps its position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from flowserve.errors import FlowserveError
from flowserve.scheduling.flow import Facts, Flow, Ticket

# (m, ticket, outputs, errors): the results of the batch in which the ticket was the m-th, as for `Scheduler.complete`.
HeldOutcome = tuple[int, Ticket, Sequence[Sequence[Facts | None]], Mapping[int, FlowserveError]]


class Order:
    """The started tickets of one model, and the outcomes that wait for an earlier one."""

    __slots__ = ("_held", "_started")

    def __init__(self) -> None:
        self._started: deque[Ticket] = deque()
        self._held: dict[Ticket, HeldOutcome] = {}

    def started(self, tickets: Sequence[Ticket]) -> None:
        """Append tickets that left the queue, in this order."""
        self._started.extend(tickets)

    def hold(
        self,
        tickets: Sequence[Ticket],
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
    ) -> None:
        """Hold the outcomes of a complete batch."""
        for m, ticket in enumerate(tickets):
            if not ticket.flow.done:
                self._held[ticket] = (m, ticket, outputs, errors)

    def holds(self, flow: Flow) -> bool:
        """Whether an outcome of `flow` is held."""
        return any(ticket.flow is flow for ticket in self._held)

    def pop(self) -> HeldOutcome | None:
        """Remove and return the next outcome in order; None if an earlier one is missing."""
        started = self._started
        while started:
            outcome = self._held.pop(started[0], None)
            if outcome is None and not started[0].flow.done:
                return None
            started.popleft()
            if outcome is not None:
                return outcome
        return None

    def ahead_of(self, flow: Flow) -> Iterator[Ticket]:
        """The started tickets before the first one of `flow`; all of them if it has none."""
        return takewhile(lambda ticket: ticket.flow.whole is not flow, self._started)

    def check(self) -> None:
        """Assert that no outcome could leave. For tests and simulation, between two calls of `schedule`."""
        assert not self._started or not (self._started[0] in self._held or self._started[0].flow.done), (
            "an outcome that could leave is held"
        )
        assert self._held.keys() <= set(self._started), "an outcome is held whose ticket has not started"
