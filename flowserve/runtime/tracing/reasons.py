"""Why a traced step waited before its batch was formed.

Decides the reason for the time in which only the rules of its queue kept a ticket waiting. tracing.py finds the times
without a free instance; observe/waits.py has the texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowserve.observe.trace import Trace
from flowserve.observe.waits import CLOSED, DELAYED, FULL, LIMITER, SEQUENCE, SIZED, TURN, BusyPeriods, Wait, divided
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Flow, Ticket
from flowserve.scheduling.queue import Queue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.streaming.iterations import Iteration, StreamFlow


def ready_ns(
    begun: Mapping[Flow, int], over: Mapping[tuple[Flow, int], int], flow: Flow, n: int, queued_ns: int
) -> int:
    """When the inputs of a step of node n were complete: earlier than `queued_ns` if steps in flight are limited.
    `begun`: the known start times of iterations, `over`: the end times of nodes of iterations.
    """
    if not isinstance(flow, Iteration):
        return queued_ns
    moments = [begun[flow]] if flow in begun else []
    for edge in flow.plan.graph.edges:
        at: Iteration | None = flow
        while edge.consumer == n and at is not None:
            if (at, edge.producer) in over:
                moments.append(over[at, edge.producer])
            at = at.parent
    return min(max(moments, default=queued_ns), queued_ns)


def passed_on_ns(trace: Trace, n: int) -> int:
    """When the outputs of node n were passed on, to the steps that read them or to the caller."""
    readers = {edge.consumer for edge in trace.graph.edges if edge.producer == n}
    return min([step.ready_ns for step in trace.steps if step.node.index in readers], default=trace.ended_ns)


def is_held(batch: Batch, ticket: Ticket) -> bool:
    """Whether a response of this batch must wait for earlier requests."""
    order = batch.queue.order
    return order is not None and any(one not in batch.tickets for one in order.ahead_of(ticket.flow.whole))


def shares_slots(flow: Flow, n: int) -> bool:
    """Whether a request's step of node n waits for the end of other requests' steps."""
    return (
        isinstance(flow, StreamFlow) and flow.nesting.is_shared and flow.slots is not None and flow.slots.limits[n] > 0
    )


def waits_in_queue(
    scheduler: Scheduler, batch: Batch, queued_ns: int, taken_ns: int, periods: BusyPeriods
) -> list[Wait]:
    """Why a ticket waited in its queue between these times."""
    queue = batch.queue
    batcher = queue.batcher
    busy = periods.after(queued_ns)
    if queue.bound is not None:
        return divided(queued_ns, taken_ns, busy, SEQUENCE)
    otherwise = LIMITER if scheduler.rate_limit is not None and queue.needs else TURN
    if not (isinstance(batcher, Queue) and batcher.delay_ns):
        return divided(queued_ns, taken_ns, busy, otherwise)
    due_ns = min(ticket.queued_ns for ticket in batch.tickets) + batcher.delay_ns
    until_ns = max(min(due_ns, taken_ns), queued_ns)
    return [
        *divided(
            queued_ns, until_ns, busy, DELAYED if batch.started_ns >= due_ns else _why_complete(batch, len(batcher))
        ),
        *divided(until_ns, taken_ns, busy, otherwise),
    ]


def _why_complete(batch: Batch, left: int) -> str:
    """Why a batch was formed before its delay was over."""
    if batch.rows >= batch.tickets[0].node.max_batch_size:
        return FULL
    return CLOSED if left else SIZED
