"""Frames of graphs with regions: rows that pass a test, items, responses of decoupled steps, shared limits.

Decides what happens when a region is entered and left, by its kind. This is the only module that does.

A space (`when`, `each`) has no frame of its own: its steps run in the frame in which it opens, each for all rows of the
space at once, in parts that the model accepts. When a space opens without a row, all its steps and operations are
skipped at once, and the nodes and operations that wait for their slots continue: no step can wait for a branch that was
not taken. If a test reads an output of a step that runs for the request's own rows, the space opens when that step
ends, and its rows are computed for all members of the step's batch together.

A response of a decoupled step begins a frame of the next level, with its own slots, which begin with the tensors of the
frame above. So the inputs of a join always belong together, however late or out of order they were computed. A frame
whose steps are all over is a response of the graph; responses leave in the order in which their frames began. If the
decoupled step is in a space, each row of it has responses of its own, and their frames have only the rows that this row
is made from; a row of the request from which none is made has one response.

`max_inflight_requests` counts in-flight slots (slots.py); a part of a step holds one as a step does. A decoupled step
holds a *credit* before it responds; free slots of all nodes that the response starts are reserved for each credit, so
the only unsent response is the one that the model is about to send. For steps behind a test or a division into items
none are reserved; no further credits are granted while one of them is parked. If the responses are not read, no further
credits are granted. A full queue limits the parts of a step too: those that it does not take wait here.

Always true of a request that is not over (see `RegionFrame.check`):
  (1) no node holds more slots than its limit, those reserved for credits included;
  (2) every unread frame has open steps, open frames below it, or waits for an earlier response;
  (3) responses are returned in order, each once;
  (4) a part of a step that is not queued is parked, or held back while another part of its frame is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Final

from flowserve.errors import FlowserveError, Internal
from flowserve.graph.plan import Plan, PlanNode
from flowserve.graph.regions import NO_SLOT, Entry, Operation, RegionPlan
from flowserve.scheduling.frames.frame import OVER, Facts, Frame, Ticket
from flowserve.scheduling.frames.operations import RowOperations, made, only_branch
from flowserve.scheduling.frames.parts import Part, PartedStep
from flowserve.scheduling.frames.ranges import RowRanges
from flowserve.scheduling.frames.request import RequestRecord
from flowserve.scheduling.frames.slots import Gauge, Hold, InflightSlots, Parked, unlimited
from flowserve.scheduling.frames.stream import UNREAD_MAX, Stream, StreamSender, ignore

# The largest number of parts of a step that are queued when one is finished. It is more than one so that a step that a
# full queue held back regains its number of parts under way as the queue empties.
_MORE_PARTS: Final = 2
# What frames without spaces, and without frames below, never add to.
_NO_PARTS: Final[dict[int, PartedStep]] = {}
_NO_CHILDREN: Final[deque[RegionFrame]] = deque()
_NO_SOURCES: Final[dict[Source, None]] = {}


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

    frame: RegionFrame  # type: ignore[mutable-override]  # a ticket keeps its frame

    def __init__(self, frame: RegionFrame, node: PlanNode, rows: int, key: Hashable) -> None:
        super().__init__(frame, node, rows, key)
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


class RegionFrame(Frame):
    """The execution of the nodes of one level. `open` is 1 from `begin` on: the request ends as a whole.

    `steps`: the number of its steps that became ready and are not over, and 1 while it begins. `children`: its frames
    of the next level that are not complete, in order. `unread`: complete responses from below it that were not read.
    `sources`: its decoupled steps that are not over. `spreads`: of each space that began, by its number; else None.
    `request_rows`: the rows of space 0. `parted`: its steps that have parts under way, by node; those in `held_back`
    wait until another part of the frame is over. `ranges`: the rows that it has of the frame above, None for all.
    `awaited`: spaces that have not opened yet in a frame above, and that steps of this one are in; each counts as a
    step.
    """

    __slots__ = (
        "awaited",
        "children",
        "depth",
        "held_back",
        "parent",
        "parted",
        "ranges",
        "regions",
        "request_rows",
        "sources",
        "spreads",
        "steps",
        "stream",
        "unread",
    )

    def __init__(
        self, record: RequestRecord, plan: Plan, queues: Sequence[Any], tensors: list[Any], request: Any, stream: Stream
    ) -> None:
        # Without `Frame.__init__`: a frame below begins with the tensors of the one above and the counts of its level.
        assert plan.regions is not None
        self.regions: RegionPlan = plan.regions
        self.record = record
        self.plan = plan
        self.queues = queues
        self.request = request
        self.tensors = tensors
        self.missing = [*plan.regions.missing]
        self.readers = [*plan.regions.readers]
        self.open = 0
        self.wanted = ()
        self.parameters = None
        self.stream = stream
        self.parent: RegionFrame | None = None
        self.depth = 0
        self.steps = 1
        self.unread = 0
        self.children: deque[RegionFrame] = deque() if plan.regions.splits else _NO_CHILDREN
        self.sources: dict[Source, None] = {} if plan.regions.splits else _NO_SOURCES
        self.spreads: list[Any] = [None] * len(plan.regions.nodes)
        self.request_rows = 1
        self.parted: dict[int, PartedStep] = {} if plan.regions.operations else _NO_PARTS
        self.held_back: list[PartedStep] = []
        self.ranges: RowRanges | None = None
        self.awaited: list[int] = []

    @property
    def is_stream(self) -> bool:
        return not self.stream.is_read_whole

    @property
    def whole(self) -> RegionFrame:
        at = self
        while at.parent is not None:
            at = at.parent
        return at

    # ------------------------------------------------------------------ the verbs of a frame

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        """As `Frame.begin`; `changed` is called with this frame when `Streams.settle` has something to do for it."""
        stream = self.stream
        stream.changed = changed or ignore
        if self.plan.lacking:
            self._check_given(self.plan)
        self.open = 1
        if self.regions.is_shared:
            stream.slots.sharers[self] = None
        tickets: list[Ticket] = []
        self._go_on([*self.regions.first], [], None, tickets)
        self._has_begun()
        return tickets

    def finish_step(
        self, ticket: Ticket, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        """As `Frame.finish_step`. The returned tickets may belong to other frames, and to other requests if slots are
        shared.
        """
        tickets: list[Ticket] = []
        part: Part | None = ticket.part
        if part is None:
            tests = self.regions.tests[node.index]
            opened = self._tested(node, tests, outputs, m, shared) if tests else ()
            self._step_over(node, [outputs[j][m] for j, _, _ in node.writes], opened, tickets)
            return tickets
        step = part.step
        step.outputs[part.number] = [column[m] for column in outputs]
        if self._is_last_part(step, tickets):
            values = [self._joined(node, [made[j] for made in step.outputs], j) for j, _, _ in node.writes]
            self._step_over(node, values, (), tickets)
        return tickets

    def respond(
        self,
        source: Source,
        outputs: Sequence[Facts | None],
        parameters: Any = None,
        request: Any = None,
        *,
        is_last: bool = False,
    ) -> list[Ticket]:
        """A decoupled step of this frame sent a response: begin a frame below with these `parameters` and, if given,
        its own request. `is_last`: the step sends no further response.
        """
        part: Part | None = source.part
        node = source.node
        child = self._begin_below(request)
        child.parameters = parameters
        values: Sequence[Any] = [outputs[j] for j, _, _ in node.writes]
        if part is not None:
            values = [self._joined(node, [value], j) for value, (j, _, _) in zip(values, node.writes, strict=True)]
            # Before the response is written, whose rows are those of this one row already.
            child._restrict_to(part.step.space, part.start)
        elif self.regions.operations:
            child.request_rows = _rows_of(values, self.request_rows)
        ready: list[int] = []
        child._store(node, values, ready, [])
        tickets: list[Ticket] = []
        child._enter_spaces(ready, tickets)
        behind: list[int] = []
        for n in ready:
            if n in self.regions.firsts[self.depth]:  # its slot was reserved with the credit
                child.steps += 1
                child._take_slot(n)
                child._enter(self.plan.nodes[n], tickets)
            else:
                behind.append(n)
        child._go_on(behind, [], None, tickets)
        # After the steps of the response are counted: if this step ended first, its frame could be complete without
        # them.
        if is_last:
            tickets += self.end_responses(source)
        child._has_begun()
        return tickets

    def end_responses(self, source: Source) -> list[Ticket]:
        """A decoupled step sends no further response."""
        tickets: list[Ticket] = []
        n = source.node.index
        if source.part is None or self._is_last_part(source.part.step, tickets):
            self.missing[n] = OVER
            hold = Hold(self.whole, n) if self.stream.slots.limits[n] else None
            self._end_step(n, hold, tickets)
        return tickets

    def take(self) -> RegionFrame | None:
        """Remove and return the next response; its outputs are in `tensors`. None: there is none now."""
        if not self.stream.answers:
            return None
        answer: RegionFrame = self.stream.answers.popleft()
        above = answer.parent
        while above is not None:
            above.unread -= 1
            above = above.parent
        self.stream.changed(self)
        return answer

    def hold_back(self, ticket: Ticket, freed: list[Ticket]) -> bool:
        """The queue of a part's model is full. Returns whether the part waits until another part is finished; False if
        no other one is under way, and the request must be refused. Tickets that got its slot are added to `freed`.
        """
        step: PartedStep = ticket.part.step
        if sum(one.live for one in self.parted.values()) < 2:
            return False
        n = step.node.index
        if isinstance(ticket, Source):
            del self.sources[ticket]
        step.waiting.appendleft(ticket.part.number)
        # It waits for the end of another part, not for a slot: with a free slot it would meet the full queue again.
        self._unpark(n)
        if step not in self.held_back:
            self.held_back.append(step)
        if self.stream.slots.limits[n]:
            self._release(n, freed)
        return True

    def replace_request(self, request: Any) -> None:
        """Set the request of this frame, and of those below that share its previous request."""
        before, self.request = self.request, request
        for below in self._all_below():
            if below.request is before:
                below.request = request

    def is_last_reader(self, slot: int) -> bool:
        if self.regions.operations:
            return False  # other slots may hold the same rows
        return super().is_last_reader(slot) and not self.regions.below[slot]

    # ------------------------------------------------------------------ steps

    def _go_on(self, ready: list[int], written: list[int], hold: Hold | None, tickets: list[Ticket]) -> None:
        """Start the nodes and operations that are ready, and those that become ready as a result; then pass the slots
        that were `written` to the frames below. `hold`: the slot of the step that made them ready.
        """
        nodes, regions = self.plan.nodes, self.regions
        count = len(nodes)
        for n in ready:  # operations append to it
            if n < count:
                self._admit(nodes[n], hold, tickets)
            elif regions.late[n] and not self.has_inputs_from_above(regions.late[n]):
                self.steps += 1
                self.stream.late.append((self, n))
            else:
                self._operate(regions.operations[n - count], ready, written, tickets)
        if written and self.children:
            self._pass_down(written, tickets)

    def _admit(self, node: PlanNode, hold: Hold | None, tickets: list[Ticket]) -> None:
        """A step has its inputs of this level: let it enter if its node has a free slot, else park it."""
        self.steps += 1
        n = node.index
        slots = self.stream.slots
        if not slots.limits[n]:
            self._enter(node, tickets)
        elif slots.has_room(n):
            self._take_slot(n)
            self._enter(node, tickets)
        else:
            if hold is not None:
                hold.count += 1
            slots.parked[n].append(Parked(self, n, hold))
            self.stream.changed(self.whole)

    def _enter(self, node: PlanNode, tickets: list[Ticket]) -> None:
        """A step has its slot; it is queued as soon as its inputs from levels above are present."""
        n = node.index
        regions = self.regions
        if regions.late[n] and not self.has_inputs_from_above(regions.late[n]):
            self.stream.late.append((self, n))
        elif regions.spreads[n] == NO_SLOT:
            ticket = self._ticket(node)
            if regions.splits and self._is_split(n):
                ticket = source = Source(self, node, ticket.rows, ticket.key)
                self.sources[source] = None
            tickets.append(ticket)
        else:
            space = self.plan.graph.nodes[n].space
            step = self.parted[n] = PartedStep(self, node, self.spreads[space])
            self._queue_part(step, tickets)
            self._queue_parts(step, len(step.waiting), tickets)

    def _is_split(self, n: int) -> bool:
        splits = self.regions.splits
        return self.depth < len(splits) and splits[self.depth] == n

    def _step_over(
        self, node: PlanNode, values: Sequence[Any], opened: Sequence[tuple[Operation, Any]], tickets: list[Ticket]
    ) -> None:
        """A step is over: it has written `values`, in the order of its `writes`, and read its inputs. Spaces that test
        its outputs are `opened`, with these spreads.
        """
        hold = Hold(self.whole, node.index) if self.stream.slots.limits[node.index] else None
        ready: list[int] = []
        written: list[int] = []
        self._store(node, values, ready, written)
        self.missing[node.index] = OVER  # before others continue: frames below ask whether this step is over
        for operation, spread in opened:
            self._open(operation, spread, ready, written, tickets)
        self._go_on(ready, written, hold, tickets)
        # After the steps that it made ready have slots, or are parked behind its slot: freed earlier, that would let
        # another step of this node begin, and work would collect in front of the slower node.
        self._end_step(node.index, hold, tickets)

    def _store(self, node: PlanNode, values: Sequence[Any], ready: list[int], written: list[int]) -> None:
        """Write the outputs of a step, in the order of its `writes`. Their slots are added to `written`, and the nodes
        and operations of this level that wait for no other to `ready`.
        """
        missing, readers, consumers = self.missing, self.readers, self.regions.consumers
        for value, (_, slot, _) in zip(values, node.writes, strict=True):
            if value is None and self.plan.needed_by[slot]:
                raise self._missing_input(node, slot)
            if readers[slot]:  # 0 if all readers were skipped
                self.tensors[slot] = value
            written.append(slot)
            for n in consumers[slot]:
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)

    def _end_step(self, n: int, hold: Hold | None, tickets: list[Ticket]) -> None:
        self._read(self.regions.frees[n])
        self.steps -= 1
        if hold is not None and not hold.count:
            self._release(n, tickets)
        if not self.steps:
            self._complete()

    def _read(self, slots: Collection[int]) -> None:
        """A node or operation has read these slots of its level."""
        readers = self.readers
        for slot in slots:
            readers[slot] -= 1
            if not readers[slot]:
                self.tensors[slot] = None

    # ------------------------------------------------------------------ parts of steps

    def _queue_parts(self, step: PartedStep, count: int, tickets: list[Ticket]) -> None:
        """Queue up to `count` parts of a step, as far as there are slots."""
        n = step.node.index
        slots = self.stream.slots
        while step.waiting and count:
            if not slots.has_room(n):
                slots.parked[n].append(Parked(self, n, None))
                return
            self._take_slot(n)
            self._queue_part(step, tickets)
            count -= 1
        if step.waiting:
            self.held_back.append(step)

    def _queue_part(self, step: PartedStep, tickets: list[Ticket]) -> None:
        """Queue the next part of a step, which has its slot."""
        node = step.node
        part = step.next_part(self.stream.rows)
        rows, key = self._prepare(node, part)
        ticket = Ticket(self, node, rows, key)
        if self._is_split(node.index):
            ticket = source = Source(self, node, rows, key)
            self.sources[source] = None
        ticket.part = part
        ticket.tensors = part.tensors
        tickets.append(ticket)

    def _is_last_part(self, step: PartedStep, tickets: list[Ticket]) -> bool:
        """A part of a step is over. Returns whether that was the last; else its slot is free, and others follow."""
        step.left -= 1
        n = step.node.index
        if not step.left:
            del self.parted[n]
        elif self.stream.slots.limits[n]:
            self._release(n, tickets)
        if self.held_back:
            due, self.held_back = self.held_back, []
            for one in due:
                self._queue_parts(one, _MORE_PARTS if one is step else 1, tickets)
        return not step.left

    def _joined(self, node: PlanNode, values: Sequence[Any], j: int) -> Any:
        """The j-th output of all parts of a step as one tensor."""
        graph = self.plan.graph
        written = graph.nodes[node.index]
        missing = sum(value is None for value in values)
        if missing == len(values):
            return None
        name = written.outputs[j].name
        if missing:
            text = (
                f"model '{node.model.name}' left out output '{name}' for {missing} of {len(values)} parts of its rows"
            )
            raise self.located(Internal(text), node)
        if not graph.has_rows(written.space):
            return values[0]
        try:
            return self.stream.rows.join(values, name)
        except FlowserveError as error:
            raise self.located(error, node) from None

    # ------------------------------------------------------------------ spaces

    def _operate(self, operation: Operation, ready: list[int], written: list[int], tickets: list[Ticket]) -> None:
        tensors = self.tensors
        result = only_branch(operation, tensors) if operation.branches else None
        if result is None:
            result = made(self, self.stream.rows, operation, [tensors[slot] for slot in operation.tensors])
        if operation.opens is not None:
            self._open(operation, result, ready, written, tickets)
        else:
            slot = operation.slot
            if result is None and self.plan.needed_by[slot]:
                raise self._left_out(operation)
            self.missing[operation.index] = OVER
            if self.readers[slot]:
                tensors[slot] = result
            written.append(slot)
            for n in self.regions.consumers[slot]:
                self.missing[n] -= 1
                if not self.missing[n]:
                    ready.append(n)
        self._read(self.regions.frees[operation.index])

    def _open(
        self, operation: Operation, spread: Any, ready: list[int], written: list[int], tickets: list[Ticket]
    ) -> None:
        """A space begins with these rows."""
        space = operation.opens
        assert space is not None
        self.missing[operation.index] = OVER
        self.spreads[space.index] = spread
        if self.readers[operation.slot]:
            self.tensors[operation.slot] = spread
        written.append(operation.slot)
        entry = self.regions.entries[self.depth][space.index]
        assert entry is not None
        self._enter_space(entry, spread, ready, tickets)

    def _enter_spaces(self, ready: list[int], tickets: list[Ticket]) -> None:
        """A frame begins: enter the spaces that are open in the frame above."""
        for entry in self.regions.entries[self.depth]:
            if entry is not None and entry.is_from_above:
                if self.spreads[entry.space.index] is not None:
                    self._enter_from_above(entry, ready, tickets)
                elif not self._is_skipped(entry.space.parent):
                    self.awaited.append(entry.space.index)
        self.steps += len(self.awaited)

    def _enter_from_above(self, entry: Entry, ready: list[int], tickets: list[Ticket]) -> None:
        if not self._is_skipped(entry.space.parent):
            self._enter_space(entry, self.spreads[entry.space.index], ready, tickets)

    def _is_skipped(self, space: int) -> bool:
        """Whether a space, or one around it, has no row; its absence is part of that of the outermost such space."""
        spaces = self.plan.graph.spaces
        while space:
            spread = self.spreads[space]
            if spread is not None and not spread.rows:
                return True
            space = spaces[space - 1].parent
        return False

    def _enter_space(self, entry: Entry, spread: Any, ready: list[int], tickets: list[Ticket]) -> None:
        """Let the steps of a space begin in this frame. If it has no rows, its steps and those of the spaces within it
        are skipped.
        """
        missing, readers, absence = self.missing, self.readers, entry.absence
        if spread.rows:
            for n in entry.readers:
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)
        else:
            for n in absence.members:
                missing[n] = OVER  # not only never ready: late steps of frames below wait until they are over
            for within in absence.spaces:
                self.spreads[within.index] = self.stream.rows.undecided(within, 0)
            for n, slots in absence.waiting:
                missing[n] -= slots
                if not missing[n]:
                    ready.append(n)
            for slot, count in absence.reading:
                readers[slot] -= count
                if not readers[slot]:
                    self.tensors[slot] = None
        splits = self.regions.splits
        if self.depth < len(splits):
            split = splits[self.depth]
            is_here = self.plan.graph.nodes[split].space == entry.space.index
            if is_here or (not spread.rows and split in absence.members):
                self._answer_other_rows(self.plan.graph.nodes[split].space, tickets)

    def _answer_other_rows(self, space: int, tickets: list[Ticket]) -> None:
        """The decoupled step of this level runs for the rows of a space: each other row has one response."""
        spread, spaces = self.spreads[space], self.plan.graph.spaces
        answered = {*range(spread.rows)} if spread is not None else set()
        while space:
            answered = {self.spreads[space].parent_of(row) for row in answered}
            space = spaces[space - 1].parent
        for row in range(self.request_rows):
            if row in answered:
                continue
            child = self._begin_below(None)
            child._restrict_to(0, row)
            ready: list[int] = []
            child._enter_spaces(ready, tickets)
            child._go_on(ready, [], None, tickets)
            child._has_begun()

    def rows_of(self, space: int) -> int:
        """The number of rows of a space that is open; 0 is the space of the request's own rows."""
        if not space:
            return self.request_rows
        rows: int = self.spreads[space].rows
        return rows

    def _tested(
        self,
        node: PlanNode,
        tests: Sequence[tuple[int, Operation]],
        outputs: Sequence[Sequence[Facts | None]],
        m: int,
        shared: dict[Any, Any],
    ) -> list[tuple[Operation, Any]]:
        """The spreads of the spaces that test outputs of a step, computed for all members of its batch together."""
        columns = shared.get(node)
        rows: RowOperations = self.stream.rows
        if columns is None:
            columns = shared[node] = []
            for j, operation in tests:
                assert operation.opens is not None
                try:
                    columns.append(rows.open_together(operation.opens, outputs[j]))
                except Exception:  # the member at fault raises it again by itself, and the others continue
                    columns.append(())
        return [
            (operation, column[m] if column else made(self, rows, operation, [outputs[j][m]]))
            for (j, operation), column in zip(tests, columns, strict=True)
        ]

    def _left_out(self, operation: Operation) -> FlowserveError:
        plan, derived = self.plan, operation.derived
        reader = next(node for node in plan.nodes if node.name == plan.needed_by[operation.slot])
        name = derived.spec.name if derived is not None else ""
        text = f"model '{reader.model.name}' needs tensor '{name}', which was left out for the rows of this step"
        return self.located(Internal(text), reader)

    # ------------------------------------------------------------------ frames above and below

    def _begin_below(self, request: Any) -> RegionFrame:
        """A frame of the next level, without the tensors that begin it."""
        own = self.request if request is None else request
        child = RegionFrame(self.record, self.plan, self.queues, [*self.tensors], own, self.stream)
        child.wanted = self.whole.wanted
        child.parent = self
        child.depth = self.depth + 1
        child.open = 1
        if self.regions.operations:
            child.spreads = [*self.spreads]
            child.request_rows = self.request_rows
        self.children.append(child)
        self.stream.live[child] = None
        return child

    def _restrict_to(self, space: int, row: int) -> None:
        """This frame has only the rows of the frame above that one row of a space is made from."""
        assert self.parent is not None
        self.ranges = ranges = RowRanges(self.parent, space, row)
        self.request_rows = 1
        for one in self.plan.graph.spaces:
            if self.spreads[one.index] is not None:
                self.spreads[one.index] = ranges.spread(one.index)
        opened = self.regions.space_opened
        for slot, is_read_below in enumerate(self.regions.below):
            tensor = self.tensors[slot]
            if tensor is not None and is_read_below:
                self.tensors[slot] = self.spreads[opened[slot]] if slot in opened else ranges.tensor(slot, tensor)

    def _pass_down(self, slots: Sequence[int], tickets: list[Ticket]) -> None:
        """Pass what this frame has written, and deeper levels read, to the frames below."""
        below = [slot for slot in slots if self.regions.below[slot]]
        if not below:
            return
        stream = self.stream
        for child in [*self.children]:  # a copy: one that becomes complete leaves the queue
            child._receive(below, tickets)
        late, stream.late = stream.late, []  # a step that is tried may wait again, for another tensor
        for frame, n in late:
            frame._retry(n, tickets)
        whole = self.whole
        stream.changed(whole)
        whole._advance()

    def _receive(self, slots: Sequence[int], tickets: list[Ticket]) -> None:
        """The frame above has written these slots."""
        above, ready = self.parent, list[int]()
        assert above is not None
        for slot in slots:
            tensor = above.tensors[slot]
            space = self.regions.space_opened.get(slot)
            if space is not None:
                if self.spreads[space] is not None:
                    continue  # this frame began after the space, while the frame above continued
                self.spreads[space] = tensor = tensor if self.ranges is None else self.ranges.spread(space)
                self.tensors[slot] = tensor
                entry = self.regions.entries[self.depth][space]
                if entry is not None:
                    self._enter_from_above(entry, ready, tickets)
            else:
                if self.ranges is not None and tensor is not None:
                    tensor = self.ranges.tensor(slot, tensor)
                self.tensors[slot] = tensor
        for child in [*self.children]:
            child._receive(slots, tickets)
        self._go_on(ready, [], None, tickets)
        if self.awaited:
            waiting = [one for one in self.awaited if self.spreads[one] is None and not self._is_skipped(one)]
            self.steps -= len(self.awaited) - len(waiting)
            self.awaited = waiting
            if not self.steps:
                self._complete()

    def _retry(self, n: int, tickets: list[Ticket]) -> None:
        """Start a node or an operation that waited for a tensor from above, if it is there now."""
        if n < len(self.plan.nodes):
            self._enter(self.plan.nodes[n], tickets)
        elif self.has_inputs_from_above(self.regions.late[n]):
            self._go_on([n], [], None, tickets)
            self.steps -= 1
            if not self.steps:
                self._complete()
        else:
            self.stream.late.append((self, n))

    def has_inputs_from_above(self, makers: Sequence[int]) -> bool:
        """Whether these nodes and operations of levels above this one are over."""
        for maker in makers:
            above = self.around(maker)
            if above is None or not above.is_over(maker):
                return False
        return True

    def around(self, n: int) -> RegionFrame | None:
        """The frame around this one, or this one, to which its step of node n belongs."""
        above: RegionFrame | None = self
        while above is not None and above.depth != self.regions.depth[n]:
            above = above.parent
        return above

    def _has_begun(self) -> None:
        """All steps that are ready at its begin are counted. If it were complete earlier, rows that have a response of
        their own would end it when they are answered, before its other steps are counted.
        """
        self.steps -= 1
        if not self.steps:
            self._complete()

    def _all_below(self) -> Iterator[RegionFrame]:
        for child in self.children:
            yield child
            yield from child._all_below()

    def _complete(self) -> None:
        """Its own steps are over; its frames below may continue."""
        if self.regions.is_single:
            self.stream.is_over = True
            self.open = 0  # it holds nothing, so that the scheduler ends it at once
            return
        if self.depth == len(self.regions.splits):
            # Before responses leave, which counts down: `unread` limits the credits of each step above.
            above = self.parent
            while above is not None:
                above.unread += 1
                above = above.parent
        whole = self if self.parent is None else self.whole
        whole._advance()

    def _advance(self) -> None:
        """Append the responses that are next in order to the answers, and end the stream after the last: a response
        that is appended together with the end carries the final flag.
        """
        stream, regions = self.stream, self.regions
        if stream.is_over:
            return
        is_empty = True
        at = self
        while True:
            while at.children:
                at = at.children[0]
            if at.steps:
                return  # the next response is not complete, and no later one may leave before it
            if at.depth == len(regions.splits):
                if not at.has_inputs_from_above(regions.answer_late):
                    return
                if not stream.is_read_whole:
                    stream.answers.append(at)
                    stream.changed(self)
                is_empty = False
            above = at.parent
            if above is None:
                stream.is_over = True
                stream.ends_empty = is_empty
                stream.changed(self)
                return
            above.children.popleft()
            del stream.live[at]
            at = above

    # ------------------------------------------------------------------ slots and credits

    def _take_slot(self, n: int) -> None:
        if self.stream.slots.limits[n]:
            self.stream.slots.take(n)
            self.stream.held[n] += 1

    def _release(self, n: int, tickets: list[Ticket]) -> None:
        """Free a slot of node n: the first parked step gets it, and frees the slot that it kept."""
        slots = self.stream.slots
        freed = [Hold(self.whole, n)]
        while freed:
            free = freed.pop()
            n = free.n
            slots.taken[n] -= 1
            free.whole.stream.held[n] -= 1  # a hold further on may be of another request that shares the slots
            if not slots.parked[n]:
                continue
            frame, _, hold = slots.parked[n][0]
            frame._take_slot(n)
            try:
                frame._leave_park(n, tickets)
            except FlowserveError as error:  # an error of this step, not of the one that freed the slot
                frame.stream.refusal = error.with_traceback(None)
                frame.stream.changed(frame.whole)
            if hold is not None:
                hold.count -= 1
                if not hold.count and not hold.whole.record.done:
                    freed.append(hold)
        self.stream.changed(self.whole)

    def _leave_park(self, n: int, tickets: list[Ticket]) -> None:
        """The first parked step of node n, which is of this frame, has a slot."""
        parked = self.stream.slots.parked[n]
        step = self.parted.get(n)
        if step is None or len(step.waiting) == 1:
            parked.popleft()
        if step is None:
            self._enter(self.plan.nodes[n], tickets)
        else:
            self._queue_part(step, tickets)

    def _unpark(self, n: int) -> None:
        """The step of node n of this frame no longer waits for a slot."""
        parked = self.stream.slots.parked[n]
        others = [one for one in parked if one.frame is not self]
        if len(others) < len(parked):
            parked.clear()
            parked.extend(others)

    def release_all(self, tickets: list[Ticket]) -> None:
        """The request is over, and shares its slots: free those that it holds, and no longer wait for others."""
        slots = self.stream.slots
        slots.sharers.pop(self, None)
        # Its parked steps first: a slot that it frees must not go to one of them.
        for parked in slots.parked:
            others = [one for one in parked if one.frame.stream is not self.stream]
            parked.clear()
            parked.extend(others)
        for n, count in enumerate(self.stream.held):
            for _ in range(count):
                self._release(n, tickets)

    def forget(self) -> None:
        """The request is over: drop the frames below and the parts, which refer to this frame in cycles."""
        self.children.clear()
        self.sources.clear()
        self.parted.clear()
        self.held_back.clear()

    def room(self, source: Source) -> int:
        """The number of responses a step of this frame may send beyond its credits."""
        slots = self.stream.slots
        if any(slots.parked[n] for n in self.regions.chosen[self.depth]):
            return 0
        room = UNREAD_MAX - self.unread - source.credit
        for n in self.regions.firsts[self.depth]:
            if slots.limits[n]:
                room = min(room, slots.limits[n] - slots.taken[n] - slots.promised[n])
        return max(room, 0)

    def promise(self, source: Source, count: int) -> None:
        """Grant `count` credits, or take them back if negative."""
        source.credit += count
        slots = self.stream.slots
        for n in self.regions.firsts[self.depth]:
            if slots.limits[n]:
                slots.promised[n] += count

    # ------------------------------------------------------------------ for observers

    @property
    def skipped(self) -> list[int]:
        """The nodes whose space had no row."""
        return skipped(self.plan, self.spreads)

    def all_sources(self) -> Iterator[Source]:
        """The decoupled steps of the request that may still respond."""
        for frame in (self, *self.stream.live):
            for source in frame.sources:
                if not source.is_over:
                    yield source

    def steps_under_way(self) -> list[PlanNode]:
        if self.record.done:
            return []
        depth = self.regions.depth
        found = {
            node.index
            for frame in (self, *self.stream.live)
            for node in self.plan.nodes
            if node.is_needed and depth[node.index] == frame.depth and not frame.missing[node.index]
        }
        return [node for node in self.plan.nodes if node.index in found]

    def check(self) -> None:
        """Assert the numbered invariants. For tests and simulation."""
        if self.record.done:
            return
        stream = self.stream
        stream.slots.check()
        for frame in (self, *stream.live):
            assert all(count >= 0 for count in frame.missing), "a node became ready twice"
            if frame is not self:
                assert frame.parent is not None, "(2)"
                assert frame in frame.parent.children, f"(2) {frame!r} was lost"
            parts = sum(step.live for step in frame.parted.values())
            for n, step in frame.parted.items():
                is_parked = any(one.frame is frame for one in stream.slots.parked[n])
                is_held = step in frame.held_back and parts > 0
                assert not step.waiting or is_parked or is_held, f"(4) parts of node {n} are forgotten"
        at: RegionFrame = self
        while at.children:
            at = at.children[0]
        is_late = not at.has_inputs_from_above(self.regions.answer_late)
        assert at.steps or is_late or stream.is_over, f"(2) {at!r} cannot continue"
        assert stream.is_over or self.steps or self.children, f"(2) {self!r} is neither over nor able to continue"

    def __repr__(self) -> str:
        return f"RegionFrame({self.plan.graph.name}, level={self.depth}, steps={self.steps}, done={self.record.done})"


