"""Single flight: of several equal requests or steps at a time, one runs and the others wait for its result.

Decides which member of a group with one key leads (runs), who leads after it has left, and which members run by
themselves after it has failed. Does not know what a key means, where results are kept, or how a member runs. Used by
the scheduler for steps (`Lookups`) and by admission control for requests.

The cost of an operation depends on the number of members that it returns, not on the number that wait. Always true: a
group has one leader, and is removed with it unless another member leads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import Tickets

M = TypeVar("M", bound=Hashable)


class _Group(Generic[M]):
    __slots__ = ("followers", "key", "leader")

    def __init__(self, key: Hashable, leader: M) -> None:
        self.key = key
        self.leader = leader
        # In order of arrival. A dict would be slow: the search for its first entry passes all removed ones.
        self.followers: OrderedDict[M, None] = OrderedDict()


class SingleFlight(Generic[M]):
    """The groups of equal members, by key. A member is in one group at most."""

    __slots__ = ("_groups", "_of")

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group[M]] = {}
        self._of: dict[M, _Group[M]] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether a member with this key runs."""
        return key in self._groups

    def join(self, key: Hashable, member: M) -> bool:
        """Whether the new member leads; otherwise it waits for the leader's result."""
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = self._of[member] = _Group(key, member)
            return True
        group.followers[member] = None
        self._of[member] = group
        return False

    def leads(self, member: M) -> bool:
        group = self._of.get(member)
        return group is not None and group.leader is member

    def land(self, leader: M) -> list[M]:
        """`leader` has its result: returns the members that waited for it, in order, and removes the group. Returns no
        member if `leader` does not lead.
        """
        return self._end(self._of[leader]) if self.leads(leader) else []

    def leave(self, member: M, *, has_failed: bool) -> list[M]:
        """`member` is over without a result that others could take. Returns the members that have to run now: all, each
        by itself, if the leader `has_failed`, because they may fail in the same way; else the next one, which leads.
        """
        group = self._of.get(member)
        if group is None:
            return []
        if group.leader is not member:
            del self._of[member], group.followers[member]
            return []
        if has_failed or not group.followers:
            return self._end(group)
        del self._of[member]
        group.leader, _ = group.followers.popitem(last=False)
        return [group.leader]

    def _end(self, group: _Group[M]) -> list[M]:
        members = [*group.followers]
        del self._groups[group.key]
        for member in (group.leader, *members):
            del self._of[member]
        return members

    def check(self) -> None:
        """Assert the invariant. For tests and simulation."""
        for key, group in self._groups.items():
            assert group.key == key
            for member in (group.leader, *group.followers):
                assert self._of[member] is group, "a member is in two groups"
            assert group.leader not in group.followers, "a leader waits for itself"
        assert len(self._of) == sum(1 + len(group.followers) for group in self._groups.values()), "a member is lost"


class Lookups:
    """The steps of one model that wait for its response cache: to be looked up (`batch.Lookup`), or for the result of
    an equal step. Steps that run are in the model's queue, or in a batch.
    """

    __slots__ = ("_leaders", "flights", "waiting")

    def __init__(self) -> None:
        self.waiting = Tickets()
        self.flights: SingleFlight[Ticket] = SingleFlight()
        self._leaders: dict[Frame, list[Ticket]] = {}  # running steps that lead, by flow

    def run(self, ticket: Ticket, key: Hashable, *, may_follow: bool) -> bool:
        """Whether a step that was looked up and not found has to run; else it waits for an equal one. `key` None: it is
        equal to no other. `may_follow` False: it runs even if an equal step is running.
        """
        if key is None or (key in self.flights and not may_follow):
            self.waiting.discard(ticket)
            return True
        if not self.flights.join(key, ticket):
            return False
        self._lead(ticket)
        return True

    def land(self, ticket: Ticket) -> list[Ticket]:
        """A step has its result: returns the steps that waited for it."""
        return self._stop_leading(ticket, self.flights.land(ticket))

    def fail(self, ticket: Ticket) -> list[Ticket]:
        """A step failed, or was refused. Returns the steps that waited for it, which have to run."""
        self.waiting.discard(ticket)
        return self._stop_leading(ticket, self.flights.leave(ticket, has_failed=True))

    def withdraw(self, *flows: Frame) -> tuple[int, list[Ticket]]:
        """Remove the steps of flows that are over. Returns how many of them waited here, and the steps that have to run
        instead of the removed ones.
        """
        gone = [ticket for flow in flows for ticket in self.waiting.withdraw(flow)]
        for ticket in gone:
            self.flights.leave(ticket, has_failed=False)
        leaders = [leader for flow in flows for leader in self._leaders.pop(flow, ())]
        to_run = [ticket for leader in leaders for ticket in self.flights.leave(leader, has_failed=False)]
        for ticket in to_run:
            self._lead(ticket)
        return len(gone), to_run

    def _lead(self, ticket: Ticket) -> None:
        self.waiting.discard(ticket)
        self._leaders.setdefault(ticket.flow, []).append(ticket)

    def _stop_leading(self, ticket: Ticket, followers: list[Ticket]) -> list[Ticket]:
        leaders = self._leaders.get(ticket.flow, [])  # at most as many as the flow has steps of this model
        if ticket in leaders:
            leaders.remove(ticket)
            if not leaders:
                del self._leaders[ticket.flow]
        for follower in followers:
            self.waiting.discard(follower)
        return followers

    def __len__(self) -> int:
        return len(self.waiting)

    def check(self) -> None:
        """Assert that each waiting step waits for one that runs. For tests and simulation, after the notices of
        `schedule` were executed.
        """
        self.waiting.check()
        self.flights.check()
        for flow, leaders in self._leaders.items():
            assert not flow.record.done, "steps wait for one whose flow is over"
            assert all(self.flights.leads(ticket) for ticket in leaders), "a leader is lost"
        for ticket in self.waiting:
            assert not ticket.flow.record.done, "a step of a flow that is over waits for another"
            assert not self.flights.leads(ticket), "a step leads, and is in no queue"
