"""All machines of a server, composed: requests in, batches and answers out.

Decided here: in which order work that became ready is queued, which free instance takes a batch, who is told when a
flow is over. It is the only class of this room that the runtime talks to, and it is touched from one thread only. Its
outputs are the callables it is given: `run` starts a batch, `answered` is told of every flow that is over; both may
call straight back in. `refused` is told, before the flow is over, of each ticket that its queue would not take or keep.

Always true between two calls of `pump` (see `check`):
  (1) every flow that was submitted is answered exactly once;
  (2) an instance is either free, or runs exactly one batch, or was taken away;
  (3) no ticket waits beside a free instance unless its batcher waits for company;
  (4) what finished together was queued together, in the order it had in its batch, before any batcher decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from flowserve.errors import Cancelled, FlowserveError, InstanceDied, Invalid, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.scheduling.affinity import Affine
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.calls import Called, Calls
from flowserve.scheduling.closed import Closed
from flowserve.scheduling.credits import Streams
from flowserve.scheduling.deadlines import Deadlines
from flowserve.scheduling.iterative import Iterative
from flowserve.scheduling.lineage import located, steps_under_way, traced
from flowserve.scheduling.ordering import Order
from flowserve.scheduling.pauses import Pauses
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.sequences import Sequences
from flowserve.scheduling.streams import StreamFlow

_by_stamp = attrgetter("stamp")


class Late(Unavailable):
    """The deadline of a request passed."""


def tell_nobody(*_: object) -> None:
    """Where nobody counts who was refused, or reads answers as they come."""


class Dispatcher:
    """Composes router, batchers and instances. See the module's text for what is always true."""

    def __init__(
        self,
        run: Callable[[Batch], None],
        answered: Callable[[Flow], None],
        refused: Callable[[ModelQueue, Ticket, int], None] = tell_nobody,
        told: Callable[[StreamFlow], None] = tell_nobody,
    ) -> None:
        """`told` is called with a stream that has answers to be taken."""
        self._run = run
        self._answered = answered
        self._refused = refused
        self.pauses = Pauses(self._can_start)
        self.calls = Calls(self._can_start, self.pauses)
        self.streams = Streams(self._put, self._fail, self._over, told, self.pauses, self.calls.stuck)
        self._queues: list[ModelQueue] = []
        self._arrivals: list[Flow] = []
        self._dirty: deque[ModelQueue] = deque()
        self._delayed: list[ModelQueue] = []  # queues whose batcher may wait for company
        self._expiring: list[ModelQueue] = []  # queues in which patience may end
        self._halves: deque[tuple[ModelQueue, list[Ticket]]] = deque()
        self._ending = ""  # why nothing new is started any more, once that is so
        self.in_flight = 0  # flows submitted or held and not yet answered
        self._held: dict[Flow, None] = {}
        self._due: Deadlines[Flow] | None = None  # of the flows that have a deadline; None until one has

    def tell(self, run: Callable[[Batch], None], answered: Callable[[Flow], None]) -> None:
        """From now on batches are started, and flows that are over are told, here."""
        self._run = run
        self._answered = answered

    def add(self, queue: ModelQueue) -> None:
        """Serve a model: flows may have this queue on their route from now on."""
        self._queues.append(queue)
        if queue.batcher.may_wait:
            self._delayed.append(queue)
        if queue.batcher.may_expire:
            self._expiring.append(queue)

    def remove(self, queue: ModelQueue) -> None:
        """Forget a model whose queue is on the route of no flow any more."""
        self._queues.remove(queue)
        if queue in self._delayed:
            self._delayed.remove(queue)
        if queue in self._expiring:
            self._expiring.remove(queue)

    def submit(self, flow: Flow) -> None:
        """Take a request. Nothing happens to it before the next `pump`."""
        self.in_flight += 1
        self._arrivals.append(flow)

    def hold(self, flow: Flow) -> None:
        """Take a request that is not run before `release`, or is answered without by `answer`."""
        self.in_flight += 1
        self._held[flow] = None

    def release(self, flow: Flow) -> None:
        """Nothing keeps it from running any more. Nothing happens to it before the next `pump`."""
        del self._held[flow]
        self._arrivals.append(flow)

    def answer(self, flow: Flow) -> None:
        """A held flow has its outputs from elsewhere."""
        self._over(flow)

    def due_by(self, flow: Flow, at_ns: int) -> None:
        """Whatever becomes of it, the flow is over at that moment."""
        if self._due is None:
            self._due = Deadlines()
        self._due.add(flow, at_ns)

    def call(self, batch: Batch | None, flow: Called) -> None:
        """Take a request that a model makes, in the execution of `batch` if in any. Raises Unavailable where that would
        wait for ever, and where nothing new is started any more. `calls` wants to hear when it is over.
        """
        if self._ending:
            raise Unavailable(self._ending)
        if batch is not None:
            self.calls.begin(batch, flow)
        self.submit(flow)

    def cancel(self, flow: Flow) -> Sequence[ModelQueue]:
        """Nobody waits for this flow any more: what is queued of it leaves every queue, what runs runs out. Harmless
        afterwards. Returns the queue of each ticket that was withdrawn; the next `pump` may find a batch without them.
        """
        return () if flow.done else self._end(flow)

    def batch_done(
        self,
        batch: Batch,
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
        now_ns: int,
    ) -> None:
        """A batch ran. `outputs[j][m]` is the model's j-th output for the m-th ticket; `errors[m]` why ticket m
        failed.
        """
        self._set_free(batch)
        if errors:
            errors = {m: traced(error, batch.tickets[m], batch.instance) for m, error in errors.items()}
        if batch.queue.order is None:
            self._deliver(enumerate(batch.tickets), outputs, errors, now_ns)
        else:
            batch.queue.order.hold(batch.tickets, outputs, errors)

    def _deliver(
        self,
        tickets: Iterable[tuple[int, Ticket]],
        outputs: Sequence[Sequence[Facts | None]],
        errors: Mapping[int, FlowserveError],
        now_ns: int,
    ) -> None:
        """Take the flows of these tickets, each with its number in its batch, one step on."""
        for m, ticket in tickets:
            flow = ticket.flow
            if flow.done:
                continue
            if errors and m in errors:
                self._fail(flow, errors[m])
                continue
            try:
                following = flow.finish_step(ticket.node, outputs, m)
                if following:
                    if self._ending:
                        raise Unavailable(self._ending)
                    for one in following:
                        self._put(one, now_ns)
            except FlowserveError as error:
                if not flow.done:
                    self._fail(flow, error)
                continue
            if not flow.open:
                self._end(flow)
                self._answered(flow)

    def reschedule(self, batch: Batch, tickets: Iterable[Ticket], now_ns: int) -> None:
        """These steps of a batch that is about to be back are to run again, in the same instance, instead of going on.
        Theirs is a queue of iterative sequences.
        """
        bound = batch.queue.bound
        assert isinstance(bound, Iterative)
        for ticket in tickets:
            if self._ending and not ticket.flow.done:
                self._fail(ticket.flow, Unavailable(self._ending))
            else:
                bound.reschedule(ticket, now_ns)

    def execute_returned(self, batch: Batch) -> None:
        """A batch of a decoupled model keeps its instance no longer; its steps may go on answering (`streams`)."""
        self.pauses.returned(batch)
        self._set_free(batch)

    def take_away(self, queue: ModelQueue, instance: Any) -> None:
        """An instance that runs nothing is not there any more."""
        queue.free.remove(instance)
        queue.away.append(instance)
        if queue.bound is not None:
            queue.bound.lost(instance)
            self._mark(queue)

    def give_back(self, queue: ModelQueue, instance: Any) -> None:
        """It is there again, and takes what waits; a queue that was closed is open."""
        queue.away.remove(instance)
        queue.free.append(instance)
        if queue.closed is not None:
            queue.batcher, queue.closed = queue.closed, None
        if queue.bound is not None:
            queue.bound.found(instance)
        self._mark(queue)

    def close(self, queue: ModelQueue, reason: str) -> None:
        """None of its instances is there or will be soon: refuse what waits and what comes, until one is given back."""
        if queue.closed is None:
            halves, self._halves = self._halves, deque()
            for half in halves:
                if half[0] is queue:
                    self._fail_each(half[1], reason)
                else:
                    self._halves.append(half)
            self._fail_waiting(queue, reason)
            queue.closed = queue.batcher
        queue.batcher = Closed(reason)

    def batch_failed(self, batch: Batch, error: FlowserveError) -> bool:
        """A batch raised. Returns whether it is tried again.

        Where the model is pure, halves of the batch are tried again, so that one request does not fail its neighbours;
        not where its instance died of it.
        """
        self._set_free(batch)
        tickets = [ticket for ticket in batch.tickets if not ticket.flow.done]
        if batch.queue.is_pure and len(batch.tickets) > 1 and tickets and not isinstance(error, InstanceDied):
            middle = (len(tickets) + 1) // 2
            if batch.queue.bound is not None:
                batch.queue.bound.again(batch.instance, (tickets[:middle], tickets[middle:]))
                return True
            for half in (tickets[:middle], tickets[middle:]):
                if half:
                    self._halves.append((batch.queue, half))
            return True
        if batch.queue.order is not None:
            errors = {m: traced(error, ticket, batch.instance) for m, ticket in enumerate(batch.tickets)}
            batch.queue.order.hold(batch.tickets, (), errors)
            return False
        for ticket in tickets:
            if not ticket.flow.done:  # two tickets of a batch may belong to one flow
                self._fail(ticket.flow, traced(error, ticket, batch.instance))
        return False

    def pump(self, now_ns: int) -> None:
        """Queue what arrived, in order, then start everything that can start."""
        if self._expiring or self._due is not None:
            self._expire(now_ns)
        if self._arrivals:
            self._queue_arrivals(now_ns)
        while True:
            while self._dirty or self._halves:
                if self._halves:
                    self._start_halves(now_ns)
                if self._dirty:
                    self._start(self._dirty.popleft(), now_ns)
                elif self._halves and not self._can_start_half():
                    break  # their instances are busy; the next `batch_done` comes back here
            if not self.streams.is_due:
                return
            self.streams.settle(now_ns)

    def next_deadline(self) -> int | None:
        """When `pump` should be called even if nothing happens, or None."""
        soonest = self._next_expiry() if self._expiring or self._due is not None else None
        for queue in self._delayed:
            if queue.free:
                deadline = queue.batcher.deadline()
                if deadline is not None and (soonest is None or deadline < soonest):
                    soonest = deadline
        return soonest

    def wake(self, now_ns: int) -> None:
        """Look again at queues whose delay is over. Early calls do nothing."""
        for queue in self._delayed:
            deadline = queue.batcher.deadline()
            if deadline is not None and deadline <= now_ns:
                self._mark(queue)

    def waiting(self) -> dict[ModelKey, int]:
        """How many tickets wait for each model, in all of its queues: a model that was replaced may still have its
        former one.
        """
        waiting: dict[ModelKey, int] = {}
        for queue in self._queues:
            waiting[queue.key] = waiting.get(queue.key, 0) + len(queue.batcher)
        return waiting

    @property
    def open_sequences(self) -> int:
        """How many sequences have begun, of all models, and may go on."""
        return sum(queue.bound.live for queue in self._queues if isinstance(queue.bound, Sequences))

    def fail_all(self, reason: str) -> None:
        """The server is going away: answer every flow that waits, and those that run when their batch is done and they
        would have to go on.
        """
        self._ending = reason
        self.streams.stop(reason)
        arrivals, self._arrivals = self._arrivals, []
        for flow in [*arrivals, *self._held]:
            if not flow.done:
                self._fail(flow, Unavailable(reason))
        halves, self._halves = self._halves, deque()
        for _, tickets in halves:
            self._fail_each(tickets, reason)
        for queue in self._queues:
            self._fail_waiting(queue, reason)

    def _fail_waiting(self, queue: ModelQueue, reason: str) -> None:
        while taken := queue.batcher.take(1 << 62):
            self._fail_each(taken, reason)

    def _fail_each(self, tickets: Sequence[Ticket], reason: str) -> None:
        for ticket in tickets:
            if not ticket.flow.done:
                self._fail(ticket.flow, Unavailable(reason))

    def _queue_arrivals(self, now_ns: int) -> None:
        arrivals = self._arrivals
        self._arrivals = []
        if len(arrivals) > 1:
            arrivals.sort(key=_by_stamp)
        note = self.streams.note
        for flow in arrivals:
            if flow.done:
                continue
            try:
                tickets = flow.begin(note)
                for ticket in tickets:
                    self._put(ticket, now_ns)
            except FlowserveError as error:
                if not flow.done:
                    self._fail(flow, error)
                continue
            if not flow.open:  # every output asked for is one of the inputs
                self._over(flow)

    def _put(self, ticket: Ticket, now_ns: int) -> None:
        queue: ModelQueue = ticket.flow.route[ticket.node.index]
        ticket.queued_ns = now_ns
        is_full = False
        try:
            queue.batcher.put(ticket)
        except Unavailable:
            is_full = True
        except Invalid as error:  # it belongs to no sequence
            located(error, ticket.flow, ticket.node)
            self._give_up(queue, ticket, now_ns)
            raise
        if is_full:  # not in the handler: errors raised in there would hold these frames, and flows, by their context
            self._put_after_all(queue, ticket, now_ns)
        if not queue.is_dirty:
            queue.is_dirty = True
            self._dirty.append(queue)

    def _put_after_all(self, queue: ModelQueue, ticket: Ticket, now_ns: int) -> None:
        """The queue is full, perhaps of those whose time is over, or whom free instances take this very moment. Raises
        Unavailable where it stays full, and Cancelled where the flow is over meanwhile.
        """
        self._expire(now_ns)
        if queue.free:
            self._start(queue, now_ns)
        if ticket.flow.done:  # what ran inline failed it, or another of its steps has expired
            raise Cancelled("its request is over")
        try:
            queue.batcher.put(ticket)
        except Unavailable as error:
            located(error, ticket.flow, ticket.node)
            self._give_up(queue, ticket, now_ns)
            raise

    def _give_up(self, queue: ModelQueue, ticket: Ticket, now_ns: int) -> None:
        """A ticket that is in no queue will not run; its flow is about to fail."""
        self._refused(queue, ticket, now_ns)
        ticket.flow.open -= 1
        ticket.flow.tensors = []

    def _next_expiry(self) -> int | None:
        moments = [at for queue in self._expiring if (at := queue.batcher.expiry()) is not None]
        if self._due is not None and (at := self._due.soonest()) is not None:
            moments.append(at)
        return min(moments, default=None)

    def _expire(self, now_ns: int) -> None:
        """Refuse whoever has waited too long."""
        if self._due is not None:
            for flow in self._due.due(now_ns):
                self._fail(flow, _late(flow, now_ns))
        for queue in self._expiring:
            at = queue.batcher.expiry()
            if at is None or at > now_ns:
                continue
            for ticket in queue.batcher.expire(now_ns):
                if not ticket.flow.done:
                    waited = f"it waited {(now_ns - ticket.queued_ns) // 1_000_000} ms in the queue of model"
                    text = f"Request timeout expired: {waited} '{queue.key.name}'"
                    error = located(Unavailable(text), ticket.flow, ticket.node)
                    self._give_up(queue, ticket, now_ns)
                    self._fail(ticket.flow, error)
            self._mark(queue)

    def _start(self, queue: ModelQueue, now_ns: int) -> None:
        queue.is_dirty = False
        order = queue.order
        if order is not None:
            self._release(order, now_ns)
        if queue.bound is not None:
            self._start_bound(queue, queue.bound, now_ns)
            return
        free = queue.free
        take = queue.batcher.take
        while free:
            tickets = take(now_ns)
            if tickets is None:
                return
            if order is not None:
                order.started(tickets)
            queue.running += 1
            self._run(Batch(queue, free.popleft(), tickets, now_ns))

    def _start_bound(self, queue: ModelQueue, bound: Sequences | Affine, now_ns: int) -> None:
        """As `_start`, where each instance has tickets of its own."""
        self._tell_orphans(queue, bound, now_ns)
        for instance in [*queue.free]:
            tickets = bound.take_for(instance, now_ns) if instance in queue.free else None
            if tickets is not None:
                queue.free.remove(instance)
                queue.running += 1
                if isinstance(bound, Affine):
                    self._mark(queue)  # others may have been waiting for this instance to take it
                self._run(Batch(queue, instance, tickets, now_ns))

    def _tell_orphans(self, queue: ModelQueue, bound: Sequences | Affine, now_ns: int) -> None:
        for ticket, error in bound.orphans():
            if not ticket.flow.done:
                own = located(type(error)(str(error)), ticket.flow, ticket.node)
                self._give_up(queue, ticket, now_ns)
                self._fail(ticket.flow, own)

    def _release(self, order: Order, now_ns: int) -> None:
        """Hand on every answer whose turn it is."""
        while (outcome := order.pop()) is not None:
            m, ticket, outputs, errors = outcome
            self._deliver(((m, ticket),), outputs, errors, now_ns)

    def _can_start_half(self) -> bool:
        return any(queue.free for queue, _ in self._halves)

    def _start_halves(self, now_ns: int) -> None:
        for _ in range(len(self._halves)):
            queue, tickets = self._halves.popleft()
            tickets = [ticket for ticket in tickets if not ticket.flow.done]
            if not tickets:
                continue
            if not queue.free:
                self._halves.append((queue, tickets))
                continue
            queue.running += 1
            self._run(Batch(queue, queue.free.popleft(), tickets, now_ns))

    def _set_free(self, batch: Batch) -> None:
        queue = batch.queue
        queue.running -= 1
        queue.free.append(batch.instance)
        if self.pauses.waiting:  # whoever stands in a send may have waited for this one only
            self.streams.is_due = True
        if queue.batcher or queue.order is not None or queue.bound is not None:
            self._mark(queue)

    def _mark(self, queue: ModelQueue) -> None:
        if not queue.is_dirty:
            queue.is_dirty = True
            self._dirty.append(queue)

    def _over(self, flow: Flow) -> None:
        self._end(flow)
        self._answered(flow)

    def _can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Whether a batch of this queue could ever be started if these kept their instances for ever."""
        return sum(batch.queue is queue for batch in kept_by) < len(queue.instances)

    def _fail(self, flow: Flow, error: FlowserveError) -> None:
        flow = flow.whole
        # Without its traceback: its frames hold the flow and its tensors, in a circle that only the collector opens.
        flow.error = error.with_traceback(None)
        self._end(flow)
        self._answered(flow)

    def _end(self, flow: Flow) -> Sequence[ModelQueue]:
        """The flow is over; whatever of it still waits leaves its queue now. Returns the queue of each such ticket."""
        flow.done = True
        self.in_flight -= 1
        if self._held:
            self._held.pop(flow, None)
        if self._due is not None:
            self._due.discard(flow)
        return self._withdraw(flow) if flow.open else ()

    def _withdraw(self, flow: Flow) -> list[ModelQueue]:
        left: list[ModelQueue] = []
        if isinstance(flow, StreamFlow):
            self.streams.ended(flow)
            for one in dict.fromkeys(flow.route):
                left += [one] * one.batcher.withdraw(flow)
                self._mark(one)
            return left
        for node in flow.plan.nodes:
            if not flow.missing[node.index]:
                queue: ModelQueue = flow.route[node.index]
                left += [queue] * queue.batcher.withdraw(flow)
                self._mark(queue)  # those behind it may make a batch now, and answers that waited for its own may go
        flow.open = 0
        flow.tensors = []
        return left

    def check(self) -> None:
        """Assert the numbered promises. For tests and simulation, between two calls of `pump`."""
        for queue in self._queues:
            queue.batcher.check()
            assert len(queue.free) + queue.running + len(queue.away) == len(queue.instances), (
                f"(2) {queue.key}: an instance is lost or doubled"
            )
            assert not queue.is_dirty, f"(3) {queue.key} was left unlooked at"
            if queue.order is not None:
                queue.order.check()
        self._check_halves()

    def _check_halves(self) -> None:
        for queue, tickets in self._halves:
            assert not queue.free, (
                f"(3) {queue.key}: {len(tickets)} tickets of a failed batch wait beside a free instance"
            )


def _late(flow: Flow, now_ns: int) -> Late:
    steps = steps_under_way(flow)
    names = ", ".join(f"'{node.name}'" for node in steps)
    where = f"it was in step {names}" if steps else "it had not begun" if not flow.open else "it was under way"
    waited_ms = (now_ns - flow.arrived_ns) // 1_000_000
    error = Late(f"Request timeout expired: its deadline passed after {waited_ms} ms, {where}")
    return located(error, flow, steps[0]) if steps else error
