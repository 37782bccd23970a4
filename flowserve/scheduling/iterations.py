"""One run through the nodes of one level of a graph in which a step may answer many times.

Decided here: which steps of an iteration are ready, what an answer of its decoupled step begins, and what is handed
down to the iterations below it. An answer of a decoupled step starts an *iteration*: a flow of its own through the
nodes below that step, with its own slots, into which the tensors of the iteration it came out of are taken over. So
whatever a join reads belongs together, however late or out of order it was made. In which order answers leave, and how
many steps may be under way, is decided for the request as a whole, in streams.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowserve.graph.nesting import Nesting
from flowserve.graph.plan import PlanNode
from flowserve.scheduling.router import TOOK_NOTHING, Facts, Flow, Ticket
from flowserve.scheduling.slots import Hold

if TYPE_CHECKING:
    from flowserve.scheduling.streams import StreamFlow


class Sender(Protocol):
    """The other side of a decoupled step: whoever gives the model's answers to `Streams`."""

    def grant(self, count: int) -> None:
        """So many more answers may be sent."""

    def withdraw(self) -> None:
        """Nobody wants any more answers."""


class Source(Ticket):
    """A step that answers any number of times. `credit`: answers it may send now. `is_waiting`: its model stands in
    its send and waits for one; `holder` is the batch whose instance it keeps while it does, None where it keeps none.
    `instance`, `count`, `last_ns` and `is_counted` are the runtime's: what runs it, its answers so far, when it began
    or answered last, and whether its end is written down.
    """

    __slots__ = (
        "count",
        "credit",
        "holder",
        "instance",
        "is_counted",
        "is_over",
        "is_waiting",
        "last_ns",
        "sender",
        "started_ns",
    )

    def __init__(self, flow: Iteration, node: PlanNode, rows: int, key: Hashable) -> None:
        super().__init__(flow, node, rows, key)
        self.credit = 0
        self.sender: Sender | None = None
        self.is_waiting = False
        self.is_over = False
        self.holder: Any = None
        self.started_ns = 0
        self.instance: Any = None
        self.count = 0
        self.last_ns = 0
        self.is_counted = False


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
        self.request = parent.request
        self.wanted = stream.wanted
        self.priority = stream.priority
        self.timeout_ns = stream.timeout_ns
        self.arrived_ns = stream.arrived_ns
        self.stamp = stream.stamp
        self.waiter = self.parameters = self.error = None
        self.took = TOOK_NOTHING
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

    def answer_begins(
        self, node: PlanNode, outputs: Sequence[Facts | None], said: Any = None, request: Any = None
    ) -> list[Ticket]:
        """The decoupled `node` of this iteration answered: begin the iteration that follows from it, with `said` for
        its `parameters` and, where it is given, a request of its own.
        """
        stream = self.stream
        child = Iteration(stream, self)
        child.parameters = said
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
        child._count_down(node)
        if not child.steps:
            child._is_complete()
        return tickets

    def speaks_as(self, request: Any) -> None:
        """From here on steps and answers are told that the request is this one, unless something below says more."""
        before, self.request = self.request, request
        for below in self._all_below():
            if below.request is before:
                below.request = request

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
