"""How one request moves through a graph in which a step may answer many times: the flow, with iterations.

Decided here: in which order a request's answers leave, how many steps of a node may be under way, and so when a
decoupled step may answer again. What goes on within one iteration is iterations.py's. Graphs without decoupled nodes
never come here: their flows are router.py's. Like that file this one never opens a tensor and knows no queue, instance
or clock.

An iteration whose steps are all over is an answer of the graph; answers leave in the order in which their iterations
began, whichever was ready first.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from flowserve.errors import FlowserveError
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.iterations import Iteration, Source
from flowserve.scheduling.router import Flow, Ticket, longer
from flowserve.scheduling.slots import Gauge, Hold, Slots

# So many answers of one decoupled step are ready and not yet taken by whoever reads them, and it may not answer again.
UNREAD_MAX: Final = 16


class StreamFlow(Iteration):
    """The request itself, and its one iteration of level 0. `answers`: complete iterations whose turn it is, for
    whoever reads them. `waiter` is called when there are some or it is `done`, whichever is first.
    `live`: the iterations below that are not answered. `late`: steps with a slot that wait for a tensor from above.
    `refusal`: why it cannot go on, found when it was given a slot. `is_answered` is the runtime's: whether it has had
    its first answer.
    """

    __slots__ = ("answers", "changed", "held", "is_answered", "is_over", "late", "live", "nesting", "refusal", "slots")

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
        self.refusal: FlowserveError | None = None
        self.is_answered = False
        self.changed: Callable[[Any], None] = _tell_nobody

    @property
    def has_answers(self) -> bool:
        """Whether there are some that nobody has taken."""
        return bool(self.answers)

    @property
    def stream(self) -> StreamFlow:  # type: ignore[override]  # not an attribute: that would be a circle
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """As `Flow.begin`; `changed` is called with the stream whenever `Streams.settle` has something to do for it."""
        self.changed = changed or _tell_nobody
        self._check_given(self.plan)
        if self.nesting.is_shared and self.slots is not None:
            self.slots.sharers[self] = None
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
                try:
                    iteration._enter(node, tickets)
                except FlowserveError as error:  # its own, and not of whoever had the slot before
                    iteration.stream.refusal = error.with_traceback(None)
                    iteration.stream.changed(iteration.stream)
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
            for n in self.nesting.firsts[source.flow.depth]:  # type: ignore[attr-defined]  # an iteration
                if self.slots.limits[n]:
                    self.slots.promised[n] += count

    def steps_under_way(self) -> list[PlanNode]:
        found = {
            n
            for iteration in (self, *self.live)
            for n, depth in enumerate(self.nesting.depth)
            if depth == iteration.depth and not iteration.missing[n] and n not in iteration.finished
        }
        return [node for node in self.plan.nodes if node.index in found and node.writes]

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


class WholeFlow(StreamFlow):
    """A request whose one answer is itself, read off by whoever asked when it is done: there is nothing to take. It
    would hold itself in a circle.
    """

    __slots__ = ()

    @property
    def has_answers(self) -> bool:
        return self.is_over

    def advance(self) -> None:
        super().advance()
        self.answers.clear()


def _tell_nobody(stream: StreamFlow) -> None:
    """Before it is submitted."""


def _add_up(iteration: Iteration, above: Iteration) -> None:
    """What its steps took is part of what the request took."""
    above.took = longer(above.took, *iteration.took)
