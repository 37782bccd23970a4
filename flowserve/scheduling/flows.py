"""Every flow of a server from its submission to its end, and the tickets of it that wait meanwhile.

Decided here: in which order what arrived is queued, what it means that a queue is full, a patience or a deadline over,
a caller gone, and that a flow is over once, with nothing of it left waiting. Which batches start, and what comes of
them, is decided in dispatcher.py, whose lower half this is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from flowserve.errors import Cancelled, FlowserveError, Invalid, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.scheduling.batch import Batch, ModelQueue
from flowserve.scheduling.calls import Calls
from flowserve.scheduling.credits import Streams
from flowserve.scheduling.deadlines import Deadlines
from flowserve.scheduling.iterations import Iteration
from flowserve.scheduling.lineage import located, steps_under_way
from flowserve.scheduling.pauses import Pauses
from flowserve.scheduling.router import Flow, Ticket
from flowserve.scheduling.sequences import Sequences
from flowserve.scheduling.streams import StreamFlow

_by_stamp = attrgetter("stamp")


class Late(Unavailable):
    """The deadline of a request passed. `is_running`: while it ran, on the one model it was for."""

    is_running = False


def tell_nobody(*_: object) -> None:
    """Where nobody counts who was refused, or reads answers as they come."""


class Flows:
    """What is in flight. The queues and what is to be looked at in them belong to both halves."""

    def __init__(
        self,
        answered: Callable[[Flow], None],
        refused: Callable[[ModelQueue, Ticket, FlowserveError], None],
        told: Callable[[StreamFlow], None],
        withdrawn: Callable[[ModelQueue], None],
    ) -> None:
        self._answered = answered
        self._refused = refused
        self._withdrawn = withdrawn
        self.pauses = Pauses(self._can_start)
        self.calls = Calls(self._can_start, self.pauses)
        self.streams = Streams(self._put, self._fail, self._over, told, self.pauses, self.calls.stuck)
        self._queues: list[ModelQueue] = []
        self._arrivals: list[Flow] = []
        self._dirty: deque[ModelQueue] = deque()  # queues to look at
        self._delayed: list[ModelQueue] = []  # queues whose batcher may wait for company
        self._expiring: list[ModelQueue] = []  # queues in which patience may end
        self._halves: deque[tuple[ModelQueue, list[Ticket]]] = deque()  # of batches that failed, to be tried again
        self._ending = ""  # why nothing new is started any more, once that is so
        self.in_flight = 0  # flows submitted or held and not yet answered
        self._held: dict[Flow, None] = {}
        self._due: Deadlines[Flow] | None = None  # of the flows that have a deadline; None until one has

    def _start(self, queue: ModelQueue, now_ns: int) -> None:
        """Give free instances of a queue what they can run."""
        raise NotImplementedError

    def _can_start(self, queue: ModelQueue, kept_by: Sequence[Batch]) -> bool:
        """Whether a batch of this queue could ever be started if these kept their instances for ever."""
        raise NotImplementedError

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

    @property
    def begun(self) -> int:
        """How many flows are in flight that nothing holds."""
        return self.in_flight - len(self._held)

    @property
    def is_due(self) -> bool:
        """Whether a `pump` would find something to do now."""
        return bool(self._arrivals or self._dirty or self.streams.is_due)

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

    def cancel(self, flow: Flow) -> Sequence[ModelQueue]:
        """Nobody waits for this flow any more: what is queued of it leaves every queue, what runs runs out. Harmless
        afterwards. Returns the queue of each ticket that was withdrawn; the next `pump` may find a batch without them.
        """
        left = () if flow.done else self._end(flow)
        if isinstance(flow, StreamFlow):
            flow.answers.clear()  # nobody takes them, and each of them holds the flow, which holds it
        return left

    def is_tried_again(self, flow: Flow) -> bool:
        """Whether it waits because the batch that it was in failed."""
        return any(ticket.flow is flow for _, tickets in self._halves for ticket in tickets)

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
        for queue, tickets in halves:
            self._fail_each(queue, tickets, reason)
        for queue in self._queues:
            self._fail_waiting(queue, reason)

    def _fail_waiting(self, queue: ModelQueue, reason: str) -> None:
        while taken := queue.batcher.take(1 << 62):
            self._fail_each(queue, taken, reason)

    def _fail_each(self, queue: ModelQueue, tickets: Sequence[Ticket], reason: str) -> None:
        for ticket in tickets:
            if not ticket.flow.done:
                error = Unavailable(reason)
                self._give_up(queue, ticket, error)
                self._fail(ticket.flow, error)

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
            self._give_up(queue, ticket, error)
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
            self._give_up(queue, ticket, error)
            raise

    def _give_up(self, queue: ModelQueue, ticket: Ticket, error: FlowserveError) -> None:
        """A ticket that is in no queue will not run; its flow is about to fail."""
        self._refused(queue, ticket, error)
        flow = ticket.flow
        flow.tensors = []
        if not isinstance(flow, Iteration):  # theirs counts no steps
            flow.open -= 1

    def _next_expiry(self) -> int | None:
        moments = [at for queue in self._expiring if (at := queue.batcher.expiry()) is not None]
        if self._due is not None and (at := self._due.soonest()) is not None:
            moments.append(at)
        return min(moments, default=None)

    def _expire(self, now_ns: int) -> None:
        """Refuse whoever has waited too long."""
        if self._due is not None:
            for flow in self._due.due(now_ns):
                if flow.done:  # called by one before it, and withdrawn with that
                    continue
                if isinstance(flow, StreamFlow) and flow.is_over:  # its last answer came just before
                    self._over(flow)
                    continue
                late = _late(flow, now_ns)
                if flow.open and not flow.plan.graph.is_ensemble and not isinstance(flow, StreamFlow):
                    flow.done = True  # queues are told of nobody who is not
                    late.is_running = not self._withdraw(flow)
                self._fail(flow, late)
        for queue in self._expiring:
            at = queue.batcher.expiry()
            if at is None or at > now_ns:
                continue
            for ticket in queue.batcher.expire(now_ns):
                if not ticket.flow.done:
                    waited = f"it waited {(now_ns - ticket.queued_ns) // 1_000_000} ms in the queue of model"
                    text = f"Request timeout expired: {waited} '{queue.key.name}'"
                    error = located(Unavailable(text), ticket.flow, ticket.node)
                    self._give_up(queue, ticket, error)
                    self._fail(ticket.flow, error)
            self._mark(queue)

    def _mark(self, queue: ModelQueue) -> None:
        if not queue.is_dirty:
            queue.is_dirty = True
            self._dirty.append(queue)

    def _over(self, flow: Flow) -> None:
        self._end(flow)
        self._answered(flow)

    def _fail(self, flow: Flow, error: FlowserveError) -> None:
        flow = flow.whole
        # Without its traceback and those of what it came of: their frames hold the flow and its tensors, in a circle
        # that only the collector opens.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        flow.error = error
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
        if not flow.open:
            return ()
        left = self._withdraw(flow)
        if flow.plan.graph.is_ensemble:
            for queue in left:
                self._withdrawn(queue)
        return left

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


def _late(flow: Flow, now_ns: int) -> Late:
    steps = steps_under_way(flow)
    names = ", ".join(f"'{node.name}'" for node in steps)
    where = f"it was in step {names}" if steps else "it had not begun" if not flow.open else "it was under way"
    waited_ms = (now_ns - flow.arrived_ns) // 1_000_000
    error = Late(f"Request timeout expired: its deadline passed after {waited_ms} ms, {where}")
    return located(error, flow, steps[0]) if steps else error
