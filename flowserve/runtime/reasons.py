"""Why a traced step waited before its batch was taken.

Decided here: which reason counts for the time in which nothing but a queue's own rules kept a ticket there. That no
instance was free is noticed in tracing.py, the words are observe/waits.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowserve.observe.trace import Trace
from flowserve.observe.waits import CLOSED, DELAYED, FULL, LIMITER, SEQUENCE, SIZED, TURN, Spells, Wait, divided
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.batcher import DynamicBatcher
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.iterations import Iteration
from flowserve.scheduling.limited import LimitedDispatcher
from flowserve.scheduling.queues import PolicyBatcher
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.streams import StreamFlow


def ready_ns(
    begun: Mapping[Flow, int], over: Mapping[tuple[Flow, int], int], flow: Flow, n: int, queued_ns: int
) -> int:
    """When everything was there that a step of node n reads: it is queued later where steps under way are limited.
    `begun`: when iterations were, as far as it is known, `over`: when nodes of iterations were.
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
    """When what node n made was handed on: to the steps that read it, or to the caller."""
    readers = {edge.consumer for edge in trace.graph.edges if edge.producer == n}
    return min([step.ready_ns for step in trace.steps if step.node.index in readers], default=trace.ended_ns)


def is_held(batch: Batch, ticket: Ticket) -> bool:
    """Whether an answer that came back with this batch has to wait for others."""
    order = batch.queue.order
    return order is not None and any(one not in batch.tickets for one in order.ahead_of(ticket.flow.whole))


def shares_slots(flow: Flow, n: int) -> bool:
    """Whether a request's step of node n waits for steps of other requests to be over."""
    return (
        isinstance(flow, StreamFlow) and flow.nesting.is_shared and flow.slots is not None and flow.slots.limits[n] > 0
    )


def waits_in_queue(dispatcher: Dispatcher, batch: Batch, queued_ns: int, taken_ns: int, spells: Spells) -> list[Wait]:
    """Why a ticket waited in its queue between these moments."""
    queue = batch.queue
    batcher = queue.batcher
    busy = spells.after(queued_ns)
    if queue.bound is not None:
        return divided(queued_ns, taken_ns, busy, SEQUENCE)
    otherwise = LIMITER if isinstance(dispatcher, LimitedDispatcher) and queue.needs else TURN
    if not (isinstance(batcher, DynamicBatcher | PolicyBatcher) and batcher.delay_ns):
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
    """Why a batch left before its delay was over."""
    if batch.rows >= batch.tickets[0].node.max_batch_size:
        return FULL
    return CLOSED if left else SIZED