def region_frame(
    plan: Plan,
    queues: Sequence[Any],
    inputs: Sequence[Facts | None],
    arrived_ns: int,
    stamp: int = 0,
    request: Any = None,
    owner: Any = None,
    priority: int = 0,
    timeout_ns: int = 0,
    *,
    rows: RowOperations | None = None,
    shared: InflightSlots | None = None,
    gauges: Sequence[Gauge] = (),
    is_read_whole: bool = False,
) -> RegionFrame:
    """The frame of a request whose graph has regions, with its record. `rows` works on the tensors of spaces. `shared`:
    the slots of the graph, if all its requests share them; else the request has its own, with these `gauges`.
    `is_read_whole`: its one response is read from the frame when the request is over, as always if it has one frame.
    """
    regions = plan.regions
    assert regions is not None
    slots = shared or (InflightSlots(regions.limits, gauges) if regions.has_limits else unlimited(regions.limits))
    record = RequestRecord(arrived_ns, stamp, owner, priority, timeout_ns)
    stream = Stream(slots, rows, is_read_whole=is_read_whole or regions.is_single)
    frame = RegionFrame(record, plan, queues, [*inputs, *plan.blank], request, stream)
    frame.request_rows = _rows_of(inputs, 1)
    return frame


def skipped(plan: Plan, spreads: Sequence[Any]) -> list[int]:
    """The nodes whose space had no row."""
    assert plan.regions is not None
    nodes = zip(plan.regions.nodes, spreads, strict=True)
    return [n for inside, spread in nodes if spread is not None and not spread.rows for n in inside]


def _rows_of(tensors: Sequence[Facts | None], otherwise: int) -> int:
    """The rows of the first tensor that is present."""
    for tensor in tensors:
        if tensor is not None:
            return 1 if tensor.stop < 0 else tensor.stop - tensor.start
    return otherwise
