"""The routes of a graph: which stages a batch may pass before it returns to the scheduler.

Decides which nodes a route contains (`find_route`), given the runs of nodes that the plan allows (graph/plan.py) and
the properties of their queues. `Scheduler._choose_route` decides whether a batch takes its route: if returning could
not change the batch. Does not know batches, or how a worker runs a route. Called by the scheduler.

A worker may return a batch early, after any stage: if a member failed, if an output cannot be passed on as one tensor,
or if the batch was recalled. The passed steps are then finished, and the flows continue on the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flowserve.graph.plan import Plan, PlanNode, is_private
from flowserve.scheduling.model_queue import ModelQueue

# The time after which a batch is recalled from its route if a ticket waits for an instance that it holds.
RECALL_NS: Final = 1_500_000
# The additional cost of a batch of its own for a stage of a route: the way to the scheduler and back (decision 0046).
RETURN_NS: Final = 75_000


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
