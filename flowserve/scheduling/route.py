"""Routes: the nodes that a batch passes without returning to the scheduler in between.

Decides which nodes a route contains (`find_route`), given the runs of nodes that the plan allows (graph/plan.py) and
the properties of their queues. `Scheduler._choose_route` decides whether a batch takes its route: if returning could
not change the batch. Does not know how a worker runs a route.

A worker may return a batch early, after any stage: if a member failed, if an output cannot be passed on as one tensor,
or if the batch was recalled. The passed steps are then finished, and the flows continue on the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.batch import ModelQueue, Route

# The time after which a batch is recalled from its route if a ticket waits for an instance that it holds.
RECALL_NS: Final = 1_500_000


def find_route(plan: Plan, first: PlanNode, queues: Sequence[ModelQueue]) -> Route | None:
    """The longest route from `first` whose models all belong to one `route_group`; None if there is none. `queues[n]`
    is the queue of node n's model. The scheduler calls this once per plan and node.
    """
    nodes = [plan.nodes[n] for n in plan.runs[first.index]]
    group = queues[first.index].route_group
    while len(nodes) > 1:
        on_route = [queues[node.index] for node in nodes]
        if all(queue.route_group is group is not None for queue in on_route) and all(
            queue.batcher.joins_max for queue in on_route[1:]
        ):
            return Route(nodes, on_route)
        nodes.pop()
        while len(nodes) > 1 and not _is_private(plan, nodes):
            nodes.pop()
    return None


def _is_private(plan: Plan, nodes: Sequence[PlanNode]) -> bool:
    """Whether the outputs of all but the last of these nodes are read by these nodes only."""
    inside = {node.index for node in nodes}
    return all(
        inside.issuperset(plan.consumers[slot]) and slot not in plan.output_slots
        for node in nodes[:-1]
        for _, slot, _ in node.writes
    )
