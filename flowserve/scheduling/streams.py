"""How one request moves through a graph in which a step may answer many times: the flow, with iterations.

Decided here: what an answer of a decoupled step starts, in which order a request's answers leave, how many steps of a
node may be under way, and so when a decoupled step may answer again. Graphs without decoupled nodes never come here:
their flows are router.py's. Like that file this one never opens a tensor and knows no queue, instance or clock.

An answer of a decoupled step starts an *iteration*: a flow of its own through the nodes below that step, with its own
slots, into which the tensors of the iteration it came out of are taken over. So whatever a join reads belongs
together, however late or out of order it was made. An iteration whose steps are all over is an answer of the graph;
answers leave in the order in which their iterations began, whichever was ready first.

`max_inflight_requests` counts *slots*: a step holds one of its node from when it could run until it is over and the
steps that it made ready have theirs. A decoupled step holds a *credit* before it answers, and behind every credit
there are free slots of all the nodes that the answer is for; so nothing ever waits unsent but the answer in the hands
of the model. Where nobody reads the answers credits end as well.

Always true of a stream that is not done (see `StreamFlow.check`):
  (1) no node holds more slots than its limit, those behind credits counted;
  (2) every iteration that is not answered has open steps, open iterations below it, or waits for an earlier answer;
  (3) answers are handed out in order, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

from flowserve.graph.nesting import Nesting
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.router import Facts, Flow, Ticket
from flowserve.scheduling.slots import Gauge, Hold, Slots

# So many answers of one decoupled step are ready and not yet taken by whoever reads them, and it may not answer again.
UNREAD_MAX: Final = 16


class Sender(Protocol):
    """The other side of a decoupled step: whoever gives the model's answers to `Streams`."""

    def grant(self, count: int) -> None:
        """So many more answers may be sent."""

    def withdraw(self) -> None:
        """Nobody wants any more answers."""


class Source(Ticket):
    """A step that answers any number of times. `credit`: answers it may send now. `is_waiting`: its model stands in
    its send and waits for one; `holder` is the batch whose instance it keeps while it does, None where it keeps none.
    """

    __slots__ = ("credit", "holder", "is_over", "is_waiting", "sender", "started_ns")

    def __init__(self, flow: Iteration, node: PlanNode, rows: int, key: Hashable) -> None:
        super().__init__(flow, node, rows, key)
        self.credit = 0
        self.sender: Sender | None = None
        self.is_waiting = False
        self.is_over = False
        self.holder: Any = None
        self.started_ns = 0


