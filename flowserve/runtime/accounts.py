"""What a finished batch and an answered request are written down as.

Decided here: which durations and failures belong to whom. A batch is written into its model's statistics and into the
traffic of the nodes its tickets belong to; the answer of an ensemble into the ensemble's, with the sums over its steps.
It runs for every batch on the loop, so what can be told of the batch as a whole is never asked of its tickets.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowserve.backends.base import Results
from flowserve.errors import FlowserveError
from flowserve.observe.statistics import BACKEND, OTHER, Statistics
from flowserve.observe.traffic import NodeTraffic
from flowserve.runtime.clock import wall_clock_ms
from flowserve.scheduling.dispatcher import Batch
from flowserve.scheduling.router import Flow, Ticket


def record_batch(statistics: Statistics, batch: Batch, outcome: Results | FlowserveError, now_ns: int) -> None:
    """Write one finished batch into its model's statistics, and its durations into the flows of ensembles."""
    tickets = batch.tickets
    node = tickets[0].node
    queued = []
    is_alike = True
    for ticket in tickets:
        queued.append(ticket.queued_ns)
        is_alike &= ticket.node is node
    if not isinstance(outcome, Results):
        statistics.failed(len(queued), len(queued) * now_ns - sum(queued), BACKEND)
        return
    started_ns = batch.started_ns
    input_ns = outcome.gathered_ns - started_ns
    infer_ns = outcome.computed_ns - outcome.gathered_ns
    output_ns = now_ns - outcome.computed_ns
    statistics.executed(max(batch.rows, 1), input_ns, infer_ns, output_ns, wall_clock_ms())
    stayed = queued[0] == queued[-1]
    if is_alike:
        _carry(tickets, batch.rows, batch.rows, outcome, stayed=stayed)
    else:
        _carry_apart(batch, outcome, stayed=stayed)
    if outcome.errors:
        failed = [queued[m] for m in outcome.errors]
        statistics.failed(len(failed), len(failed) * now_ns - sum(failed), BACKEND)
        queued = [moment for m, moment in enumerate(queued) if m not in outcome.errors]
    if queued:
        statistics.succeeded(queued, started_ns, input_ns, infer_ns, output_ns)
    if tickets[0].flow.plan.graph.is_ensemble or len(tickets) > 1:
        for ticket in tickets:
            flow = ticket.flow
            if flow.plan.graph.is_ensemble:
                flow.queue_ns += started_ns - ticket.queued_ns
                flow.compute_input_ns += input_ns
                flow.compute_infer_ns += infer_ns
                flow.compute_output_ns += output_ns


def record_ensemble(flow: Flow, now_ns: int) -> None:
    """Write one answered request of an ensemble into the ensemble's statistics."""
    statistics: Statistics = flow.owner.statistics
    total_ns = now_ns - flow.arrived_ns
    if flow.error is not None:
        statistics.failed(1, total_ns, OTHER)  # the model whose step it was has counted the reason
        return
    rows = len(next(iter(flow.request.inputs.values()))) if flow.plan.graph.max_batch_size else 1
    durations = (flow.compute_input_ns, flow.compute_infer_ns, flow.compute_output_ns)
    statistics.executed(max(rows, 1), *durations, now_ms=wall_clock_ms())
    statistics.passed(total_ns, flow.queue_ns, *durations)


def _carry(tickets: Sequence[Ticket], rows: int, own: int, results: Results, *, stayed: bool) -> None:
    """`tickets`, all steps of one node, were `own` of a batch's `rows` rows."""
    first = tickets[0]
    node: NodeTraffic = first.flow.owner.traffic[first.node.index]
    sizes = None if node.is_fixed else [_nbytes(tickets, edge.input) for edge in node.edges]
    node.ran(rows, own, sizes, results.copied, results.placed, stayed=stayed)


def _carry_apart(batch: Batch, results: Results, *, stayed: bool) -> None:
    """The same for a batch of several nodes, or of several graphs."""
    groups: dict[tuple[int, int], list[Ticket]] = {}
    for ticket in batch.tickets:
        groups.setdefault((id(ticket.flow.owner), ticket.node.index), []).append(ticket)
    for tickets in groups.values():
        _carry(tickets, batch.rows, sum([ticket.rows for ticket in tickets]), results, stayed=stayed)


def _nbytes(tickets: Sequence[Ticket], i: int) -> int:
    """What the model's i-th input weighs for these tickets. Who left meanwhile has let go of it, and counts nothing."""
    return sum(
        [
            tensor.nbytes
            for ticket in tickets
            if not ticket.flow.done and (tensor := ticket.flow.tensors[ticket.node.inputs[i]]) is not None
        ]
    )
