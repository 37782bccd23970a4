"""The statistics of executed batches and finished requests.

Decides which durations and failures belong to which model, and that each request is counted once. A batch is recorded
in its model's statistics and in the traffic of the nodes its tickets belong to; a finished request of an ensemble in
the ensemble's, with the sums over its steps. A request that ends before its response (refused, cancelled, late) has its
`outcome` from then on: a batch that it is still in counts its rows only. This runs for every batch on the event loop,
so facts about the batch as a whole are not computed per ticket. Called by the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from flowserve.backends.base import Results
from flowserve.errors import Cancelled, DeadlineExceeded, FlowserveError, InstanceDied, Unavailable
from flowserve.graph.plan import Plan
from flowserve.memory.recipe import RECIPES
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import BACKEND, CANCELED, OTHER, RAN, REJECTED, Statistics
from flowserve.observe.traffic import REQUEST, EdgeTraffic, NodeTraffic, share
from flowserve.runtime.clock import wall_clock_ms
from flowserve.scheduling.batch import Batch, TicketRefused, Withdrawn
from flowserve.scheduling.frames.borders import RegionFrame, skipped
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.scheduling.frames.request import TOOK_NOTHING

log = logging.getLogger("flowserve.runtime")

# Why a queue refused or dropped a ticket: no room or no time, the instance with its sequence died, or an earlier
# request of its sequence was cancelled. Other errors: the request was invalid, such as one that belongs to no sequence.
_REASONS: Final = ((InstanceDied, BACKEND), (Unavailable, REJECTED), (Cancelled, CANCELED))


class Accounting:
    """The first observer of an engine: it is called at the same points as the others, before them. What succeeded is
    counted by `write`, at the end of a step, so that no response waits for it; failures are counted at once.
    """

    def __init__(self) -> None:
        self.records: list[Callable[[], object]] = []  # functions that count the step's events

    def computed(self, batch: Batch, made: Sequence[Results], now_ns: int, *, has_failed: bool) -> None:
        """A batch has returned with the results of these stages; the scheduler is notified afterwards. `has_failed`:
        the stage after them failed.
        """
        regathered: Sequence[int] = ()
        first = batch.tickets[0]
        if made[0].copied and first.frame.plan.missing[first.node.index]:  # it reads outputs of other nodes
            regathered = find_regathered(batch, made[0].copied)  # while the requests have the tensors
        if batch.route is None:
            record = partial(record_batch, batch.queue.statistics, batch, made[0], now_ns, (), regathered)
        else:
            record = partial(record_stages, batch, made, has_failed, now_ns, regathered)
        self.records.append(record)

    def finished(self, frames: Sequence[Frame], now_ns: int) -> None:
        """These requests are over; their callers have not been notified yet."""
        ensembles = []
        for frame in frames:
            if frame.plan.graph.is_ensemble:
                ensembles.append(frame)
            elif isinstance(frame.record.error, DeadlineExceeded):
                record_ended(frame, REJECTED, now_ns - frame.record.arrived_ns)
        if ensembles:
            self.records.append(partial(record_finished, ensembles, now_ns))

    def noticed(self, notice: TicketRefused | Withdrawn, now_ns: int) -> None:
        """A step will not run. The request of a model itself that is withdrawn is counted when it ends."""
        if isinstance(notice, Withdrawn):
            notice.queue.statistics.failed(1, 0, CANCELED)
            return
        reason = next((reason for kind, reason in _REASONS if isinstance(notice.error, kind)), OTHER)
        notice.queue.statistics.failed(1, now_ns - notice.ticket.queued_ns, reason)

    def write(self) -> None:
        """Count the step's events."""
        records, self.records = self.records, []
        for record in records:
            try:
                record()
            except Exception:  # only statistics depend on it
                log.exception("accounting for a batch failed")