class Iteration(Flow):
    """One run through the nodes of one level. `open` says nothing here: the stream as a whole ends, not a flow in it.

    `steps`: how many of its steps are made ready and not over. `children`: the iterations that began in it and are
    not answered yet, in order. `unread`: answers from below it that are ready and not taken.
    """

    __slots__ = ("children", "depth", "finished", "parent", "source", "steps", "stream", "unread")

    def __init__(self, stream: StreamFlow, parent: Iteration) -> None:
        plan = stream.plan
        self.stream = stream
        self.plan = plan
        self.route = stream.route
        self.owner = stream.owner
        self.request = stream.request
        self.wanted = stream.wanted
        self.priority = stream.priority
        self.timeout_ns = stream.timeout_ns
        self.arrived_ns = stream.arrived_ns
        self.stamp = stream.stamp
        self.waiter = self.parameters = self.error = None
        self.queue_ns = self.compute_input_ns = self.compute_infer_ns = self.compute_output_ns = 0
        self.tensors = [*parent.tensors]
        self._begin_at(parent, parent.depth + 1, stream.nesting)

    def _begin_at(self, parent: Iteration | None, depth: int, nesting: Nesting) -> None:
        self.done = False
        self.open = 1
        self.missing = [*nesting.missing]
        self.readers = [*nesting.readers]
        self.parent = parent
        self.depth = depth
        self.steps = 0
        self.unread = 0
        self.children: deque[Iteration] = deque()
        self.finished: set[int] = set()
        self.source: Source | None = None

    @property
    def whole(self) -> Flow:
        return self.stream

    def is_last_reader(self, slot: int) -> bool:
        return self.readers[slot] == 1 and not self.stream.nesting.below[slot]

    def finish_step(self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int) -> list[Ticket]:
        """As `Flow.finish_step`. What became ready may belong to other iterations, and to other requests where slots
        are shared.
        """
        hold = self.stream.hold(node.index)
        tickets: list[Ticket] = []
        self._write(node, [column[m] for column in outputs])
        self.finished.add(node.index)
        self._pass_on(node, hold, tickets)
        self._inherit(node, tickets)
        self._step_over(node, hold, tickets)
        return tickets

    def answer_begins(self, node: PlanNode, outputs: Sequence[Facts | None]) -> list[Ticket]:
        """The decoupled `node` of this iteration answered: begin the iteration that follows from it."""
        stream = self.stream
        child = Iteration(stream, self)
        child._write(node, outputs)
        self.children.append(child)
        stream.live[child] = None
        tickets: list[Ticket] = []
        for n in stream.nesting.firsts[self.depth]:
            child.steps += 1
            stream.take_slot(n)
            child._enter(stream.plan.nodes[n], tickets)
        child._count_down(node)
        if not child.steps:
            child._is_complete()
        return tickets

    def last_answer(self, node: PlanNode) -> list[Ticket]:
        """The decoupled `node` will not answer again."""
        tickets: list[Ticket] = []
        self.finished.add(node.index)
        self._step_over(node, self.stream.hold(node.index), tickets)
        return tickets

    def _write(self, node: PlanNode, row: Sequence[Facts | None]) -> None:
        for j, slot, _ in node.writes:
            if row[j] is None and self.plan.needed_by[slot]:
                raise self._deadlock(node, slot)
            self.tensors[slot] = row[j]

    def _pass_on(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        """Whoever on this level waited for `node` only is ready now, as far as this level goes."""
        nesting = self.stream.nesting
        for _, slot, _ in node.writes:
            for n in nesting.consumers[slot]:
                self.missing[n] -= 1
                if not self.missing[n]:
                    self._arrive(self.plan.nodes[n], hold, tickets)

    def _count_down(self, node: PlanNode) -> None:
        """The answer that this iteration begins with is there; whoever waited for nothing else has been let in."""
        for _, slot, _ in node.writes:
            for n in self.stream.nesting.consumers[slot]:
                self.missing[n] -= 1

    def _arrive(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        """A step could run: let it in where there is a slot for it."""
        self.steps += 1
        slots = self.stream.slots
        if slots is None or not slots.limits[node.index]:
            self._enter(node, tickets)
        elif slots.has_room(node.index):
            self.stream.take_slot(node.index)
            self._enter(node, tickets)
        else:
            if hold is not None:
                hold.count += 1
            slots.parked[node.index].append((self, node, hold))
            self.stream.changed(self.stream)

    def _enter(self, node: PlanNode, tickets: list[Ticket]) -> None:
        """A step has its slot; it runs as soon as what it reads from above is there."""
        if self.has_from_above(self.stream.nesting.late[node.index]):
            tickets.append(self._ticket(node))
        else:
            self.stream.late.append((self, node))

    def has_from_above(self, makers: Sequence[int]) -> bool:
        """Whether these nodes, of levels above this one, are done."""
        for maker in makers:
            above: Iteration | None = self
            while above is not None and above.depth != self.stream.nesting.depth[maker]:
                above = above.parent
            if above is None or maker not in above.finished:
                return False
        return True

    def _inherit(self, node: PlanNode, tickets: list[Ticket]) -> None:
        """What `node` wrote is read further down too: hand it to the iterations that are there already."""
        stream = self.stream
        slots = [slot for _, slot, _ in node.writes if stream.nesting.below[slot]]
        if not slots or not self.children:
            return
        for below in self._all_below():
            for slot in slots:
                below.tensors[slot] = self.tensors[slot]
        late, stream.late = stream.late, []
        for iteration, waiting in late:
            iteration._enter(waiting, tickets)
        stream.changed(stream)
        if node.index in stream.nesting.answer_late:
            stream.advance()

    def _all_below(self) -> Iterator[Iteration]:
        for child in self.children:
            yield child
            yield from child._all_below()

    def _step_over(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        for slot in self.stream.nesting.frees[node.index]:
            self.readers[slot] -= 1
            if not self.readers[slot]:
                self.tensors[slot] = None
        self.steps -= 1
        if hold is not None and not hold.count:
            self.stream.release(node.index, tickets)
        if not self.steps:
            self._is_complete()

    def _is_complete(self) -> None:
        """Its own steps are over. What began in it may go on."""
        stream = self.stream
        if self.depth == len(stream.nesting.splits):
            above = self.parent
            while above is not None:
                above.unread += 1
                above = above.parent
        stream.advance()

    def _ticket(self, node: PlanNode) -> Ticket:
        ticket = super()._ticket(node)
        if self.depth < len(self.stream.nesting.splits) and self.stream.nesting.splits[self.depth] == node.index:
            self.source = Source(self, node, ticket.rows, ticket.key)
            return self.source
        return ticket

    def check(self) -> None:
        self.stream.check()

    def __repr__(self) -> str:
        return f"Iteration({self.plan.graph.name}, level={self.depth}, steps={self.steps})"


class StreamFlow(Iteration):
    """The request itself, and its one iteration of level 0. `answers`: complete iterations whose turn it is, for
    whoever reads them. `waiter` is called when there are some or it is `done`, whichever is first.
    `live`: the iterations below that are not answered. `late`: steps with a slot that wait for a tensor from above.
    """

    __slots__ = ("answers", "changed", "held", "is_over", "late", "live", "nesting", "slots")

    def __init__(
        self, plan: Plan, *arguments: Any, shared: Slots | None = None, gauges: Sequence[Gauge] = (), **options: Any
    ) -> None:
        """As `Flow`. `shared`: the slots of the graph, where all of its requests share them; else its own show
        `gauges` how full they are.
        """
        Flow.__init__(self, plan, *arguments, **options)
        assert plan.nesting is not None
        self.nesting = plan.nesting
        self._begin_at(None, 0, plan.nesting)
        self.slots = shared or (Slots(plan.nesting.limits, gauges) if any(plan.nesting.limits) else None)
        self.answers: deque[Iteration] = deque()
        self.live: dict[Iteration, None] = {}
        self.late: list[tuple[Iteration, PlanNode]] = []
        self.held = [0] * len(plan.nodes)  # slots that are its own
        self.is_over = False
        self.changed: Callable[[Any], None] = _tell_nobody

    @property
    def stream(self) -> StreamFlow:  # type: ignore[override]  # not an attribute: that would be a circle
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """As `Flow.begin`; `changed` is called with the stream whenever `Streams.settle` has something to do for it."""
        self.changed = changed or _tell_nobody
        self._check_given(self.plan)
        tickets: list[Ticket] = []
        for n in self.plan.first:
            self._arrive(self.plan.nodes[n], None, tickets)
        if not self.steps:
            self._is_complete()
        return tickets

    def hold(self, n: int) -> Hold | None:
        """The slot that a step of node n has, None where there is no limit."""
        slots = self.slots
        return None if slots is None or not slots.limits[n] else Hold(self, n)

    def take_slot(self, n: int) -> None:
        if self.slots is not None and self.slots.limits[n]:
            self.slots.take(n)
            self.held[n] += 1

    def release(self, n: int, tickets: list[Ticket]) -> None:
        """A slot of node n is free: whoever waits for it first has it, and gives up the one before."""
        slots = self.slots
        assert slots is not None
        freed = [Hold(self, n)]
        while freed:
            free = freed.pop()
            n = free.n
            slots.taken[n] -= 1
            free.stream.held[n] -= 1
            if slots.parked[n]:
                iteration, node, hold = slots.parked[n].popleft()
                iteration.stream.take_slot(n)
                iteration._enter(node, tickets)
                if hold is not None:
                    hold.count -= 1
                    if not hold.count and not hold.stream.done:
                        freed.append(hold)
        self.changed(self)

    def advance(self) -> None:
        """Hand out, in order, every answer whose turn it is; see whether anything is left to wait for."""
        deepest = len(self.nesting.splits)
        at: Iteration = self
        while True:
            while at.children:
                at = at.children[0]
            if at.steps:
                return
            if at.depth == deepest:
                if not at.has_from_above(self.nesting.answer_late):
                    return
                self.answers.append(at)
                self.changed(self)
            above = at.parent
            if above is None:
                self.is_over = True
                self.changed(self)
                return
            above.children.popleft()
            del self.live[at]
            _add_up(at, above)
            at = above

    def take(self) -> Iteration | None:
        """The next answer, for whoever reads it: its outputs are in `tensors`. None: there is none just now."""
        if not self.answers:
            return None
        answer = self.answers.popleft()
        above = answer.parent
        while above is not None:
            above.unread -= 1
            above = above.parent
        self.changed(self)
        return answer

    def room(self, source: Source) -> int:
        """How many more answers this step may send, credits that it has not counted."""
        iteration = source.flow
        assert isinstance(iteration, Iteration)
        room = UNREAD_MAX - iteration.unread - source.credit
        slots = self.slots
        if slots is not None:
            for n in self.nesting.firsts[iteration.depth]:
                if slots.limits[n]:
                    room = min(room, slots.limits[n] - slots.taken[n] - slots.promised[n])
        return max(room, 0)

    def promise(self, source: Source, count: int) -> None:
        """Give so many credits, or (negative) take them back."""
        source.credit += count
        if self.slots is not None:
            for n in self.nesting.firsts[source.flow.depth]:  # type: ignore[attr-defined]
                if self.slots.limits[n]:
                    self.slots.promised[n] += count

    def sources(self) -> Iterator[Source]:
        """The decoupled steps that may still answer."""
        for iteration in (self, *self.live):
            if iteration.source is not None and not iteration.source.is_over:
                yield iteration.source

    def check(self) -> None:
        """Assert the numbered promises. For tests and simulation."""
        if self.done:
            return
        if self.slots is not None:
            self.slots.check()
        for iteration in self.live:
            parent = iteration.parent
            assert parent is not None, "(2)"
            assert iteration in parent.children, f"(2) {iteration!r} was lost"
        at: Iteration = self
        while at.children:
            at = at.children[0]
        is_late = not at.has_from_above(self.nesting.answer_late)
        assert at.steps or is_late or self.is_over, f"(2) {at!r} goes nowhere"
        assert self.is_over or self.steps or self.children, f"(2) {self!r} is neither done nor going anywhere"

    def __repr__(self) -> str:
        return f"StreamFlow({self.plan.graph.name}, live={len(self.live)}, done={self.done})"


def _tell_nobody(stream: StreamFlow) -> None:
    """Before it is submitted."""


def _add_up(iteration: Iteration, above: Iteration) -> None:
    """What its steps took is part of what the request took."""
    above.queue_ns += iteration.queue_ns
    above.compute_input_ns += iteration.compute_input_ns
    above.compute_infer_ns += iteration.compute_infer_ns
    above.compute_output_ns += iteration.compute_output_ns
