"""What a finished batch and an answered request are written down as.

Decided here: which durations and failures belong to whom. A batch is written into its model's statistics and into the
traffic of the nodes its tickets belong to; the answer of an ensemble into the ensemble's, with the sums over its steps.
It runs for every batch on the loop, so what can be told of the batch as a whole is never asked of its tickets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flowserve.backends.base import Results
from flowserve.errors import Cancelled, FlowserveError, InstanceDied, Unavailable
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import BACKEND, CANCELED, OTHER, REJECTED, Statistics
from flowserve.observe.traffic import REQUEST, EdgeTraffic, NodeTraffic, share
from flowserve.runtime.clock import wall_clock_ms
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.dispatcher import Dispatcher
from flowserve.scheduling.relays import Relay, Way
from flowserve.scheduling.router import TOOK_NOTHING, Flow, Ticket, longer
from flowserve.scheduling.streams import StreamFlow

if TYPE_CHECKING:
    from flowserve.runtime.deployment import Deployment

# A stop of a relay: when its inputs were in place, when it was computed, the bytes of each output.
Stop = tuple[int, int, Sequence[int]]
# What most batches say of their members. Nobody writes into results.
_NONE: Final[Mapping[int, Any]] = {}
# Why a queue gave somebody up: no place or no time, the instance that had begun his sequence died, one before him in it
# left. Anything else: the request did not fit, as one that begins no sequence.
_REASONS: Final = ((InstanceDied, BACKEND), (Unavailable, REJECTED), (Cancelled, CANCELED))


def record_batch(statistics: Statistics, batch: Batch, outcome: Results | FlowserveError, now_ns: int) -> None:
    """Write one finished batch into its model's statistics, and its durations into the flows of ensembles."""
    tickets = batch.tickets
    present = who_stayed(statistics, tickets) if statistics.left else tickets
    if not isinstance(outcome, Results):
        statistics.failed(len(present), _waited(present, now_ns), BACKEND)
        statistics.told(str(outcome), wall_clock_ms())
        return
    started_ns = batch.started_ns
    input_ns = outcome.gathered_ns - started_ns
    infer_ns = outcome.computed_ns - outcome.gathered_ns
    output_ns = now_ns - outcome.computed_ns
    count = len(tickets)
    first = tickets[0]
    queued_ns = first.queued_ns
    if (
        outcome.errors
        or present is not tickets
        or (count > 1 and [ticket.queued_ns for ticket in tickets].count(queued_ns) != count)
    ):
        _record_each(statistics, batch, present, outcome, now_ns)
    else:  # they became ready in one moment, as most batches do
        statistics.ran(
            batch.rows or 1,
            count,
            now_ns - queued_ns,
            started_ns - queued_ns,
            input_ns,
            infer_ns,
            output_ns,
            now_ns,
        )
    members: Sequence[Ticket] = tickets
    if count == 1 or [ticket.node for ticket in tickets].count(first.node) == count:
        flow = first.flow
        node: NodeTraffic = flow.owner.traffic[first.node.index]
        node.ran(batch.rows, outcome.placed)
        if node.is_fixed and not any(outcome.copied):
            node.whole_rows += batch.rows
        else:
            _carry(node, tickets, batch.rows, outcome.copied, is_mixed=False)
        if not flow.plan.graph.is_ensemble:
            return
    else:
        _share_out(batch, outcome)
        members = [ticket for ticket in tickets if ticket.flow.plan.graph.is_ensemble]
    before = after = None
    for ticket in members:
        flow = ticket.flow
        if flow.took is not before or ticket.queued_ns != queued_ns or after is None:
            before, queued_ns = flow.took, ticket.queued_ns
            after = longer(before, started_ns - queued_ns, input_ns, infer_ns, output_ns)
        flow.took = after


def record_relay(relay: Relay, results: Sequence[Results], now_ns: int) -> None:
    """Write what a relay came by. Each stop waits for nothing and takes over where the one before was done."""
    last = len(results) - 1
    since_ns = relay.batch.started_ns
    for i, made in enumerate(results):
        batch = relay.stop(i, since_ns)
        since_ns = made.computed_ns
        record_batch(relay.way.queues[i].observer, batch, made, now_ns if i == last else since_ns)