def record_batch(
    statistics: Statistics,
    batch: Batch,
    outcome: Results | FlowserveError,
    now_ns: int,
    input_bytes: Sequence[int] = (),
    regathered: Sequence[int] = (),
    later_ns: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """Record one batch that ran, and its durations in the requests of ensembles. `input_bytes`: of each input, if the
    outcome does not have them. `regathered`: as `find_regathered` found it. `later_ns`: the durations (input, infer,
    output) of later stages of its route, which are added to the requests' as well.
    """
    tickets = batch.tickets
    count = len(tickets)
    first = tickets[0]
    present: Sequence[Ticket] = tickets
    if first.frame.record.outcome or (
        count > 1 and [ticket.frame.record.outcome for ticket in tickets].count(None) != count
    ):
        present = _undecided(statistics, tickets)
    if batch.queue.order is not None:  # the responses may be held for long, while their callers leave
        for ticket in present:
            if not ticket.frame.plan.graph.is_ensemble:
                ticket.frame.record.outcome = RAN
    if not isinstance(outcome, Results):
        statistics.failed(len(present), _waited(present, now_ns), BACKEND)
        statistics.note_error(str(outcome), wall_clock_ms())
        return
    started_ns = batch.started_ns
    input_ns = outcome.gathered_ns - started_ns
    infer_ns = outcome.computed_ns - outcome.gathered_ns
    output_ns = now_ns - outcome.computed_ns
    queued_ns = first.queued_ns
    if (
        outcome.errors
        or present is not tickets
        or (count > 1 and [ticket.queued_ns for ticket in tickets].count(queued_ns) != count)
    ):
        _record_each(statistics, batch, present, outcome, now_ns)
    else:  # all became ready at the same time, as in most batches
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
        frame = first.frame
        node: NodeTraffic = frame.record.owner.traffic[first.node.index]
        node.ran(batch.rows, outcome.placed, outcome.taken or input_bytes, outcome.copied, regathered)
        if not frame.plan.graph.is_ensemble:
            return
    else:
        _share_out(batch, outcome)
        members = [ticket for ticket in tickets if ticket.frame.plan.graph.is_ensemble]
    input_ns, infer_ns, output_ns = input_ns + later_ns[0], infer_ns + later_ns[1], output_ns + later_ns[2]
    before = after = None
    for ticket in members:
        frame = ticket.frame.whole
        if frame.record.took is not before or ticket.queued_ns != queued_ns or after is None:
            before, queued_ns = frame.record.took, ticket.queued_ns
            waited, gathered, inferred, read = before
            after = waited + started_ns - queued_ns, gathered + input_ns, inferred + infer_ns, read + output_ns
        frame.record.took = after


def record_stages(
    batch: Batch, made: Sequence[Results], has_failed: bool, now_ns: int, regathered: Sequence[int]
) -> None:
    """Record the stages of a batch's route that have results, in order. `has_failed`: the stage after them failed.
    `regathered`: of the first stage.
    """
    route, rows = batch.route, batch.rows
    assert route is not None
    owner, count = batch.tickets[0].frame.record.owner, len(batch.tickets)
    last = len(made) - 1
    inputs_ns = infers_ns = outputs_ns = 0  # sums over the stages that are recorded here
    since_ns = made[0].computed_ns
    for i in range(1, last + 1):
        results = made[i]
        is_over_ns = results.computed_ns if i < last or has_failed else now_ns
        statistics: Statistics = route.queues[i].statistics
        sizes = results.taken
        if not sizes:
            sizes = []
            for of, j in route.reads[i - 1]:
                sizes.append(made[of].placed[j])  # a comprehension is one more call
        if results.errors:
            stage = batch.stage(i)
            stage.begin_at(since_ns)
            record_batch(statistics, stage, results, is_over_ns, sizes, range(len(sizes)))
        else:  # as `record_batch`, for a stage without failures, which is queued and started at `since_ns`
            input_ns, infer_ns = results.gathered_ns - since_ns, results.computed_ns - results.gathered_ns
            output_ns = is_over_ns - results.computed_ns
            statistics.ran(rows or 1, count, is_over_ns - since_ns, 0, input_ns, infer_ns, output_ns, is_over_ns)
            traffic: NodeTraffic = owner.traffic[route.nodes[i].index]
            # All inputs come from this batch.
            traffic.ran(rows, results.placed, sizes, results.copied, range(len(sizes)))
            inputs_ns, infers_ns, outputs_ns = inputs_ns + input_ns, infers_ns + infer_ns, outputs_ns + output_ns
        since_ns = results.computed_ns
    first_ns = made[0].computed_ns if last or has_failed else now_ns
    later_ns = inputs_ns, infers_ns, outputs_ns
    record_batch(route.queues[0].statistics, batch, made[0], first_ns, (), regathered, later_ns)


def record_finished(frames: Sequence[Frame], now_ns: int) -> None:
    """Record requests of ensembles that are over, except those that were counted before. Requests that stayed in the
    same batches are recorded together.
    """
    owner: Any = None
    took = TOOK_NOTHING
    rows = 0
    spread: dict[tuple[Any, ...], int] = {}  # requests by the rows of their spaces
    totals: list[int] = []
    for frame in frames:
        if frame.record.outcome is not None:
            continue
        total_ns = now_ns - frame.record.arrived_ns
        statistics: Statistics = frame.record.owner.statistics
        if isinstance(frame, RegionFrame):
            if frame.regions.operations:
                key = (frame.record.owner, frame.plan, *frame.spreads)
                spread[key] = spread.get(key, 0) + 1
            is_repeated = frame.regions.splits or frame.regions.is_shared
            if is_repeated and frame.stream.has_answers and not frame.stream.is_answered:  # the first is the last
                statistics.first_answered(total_ns)
        if frame.record.error is not None:
            # The model of a failed step has counted the reason.
            statistics.failed(1, total_ns, REJECTED if isinstance(frame.record.error, DeadlineExceeded) else OTHER)
            continue
        # The number of inferences that the request counts as.
        here = len(next(iter(frame.request.inputs.values()), ())) or 1 if frame.plan.graph.max_batch_size else 1
        if frame.record.owner is not owner or frame.record.took is not took or here != rows:
            if totals:
                _record_totals(owner, rows, totals, took, now_ns)
            owner, took, rows, totals = frame.record.owner, frame.record.took, here, []
        totals.append(total_ns)
    if totals:
        _record_totals(owner, rows, totals, took, now_ns)
    for (deployment, plan, *spreads), requests in spread.items():
        _record_spaces(deployment, plan, spreads, requests)


def _record_spaces(owner: Any, plan: Plan, spreads: Sequence[Any], requests: int) -> None:
    """Record the rows of the spaces and the skipped steps of `requests` equal requests."""
    for n in skipped(plan, spreads):
        owner.traffic[n].skipped += requests
    for traffic, spread in zip(owner.space_traffic, spreads[1:], strict=True):
        if spread is not None:
            traffic.began(spread.rows, spread.parent_rows, requests)


def _record_totals(owner: Any, rows: int, totals: Sequence[int], took: Sequence[int], now_ns: int) -> None:
    if len(totals) == 1:
        owner.statistics.ran(rows, 1, totals[0], *took, now_ns)
    else:
        owner.statistics.ran_apart(rows, totals, *took, now_ns)


def record_ended(frame: Frame, reason: str, total_ns: int) -> None:
    """Record a request that ended before its response, unless it has been counted: as refused, late or cancelled."""
    if frame.record.outcome is None:
        frame.record.outcome = reason
        frame.record.owner.statistics.failed(1, total_ns, reason)


def _undecided(statistics: Statistics, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
    """The tickets of a batch without those whose request has been counted, if it is a request of this model itself."""
    left = [
        one
        for one in tickets
        if one.frame.record.outcome is not None and one.frame.record.owner.statistics is statistics
    ]
    return [ticket for ticket in tickets if ticket not in left] if left else tickets


def _record_each(
    statistics: Statistics, batch: Batch, present: Sequence[Ticket], outcome: Results, now_ns: int
) -> None:
    """Record a batch of which some members failed or left, or whose members waited for different times."""
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
        statistics.note_error(str(next(iter(outcome.errors.values()))), wall_clock_ms())
        present = [ticket for m, ticket in enumerate(tickets) if m not in outcome.errors and ticket in present]
    if present:
        statistics.succeeded([ticket.queued_ns for ticket in present], batch.started_ns, *durations)


def _waited(tickets: Sequence[Ticket], now_ns: int) -> int:
    """The sum of the times since they were queued."""
    return sum([now_ns - ticket.queued_ns for ticket in tickets])


def _share_out(batch: Batch, results: Results) -> None:
    """Record a batch of several nodes, or of several graphs, in the traffic of each by its rows."""
    groups: dict[tuple[int, int], list[Ticket]] = {}
    for ticket in batch.tickets:
        groups.setdefault((id(ticket.frame.record.owner), ticket.node.index), []).append(ticket)
    for tickets in groups.values():
        rows = sum([ticket.rows for ticket in tickets])
        node: NodeTraffic = tickets[0].frame.record.owner.traffic[tickets[0].node.index]
        node.ran(batch.rows, share(results.placed, rows, batch.rows))
        taken, copied = share(results.taken, rows, batch.rows), share(results.copied, rows, batch.rows)
        for edge in node.edges:
            nbytes = rows * edge.row_bytes or taken[edge.input]  # the requests no longer have the tensors
            edge.carried(nbytes, copied[edge.input] if copied else 0, out_of_one=False)


def find_regathered(batch: Batch, copied: Sequence[int]) -> Sequence[int]:
    """The inputs that came from one batch of another node, but were copied. Called before the inputs of the batch are
    released. `copied`: the copied bytes of each input.
    """
    tickets = batch.tickets
    node: NodeTraffic = tickets[0].frame.record.owner.traffic[tickets[0].node.index]
    if not node.is_fed:
        return ()
    edges = [edge for edge in node.edges if copied[edge.input] and edge.producer != REQUEST]
    return [edge.input for edge in edges if _came_out_of_one_batch(edge, tickets)]


def _came_out_of_one_batch(edge: EdgeTraffic, tickets: Sequence[Ticket]) -> bool:
    """Members of a completed batch are queued again at the same time. If they also waited for another producer, the
    check is whether their rows are in one block.
    """
    if any(ticket.queued_ns != tickets[0].queued_ns for ticket in tickets):
        return False
    if not edge.is_joined:
        return True
    found = _tensors(tickets, edge.input)
    return RECIPES.isdisjoint(map(type, found)) and len({id(tensor.block) for tensor in found}) == 1


def _tensors(tickets: Sequence[Ticket], i: int) -> list[Tensor]:
    """The model's i-th input of these tickets. A request whose caller left has none."""
    return [
        tensor
        for ticket in tickets
        if not ticket.frame.record.done and (tensor := ticket.tensors[ticket.node.inputs[i]]) is not None
    ]
