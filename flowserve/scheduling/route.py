"""The routes of a graph: which stages a batch may pass before it returns to the scheduler.

Decides which nodes a route contains (`find_route`), given the runs of nodes that the plan allows (graph/plan.py) and
the properties of their queues. `Routes.choose` decides whether a batch takes its route: if returning could
not change the batch. Does not know batches, or how a worker runs a route. Called by the scheduler.

A worker may return a batch early, after any stage: if a member failed, if an output cannot be passed on as one tensor,
or if the batch was recalled. The passed steps are then finished, and the requests continue on the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from flowserve.graph.plan import Plan, PlanNode, is_private
from flowserve.scheduling.model_queue import ModelQueue

# The time after which a batch is recalled from its route if a ticket waits for an instance that it holds.
RECALL_NS: Final = 1_500_000


class Route:
    """The stages that a batch passes before it returns: `nodes` and their `queues`, the batch's own first.

    `rows_max` and `requests_max`: the largest batch that every further stage accepts. `reads[i]`: for each input of
    stage i + 1 the output that feeds it, as (stage, output); `last_reads[i]`: for each of these whether no later stage
    reads it. `checks[i]`: the inputs of stage i + 1 whose dims are known only at run time, as (input, dims). `inner`:
    the argument of `Frame.skip_to`. `worker_data` belongs to the workers. `groups`: the group of each instance of the
    first stage, if only instances of one group pass batches to each other; else empty.
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

    def __len__(self) -> int:
        return len(self.nodes)


def find_route(plan: Plan, first: PlanNode, queues: Sequence[ModelQueue]) -> Route | None:
    """The longest route from `first` whose models all have the same `route_groups`, without branches that could compute
    at the same time; None if there is none. `queues[n]` is the queue of node n's model. The scheduler calls this once
    per plan and node.
    """
    nodes = [plan.nodes[n] for n in plan.runs[first.index]]
    groups = queues[first.index].route_groups
    while len(nodes) > 1:
        on_route = [queues[node.index] for node in nodes]
        if (
            is_private(nodes, plan.consumers, plan.output_slots)
            and all(queue.route_groups == groups is not None for queue in on_route)
            and all(queue.batcher.joins_max for queue in on_route[1:])
            and not _has_branches(nodes, on_route)
        ):
            return Route(nodes, on_route)
        nodes.pop()
    return None


def _has_branches(nodes: Sequence[PlanNode], queues: Sequence[ModelQueue]) -> bool:
    """Whether a stage could compute at the same time as the stage before it: it reads nothing of it (decision 0046)."""
    return any(
        queue.computes_apart and not {*node.inputs} & {*before.outputs}
        for (before, node), queue in zip(pairwise(nodes), queues[1:], strict=True)
    )