def record_run_through(relay: Relay, copied: Sequence[Sequence[int]], stops: Sequence[Stop], now_ns: int) -> None:
    """As `record_relay`, for one that has run through with no member failing. `copied`: bytes of each input of the
    first stop, and of those after it as far as anything was copied there.
    """
    batch = relay.batch
    gathered_ns, since_ns, placed = stops[0]
    first = Results([], _NONE, gathered_ns, since_ns, copied[0], placed, _NONE)
    record_batch(batch.queue.observer, batch, first, since_ns)
    durations = _record_stops(
        relay.way, batch.tickets[0].flow.owner, batch.rows, len(batch.tickets), copied, stops, now_ns
    )
    before = after = None
    for ticket in batch.tickets:
        flow = ticket.flow
        if flow.took is not before or after is None:
            before = flow.took
            after = longer(before, 0, *durations)
        flow.took = after


def sizes_of(inputs: Sequence[Tensor | None]) -> list[int]:
    """The bytes of each input of one request."""
    return [0 if tensor is None else tensor.nbytes for tensor in inputs]


def _record_stops(
    way: Way,
    deployment: Deployment,
    rows: int,
    count: int,
    copied: Sequence[Sequence[int]],
    stops: Sequence[Stop],
    now_ns: int,
) -> tuple[int, int, int]:
    """Those of a relay after the first. Returns how long they took, all together: inputs, computing, outputs."""
    since_ns = stops[0][1]
    input_ns = infer_ns = 0
    last = len(stops) - 1
    for i in range(1, last + 1):
        gathered_ns, computed_ns, placed = stops[i]
        until_ns = now_ns if i == last else computed_ns
        way.queues[i].observer.ran(
            rows,
            count,
            until_ns - since_ns,
            0,
            gathered_ns - since_ns,
            computed_ns - gathered_ns,
            until_ns - computed_ns,
            until_ns,
        )
        node: NodeTraffic = deployment.traffic[way.nodes[i].index]
        node.ran(rows, placed)
        # Whoever hands on makes what weighs the same in every row.
        node.took_in(rows, None, copied[i] if i < len(copied) else (), out_of_one=True)
        input_ns += gathered_ns - since_ns
        infer_ns += computed_ns - gathered_ns
        since_ns = computed_ns
    return input_ns, infer_ns, now_ns - since_ns


def record_ensemble(flow: Flow, now_ns: int) -> None:
    """Write one answered request of an ensemble into the ensemble's statistics."""
    statistics: Statistics = flow.owner.statistics
    total_ns = now_ns - flow.arrived_ns
    if isinstance(flow, StreamFlow) and flow.has_answers and not flow.is_answered:  # its first answers are its last
        statistics.first_answered(total_ns)
    if flow.error is not None:
        statistics.failed(1, total_ns, OTHER)  # the model whose step it was has counted the reason
        return
    statistics.ran(
        _rows_of(flow),
        1,
        total_ns,
        *flow.took,
        now_ns,
    )


def record_together(flows: Sequence[Flow], now_ns: int) -> None:
    """As `record_ensemble`, of requests that were answered out of one batch and have not failed, with one answer each.
    What those who stayed together have in common is written once.
    """
    if len(flows) == 1:
        record_ensemble(flows[0], now_ns)
        return
    owner: Deployment | None = None
    took = TOOK_NOTHING
    rows = 0
    totals: list[int] = []
    for flow in flows:
        here = _rows_of(flow)
        if flow.owner is not owner or flow.took is not took or here != rows:
            if owner is not None:
                owner.statistics.ran_apart(rows, totals, *took, now_ns)
            owner, took, rows, totals = flow.owner, flow.took, here, []
        totals.append(now_ns - flow.arrived_ns)
    if owner is not None:
        owner.statistics.ran_apart(rows, totals, *took, now_ns)


def _rows_of(flow: Flow) -> int:
    """What a request counts for."""
    return len(next(iter(flow.request.inputs.values()), ())) or 1 if flow.plan.graph.max_batch_size else 1


