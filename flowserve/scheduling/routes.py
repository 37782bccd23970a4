"""The batches on routes: which batch passes several stages before it returns, and which is recalled.

Decides whether a batch takes the route of its node (`choose`), that it gives its instances back as it passes, and that
it is recalled if a ticket waits for long for an instance that it holds. `route` has the stages of a route; the
scheduler continues with what a batch computed. Called by the scheduler; the engine reports the stages that a batch has
passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.queue import Deadlines
from flowserve.scheduling.route import RECALL_NS, Route, find_route


class Routes:
    """`freed` is called after instances were freed; `due` are the deadlines of requests."""

    def __init__(self, freed: Callable[[], None], due: Deadlines[Frame]) -> None:
        self._freed = freed
        self._due = due
        self.running: dict[Batch, None] = {}

    def choose(self, batch: Batch) -> None:
        """Give a batch its route if returning between the stages could not change the batch: all members have the same
        next nodes, the queues of the route are empty and their instances idle, and no member has a deadline. If
        instances are in several groups, a route stays in the group of its first instance, and instances of other groups
        need not be idle: a batch does not wait for others to join it while an instance is free.
        """
        tickets = batch.tickets
        first = tickets[0]
        node, plan, queues = first.node, first.frame.plan, first.frame.queues
        try:
            route: Route | None = plan.routes[node.index]
        except KeyError:
            route = plan.routes[node.index] = find_route(plan, node, queues)
        if route is None or batch.rows > route.rows_max:
            return
        queue, groups = batch.queue, route.groups
        if len(tickets) > route.requests_max or len(queue.batcher):
            return
        if not queue.is_idle_in(groups[batch.instance], 1) if groups else queue.running > 1:
            return
        instances = [batch.instance]
        for queue in route.queues[1:]:
            if queue.may_have_tickets and len(queue.batcher):
                return
            if not groups:
                if queue.running or not queue.free:
                    return
                instances.append(queue.free[0])
            elif queue.is_idle_in(group := groups[batch.instance]):
                instances.append(queue.members[group])
            else:
                return
        due = self._due.entries
        for ticket in tickets:
            frame = ticket.frame
            if frame.plan is not plan or ticket.node is not node or frame.queues is not queues or not ticket.rows:
                return
            if frame in due:
                return
        for queue, instance in zip(route.queues[1:], instances[1:], strict=True):
            queue.free.remove(instance)  # with one group the first of `free`, as chosen above
            queue.running += 1
        batch.take(route, instances)
        self.running[batch] = None

    def release(self, batch: Batch, stages: Iterable[int]) -> None:
        """Free the instances of these stages: the batch passed them, or will not reach them."""
        assert batch.route is not None
        for i in stages:
            if i not in batch.released:
                batch.released.add(i)
                batch.route.queues[i].freed(batch.instances[i])
        self._freed()

    def returned(self, batch: Batch) -> None:
        """A batch is complete, and frees the instances that it still holds."""
        batch.is_back = True
        del self.running[batch]
        assert batch.route is not None
        for i, queue in enumerate(batch.route.queues):
            if i not in batch.released:
                queue.freed(batch.instances[i])
        batch.released.update(range(len(batch.instances)))
        self._freed()

    def recalls(self, now_ns: int) -> list[Batch]:
        """The batches that must return at the next stage; each is returned once."""
        found = []
        for batch in self.running:
            if now_ns >= batch.started_ns + RECALL_NS and not batch.is_recalled and _blocks_tickets(batch):
                batch.is_recalled = True
                found.append(batch)
        return found

    def soonest(self) -> int | None:
        """When a batch must be recalled; None if no ticket waits for one."""
        waited_for = (batch for batch in self.running if not batch.is_recalled and _blocks_tickets(batch))
        return min((batch.started_ns + RECALL_NS for batch in waited_for), default=None)


def _blocks_tickets(batch: Batch) -> bool:
    """Whether a ticket waits for an instance that a batch on a route holds."""
    assert batch.route is not None
    for i, queue in enumerate(batch.route.queues):
        if queue.may_have_tickets and len(queue.batcher) and not queue.free and i not in batch.released:
            return True
    return False
