"""Relays: a batch that is handed from instance to instance, and comes back once.

Decided here: which steps of a graph one batch may run through in one go, when it does, and what comes of those that it
came by. A relay takes an instance of every model on its way before it starts. It starts only where the batch would have
stayed as it is anyway: everybody in it takes the same way, nobody waits behind it at its first model, nobody who waited
with it has just begun without it, and at all others an instance is free and nobody waits. So it overtakes nobody who
waits, and no larger batch would have been made. How a batch is handed on, and whether that is worth it, is for the
`relay` callable to know: it takes a relay, or leaves the batch to run by itself.

It may come back early, from any of its stops: because there is something to say of its members, because one failed.
Then what it came by is done, and its requests go on from there as ever.

Always true, besides what dispatcher.py promises: an instance of a relay has that batch, and nothing else, until it is
set free, whether or not the batch comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowserve.errors import FlowserveError, Unavailable
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.flows import tell_nobody
from flowserve.scheduling.lineage import traced
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.streams import StreamFlow

# What one stop made: outputs[j][m], and why members failed.
Made = tuple[Sequence[Sequence[Facts | None]], Mapping[int, FlowserveError]]


class Way:
    """The steps of a relay, in order, and their queues. `row_max`: the largest batch that all but the first may be
    given, of so many requests at most. `is_private`: what is made before the last stop is nobody's but the relay's; for
    a flow that has run through, `inner` are then those slots, each with 1 where the last stop reads it and else 0.
    `reads` says of each stop but the first what its inputs are: which output of which stop; `last_reads` of each of
    these whether no stop reads it afterwards.
    `paths` belongs to the runtime: what it keeps of this way goes with it.
    """

    __slots__ = ("inner", "is_private", "last_reads", "member_max", "nodes", "paths", "queues", "reads", "row_max")

    def __init__(self, plan: Plan, nodes: Sequence[PlanNode], route: Sequence[ModelQueue]) -> None:
        self.nodes = tuple(nodes)
        self.queues = tuple(route[node.index] for node in nodes)
        self.row_max = min(node.max_batch_size for node in nodes[1:] or nodes)
        self.member_max = min((queue.receives for queue in self.queues[1:]), default=0)
        stops = {node.index for node in nodes}
        slots = [slot for node in nodes[:-1] for _, slot, _ in node.writes]
        self.is_private = all(
            stops.issuperset(plan.consumers[slot]) and slot not in plan.output_slots for slot in slots
        )
        self.inner = [(slot, int(slot in nodes[-1].distinct_inputs)) for slot in slots]
        made = {slot: (i, j) for i, node in enumerate(nodes) for j, slot in enumerate(node.outputs) if slot >= 0}
        self.reads = [[made[slot] for slot in node.inputs] for node in nodes[1:]]
        last = {read: i for i, reads in enumerate(self.reads) for read in reads}
        self.last_reads = [[last[read] == i for read in reads] for i, reads in enumerate(self.reads)]
        self.paths: dict[tuple[Any, ...], Any] = {}


class Relay:
    """One batch on its way. `instances` are those of the stops, in order; it has them all."""

    __slots__ = ("_stops", "batch", "instances", "way")

    def __init__(self, way: Way, batch: Batch, instances: list[Any]) -> None:
        self.way = way
        self.batch = batch
        self.instances = instances
        self._stops: dict[int, Batch] = {0: batch}

    def stop(self, i: int, since_ns: int = 0) -> Batch:
        """The batch as the `i`-th stop has it, from `since_ns` on: where that is known, asked first with it."""
        batch = self._stops.get(i)
        if batch is None:
            node, since_ns = self.way.nodes[i], since_ns or self.batch.started_ns
            tickets = [Ticket(ticket.flow, node, ticket.rows, None, since_ns) for ticket in self.batch.tickets]
            batch = self._stops[i] = Batch(self.way.queues[i], self.instances[i], tickets, since_ns)
        return batch


class RelayingDispatcher(Dispatcher):
    """Composes what `Dispatcher` does. `relay` starts one, and returns True; it may call straight back in. False: its
    batch is started by itself.
    """

    def __init__(
        self,
        run: Callable[[Batch], None],
        answered: Callable[[Flow], None],
        refused: Callable[[ModelQueue, Ticket, FlowserveError], None] = tell_nobody,
        told: Callable[[StreamFlow], None] = tell_nobody,
        withdrawn: Callable[[ModelQueue], None] = tell_nobody,
        *,
        relay: Callable[[Relay], bool],
    ) -> None:
        super().__init__(run, answered, refused, told, withdrawn)
        self._relay = relay

    def add(self, queue: ModelQueue) -> None:
        """A queue that is not one line, or keeps the order of its answers, has no part in relays, whatever it says."""
        if queue.bound is not None or queue.order is not None:
            queue.passes_on, queue.receives = False, 0
        super().add(queue)

    def adopt(self, flow: Flow, way: Way, instances: Sequence[Any], now_ns: int) -> Relay:
        """Take a request that has begun already, when no other was in flight: it is in a relay of these free instances
        through all of its plan (`whole_way`), which its rows must allow. Returns that relay.
        """
        self.in_flight += 1
        (ticket,) = flow.begin()
        ticket.queued_ns = now_ns
        for queue, instance in zip(way.queues, instances, strict=True):
            queue.free.remove(instance)
            queue.running += 1
        return Relay(way, Batch(way.queues[0], instances[0], [ticket], now_ns), [*instances])

    def set_free(self, relay: Relay, stops: Iterable[int]) -> None:
        """These instances have nothing more to do with a relay."""
        for i in stops:
            if not i:
                relay.batch.is_back = True
            self._free(relay.way.queues[i], relay.instances[i])

    def relayed(self, relay: Relay, outputs: Sequence[Sequence[Facts | None]], now_ns: int) -> None:
        """A relay has run through, on a private way, with no member failing: `outputs[j][m]` are those of its last
        stop. Its instances have been set free.
        """
        way = relay.way
        first, *later = way.nodes
        if self._end_all(relay.batch.tickets, outputs, way.nodes[-1]) == len(relay.batch.tickets):
            return
        for ticket in relay.batch.tickets:
            if later and not ticket.flow.done:
                ticket.flow.pass_over(first, way.nodes, way.inner)
        self._deliver(enumerate(relay.stop(len(later)).tickets), outputs, {}, now_ns)

    def relay_returned(self, relay: Relay, made: Sequence[Made], error: FlowserveError | None, now_ns: int) -> bool:
        """A relay came back, perhaps early. `made[i]` is what its i-th stop made; after those one failed, if there is
        an `error`. Its instances have been set free. Returns whether what failed is tried again.
        """
        reached = {node.index for node in relay.way.nodes[: len(made) + (error is not None)]}
        for m, ticket in enumerate(relay.batch.tickets):
            if not ticket.flow.done:
                self._take_on(ticket.flow, m, relay, made, reached, now_ns)
        return error is not None and self.relay_failed(relay.stop(len(made)), error)

    def relay_failed(self, batch: Batch, error: FlowserveError) -> bool:
        """As `batch_failed`, for a stop whose instance is set free by itself."""
        return self._after_failure(batch, error)

    def _take_on(self, flow: Flow, m: int, relay: Relay, made: Sequence[Made], reached: set[int], now_ns: int) -> None:
        """Take a flow over all the stops that its batch came by."""
        try:
            for i, (outputs, errors) in enumerate(made):
                if errors and m in errors:
                    self._fail(flow, traced(errors[m], relay.stop(i).tickets[m], relay.instances[i]))
                    return
                for following in flow.finish_step(relay.way.nodes[i], outputs, m):
                    if following.node.index in reached:
                        continue
                    if self._ending:
                        raise Unavailable(self._ending)
                    self._put(following, now_ns)
        except FlowserveError as error:
            if not flow.done:
                self._fail(flow, error)
            return
        if not flow.open:
            self._over(flow)

    def _start(self, queue: ModelQueue, now_ns: int) -> None:
        if not queue.passes_on:
            super()._start(queue, now_ns)
            return
        queue.is_dirty = False
        free = queue.free
        batcher = queue.batcher
        is_first = True  # the rest of those who waited would overtake them where it went by relay
        while free:
            tickets = batcher.take(now_ns)
            if tickets is None:
                return
            queue.running += 1
            batch = Batch(queue, free.popleft(), tickets, now_ns)
            if batcher or not is_first or not self._is_relayed(batch):
                self._run(batch)
            is_first = False

    def _is_relayed(self, batch: Batch) -> bool:
        """Start a relay with this batch, where there is one."""
        tickets = batch.tickets
        if len(tickets) < batch.queue.relayed_min:
            return False
        first = tickets[0]
        flow, node = first.flow, first.node
        plan, route = flow.plan, flow.route
        way = way_of(plan, node, route)
        if self._halves:
            return False  # they are to be tried again where it would go, perhaps
        if way is None or batch.rows > way.row_max or len(tickets) > way.member_max:
            return False
        for queue in way.queues[1:]:
            if not queue.free or queue.batcher:
                return False
        for ticket in tickets:
            one = ticket.flow
            if one.plan is not plan or ticket.node is not node or one.route is not route or not ticket.rows:
                return False
        instances = [batch.instance]
        for queue in way.queues[1:]:
            queue.running += 1
            instances.append(queue.free.popleft())
        if self._relay(Relay(way, batch, instances)):
            return True
        for queue, instance in zip(way.queues[1:], instances[1:], strict=True):
            queue.running -= 1
            queue.free.appendleft(instance)
        return False


def way_of(plan: Plan, first: PlanNode, route: Sequence[ModelQueue]) -> Way | None:
    """As `find_way`, which is asked once."""
    try:
        way: Way | None = plan.ways[first, route]
    except KeyError:
        way = plan.ways[first, route] = find_way(plan, first, route)
    return way


def whole_way(plan: Plan, route: Sequence[ModelQueue]) -> Way | None:
    """The one way through all of a plan, where a request that is alone takes it (`RelayingDispatcher.adopt`): from the
    only step that needs nothing but what the request brings. None where there is none. A plain model's has one stop.
    """
    if not plan.first:
        return None
    first = plan.nodes[plan.first[0]]
    if first.converts or first.optional or first.checks or not first.max_batch_size or not first.inputs:
        return None
    if len(plan.nodes) > 1:
        way = way_of(plan, first, route)
    else:
        way = Way(plan, plan.nodes, route) if route[first.index].passes_on and plan.nesting is None else None
    if way is None or len(way.nodes) < len(plan.nodes) or not way.is_private:
        return None
    queue = way.queues[0]
    batcher = queue.batcher if queue.closed is None else queue.closed
    return None if batcher.may_wait else way


def find_way(plan: Plan, first: PlanNode, route: Sequence[ModelQueue]) -> Way | None:
    """Where a relay that begins with `first` goes; None where there is none. One carrier goes all of it.

    Each step reads nothing but what was made on the way, on a model of its own. What is made before the last is read on
    the way, so that no other step waits for the relay's end.
    """
    if plan.nesting is not None:
        return None
    way = [first]
    made = set(first.outputs)
    models = {first.model}
    carrier = route[first.index].carrier
    for node in plan.nodes[first.index + 1 :]:
        if not route[way[-1].index].passes_on:
            break
        queue = route[node.index]
        is_carried = queue.receives and queue.carrier is carrier
        if is_carried and node.model not in models and _reads_only(node, made):
            way.append(node)
            made.update(node.outputs)
            models.add(node.model)
    while len(way) > 1 and not _is_closed(way):
        way.pop()
    if len(way) < 2:
        return None
    found = Way(plan, way, route)
    return None if not found.is_private and carrier is not None and carrier.private_only else found


def _reads_only(node: PlanNode, made: set[int]) -> bool:
    if not node.writes or not node.inputs or not node.max_batch_size or node.converts or node.optional or node.checks:
        return False
    return len(set(node.inputs)) == len(node.inputs) and made.issuperset(node.inputs) and min(node.inputs) >= 0


def _is_closed(way: Sequence[PlanNode]) -> bool:
    """Whether nobody else waits for what is made before the last stop."""
    stops = {node.index for node in way}
    return all(stops.issuperset(consumers) for node in way[:-1] for _, _, consumers in node.writes)
