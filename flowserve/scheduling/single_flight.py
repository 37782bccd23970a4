"""Single flight: of several equal requests or steps at a time, one runs and the others wait for its result.

Decides which of the requests or steps with one key leads (runs), which leads after it has left, and which run by
themselves after it has failed. Does not know what a key means, where results are kept, or how a result is made. Each
model with a response cache has a `SingleFlight` for its steps in ensembles (`ModelQueue.flights`), used by the
scheduler, and each deployment with one has another for its requests, used by admission control. A request is a ticket
of no step.

The cost of an operation depends on the number of tickets that it returns, not on the number that wait. Always true: a
group has one leader, and is removed with it unless another ticket leads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.queue import Tickets


class _Group:
    __slots__ = ("followers", "key", "leader")

    def __init__(self, key: Hashable, leader: Ticket) -> None:
        self.key = key
        self.leader = leader
        # In order of arrival. A dict would be slow: the search for its first entry passes all removed ones.
        self.followers: OrderedDict[Ticket, None] = OrderedDict()


class SingleFlight:
    """Tickets that wait for a response cache: to be looked up, or for the result of an equal one. Those that run are in
    a queue or in a batch.
    """

    __slots__ = ("_groups", "_leaders", "_of", "waiting")

    def __init__(self) -> None:
        self.waiting = Tickets()
        self._groups: dict[Hashable, _Group] = {}
        self._of: dict[Ticket, _Group] = {}  # a ticket is in one group at most
        self._leaders: dict[Frame, list[Ticket]] = {}  # by request: at most as many as it has steps of this model

    def run(self, ticket: Ticket, key: Hashable, *, may_follow: bool) -> bool:
        """Whether a ticket that was looked up and not found has to run; else it waits for an equal one. `key` None: it
        is equal to no other. `may_follow` False: it runs even if an equal one is running.
        """
        group = self._groups.get(key)
        if group is not None and may_follow:
            group.followers[ticket] = None
            self._of[ticket] = group
            return False
        if group is None and key is not None:
            group = self._groups[key] = _Group(key, ticket)
            self._lead(ticket, group)
        self.waiting.discard(ticket)
        return True

    def land(self, ticket: Ticket) -> list[Ticket]:
        """A ticket has its result: returns those that waited for it, in order."""
        return self._end(self._of[ticket]) if self.leads(ticket) else []

    def fail(self, ticket: Ticket) -> list[Ticket]:
        """A ticket failed, or was refused. Returns those that waited for it. They have to run, each by itself, because
        they may fail in the same way.
        """
        self.waiting.discard(ticket)
        if self.leads(ticket):
            return self._end(self._of[ticket])
        self._leave_group(ticket)
        return []

    def withdraw(self, *frames: Frame) -> tuple[int, list[Ticket]]:
        """Remove the tickets of requests that are over. Returns how many of them waited here, and the tickets that have
        to run: each leads instead of a removed one.
        """
        gone = [ticket for frame in frames for ticket in self.waiting.withdraw(frame)]
        for ticket in gone:
            self._leave_group(ticket)
        to_run: list[Ticket] = []
        for frame in frames:
            for leader in self._leaders.pop(frame, ()):
                group = self._of.pop(leader)
                if not group.followers:
                    del self._groups[group.key]
                    continue
                group.leader, _ = group.followers.popitem(last=False)
                self.waiting.discard(group.leader)
                self._lead(group.leader, group)
                to_run.append(group.leader)
        return len(gone), to_run

    def leads(self, ticket: Ticket) -> bool:
        group = self._of.get(ticket)
        return group is not None and group.leader is ticket

    def _lead(self, ticket: Ticket, group: _Group) -> None:
        self._of[ticket] = group
        self._leaders.setdefault(ticket.frame, []).append(ticket)

    def _leave_group(self, follower: Ticket) -> None:
        group = self._of.pop(follower, None)
        if group is not None:
            del group.followers[follower]

    def _end(self, group: _Group) -> list[Ticket]:
        del self._groups[group.key]
        del self._of[group.leader]
        leaders = self._leaders[group.leader.frame]
        leaders.remove(group.leader)
        if not leaders:
            del self._leaders[group.leader.frame]
        for follower in group.followers:
            del self._of[follower]
            self.waiting.discard(follower)
        return [*group.followers]

    def __len__(self) -> int:
        return len(self.waiting)

    def check(self) -> None:
        """Assert that each waiting ticket waits for one that runs. For tests and simulation, after the lookups of
        `schedule` were executed.
        """
        self.waiting.check()
        for key, group in self._groups.items():
            assert group.key == key
            for ticket in (group.leader, *group.followers):
                assert self._of[ticket] is group, "a ticket is in two groups"
            assert group.leader not in group.followers, "a leader waits for itself"
        assert len(self._of) == sum(1 + len(group.followers) for group in self._groups.values()), "a ticket is lost"
        for frame, leaders in self._leaders.items():
            assert not frame.record.done, "tickets wait for one whose request is over"
            assert all(self.leads(ticket) for ticket in leaders), "a leader is lost"
        for ticket in self.waiting:
            assert not ticket.frame.record.done, "a ticket of a request that is over waits for another"
            assert not self.leads(ticket), "a ticket leads, and is in no queue"
