"""The execution of a request whose graph has decoupled steps: a flow that consists of iterations.

Decides which steps of an iteration are ready, what a response of a decoupled step starts, in which order the responses
of a request leave, how many steps of a node may be under way, and so when a decoupled step may respond again. Graphs
without decoupled nodes use flow.py only. As that module, this one reads no tensor contents and knows no queue, instance
or clock. Called by the scheduler and by credits.py.

A response of a decoupled step starts an *iteration*: a flow through the nodes below that step, with its own tensor
slots, which begin with the tensors of the parent iteration. So the inputs of a join always belong together, however
late or out of order they were computed. An iteration whose steps are all over is a response of the graph; responses
leave in the order in which their iterations began.

`max_inflight_requests` counts *in-flight slots*: a step holds one of its node from when it is ready until it is over
and the steps that it made ready have theirs. A decoupled step holds a *credit* before it responds; free slots of all
nodes that the response starts are reserved for each credit, so the only unsent response is the one that the model is
about to send. If the responses are not read, no further credits are granted.

Always true of a stream that is not done (see `StreamFlow.check`):
  (1) no node holds more slots than its limit, those reserved for credits included;
  (2) every unread iteration has open steps, open iterations below it, or waits for an earlier response;
  (3) responses are returned in order, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from flowserve.errors import FlowserveError
from flowserve.graph.nesting import Nesting
from flowserve.graph.plan import Plan, PlanNode
from flowserve.scheduling.flow import Facts, Flow, Ticket

# The largest number of unread responses below one decoupled step; then it may not respond.
UNREAD_MAX: Final = 16


class Gauge(Protocol):
    """Statistics of a node: the largest number of its steps under way."""

    most_inflight: int


class InflightSlots:
    """The number of steps of each node under way, of one request or of all requests that share the slots. `promised[n]`
    are reserved for credits. A step without a free slot is in `parked`, with `hold`, the slot of the step that made it
    ready. `gauges[n]` records the maximum of node n. `sharers`: the requests that share the slots, empty if they belong
    to one request.
    """

    __slots__ = ("gauges", "limits", "parked", "promised", "sharers", "taken")

    def __init__(self, limits: Sequence[int], gauges: Sequence[Gauge] = ()) -> None:
        self.limits = limits
        self.gauges = gauges
        self.taken = [0] * len(limits)
        self.promised = [0] * len(limits)
        self.sharers: dict[StreamFlow, None] = {}
        self.parked: list[deque[tuple[Iteration, PlanNode, Hold | None]]] = [deque() for _ in limits]

    def has_room(self, n: int) -> bool:
        return not self.limits[n] or self.taken[n] + self.promised[n] < self.limits[n]

    def take(self, n: int) -> None:
        self.taken[n] += 1
        if self.gauges and self.taken[n] > self.gauges[n].most_inflight:
            self.gauges[n].most_inflight = self.taken[n]

    def check(self) -> None:
        for n, limit in enumerate(self.limits):
            assert not limit or 0 <= self.taken[n] + self.promised[n] <= limit, f"(1) node {n} is over its limit"
            assert not self.parked[n] or not self.has_room(n), f"(1) a step of node {n} waits beside a free slot"


_unlimited = cache(InflightSlots)  # without limits they never change, so that streams may share them


@dataclass(slots=True, eq=False)
class Hold:
    """The slot of a step that is over, kept until `count` steps that it made ready have slots of their own."""

    stream: StreamFlow
    n: int
    count: int = 0


class StreamSender(Protocol):
    """The runtime's side of a decoupled step, which passes the model's responses to `Streams`."""

    def grant(self, count: int) -> None:
        """The step may send `count` more responses."""

    def withdraw(self) -> None:
        """No further response is needed."""


class Source(Ticket):
    """The ticket of a decoupled step. `credit`: the responses it may send now. `is_waiting`: its model is blocked in
    send(); `holder` is the batch whose instance it keeps meanwhile, None if it keeps none. `instance`, `count`,
    `last_ns` and `outcome` are the runtime's: its instance, its number of responses, the time of its start or last
    response, and as what its end is counted, "" before.
    """

    __slots__ = (
        "count",
        "credit",
        "holder",
        "instance",
        "is_over",
        "is_waiting",
        "last_ns",
        "outcome",
        "sender",
        "started_ns",
    )

    flow: Iteration  # type: ignore[mutable-override]  # a ticket keeps its flow

    def __init__(self, flow: Iteration, node: PlanNode, rows: int, key: Hashable) -> None:
        super().__init__(flow, node, rows, key)
        self.credit = 0
        self.sender: StreamSender | None = None
        self.is_waiting = False
        self.is_over = False
        self.holder: Any = None
        self.started_ns = 0
        self.instance: Any = None
        self.count = 0
        self.last_ns = 0
        self.outcome = ""


class Iteration(Flow):
    """The execution of the nodes of one level. `open` is constant here: the stream ends as a whole.

    `steps`: the number of its steps that became ready and are not over. `children`: its child iterations that are not
    complete, in order. `unread`: complete responses from below it that were not read.
    """

    __slots__ = ("children", "depth", "finished", "parent", "source", "steps", "stream", "unread")

    def __init__(self, stream: StreamFlow, parent: Iteration) -> None:
        # Without `Flow.__init__`: an iteration begins with the tensors of its parent and the counts of its level.
        plan = stream.plan
        self.stream = stream
        self.plan = plan
        self.queues = stream.queues
        self.owner = stream.owner
        self.request = parent.request
        self.wanted = stream.wanted
        self.priority = stream.priority
        self.timeout_ns = stream.timeout_ns
        self.arrived_ns = stream.arrived_ns
        self.stamp = stream.stamp
        self.waiter = self.parameters = self.error = self.outcome = None
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
        return super().is_last_reader(slot) and not self.stream.nesting.below[slot]

    def finish_step(
        self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        """As `Flow.finish_step`. The returned tickets may belong to other iterations, and to other requests if slots
        are shared.
        """
        hold = self.stream.hold(node.index)
        tickets: list[Ticket] = []
        self._write(node, [column[m] for column in outputs])
        self.finished.add(node.index)
        self._release_consumers(node, hold, tickets)
        self._copy_down(node, tickets)
        self._end_step(node, hold, tickets)
        return tickets

    def begin_iteration(
        self,
        node: PlanNode,
        outputs: Sequence[Facts | None],
        parameters: Any = None,
        request: Any = None,
        *,
        is_last: bool = False,
    ) -> list[Ticket]:
        """The decoupled `node` of this iteration sent a response: begin a child iteration with these `parameters` and,
        if given, its own request. `is_last`: the node sends no further response.
        """
        stream = self.stream
        child = Iteration(stream, self)
        child.parameters = parameters
        if request is not None:
            child.request = request
        child._write(node, outputs)
        self.children.append(child)
        stream.live[child] = None
        tickets: list[Ticket] = []
        for n in stream.nesting.firsts[self.depth]:
            child.steps += 1
            stream.take_slot(n)
            child._enter(stream.plan.nodes[n], tickets)
        for _, slot, _ in node.writes:  # its consumers have the response that begins the child
            for n in stream.nesting.consumers[slot]:
                child.missing[n] -= 1
        if is_last:
            tickets += self.end_responses(node)
        if not child.steps:
            child._complete()
        return tickets

    def replace_request(self, request: Any) -> None:
        """Set the request of this iteration, and of those below that share its previous request."""
        before, self.request = self.request, request
        for below in self._all_below():
            if below.request is before:
                below.request = request

    def end_responses(self, node: PlanNode) -> list[Ticket]:
        """The decoupled `node` sends no further response."""
        tickets: list[Ticket] = []
        self.finished.add(node.index)
        self._end_step(node, self.stream.hold(node.index), tickets)
        return tickets

    def _write(self, node: PlanNode, row: Sequence[Facts | None]) -> None:
        for j, slot, _ in node.writes:
            if row[j] is None and self.plan.needed_by[slot]:
                raise self._missing_input(node, slot)
            self.tensors[slot] = row[j]

    def _release_consumers(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        """Count `node` as finished for its consumers of this level, and admit those that wait for no other node."""
        nesting = self.stream.nesting
        for _, slot, _ in node.writes:
            for n in nesting.consumers[slot]:
                self.missing[n] -= 1
                if not self.missing[n]:
                    self._admit(self.plan.nodes[n], hold, tickets)

    def _admit(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        """A step has its inputs of this level: let it enter if its node has a free slot, else park it."""
        self.steps += 1
        slots = self.stream.slots
        if not slots.limits[node.index]:
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
        """A step has its slot; it is queued as soon as its inputs from levels above are present."""
        if self.has_inputs_from_above(self.stream.nesting.late[node.index]):
            tickets.append(self._ticket(node))
        else:
            self.stream.late.append((self, node))

    def has_inputs_from_above(self, makers: Sequence[int]) -> bool:
        """Whether these nodes of levels above this one are finished."""
        for maker in makers:
            above = self.around(maker)
            if above is None or maker not in above.finished:
                return False
        return True

    def around(self, n: int) -> Iteration | None:
        """The iteration around this one, or this one, to which its step of node n belongs."""
        above: Iteration | None = self
        while above is not None and above.depth != self.stream.nesting.depth[n]:
            above = above.parent
        return above

    def _copy_down(self, node: PlanNode, tickets: list[Ticket]) -> None:
        """Copy the outputs of `node` that lower levels read into the existing iterations below."""
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

    def _end_step(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        for slot in self.stream.nesting.frees[node.index]:
            self.readers[slot] -= 1
            if not self.readers[slot]:
                self.tensors[slot] = None
        self.steps -= 1
        if hold is not None and not hold.count:
            self.stream.release(node.index, tickets)
        if not self.steps:
            self._complete()

    def _complete(self) -> None:
        """Its own steps are over; its child iterations may continue."""
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
    """The flow of the request, and its one iteration of level 0. `answers`: complete responses in order, to be read.
    `waiter` is called when there is one or the flow is `done`, whichever is first. `live`: the iterations below that
    are not complete. `late`: steps with a slot that wait for a tensor from above. `refusal`: an error that occurred
    when a step got a slot. `ends_empty`: when it was over, nothing was left that the last response could have waited
    for, so that its end needs a message of its own. `is_answered` is the runtime's: whether its first response was
    counted.
    """

    __slots__ = (
        "answers",
        "changed",
        "ends_empty",
        "held",
        "is_answered",
        "is_over",
        "late",
        "live",
        "nesting",
        "refusal",
        "slots",
    )

    def __init__(
        self,
        plan: Plan,
        *arguments: Any,
        shared: InflightSlots | None = None,
        gauges: Sequence[Gauge] = (),
        **options: Any,
    ) -> None:
        """As `Flow`. `shared`: the slots of the graph, if all its requests share them; else the flow has its own, with
        these `gauges`.
        """
        Flow.__init__(self, plan, *arguments, **options)
        assert plan.nesting is not None
        self.nesting = plan.nesting
        self._begin_at(None, 0, plan.nesting)
        limits = plan.nesting.limits
        self.slots = shared or (InflightSlots(limits, gauges) if any(limits) else _unlimited(limits))
        self.answers: deque[Iteration] = deque()
        self.live: dict[Iteration, None] = {}
        self.late: list[tuple[Iteration, PlanNode]] = []
        self.held = [0] * len(plan.nodes)  # the number of slots that it holds, by node
        self.is_over = False
        self.refusal: FlowserveError | None = None
        self.is_answered = self.ends_empty = False
        self.changed: Callable[[Any], None] = _ignore

    @property
    def has_answers(self) -> bool:
        """Whether a response waits to be read."""
        return bool(self.answers)

    @property
    def has_ended(self) -> bool:
        """Whether the last response was read and carries the final flag."""
        return self.is_over and not self.ends_empty and not self.answers

    @property
    def stream(self) -> StreamFlow:  # type: ignore[override]  # an attribute would be a reference cycle
        return self

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """As `Flow.begin`; `changed` is called with the stream whenever `Streams.settle` has something to do for it."""
        self.changed = changed or _ignore
        self._check_given(self.plan)
        if self.nesting.is_shared:
            self.slots.sharers[self] = None
        tickets: list[Ticket] = []
        for n in self.plan.first:
            self._admit(self.plan.nodes[n], None, tickets)
        if not self.steps:
            self._complete()
        return tickets

    def hold(self, n: int) -> Hold | None:
        """The slot that a step of node n holds, None without a limit."""
        return Hold(self, n) if self.slots.limits[n] else None

    def take_slot(self, n: int) -> None:
        if self.slots.limits[n]:
            self.slots.take(n)
            self.held[n] += 1

    def release(self, n: int, tickets: list[Ticket]) -> None:
        """Free a slot of node n: the first parked step gets it, and frees the slot that it kept."""
        slots = self.slots
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
                except FlowserveError as error:  # an error of this step, not of the one that freed the slot
                    iteration.stream.refusal = error.with_traceback(None)
                    iteration.stream.changed(iteration.stream)
                if hold is not None:
                    hold.count -= 1
                    if not hold.count and not hold.stream.done:
                        freed.append(hold)
        self.changed(self)

    def advance(self) -> None:
        """Append the responses that are next in order to `answers`, and set `is_over` after the last: a response that
        is appended together with the end carries the final flag.
        """
        if self.is_over:
            return
        deepest = len(self.nesting.splits)
        is_empty = True
        at: Iteration = self
        while True:
            while at.children:
                at = at.children[0]
            if at.steps:
                return
            if at.depth == deepest:
                if not at.has_inputs_from_above(self.nesting.answer_late):
                    return
                self.answers.append(at)
                is_empty = False
                self.changed(self)
            above = at.parent
            if above is None:
                self.is_over = True
                self.ends_empty = is_empty
                self.changed(self)
                return
            above.children.popleft()
            del self.live[at]
            at = above

    def take(self) -> Iteration | None:
        """Remove and return the next response; its outputs are in `tensors`. None: there is none now."""
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
        """The number of responses this step may send beyond its credits."""
        iteration, slots = source.flow, self.slots
        room = UNREAD_MAX - iteration.unread - source.credit
        for n in self.nesting.firsts[iteration.depth]:
            if slots.limits[n]:
                room = min(room, slots.limits[n] - slots.taken[n] - slots.promised[n])
        return max(room, 0)

    def promise(self, source: Source, count: int) -> None:
        """Grant `count` credits, or take them back if negative."""
        source.credit += count
        for n in self.nesting.firsts[source.flow.depth]:
            if self.slots.limits[n]:
                self.slots.promised[n] += count

    def steps_under_way(self) -> list[PlanNode]:
        found = {
            n
            for iteration in (self, *self.live)
            for n, depth in enumerate(self.nesting.depth)
            if depth == iteration.depth and not iteration.missing[n] and n not in iteration.finished
        }
        return [node for node in self.plan.nodes if node.index in found and node.is_needed]

    def sources(self) -> Iterator[Source]:
        """The decoupled steps that may still respond."""
        for iteration in (self, *self.live):
            if iteration.source is not None and not iteration.source.is_over:
                yield iteration.source

    def check(self) -> None:
        """Assert the numbered invariants. For tests and simulation."""
        if self.done:
            return
        self.slots.check()
        for iteration in self.live:
            parent = iteration.parent
            assert parent is not None, "(2)"
            assert iteration in parent.children, f"(2) {iteration!r} was lost"
        at: Iteration = self
        while at.children:
            at = at.children[0]
        is_late = not at.has_inputs_from_above(self.nesting.answer_late)
        assert at.steps or is_late or self.is_over, f"(2) {at!r} cannot continue"
        assert self.is_over or self.steps or self.children, f"(2) {self!r} is neither done nor able to continue"

    def __repr__(self) -> str:
        return f"StreamFlow({self.plan.graph.name}, live={len(self.live)}, done={self.done})"


class WholeFlow(StreamFlow):
    """A stream with one response, which is read from the flow itself when it is done. `answers` stays empty: an entry
    would be a reference cycle.
    """

    __slots__ = ()

    @property
    def has_answers(self) -> bool:
        return self.is_over

    def advance(self) -> None:
        super().advance()
        self.answers.clear()


def _ignore(stream: StreamFlow) -> None:
    """The callback of a flow that was not submitted."""
