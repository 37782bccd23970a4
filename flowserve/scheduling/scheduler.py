"""The scheduler of a server: requests in, decisions out.

Decides in which order requests are queued, which batch starts on which free instance, whether a batch takes a route,
which steps follow a batch that ran or failed, and when a request is finished: exactly once, with no ticket of it left
in a queue. Pure: it reads no clock and calls only its own parts. Its callers pass integer nanoseconds, and execute the
decisions that `schedule` returns. Driven by the engine, and by the simulators in tests, with four verbs: `submit`,
`schedule`, `complete`, `cancel`.

Its parts: `models` (their queues), `routes` (batches that pass several stages), `streams` (decoupled steps and their
credits), `calls` (executions that wait for BLS calls), `backpressure` (executions blocked in send()), `rate_limit`
(None without a rate limiter), `due` (the deadlines of requests).

Always true between two calls of `schedule` (`check` asserts (2) and (3)):
  (1) every request that was submitted is finished or cancelled, exactly once;
  (2) an instance is free, held by exactly one batch, or unavailable;
  (3) no ticket waits while an instance is free unless its batcher waits for more tickets;
  (4) tickets that became ready together were queued together, in the order of their batch, before any batcher decided.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

from flowserve.errors import (
    Cancelled,
    DeadlineExceeded,
    FlowserveError,
    InstanceDied,
    Invalid,
    MachineLost,
    ModelFailed,
    Raised,
    Unavailable,
)
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.batch import (
    Batch,
    Decisions,
    Lookup,
    Notice,
    Recall,
    TicketRefused,
    Withdrawn,
    make_decisions,
)
from flowserve.scheduling.call_graph import CallGraph
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import OVER, Facts, Frame, Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.models import Models
from flowserve.scheduling.queue import BoundBatcher, Deadlines, Order
from flowserve.scheduling.rate_limit.limiter import Limiter
from flowserve.scheduling.rate_limit.order import OVERTAKEN_MAX, RateLimit
from flowserve.scheduling.routes import Routes
from flowserve.scheduling.sequence.strategies import Iterative
from flowserve.scheduling.streaming.backpressure import BackpressureWaits
from flowserve.scheduling.streaming.credits import Streams

_by_stamp = attrgetter("record.stamp")


class StageResults(Protocol):
    """The results of one stage of a batch: `outputs[j][m]` is the model's j-th output for member m, `errors[m]` the
    error of member m if it failed.
    """

    @property
    def outputs(self) -> Sequence[Sequence[Facts | None]]: ...
    @property
    def errors(self) -> Mapping[int, FlowserveError]: ...


class Scheduler:
    """The queues of all models, and the decisions about them. The invariants are in the module docstring."""

    def __init__(self, limiter: Limiter | None = None, overtaken_max: int = OVERTAKEN_MAX) -> None:
        """`limiter`: the resources of the server, None without a rate limiter. `overtaken_max`: how often a queue that
        waits for resources is overtaken before they are reserved for it.
        """
        self.backpressure = BackpressureWaits(self._can_start)
        self.calls = CallGraph(self._can_start, self.backpressure)
        self._notices: list[Notice] = []
        self.streams = Streams(
            self._put, self._fail, self._finish, self._notify, self._drop_tensors, self.backpressure, self.calls.stuck
        )
        self.rate_limit: RateLimit | None = None
        if limiter is not None:
            self.rate_limit = RateLimit(limiter, overtaken_max, self.calls)
        self.models = Models(self.rate_limit)
        self.due: Deadlines[Frame] = Deadlines()  # a request that is not finished by then fails with DeadlineExceeded
        self.routes = Routes(self._freed, self.due)
        self._to_start: list[Batch] = []
        self._finished: list[Frame] = []
        self._lookups: list[Lookup] = []
        # Requests that are over, whose tensors may still be read: `_ended` by batches that the next `schedule` returns,
        # `_releasable` by batches that the last one returned. Those have started before the next call.
        self._ended: list[Frame] = []
        self._releasable: list[Frame] = []
        self._arrivals: list[Frame] = []
        self._changed = self.models.changed
        self._to_run: list[Ticket] = []  # steps that waited for the result of an equal step, which has none
        self.ending = ""  # why no further step is started; "" until `fail_all`
        self.in_flight = 0  # requests submitted or held and not finished
        self._held: dict[Frame, None] = {}
        self._timer_ns: int | None = None  # when time alone changes which batches can start

    # ------------------------------------------------------------------ requests

    def submit(self, frame: Frame) -> None:
        """Add a request. The next `schedule` queues its first tickets."""
        self.in_flight += 1
        self._arrivals.append(frame)

    def hold(self, frame: Frame) -> None:
        """Add a request that is not queued before `release`, or is finished by `answer` without running."""
        self.in_flight += 1
        self._held[frame] = None

    def release(self, frame: Frame) -> None:
        """Let a held request run. The next `schedule` queues its first tickets."""
        del self._held[frame]
        self._arrivals.append(frame)

    def answer(self, frame: Frame) -> None:
        """Finish a held request whose outputs are set already (response cache)."""
        self._finish(frame)

    def call(self, batch: Batch | None, frame: Frame) -> None:
        """Add a BLS request, made during the execution of `batch` if that is not None. Raises Unavailable if the call
        would deadlock, and while the server stops. The caller calls `calls.over` when the request is over.
        """
        if self.ending:
            raise Unavailable(self.ending)
        if batch is not None:
            self.calls.begin(batch, frame)
        self.submit(frame)

    def cancel(self, frame: Frame) -> None:
        """The caller of this request disconnected: remove its waiting tickets; running batches run to completion. A
        repeated call has no effect. The next `schedule` may form a batch without its tickets.
        """
        if not frame.record.done:
            self._end(frame)
        if isinstance(frame, RegionFrame):
            frame.stream.answers.clear()  # no reader takes them, and each is in a reference cycle with the request

    def fail_all(self, reason: str) -> None:
        """The server stops: fail every waiting request now, and every running request that is not finished by its
        current batch.
        """
        self.ending = reason
        self.streams.stop(reason)
        arrivals, self._arrivals = self._arrivals, []
        for frame in [*arrivals, *self._held]:
            if not frame.record.done:
                self._fail(frame, Unavailable(reason))
        for queue in self.models.queues:
            self._refuse_each(queue, queue.clear(), reason)

    def close(self, queue: ModelQueue, reason: str) -> None:
        """The model has no available instance and no restart under way: refuse all waiting and new tickets until an
        instance is given back.
        """
        self._refuse_each(queue, queue.close(reason), reason)

    # ------------------------------------------------------------------ scheduling

    def schedule(self, now_ns: int) -> Decisions | None:
        """Queue the arrived requests in order, then form all batches that can start. Returns the decisions since the
        last call; None if there are none.
        """
        if self._releasable:
            for frame in self._releasable:
                frame.tensors.clear()
            self._releasable = []
        if self.models.timed or self.due.entries:
            self._expire(now_ns)
        if self._timer_ns is not None and now_ns >= self._timer_ns:
            self.models.mark_due(now_ns)
        if self._arrivals:
            self._queue_arrivals(now_ns)
        while True:
            if self._to_run:
                self._queue_steps(now_ns)
            if self.rate_limit is not None:
                self._assign_in_turn(self.rate_limit, now_ns)
            else:
                while self._changed:
                    self._assign(self._changed.popleft(), now_ns)
            if self.streams.is_due:
                self.streams.settle(now_ns)
            elif not self._to_run:
                break
        if self.routes.running:
            for batch in self.routes.recalls(now_ns):
                self._notify(Recall(batch))
        if not (self._to_start or self._finished or self._notices or self._lookups):
            self.next_deadline()
            return None
        decisions = make_decisions((self._to_start, self._finished, self._notices, self._lookups))
        self._to_start, self._finished, self._notices, self._lookups = [], [], [], []
        self._releasable, self._ended = self._ended, []
        return decisions

    def take_finished(self) -> list[Frame]:
        """Remove and return the requests finished since the last `schedule`, for example by `answer`."""
        finished, self._finished = self._finished, []
        return finished

    def next_deadline(self) -> int | None:
        """When `schedule` must be called if no event occurs before: 0 if it has work now, None if never."""
        if self._arrivals or self._changed or self._finished or self._notices or self._releasable:
            return 0
        if self.streams.is_due or self._to_run or self._lookups:
            return 0
        soonest = self.due.soonest() if self.due.entries else None
        if self.models.timed and (at_ns := self.models.soonest()) is not None:
            soonest = at_ns if soonest is None else min(soonest, at_ns)
        if self.routes.running and (at_ns := self.routes.soonest()) is not None:
            soonest = at_ns if soonest is None else min(soonest, at_ns)
        self._timer_ns = soonest
        return soonest

    def _queue_arrivals(self, now_ns: int) -> None:
        arrivals = self._arrivals
        self._arrivals = []
        if len(arrivals) > 1:
            arrivals.sort(key=_by_stamp)
        changed = self.streams.mark_due
        for frame in arrivals:
            if frame.record.done:
                continue
            try:
                tickets = frame.begin(changed)
                for ticket in tickets:
                    self._put(ticket, now_ns)
            except FlowserveError as error:
                if not frame.record.done:
                    self._fail(frame, error)
                continue
            if not frame.open:  # every requested output is one of the inputs
                self._finish(frame)

    def _queue_steps(self, now_ns: int) -> None:
        """Queue the steps that waited for the result of an equal step and must run themselves."""
        steps, self._to_run = self._to_run, []
        for ticket in steps:
            self._queue_step(ticket, now_ns)

    def _queue_step(self, ticket: Ticket, now_ns: int) -> None:
        """Queue a step that was looked up in the response cache."""
        if ticket.frame.record.done:
            return
        try:
            if self.ending:
                raise Unavailable(self.ending)
            self._put(ticket, now_ns, is_looked_up=True)
        except FlowserveError as error:
            if not ticket.frame.record.done:
                self._fail(ticket.frame, error)

    def _assign(self, queue: ModelQueue, now_ns: int) -> None:
        """Assign the ready batches of a queue to its free instances."""
        queue.is_changed = False
        if queue.order is not None:
            self._release_in_order(queue.order, now_ns)
        if queue.bound is not None:
            self._assign_bound(queue, queue.bound, now_ns)
            return
        free = queue.free
        take = queue.batcher.take
        while free:
            tickets = take(None, now_ns)
            if tickets is None:
                break
            self._start(queue, free.popleft(), tickets, now_ns)
        queue.may_have_tickets = len(queue.batcher) > 0

    def _assign_bound(self, queue: ModelQueue, bound: BoundBatcher, now_ns: int) -> None:
        """As `_assign`, for a batcher whose tickets may be bound to one instance."""
        self._refuse_orphans(queue, bound)
        for instance in [*queue.free]:
            if bound.is_shared and not len(bound):
                break
            tickets = bound.take(instance, now_ns)
            if tickets is not None:
                queue.free.remove(instance)
                if bound.is_shared:
                    queue.mark()  # other instances may now take tickets that this one was expected to take
                self._start(queue, instance, tickets, now_ns)

    def _assign_in_turn(self, rate_limit: RateLimit, now_ns: int) -> None:
        """As `_assign` for all changed queues, in the order of the rate limiter."""
        while self._changed:
            self._wait_for_turn(rate_limit, self._changed.popleft(), now_ns)
        while (found := rate_limit.next(now_ns)) is not None:
            queue, instance, tickets = found
            queue.free.remove(instance)
            self._start(queue, instance, tickets, now_ns)
            while self._changed:
                self._wait_for_turn(rate_limit, self._changed.popleft(), now_ns)

    def _wait_for_turn(self, rate_limit: RateLimit, queue: ModelQueue, now_ns: int) -> None:
        queue.is_changed = False
        if queue.order is not None:
            self._release_in_order(queue.order, now_ns)
        if queue.bound is not None:
            self._refuse_orphans(queue, queue.bound)
        rate_limit.wait(queue)

    def _start(self, queue: ModelQueue, instance: Any, tickets: list[Ticket], now_ns: int) -> None:
        """Decide to run these tickets as a batch on an instance that was free."""
        queue.running += 1
        batch = Batch(queue, instance, tickets, now_ns)
        if queue.order is not None:
            queue.order.started(tickets)
        if (
            queue.route_groups is not None
            and tickets[0].frame.plan.runs[tickets[0].node.index]
            and self.rate_limit is None
            and not self.ending
        ):
            self.routes.choose(batch)
        self._to_start.append(batch)

    # ------------------------------------------------------------------ steps at a response cache

    def answer_step(
        self, ticket: Ticket, outputs: Sequence[Sequence[Facts | None]], error: FlowserveError | None, now_ns: int
    ) -> None:
        """Finish the step of a `Lookup`, or one that waited for an equal step, with these outputs and without running
        it: `outputs[j][0]` is the model's j-th output. If `error` is given, its request fails with it instead.
        """
        queue: ModelQueue = ticket.frame.queues[ticket.node.index]
        assert queue.flights is not None
        queue.flights.waiting.discard(ticket)
        errors = {} if error is None else {0: ticket.copy_located(error)}
        if queue.order is None:
            self._advance_each(((0, ticket),), outputs, errors, now_ns)
        elif not ticket.frame.record.done:
            queue.order.started((ticket,))
            queue.order.hold((ticket,), outputs, errors)
            queue.mark()

    def run_step(self, ticket: Ticket, key: Hashable, now_ns: int) -> None:
        """The step of a `Lookup` has no response in the cache: it runs, or waits for the result of an equal step that
        runs. Equal steps have the same `key`; None: nothing is known about it.

        A step of a BLS call never waits for another step, because that may belong to its caller. A step of a model that
        keeps the order of its responses does not wait either, because it would lose its position if the other step
        failed.
        """
        if ticket.frame.record.done:
            return
        queue: ModelQueue = ticket.frame.queues[ticket.node.index]
        assert queue.flights is not None
        if queue.flights.run(
            ticket, key, may_follow=queue.order is None and not self.calls.includes(ticket.frame.whole)
        ):
            self._queue_step(ticket, now_ns)

    # ------------------------------------------------------------------ results

    def complete(self, batch: Batch, made: Sequence[StageResults], error: FlowserveError | None, now_ns: int) -> bool:
        """A batch is complete and frees its instances. `made[i]` are the results of its i-th stage (a batch without a
        route has one); `error` is the error of the stage after those, None if it did not run. Returns whether parts of
        the batch are retried.

        If a model is pure, a failed batch is retried in halves, so that one request does not fail the others of its
        batch; it is not retried if its instance died. If the machine of the instance is lost, it runs once more, whole.
        """
        route = batch.route
        if route is not None:
            is_complete = error is None and len(made) == len(route.nodes)
            self.routes.returned(batch)
            if not is_complete or made[-1].errors:
                return self._complete_early(batch, made, error, now_ns)
            if self._finish_alike(batch.tickets, made[-1].outputs, route.nodes[-1]) == len(batch.tickets):
                return False
            for ticket in batch.tickets:
                if not ticket.frame.record.done:
                    ticket.frame.skip_to(route.nodes, route.inner)
            self._advance_each(enumerate(batch.stage(len(route) - 1).tickets), made[-1].outputs, {}, now_ns)
            return False
        if self.rate_limit is not None:
            self._set_free(batch)
        else:  # `_set_free` without a rate limiter, inlined: a call less per batch
            batch.is_back = True
            batch.queue.freed(batch.instance)
            self._freed()
        if error is not None:
            return self._fail_batch(batch, error)
        tickets, outputs, errors = batch.tickets, made[0].outputs, made[0].errors
        if errors:
            errors = {m: tickets[m].copy_located(error, batch.instance) for m, error in errors.items()}
        if batch.queue.order is not None:
            batch.queue.order.hold(tickets, outputs, errors)
            return False
        members: Iterable[tuple[int, Ticket]] = enumerate(tickets)
        if not errors and not self.ending:
            if tickets[0].node.goes_on is None:
                advanced = self._finish_alike(tickets, outputs, tickets[0].node)
            else:
                advanced = self._advance_alike(tickets, outputs, now_ns)
            if advanced == len(tickets):
                return False
            members = islice(members, advanced, None)
        self._advance_each(members, outputs, errors, now_ns)
        return False

    def _advance_alike(self, tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], now_ns: int) -> int:
        """`Frame.finish_step` for the members of a batch that all continue with the same single step, which is queued.
        Stops before the first member that differs; that member and those behind it are unchanged. Returns the number of
        requests that advanced.
        """
        first = tickets[0]
        node, queues = first.node, first.frame.queues
        assert node.goes_on is not None
        j, slot, consumer = node.goes_on
        queue: ModelQueue = queues[consumer]
        put = queue.batcher.put
        # It may refuse a ticket, or its step may be answered by the response cache.
        if queue.batcher.may_expire or queue.flights is not None or queue.closed:
            return 0
        following = first.frame.plan.nodes[consumer]
        read = node.inputs[0]
        advanced = 0
        for ticket, handle in zip(tickets, outputs[j], strict=True):
            frame = ticket.frame
            if (
                ticket.node is not node
                or frame.record.done
                or handle is None
                or type(frame) is not Frame
                or frame.queues is not queues
            ):
                break
            rows = handle.stop - handle.start
            if not 0 <= rows <= following.max_batch_size:
                break
            # `Frame.finish_step`, `Frame._ticket` and `_put`, inlined: three calls less per ticket.
            frame.tensors[slot] = handle
            frame.tensors[read] = None
            frame.readers[read] = 0
            frame.missing[node.index] = OVER
            frame.missing[consumer] = 0
            put(Ticket(frame, following, rows, (handle.shape[1:],) if following.variable else None, now_ns))
            advanced += 1
        if advanced:
            queue.may_have_tickets = True
            if queue.has_times:
                self.models.timed[queue] = None
            queue.mark()
        return advanced

    def _finish_alike(
        self, tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], last: PlanNode
    ) -> int:
        """As `_advance_alike`, for requests that end with node `last`, which computed `outputs`. The tickets are of
        that node, or of the first node of the batch's route.
        """
        if last.ends is None:
            return 0
        j, slot = last.ends
        node = tickets[0].node
        frames: list[Frame] = []
        for ticket, handle in zip(tickets, outputs[j], strict=True):
            frame = ticket.frame
            if ticket.node is not node or frame.record.done or frame.open != 1 or type(frame) is not Frame:
                break
            frame.tensors[slot] = handle  # `Frame.finish_step`, inlined: a call less per ticket
            for read in node.frees:
                frame.tensors[read] = None
            frame.open = 0
            frames.append(frame)
        if self._held or self.due.entries:
            for frame in frames:
                if not frame.record.done:  # the failure of an earlier one may have ended it
                    self._finish(frame)
        else:  # `_finish`, inlined: a call less per request
            for frame in frames:
                frame.record.done = True
            self._finished += frames
            self.in_flight -= len(frames)
        return len(frames)

    def _advance_each(
        self,
        tickets: Iterable[tuple[int, Ticket]],
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
        now_ns: int,
        passed: Collection[int] = (),
        shared: dict[Any, Any] | None = None,
    ) -> None:
        """Advance the requests of these tickets by one step; each ticket comes with its position in the batch. The next
        tickets are queued, except those of nodes that the batch `passed`. `shared` is as in `Frame.finish_step`.
        """
        if shared is None:
            shared = {}
        for m, ticket in tickets:
            frame = ticket.frame
            if frame.record.done:
                continue
            if errors and m in errors:
                self._fail_step(ticket, errors[m])
                continue
            at_fault = ticket  # the ticket whose request fails if an error is raised
            try:
                following = frame.finish_step(ticket, ticket.node, outputs, m, shared)
                if passed:
                    following = [after for after in following if after.node.index not in passed]
                if following:
                    if self.ending:
                        raise Unavailable(self.ending)
                    for at_fault in following:
                        self._put(at_fault, now_ns)
            except FlowserveError as error:
                if not at_fault.frame.record.done:
                    self._fail(at_fault.frame, error)
                if at_fault is not ticket:  # the rest may belong to other requests, if requests share in-flight slots
                    self.streams.put(following[following.index(at_fault) + 1 :], now_ns)
                continue
            if not frame.open:
                self._finish(frame.whole)

    def _complete_early(
        self, batch: Batch, made: Sequence[StageResults], error: FlowserveError | None, now_ns: int
    ) -> bool:
        """A batch returned before the end of its route, or members failed in its last stage."""
        route = batch.route
        assert route is not None
        ahead = route.queues[len(made) :]  # the stages that may have run if a machine was lost
        is_final = isinstance(error, MachineLost) and not all(queue.is_pure for queue in ahead)
        if isinstance(error, InstanceDied) or is_final:
            # No retry, and the outputs of finished stages may be lost with the process.
            assert error is not None
            return self._fail_batch(batch.stage(len(made)), error, is_final=True)
        passed = {node.index for node in route.nodes[: len(made) + (error is not None)]}
        for i, results in enumerate(made):
            stage = batch.stage(i)
            errors = {m: stage.tickets[m].copy_located(one, stage.instance) for m, one in results.errors.items()}
            self._advance_each(enumerate(stage.tickets), results.outputs, errors, now_ns, passed)
        return error is not None and self._fail_batch(batch.stage(len(made)), error)

    def _fail_batch(self, batch: Batch, error: FlowserveError, *, is_final: bool = False) -> bool:
        """A batch, or one stage of a route, failed as a whole. Returns whether it is retried; never if `is_final`."""
        tickets = [ticket for ticket in batch.tickets if not ticket.frame.record.done]
        if isinstance(error, MachineLost) and not is_final and _may_run_once_more(batch.queue, tickets):
            batch.queue.again(batch.instance, (tickets,))
            return True
        has_died = is_final or isinstance(error, (InstanceDied, MachineLost))
        if batch.queue.is_pure and len(batch.tickets) > 1 and tickets and not has_died:
            middle = (len(tickets) + 1) // 2
            batch.queue.again(batch.instance, (tickets[:middle], tickets[middle:]))
            return True
        if isinstance(error, Invalid) and len(batch.tickets) > 1:  # which of the requests is invalid is unknown
            text = f"model '{batch.queue.key.name}' refused a request of a batch of {len(batch.tickets)}"
            shared = ModelFailed(f"{text}; the server's log has the reason")
            shared.raised = Raised(str(error))  # for the log only: it is about one of them
            error = shared
        if batch.queue.order is not None:
            errors = {m: ticket.copy_located(error, batch.instance) for m, ticket in enumerate(batch.tickets)}
            batch.queue.order.hold(batch.tickets, (), errors)
            return False
        for ticket in tickets:
            if not ticket.frame.record.done:  # two tickets of a batch may belong to one request
                self._fail_step(ticket, ticket.copy_located(error, batch.instance))
        return False

    def reschedule(self, batch: Batch, tickets: Iterable[Ticket], now_ns: int) -> None:
        """Run these steps of a batch again on the same instance instead of finishing them. Frame before `complete`;
        the batch belongs to a queue of iterative sequences.
        """
        bound = batch.queue.bound
        assert isinstance(bound, Iterative)
        for ticket in tickets:
            if self.ending and not ticket.frame.record.done:
                self._fail(ticket.frame, Unavailable(self.ending))
            else:
                bound.reschedule(ticket, now_ns)

    def execute_returned(self, batch: Batch) -> None:
        """A batch of a decoupled model frees its instance; its steps may send further responses (`streams`)."""
        self.backpressure.returned(batch)
        self._set_free(batch)

    def break_off(self, batch: Batch, error: FlowserveError) -> None:
        """Processing the results of a batch raised, perhaps after some members: free its instances, and fail its
        unfinished members. Re-raises the last error raised meanwhile, after all members have failed.
        """
        self.backpressure.returned(batch)
        if not batch.is_back:
            if batch.route is not None:
                self.routes.returned(batch)
            else:
                self._set_free(batch)
        raised: Exception | None = None
        for ticket in batch.tickets:
            if not ticket.frame.record.done:
                try:
                    self._fail_step(ticket, ticket.copy_located(error, batch.instance))
                except Exception as one:  # the remaining members must fail too
                    raised = one
        if raised is not None:
            raise raised

    def _set_free(self, batch: Batch) -> None:
        batch.is_back = True
        if self.rate_limit is not None:
            self.rate_limit.ended(batch)
            batch.queue.mark()  # even if the queue is empty: the limiter resets the turn of an idle model
        batch.queue.freed(batch.instance)
        self._freed()

    def _freed(self) -> None:
        """Batches freed their instances."""
        if self.models.ending:
            self.models.remove_idle()
        if self.backpressure.waiting:  # an execution may be blocked in send() until these instances are free
            self.streams.is_due = True

    def _release_in_order(self, order: Order, now_ns: int) -> None:
        """Advance the requests of every outcome that is next in order."""
        shared: dict[Any, Any] = {}
        before: object = None
        while (outcome := order.pop()) is not None:
            m, ticket, outputs, errors = outcome
            if outputs is not before:
                before, shared = outputs, {}
            self._advance_each(((m, ticket),), outputs, errors, now_ns, shared=shared)

    def _can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Whether a batch of this queue could ever start if these batches never freed their instances."""
        if self.rate_limit is not None:
            return self.rate_limit.can_start(queue, kept_by)
        return sum(batch.queue is queue for batch in kept_by) < len(queue.instances)

    # ------------------------------------------------------------------ tickets

    def _put(self, ticket: Ticket, now_ns: int, *, is_looked_up: bool = False) -> None:
        """Queue a ticket; one of an ensemble whose model has a response cache when that has been looked up. Raises the
        error of a queue that refuses it.
        """
        queue: ModelQueue = ticket.frame.queues[ticket.node.index]
        ticket.queued_ns = now_ns
        if queue.flights is not None and not is_looked_up and ticket.frame.plan.graph.is_ensemble:
            queue.flights.waiting.append(ticket)
            self._lookups.append(Lookup(queue, ticket))
            return
        is_full = False
        try:
            if queue.closed:
                is_full = True
            else:
                queue.batcher.put(ticket)
        except Unavailable:
            is_full = True
        except Invalid as error:  # the request belongs to no sequence
            error.is_refusal = True
            ticket.located(error)
            self._refuse(queue, ticket, error)
            raise
        if is_full:  # not in the handler: errors raised there would hold these frames, and requests, by their context
            self._put_into_full(queue, ticket, now_ns)
        queue.may_have_tickets = True
        if queue.has_times:
            self.models.timed[queue] = None
        if not queue.is_changed:  # `mark`, inlined: a call less per ticket
            queue.is_changed = True
            self._changed.append(queue)

    def _put_into_full(self, queue: ModelQueue, ticket: Ticket, now_ns: int) -> None:
        """The queue is full, perhaps of tickets whose timeout passed or that free instances can take now. If it stays
        full, a part of a step waits for others of its step (`hold_back`). Raises Unavailable if it cannot, and
        Cancelled if the request ends meanwhile.
        """
        self._expire(now_ns)
        if queue.free:
            if self.rate_limit is None:
                self._assign(queue, now_ns)
            else:
                queue.mark()
                self._assign_in_turn(self.rate_limit, now_ns)
        if ticket.frame.record.done:  # another of its steps has timed out
            raise Cancelled("its request is over")
        try:
            queue.put(ticket)
        except Unavailable as error:
            if ticket.part is not None and self.streams.hold_back(ticket):
                if queue.flights is not None:
                    self._to_run += queue.flights.fail(ticket)
                return
            error.is_refusal = True
            ticket.located(error)
            self._refuse(queue, ticket, error)
            raise

    def _refuse(self, queue: ModelQueue, ticket: Ticket, error: FlowserveError) -> None:
        """A ticket that is in no queue will not run; the caller fails its request."""
        self._notify(TicketRefused(queue, ticket, error))
        if queue.flights is not None:
            self._to_run += queue.flights.fail(ticket)
        frame = ticket.frame
        self._drop_tensors(frame)
        if type(frame) is Frame:  # the frames of regions count their steps themselves
            frame.open -= 1

    def _refuse_orphans(self, queue: ModelQueue, bound: BoundBatcher) -> None:
        for ticket, error in bound.orphans():
            if not ticket.frame.record.done:
                own = ticket.located(type(error)(str(error)))
                self._refuse(queue, ticket, own)
                self._fail(ticket.frame, own)

    def _refuse_each(self, queue: ModelQueue, tickets: Sequence[Ticket], reason: str) -> None:
        """Refuse tickets that waited in a queue."""
        for ticket in tickets:
            if not ticket.frame.record.done:
                error = Unavailable(reason)
                self._refuse(queue, ticket, error)
                self._fail(ticket.frame, error)

    def _expire(self, now_ns: int) -> None:
        """Refuse the tickets whose timeout passed, and fail the requests whose deadline passed."""
        for frame in self.due.due(now_ns) if self.due.entries else ():
            if frame.record.done:  # ended by the failure of an earlier one
                continue
            if (
                isinstance(frame, RegionFrame) and frame.stream.is_over
            ):  # its last response was sent before the deadline
                self._finish(frame)
                continue
            self._fail(frame, _late(frame, now_ns))
        for queue in self.models.expired(now_ns):
            for ticket in queue.batcher.expire(now_ns):
                if not ticket.frame.record.done:
                    waited = f"it waited {(now_ns - ticket.queued_ns) // 1_000_000} ms in the queue of model"
                    text = f"Request timeout expired: {waited} '{queue.key.name}'"
                    error = ticket.located(Unavailable(text))
                    self._refuse(queue, ticket, error)
                    self._fail(ticket.frame, error)
            queue.mark()

    # ------------------------------------------------------------------ the end of a request

    def _notify(self, notice: Notice) -> None:
        self._notices.append(notice)

    def _finish(self, frame: Frame) -> None:
        self._finished.append(frame)
        if frame.open or self._held or self.due.entries:
            self._end(frame)
        else:
            frame.record.done = True
            self.in_flight -= 1

    def _fail(self, frame: Frame, error: FlowserveError) -> None:
        record = frame.record
        # Without its traceback and those of its causes: their frames hold the request and its tensors in a reference
        # cycle that only the garbage collector frees.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        record.error = error
        self._finish(frame.whole)

    def _fail_step(self, ticket: Ticket, error: FlowserveError) -> None:
        """A step failed, and its request with it. Equal steps that waited for it run by themselves."""
        queue: ModelQueue = ticket.frame.queues[ticket.node.index]
        if queue.flights is not None:
            self._to_run += queue.flights.fail(ticket)
        self._fail(ticket.frame, error)

    def _end(self, frame: Frame) -> None:
        """End a request: remove its waiting tickets from their queues."""
        frame.record.done = True
        self.in_flight -= 1
        if self._held:
            self._held.pop(frame, None)
        if self.due.entries:
            self.due.discard(frame)
        if not frame.open:
            return
        if isinstance(frame, RegionFrame):
            own = (frame, *frame.stream.live)
            self.streams.ended(frame)
            for one in dict.fromkeys(frame.queues):
                self._withdraw(one, frame, *own)
            return
        for node in frame.plan.nodes:
            if not frame.missing[node.index]:
                self._withdraw(frame.queues[node.index], frame, frame)
        frame.open = 0
        self._drop_tensors(frame)

    def _withdraw(self, queue: ModelQueue, whole: Frame, *frames: Frame) -> None:
        """Remove the tickets of these requests, which belong to the request of `whole`, from a queue."""
        count, to_run = queue.withdraw(*frames)
        self._to_run += to_run
        if whole.plan.graph.is_ensemble:  # a request of the model itself is counted by the engine
            self._notices += [Withdrawn(queue)] * count

    def _drop_tensors(self, frame: Frame) -> None:
        if self._to_start:
            self._ended.append(frame)
        else:
            frame.tensors.clear()

    def check(self) -> None:
        """Assert the invariants (2) and (3), and those of the queues. For tests and simulation, between two calls of
        `schedule`. (1) and (4) are about the past: the simulator and the property tests assert them.
        """
        for queue in self.models.queues:
            queue.batcher.check()
            assert len(queue.free) + queue.running + len(queue.away) == len(queue.instances), (
                f"(2) {queue.key}: an instance is lost or doubled"
            )
            assert not queue.is_changed, f"(3) {queue.key} was not looked at"
            assert queue.may_have_tickets or not len(queue.batcher), f"(3) tickets of {queue.key} are forgotten"
            if queue.order is not None:
                queue.order.check()
            if queue.flights is not None:
                queue.flights.check()
        assert not self._to_run, f"{len(self._to_run)} steps are in no queue"
        if self.rate_limit is not None:
            self.rate_limit.check()


def _may_run_once_more(queue: ModelQueue, tickets: Sequence[Ticket]) -> bool:
    """Whether steps whose machine was lost run again before all waiting ones: once, and if the model is pure."""
    if not queue.is_pure or not tickets or any(getattr(ticket, "was_lost", False) for ticket in tickets):
        return False
    for ticket in tickets:
        ticket.was_lost = True
    return True


def _late(frame: Frame, now_ns: int) -> DeadlineExceeded:
    steps = frame.steps_under_way()
    names = ", ".join(f"'{node.name}'" for node in steps)
    where = f"it was in step {names}" if steps else "it had not begun" if not frame.open else "it was under way"
    waited_ms = (now_ns - frame.record.arrived_ns) // 1_000_000
    error = DeadlineExceeded(f"Request timeout expired: its deadline passed after {waited_ms} ms, {where}")
    return frame.located(error, steps[0]) if steps else error