def record_refused(statistics: Statistics, ticket: Ticket, error: FlowserveError, now_ns: int) -> None:
    """Write one request that its model's queue would not take or keep into the model's statistics."""
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), OTHER)
    statistics.failed(1, now_ns - ticket.queued_ns, reason)


def leave_batch(flow: Flow, statistics: Statistics, dispatcher: Dispatcher) -> bool:
    """Nobody waits any more for the answer of a model, with these statistics, whose queue this flow has left. Returns
    whether it is counted already; where it runs, its batch leaves it out.
    """
    queue = flow.route[0]
    if queue.order is not None and queue.order.holds(flow):
        return True
    if not dispatcher.is_tried_again(flow):
        statistics.left.add(flow)
    return False


def who_stayed(statistics: Statistics, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
    """Those of a batch that is over whose callers are still there. The others are counted already, and forgotten."""
    left = statistics.left
    gone = left.intersection([ticket.flow for ticket in tickets])
    left -= gone
    return [ticket for ticket in tickets if ticket.flow not in gone] if gone else tickets


def _record_each(
    statistics: Statistics, batch: Batch, present: Sequence[Ticket], outcome: Results, now_ns: int
) -> None:
    """Write a batch whose members failed in part, or left, or waited for different times."""
    durations = (
        outcome.gathered_ns - batch.started_ns,
        outcome.computed_ns - outcome.gathered_ns,
        now_ns - outcome.computed_ns,
    )
    statistics.executed(batch.rows or 1, *durations, now_ns)
    if outcome.errors:
        tickets = batch.tickets
        failed = [tickets[m] for m in outcome.errors if tickets[m] in present]
        statistics.failed(len(failed), _waited(failed, now_ns), BACKEND)
        statistics.told(str(next(iter(outcome.errors.values()))), wall_clock_ms())
        present = [ticket for m, ticket in enumerate(tickets) if m not in outcome.errors and ticket in present]
    if present:
        statistics.succeeded([ticket.queued_ns for ticket in present], batch.started_ns, *durations)


def _waited(tickets: Sequence[Ticket], now_ns: int) -> int:
    """From when they were queued until now, all together."""
    return sum([now_ns - ticket.queued_ns for ticket in tickets])


def _share_out(batch: Batch, results: Results) -> None:
    """Write a batch of several nodes, or of several graphs, into the traffic of each by its rows."""
    groups: dict[tuple[int, int], list[Ticket]] = {}
    for ticket in batch.tickets:
        groups.setdefault((id(ticket.flow.owner), ticket.node.index), []).append(ticket)
    for tickets in groups.values():
        rows = sum([ticket.rows for ticket in tickets])
        node: NodeTraffic = tickets[0].flow.owner.traffic[tickets[0].node.index]
        node.ran(batch.rows, share(results.placed, rows, batch.rows))
        _carry(node, tickets, rows, share(results.copied, rows, batch.rows), is_mixed=True)


def _carry(node: NodeTraffic, tickets: Sequence[Ticket], rows: int, copied: Sequence[int], *, is_mixed: bool) -> None:
    """What these `tickets`, with so many rows, took over each edge into their node."""
    for edge in node.edges:
        nbytes = rows * edge.row_bytes or sum([tensor.nbytes for tensor in _tensors(tickets, edge.input)])
        more = copied[edge.input] if copied else 0
        edge.carried(nbytes, more, out_of_one=more > 0 and not is_mixed and _came_out_of_one_batch(edge, tickets))


def _came_out_of_one_batch(edge: EdgeTraffic, tickets: Sequence[Ticket]) -> bool:
    """Members of a batch that finished were queued again in the same moment. Where they waited for another producer
    besides, only that their rows lie in one block can tell.
    """
    if edge.producer == REQUEST or any(ticket.queued_ns != tickets[0].queued_ns for ticket in tickets):
        return False
    if not edge.is_joined:
        return True
    return len({id(tensor.block) for tensor in _tensors(tickets, edge.input)}) == 1


def _tensors(tickets: Sequence[Ticket], i: int) -> list[Tensor]:
    """The model's i-th input of these tickets. Who left meanwhile has let go of it."""
    return [
        tensor
        for ticket in tickets
        if not ticket.flow.done and (tensor := ticket.flow.tensors[ticket.node.inputs[i]]) is not None
    ]
