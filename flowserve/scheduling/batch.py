"""Records of the scheduler: a model's queue with its instances, a batch, its route, and the decisions of `schedule`.

The scheduler writes them, the runtime reads them. The engine executes the notices of `Decisions` in order, then
accounts for the finished flows, then starts the batches, then executes the lookups.

Decides which nodes a route contains (`find_route`), given the runs of nodes that the plan allows (graph/plan.py) and
the properties of their queues. `Scheduler._choose_route` decides whether a batch takes its route: if returning could
not change the batch. Does not know how a worker runs a route.

A worker may return a batch early, after any stage: if a member failed, if an output cannot be passed on as one tensor,
or if the batch was recalled. The passed steps are then finished, and the flows continue on the general path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from flowserve.errors import FlowserveError
from flowserve.graph.plan import Plan, PlanNode, is_private
from flowserve.graph.types import ModelKey
from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.queue import Batcher, BoundBatcher, Order
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.scheduling.single_flight import Lookups
from flowserve.scheduling.slots import Slots

# The time after which a batch is recalled from its route if a ticket waits for an instance that it holds.
RECALL_NS: Final = 1_500_000
NO_GROUPS: Final[Mapping[Any, object]] = {}
# The additional cost of a batch of its own for a stage of a route: the way to the scheduler and back (decision 0046).
RETURN_NS: Final = 75_000
# The limit of one batch's duration in the average `ModelQueue.compute_ns`, so that one slow batch does not dominate it.
COMPUTE_NS_MAX: Final = 2_000_000


class ModelQueue:
    """The waiting tickets of one model version, and its instances. `key` is its name in plans."""

    def __init__(
        self,
        key: ModelKey,
        batcher: Batcher,
        instances: Sequence[Any],
        *,
        is_pure: bool = False,
        statistics: Any = None,
        needs: Sequence[Needs] = (),
        keeps_order: bool = False,
        route_groups: Mapping[Any, object] = NO_GROUPS,
        computes_apart: bool = False,
        cache: Any = None,
    ) -> None:
        self.key = key
        self.batcher = batcher
        self.instances = tuple(instances)
        # Longest idle first, so that batches spread over instances evenly. Each instance is free, running or away; one
        # that takes several batches at once has as many entries.
        self.free: deque[Any] | Slots = deque(instances)
        if len({*instances}) < len(instances):
            self.free = Slots(instances)
        self.running = 0
        self.away: list[Any] = []
        self.leaving: list[Any] = []  # instances that will be away when their batch is complete
        self.bound: BoundBatcher | None = None  # its batcher, if tickets may be bound to one instance
        if isinstance(batcher, BoundBatcher):
            self.bound = batcher
            assert isinstance(self.free, deque)  # each of its instances runs one batch
            batcher.serve(self.instances, self.free)
        self.closed: Batcher | None = None  # its batcher, while a `ClosedQueue` replaces it
        self.is_pure = is_pure
        self.statistics = statistics  # the model's statistics; only the runtime uses them
        self.needs = tuple(needs)  # the resources of each instance at a rate limiter; empty: none
        self.order = Order() if keeps_order else None
        self.cache = cache  # the model's response cache, in which the runtime looks up each step; or None
        self.lookups = None if cache is None else Lookups()
        # Instances of one group pass batches to each other. All instances of a model are in one group, or each is in
        # its own. Models with routes between them have the same groups. None: no routes, because the scheduler decides
        # about each request or step of this model.
        is_free = not keeps_order and self.bound is None and cache is None
        groups = frozenset(route_groups.values())
        is_divided = len(groups) == len(route_groups)
        may_route = is_free and groups and None not in groups and (is_divided or len(groups) == 1)
        self.route_groups: frozenset[object] | None = groups if may_route else None
        # If there are several groups: the instance of each, and how many batches an idle instance can take.
        self.members = {group: one for one, group in route_groups.items()} if may_route and len(groups) > 1 else {}
        self.depth = len(self.instances) // len(groups) if self.members else 0
        self.computes_apart = computes_apart  # whether it can compute while other models with the same groups do
        self.is_timed = False  # whether `compute_ns` is kept: a route with branches needs it
        self.compute_ns = COMPUTE_NS_MAX  # the moving average of a batch's compute time
        self.has_times = batcher.may_wait or batcher.may_expire  # whether time may decide about its tickets
        self.may_have_tickets = False  # False: no ticket waits. Cheaper to read than the length of the queue
        self.is_dirty = False  # whether it is in the scheduler's list of queues to examine

    def is_idle_in(self, group: object, taken: int = 0) -> bool:
        """Whether the instance of a group has no batch except `taken` ones. Only for a model with several groups."""
        return self.free.count(self.members[group]) == self.depth - taken

    def computed(self, ns: int) -> None:
        """Add the compute time of a batch to the average."""
        self.compute_ns += (min(max(ns, 0), COMPUTE_NS_MAX) - self.compute_ns) >> 3

    @property
    def is_served(self) -> bool:
        """Whether an instance can take its tickets, now or after its current batch."""
        return len(self.away) + len(self.leaving) < len(self.instances)


class Route:
    """The stages that a batch passes before it returns: `nodes` and their `queues`, the batch's own first.

    `rows_max` and `requests_max`: the largest batch that every further stage accepts. `reads[i]`: for each input of
    stage i + 1 the output that feeds it, as (stage, output); `last_reads[i]`: for each of these whether no later stage
    reads it. `checks[i]`: the inputs of stage i + 1 whose dims are known only at run time, as (input, dims). `inner`:
    the argument of `Flow.skip_to`. `worker_data` belongs to the workers. `groups`: the group of each instance of the
    first stage, if only instances of one group pass batches to each other; else empty.

    `has_branches`: a stage does not read the one before it, so that in separate batches both could compute at the same
    time. Then `stem` is the route up to that stage, None if there is none, and `batches` is the number of batches that
    pass the stages without this route.
    """

    def __init__(self, nodes: Sequence[PlanNode], queues: Sequence[ModelQueue]) -> None:
        self.nodes = tuple(nodes)
        self.queues = tuple(queues)
        self.rows_max = min(node.max_batch_size for node in nodes[1:])
        self.requests_max = min(queue.batcher.joins_max for queue in queues[1:])
        slots = [slot for node in nodes[:-1] for _, slot, _ in node.writes]
        self.inner = [(slot, int(slot in nodes[-1].distinct_inputs)) for slot in slots]
        made = {slot: (i, j) for i, node in enumerate(nodes) for j, slot in enumerate(node.outputs) if slot >= 0}
        self.reads = [[made[slot] for slot in node.inputs] for node in nodes[1:]]
        last = {read: i for i, reads in enumerate(self.reads) for read in reads}
        self.last_reads = [[last[read] == i for read in reads] for i, reads in enumerate(self.reads)]
        self.checks = [node.checks for node in nodes[1:]]
        self.groups = {instance: group for group, instance in queues[0].members.items()}
        self.worker_data: Any = None
        self.has_branches = any(map(self.begins_branch, range(2, len(nodes))))
        self.stem: Route | None = None
        self.batches = len(nodes)
        for queue in queues if self.has_branches else ():
            queue.is_timed = True

    def __len__(self) -> int:
        return len(self.nodes)

    def begins_branch(self, i: int) -> bool:
        """Whether stage i could compute while the stage before it does."""
        return self.queues[i].computes_apart and all(stage != i - 1 for stage, _ in self.reads[i - 1])

    @property
    def is_too_long(self) -> bool:
        """Whether the route loses more time than it saves. It loses time because its branches compute one after the
        other, and saves time because the batch returns only once. Times are those of `ModelQueue.compute_ns`;
        `RETURN_NS` is measured (decision 0046).
        """
        ends_ns = [self.queues[0].compute_ns]
        total_ns = ends_ns[0]
        for queue, reads in zip(self.queues[1:], self.reads, strict=True):
            total_ns += queue.compute_ns
            ends_ns.append(max([ends_ns[stage] for stage, _ in reads]) + queue.compute_ns)
        return total_ns - max(ends_ns) > RETURN_NS * (self.batches - 1)


def find_route(plan: Plan, first: PlanNode, queues: Sequence[ModelQueue]) -> Route | None:
    """The longest route from `first` whose models all have the same `route_groups`; None if there is none. `queues[n]`
    is the queue of node n's model. The scheduler calls this once per plan and node.
    """
    route = _longest(plan, first, queues)
    if route is not None and route.has_branches:
        route.stem = _stem(route, plan)
        route.batches = 0
        passed: set[int] = set()
        for node in route.nodes:  # a batch that begins here takes a route without branches, if there is one
            if node.index not in passed:
                route.batches += 1
                alone = _longest(plan, node, queues)
                if alone is not None and alone.has_branches:
                    alone = _stem(alone, plan)
                passed.update([node.index] if alone is None else [one.index for one in alone.nodes])
    return route


def _longest(plan: Plan, first: PlanNode, queues: Sequence[ModelQueue]) -> Route | None:
    """The longest route from `first`, with or without branches."""
    nodes = [plan.nodes[n] for n in plan.runs[first.index]]
    groups = queues[first.index].route_groups
    while len(nodes) > 1:
        on_route = [queues[node.index] for node in nodes]
        if all(queue.route_groups == groups is not None for queue in on_route) and all(
            queue.batcher.joins_max for queue in on_route[1:]
        ):
            return Route(nodes, on_route)
        nodes = _private(nodes[:-1], plan)
    return None


def _stem(route: Route, plan: Plan) -> Route | None:
    """The stages of a route with branches before the first of them."""
    fork = next(i for i in range(2, len(route)) if route.begins_branch(i))
    nodes = _private(route.nodes[:fork], plan)
    return Route(nodes, route.queues[: len(nodes)]) if len(nodes) > 1 else None


def _private(nodes: Sequence[PlanNode], plan: Plan) -> list[PlanNode]:
    """The longest prefix of these nodes that may be a route."""
    nodes = [*nodes]
    while len(nodes) > 1 and not is_private(nodes, plan.consumers, plan.output_slots):
        nodes.pop()
    return nodes


class Batch:
    """Tickets that run together on one instance. `rows` is their sum; `is_back` is set when it is complete.

    A batch may have a `route`: then it holds an instance of every stage, `instances`, and `stage(i)` is the batch of
    stage i. `released` are the stages whose instance it has freed. `contexts` and `wants_outputs` are the runtime's:
    the trace contexts of its members at each stage, empty if none is traced, and whether an observer reads the outputs
    of every stage.
    """

    __slots__ = (
        "_stages",
        "contexts",
        "instance",
        "instances",
        "is_back",
        "is_recalled",
        "queue",
        "released",
        "route",
        "rows",
        "started_ns",
        "tickets",
        "wants_outputs",
    )

    def __init__(self, queue: ModelQueue, instance: Any, tickets: list[Ticket], started_ns: int) -> None:
        self.queue = queue
        self.instance = instance
        self.tickets = tickets
        self.started_ns = started_ns
        self.is_back = False
        self.route: Route | None = None
        self.contexts: Sequence[Sequence[str]] = ()
        self.wants_outputs = False
        rows = 0
        for ticket in tickets:
            rows += ticket.rows
        self.rows = rows

    def take(self, route: Route, instances: Sequence[Any]) -> None:
        """Set its route, and an instance for each stage, its own first."""
        self.route = route
        self.instances = tuple(instances)
        self.released: set[int] = set()
        self.is_recalled = False
        self._stages: dict[int, Batch] = {}

    def stage(self, i: int) -> Batch:
        """The batch of stage i, always the same object."""
        if self.route is None or not i:
            return self
        batch = self._stages.get(i)
        if batch is None:
            node, since_ns = self.route.nodes[i], self.started_ns
            tickets = [Ticket(ticket.flow, node, ticket.rows, None, since_ns) for ticket in self.tickets]
            batch = self._stages[i] = Batch(self.route.queues[i], self.instances[i], tickets, since_ns)
        return batch

    def begin_at(self, since_ns: int) -> None:
        """Set the time at which a stage of a route was queued and started, as its worker reported it."""
        self.started_ns = since_ns
        for ticket in self.tickets:
            ticket.queued_ns = since_ns

    def __repr__(self) -> str:
        return f"Batch({self.queue.key}, {len(self.tickets)} tickets, rows={self.rows})"


class TicketRefused(NamedTuple):
    """A queue refused this ticket, on arrival or later. Its flow finishes with the same error."""

    queue: ModelQueue
    ticket: Ticket
    error: FlowserveError


class Lookup(NamedTuple):
    """A step of an ensemble is ready, and its model has a response cache: the runtime looks it up, then calls
    `Scheduler.answer_step` or `run_step`.
    """

    queue: ModelQueue
    ticket: Ticket


class Withdrawn(NamedTuple):
    """A waiting ticket was removed from this queue because its ensemble's flow is over."""

    queue: ModelQueue


class Responses(NamedTuple):
    """A stream has responses for its reader."""

    stream: Any


class Grant(NamedTuple):
    """A decoupled step may send this many more responses."""

    sender: Any
    credits: int


class Stop(NamedTuple):
    """The responses of this decoupled step are no longer needed."""

    sender: Any


class Recall(NamedTuple):
    """A batch must return from its route at the next stage: a ticket waits for an instance that it holds."""

    batch: Batch


Notice = TicketRefused | Withdrawn | Responses | Grant | Stop | Recall


class Decisions(NamedTuple):
    """`batches` to start, in order; `finished` flows, in order, each exactly once; `notices`, in order; `lookups`, in
    order, after the batches have started, since a lookup may end a flow that has a step in one of them.
    """

    batches: list[Batch]
    finished: list[Flow]
    notices: list[Notice]
    lookups: list[Lookup]


# Faster than the constructor, which is a Python function.
make_decisions: Callable[[tuple[list[Batch], list[Flow], list[Notice], list[Lookup]]], Decisions] = partial(
    tuple.__new__, Decisions
)
