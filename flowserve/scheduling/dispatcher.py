"""All machines of a server, composed: requests in, batches and answers out.

Decided here: which free instance takes a batch, what comes of a batch that ran or failed, in which order work that
became ready by it is queued. What is in flight, and how it ends, is flows.py's. Whatever happens to requests and
batches the runtime tells it, or one of its parts (`streams`, `calls`), from one thread only. Its outputs are the
callables it is given: `run` starts a batch, `answered` is told of every flow that is over; both may call straight back
in. `refused` is told, before the flow is over, of each ticket that its queue would not take or keep, and why.
`withdrawn` is told, when an ensemble's flow is over, of each queue that a ticket of it leaves.

Always true between two calls of `pump` (see `check`):
  (1) every flow that was submitted is answered exactly once;
  (2) an instance is either free, or runs exactly one batch, or was taken away;
  (3) no ticket waits beside a free instance unless its batcher waits for company;
  (4) what finished together was queued together, in the order it had in its batch, before any batcher decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from flowserve.errors import FlowserveError, InstanceDied, Unavailable
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.affinity import Affine
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.batcher import Fifo
from flowserve.scheduling.calls import Called
from flowserve.scheduling.closed import Closed
from flowserve.scheduling.flows import Flows, tell_nobody
from flowserve.scheduling.iterative import Iterative
from flowserve.scheduling.lineage import located, traced
from flowserve.scheduling.ordering import Order
from flowserve.scheduling.router import Facts, Flow, Ticket, end, go_on
from flowserve.scheduling.sequences import Sequences
from flowserve.scheduling.streams import StreamFlow


class Dispatcher(Flows):
    """Composes router, batchers and instances. See the module's text for what is always true."""

    def __init__(
        self,
        run: Callable[[Batch], None],
        answered: Callable[[Flow], None],
        refused: Callable[[ModelQueue, Ticket, FlowserveError], None] = tell_nobody,
        told: Callable[[StreamFlow], None] = tell_nobody,
        withdrawn: Callable[[ModelQueue], None] = tell_nobody,
    ) -> None:
        """`told` is called with a stream that has answers to be taken."""
        super().__init__(answered, refused, told, withdrawn)
        self._run = run

    def tell(self, run: Callable[[Batch], None], answered: Callable[[Flow], None]) -> None:
        """From now on batches are started, and flows that are over are told, here."""
        self._run = run
        self._answered = answered

    def call(self, batch: Batch | None, flow: Called) -> None:
        """Take a request that a model makes, in the execution of `batch` if in any. Raises Unavailable where that would
        wait for ever, and where nothing new is started any more. `calls` wants to hear when it is over.
        """
        if self._ending:
            raise Unavailable(self._ending)
        if batch is not None:
            self.calls.begin(batch, flow)
        self.submit(flow)

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
            members: Iterable[tuple[int, Ticket]] = enumerate(batch.tickets)
            count = len(batch.tickets)
            if count > 1 and not errors and not self._ending:  # who is alone has nothing in common with anybody
                gone_on = self._go_on(batch.tickets, outputs, now_ns)
                if gone_on == count:
                    return
                members = islice(members, gone_on, None)
            self._deliver(members, outputs, errors, now_ns)
        else:
            batch.queue.order.hold(batch.tickets, outputs, errors)

    def _go_on(self, tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], now_ns: int) -> int:
        """Take as many of these, from the first, one step on together as are as usual. Returns how many."""
        first = tickets[0]
        then = first.node.then
        if then is None:
            return self._end_all(tickets, outputs, first.node)
        queue: ModelQueue = first.flow.route[then[2]]
        batcher = queue.batcher
        if not isinstance(batcher, Fifo):  # others may refuse one
            return 0
        ready = go_on(tickets, outputs, now_ns)
        if ready:
            batcher.put_all(ready)
            self._mark(queue)
        return len(ready)

    def _end_all(self, tickets: Sequence[Ticket], outputs: Sequence[Sequence[Facts | None]], last: PlanNode) -> int:
        """The same, of those whose last step was `last`."""
        flows = end(tickets, outputs, last)
        for flow in flows:
            if not flow.done:  # one before it may have withdrawn it
                self._over(flow)
        return len(flows)

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
            one = ticket
            try:
                following = flow.finish_step(ticket.node, outputs, m)
                if following:
                    if self._ending:
                        raise Unavailable(self._ending)
                    for one in following:
                        self._put(one, now_ns)
            except FlowserveError as error:
                if not one.flow.done:
                    self._fail(one.flow, error)
                if one is not ticket:  # others may be of other requests, where requests share slots
                    self.streams.put(following[following.index(one) + 1 :], now_ns)
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
                    self._fail_each(queue, half[1], reason)
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
        return self._after_failure(batch, error)

    def _after_failure(self, batch: Batch, error: FlowserveError) -> bool:
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

    def break_off(self, batch: Batch, error: FlowserveError) -> None:
        """What came of a batch could not be taken in, perhaps in the middle of that: its instance is free, and whoever
        is not answered yet fails. Raises what is raised by telling them so, when all were told.
        """
        self.pauses.returned(batch)
        if not batch.is_back:
            self._set_free(batch)
        raised: Exception | None = None
        for ticket in batch.tickets:
            if not ticket.flow.whole.done:
                try:
                    self._fail(ticket.flow, traced(error, ticket, batch.instance))
                except Exception as one:  # the others are told all the same
                    raised = one
        if raised is not None:
            raise raised

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
                self._give_up(queue, ticket, own)
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
        batch.is_back = True
        self._free(batch.queue, batch.instance)

    def _free(self, queue: ModelQueue, instance: Any) -> None:
        queue.running -= 1
        queue.free.append(instance)
        if self.pauses.waiting:  # whoever stands in a send may have waited for this one only
            self.streams.is_due = True
        if queue.batcher or queue.order is not None or queue.bound is not None:
            self._mark(queue)

    def _can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Whether a batch of this queue could ever be started if these kept their instances for ever."""
        return sum(batch.queue is queue for batch in kept_by) < len(queue.instances)

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
