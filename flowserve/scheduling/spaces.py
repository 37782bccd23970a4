"""The execution of a request whose graph has spaces: steps that run for some rows only, or for each item of a tensor.

Decides when a space begins, which steps are skipped because their space has no row, how the rows of a step are divided
into parts that its model accepts, how many parts of a step may be under way, and when a tensor at the border of a space
is made. Graphs without spaces use flow.py only. As that module, this one reads no tensor: `RowOperations` does, and
returns handles and spreads. Called by the scheduler.

A *spread* says which rows a space has. It has a slot as a tensor has, so a node, or an operation of the plan, is ready
when all slots that it reads are written. When a space begins without a row, all its steps and operations are skipped at
once, and the nodes and operations that wait for their slots continue: no step can wait for a branch that was not taken.
If a test reads an output of a step that runs once for all rows, the space begins when that step ends, and its rows are
computed for all members of the step's batch together.

A *part* is a flow of its own for a part of the rows of one step: it is queued, batched, retried and withdrawn like the
flow of a request. `max_inflight_requests` limits the parts of one step that are under way, and so does a full queue;
the others wait here.

Always true of a flow that is not done, besides the invariants of `Flow`:
  (4) `live` are exactly the parts that are queued or running; no more of a node than its limit;
  (5) a step with rows that is ready has at least one live part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from flowserve.errors import FlowserveError, Internal, Invalid, ModelFailed
from flowserve.graph.plan import NO_SLOT, Operation, Plan, PlanNode
from flowserve.graph.types import GRAPH, Conversion, Derivation, Derived, Space
from flowserve.scheduling.flow import TOOK_NOTHING, E, Facts, Flow, Ticket

_TAKE, _ITEMS, _MERGE = Derivation.TAKE, Derivation.ITEMS, Derivation.MERGE
_GATHER, _PRESENT = Derivation.GATHER, Derivation.PRESENT
# The largest number of parts that are queued when one is finished. It is more than one so that a step that a full queue
# held back regains its number of parts under way as the queue empties.
_MORE_PARTS: Final = 2
_OVER: Final = 1 << 30  # the value of `missing` for a finished step
_UNREAD: Final = ()  # stands for an output that no step reads, only a test


class Spread(Protocol):
    """The rows of a space: their number, `rows`, made from `parent_rows` rows of the space around it."""

    @property
    def rows(self) -> int: ...

    @property
    def parent_rows(self) -> int: ...

    def parent_of(self, row: int) -> int:
        """The row of the space around it that a row is made from."""


class RowOperations(Protocol):
    """Operations on rows, implemented by the owner of the tensors (`memory/rows`). A handle is None for a tensor that a
    model left out. Each operation raises a FlowserveError that names the tensor.
    """

    def open_space(self, space: Space, tensors: Sequence[Any], /) -> Any:
        """The spread of a space; `tensors` are those of `space.opens`. If the tensor of counts is None, no item is
        padding.
        """

    def open_together(self, space: Space, output: Sequence[Any], /) -> Sequence[Any]:
        """The spreads of a space for all members of a batch, from the model's output that the space tests; () if each
        member's space must be opened by itself.
        """

    def undecided(self, space: Space, parent_rows: int, /) -> Any:
        """The spread of a space whose tensors the request did not give: no row passes a test, and no row has items."""

    def take(self, tensor: Any, spread: Any, has_rows: bool, /) -> Any:
        """The rows of a parent space's tensor that belong to the space, at least one. `has_rows`, here and below:
        whether the tensors of the space that the result belongs to have a batch dimension.
        """

    def items(self, tensor: Any, spread: Any, /) -> Any:
        """The items of a tensor that a space divides into items, at least one."""

    def part(self, tensor: Any, start: int, stop: int, /) -> Any:
        """Some rows of a tensor."""

    def row(self, tensor: Any, index: int, /) -> Any:
        """One row of a tensor, without a batch dimension."""

    def join(self, tensors: Sequence[Any], name: str, /) -> Any:
        """The outputs of the parts of a step, in order, as one tensor with a batch dimension."""

    def merge(self, derived: Derived, tensors: Sequence[Any], spreads: Sequence[Any], has_rows: bool, /) -> Any:
        """One tensor from the outputs of several branches, each of which has only some of the rows. `spreads[i]` None:
        `tensors[i]` has all rows.
        """

    def gather(self, derived: Derived, tensor: Any, spread: Any, has_rows: bool, /) -> Any:
        """The items of each row as one row."""

    def present(self, derived: Derived, spreads: Sequence[Any], has_rows: bool, /) -> Any:
        """A BOOL tensor: which rows or items were written."""


class Part(Flow):
    """Some rows of one step, from row `start` on. `number`: its position among the parts of the step.

    It is a `Flow` because queues, workers and observers handle the flow of a ticket without knowing of parts. It does
    not call `Flow.__init__`, which would create the counts of a whole graph: the request's flow counts for its parts
    (`finish_part`). `tensors` has only the slots that the step reads, and is read by slot as the list is.
    """

    __slots__ = ("number", "start", "step")

    def __init__(self, step: _Step, number: int, start: int, tensors: dict[int, Any]) -> None:
        whole = step.flow
        self.step = step
        self.number = number
        self.start = start
        self.plan = whole.plan
        self.queues = whole.queues
        self.owner = whole.owner
        self.tensors = tensors  # type: ignore[assignment]  # has only the slots that this step reads
        self.missing = whole.missing
        self.readers = whole.readers
        self.open = 1
        self.done = False
        self.error = self.outcome = None
        self.arrived_ns = whole.arrived_ns
        self.stamp = whole.stamp
        self.priority = whole.priority
        self.timeout_ns = whole.timeout_ns
        self.request = whole.request
        self.waiter = self.parameters = None
        self.wanted = whole.wanted
        self.took = TOOK_NOTHING

    @property
    def whole(self) -> Flow:
        return self.step.flow

    def is_last_reader(self, slot: int) -> bool:
        return False  # other slots may hold the same rows

    def tensor_at(self, slot: int) -> Any:
        held: Any = self.tensors
        return held.get(slot) if held else None  # a flow that is over has no tensors

    def ticket(self, node: PlanNode) -> Ticket:
        """Its ticket. Raises `Invalid` if the model does not accept the shapes."""
        return self._ticket(node)

    def finish_step(
        self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        return self.step.flow.finish_part(self, [column[m] for column in outputs])

    def located(self, error: E, node: PlanNode, instance: str = "") -> E:
        located = super().located(error, node, instance)
        where = self.step.flow.where(self.step, self.start, self.step.rows_of(self.number))
        located.lineage = located.lineage.replace(f"step '{node.name}'", f"step '{node.name}', {where}", 1)
        return located

    def __repr__(self) -> str:
        return f"Part({self.plan.nodes[self.step.node.index].name}, {self.number})"


class _Step:
    """One step while its parts are under way. `outputs[p]` are those of part p. `waiting` are the numbers of the parts
    that are not queued yet, `left` those that are not finished, `most` those that may be under way at once.
    """

    __slots__ = ("count", "flow", "left", "most", "node", "outputs", "size", "space", "spread", "tensors", "waiting")

    def __init__(self, flow: SpaceFlow, node: PlanNode, space: int, spread: Spread, size: int) -> None:
        self.flow = flow
        self.node = node
        self.spread = spread
        self.size = size  # rows of a part
        self.count = self.left = -(-spread.rows // size)
        self.most = flow.plan.graph.nodes[node.index].max_inflight or self.count
        self.waiting = deque(range(self.count))
        self.space = space
        self.outputs: list[Sequence[Any]] = [()] * self.count
        written = {own: slot for slot, own, _ in node.converts}
        slots = {written.get(slot, slot) for slot in node.inputs if slot != NO_SLOT}
        self.tensors = {slot: flow.tensors[slot] for slot in slots}

    def rows_of(self, number: int) -> int:
        """The number of rows of a part."""
        return min(self.size, self.spread.rows - number * self.size)

    @property
    def live(self) -> int:
        """The number of parts under way."""
        return self.left - len(self.waiting)

    def next_part(self, rows: RowOperations, *, has_rows: bool) -> Part:
        """The next part that was not queued."""
        number = self.waiting.popleft()
        start = number * self.size
        held: dict[int, Any] = dict.fromkeys((*self.node.inputs, *self.node.distinct_inputs))
        for slot, tensor in self.tensors.items():
            if tensor is None or not has_rows:
                held[slot] = tensor
            elif self.node.max_batch_size:
                held[slot] = rows.part(tensor, start, start + self.rows_of(number))
            else:
                held[slot] = rows.row(tensor, start)
        return Part(self, number, start, held)


class SpaceFlow(Flow):
    """The flow of a request of a graph with spaces. `live`: its parts that are queued or running. `spreads`: of each
    space that began, by its number; else None.
    """

    __slots__ = ("_held_back", "_request_rows", "live", "rows", "spreads")

    def __init__(
        self,
        rows: RowOperations,
        plan: Plan,
        queues: Sequence[Any],
        inputs: Sequence[Facts | None],
        *facts: Any,
    ) -> None:
        """As `Flow`; `rows` works on the tensors."""
        super().__init__(plan, queues, inputs, *facts)
        assert plan.spaces is not None
        self.rows = rows
        self.live: dict[Part, None] = {}
        self.spreads: list[Any] = [*plan.spaces.blank]
        self._held_back: list[_Step] = []  # steps that a full queue left without a part under way
        self._request_rows = 1
        for tensor in inputs:
            if tensor is not None:
                self._request_rows = 1 if tensor.stop < 0 else tensor.stop - tensor.start
                break

    @property
    def skipped(self) -> list[int]:
        """The nodes whose space had no row."""
        return skipped(self.plan, self.spreads)

    @property
    def finished(self) -> set[int]:
        """The nodes whose steps are over."""
        return {*self.skipped, *(n for n in range(len(self.plan.nodes)) if self.missing[n] == _OVER)}

    def begin(self, changed: Callable[[Any], None] | None = None) -> list[Ticket]:
        tickets = super().begin()
        assert self.plan.spaces is not None
        if self.plan.spaces.first:
            self._go_on([*self.plan.spaces.first], tickets)
        return tickets

    def is_last_reader(self, slot: int) -> bool:
        return False  # other slots may hold the same rows

    def finish_step(
        self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]], m: int, shared: dict[Any, Any]
    ) -> list[Ticket]:
        members = shared.get(node)
        if members is None:
            members = shared[node] = self._members(node, outputs)
        tickets: list[Ticket] = []
        ready: list[int] = []
        row = members[m]
        self._written(node, row, ready)
        assert self.plan.spaces is not None
        tests = self.plan.spaces.tests[node.index]
        if tests:
            k = len(node.writes)
            for j, operation in tests:
                spread = row[k] or self._made(operation, [outputs[j][m]])
                self._begin_space(operation, spread, ready)
                k += 1
        if ready:
            self._go_on(ready, tickets)
        return tickets

    def _members(self, node: PlanNode, outputs: Sequence[Sequence[Facts | None]]) -> list[tuple[Any, ...]]:
        """For each member of a node's batch: its outputs in the order of `writes`, then the spreads of the spaces that
        test its outputs, None for a space that is opened by itself.
        """
        plan = self.plan
        assert plan.spaces is not None
        columns: list[Sequence[Any]] = []
        for j, slot, _ in node.writes:
            columns.append(outputs[j] if plan.readers[slot] else [_UNREAD] * len(outputs[j]))
        for j, operation in plan.spaces.tests[node.index]:
            assert operation.opens is not None
            try:
                spreads = self.rows.open_together(operation.opens, outputs[j])
            except Exception:  # the member at fault raises it again by itself, and the others continue
                spreads = ()
            columns.append(spreads or [None] * len(outputs[j]))
        return [*zip(*columns, strict=True)]

    def finish_part(self, part: Part, outputs: Sequence[Any]) -> list[Ticket]:
        """Store the outputs of a part. After the last part of a step the flow continues. Returns the tickets that are
        to be queued. Raises a FlowserveError if the flow cannot continue.
        """
        step, tickets = part.step, list[Ticket]()
        node = step.node
        part.done = True
        del self.live[part]
        step.outputs[part.number] = outputs
        step.left -= 1
        if self._held_back:
            for other in self._held_back:
                self._queue_parts(other, 1, tickets)
            self._held_back.clear()
        if step.left:
            self._queue_parts(step, _MORE_PARTS, tickets)
            return tickets
        joined = [self._joined(node, [made[j] for made in step.outputs], j) for j, *_ in node.writes]
        ready: list[int] = []
        self._written(node, joined, ready)
        if ready:
            self._go_on(ready, tickets)
        part.open = self.open
        return tickets

    def hold_back(self, part: Part) -> bool:
        """The queue of a part's model is full. Returns whether the part waits until another part is finished; False if
        no other one is under way, and the request must be refused.
        """
        step = part.step
        if len(self.live) < 2:
            return False
        part.done = True
        del self.live[part]
        step.waiting.appendleft(part.number)
        if not step.live:
            self._held_back.append(step)
        return True

    def where(self, step: _Step, start: int, count: int) -> str:
        """Rows of a step in words: as items of the nearest space of items, or else as rows of the request."""
        spaces = self.plan.graph.spaces
        index, first, last, of = step.space, start, start + count - 1, step.spread.rows
        while index and spaces[index - 1].each is None:
            spread = self.spreads[index]
            first, last, of = spread.parent_of(first), spread.parent_of(last), spread.parent_rows
            index = spaces[index - 1].parent
        what = "item" if index else "row"
        return f"{what} {first} of {of}" if count == 1 else f"{what}s {first} to {last} of {of}"

    def steps_under_way(self) -> list[PlanNode]:
        if self.done or not self.open:
            return []
        return [node for node in self.plan.nodes if node.writes and not self.missing[node.index]]

    def _written(self, node: PlanNode, row: Sequence[Any], ready: list[int]) -> None:
        """A step is over: it has written `row`, in the order of its `writes`, and read its inputs. Nodes and operations
        whose inputs are now complete are added to `ready`.
        """
        if None in row:
            for k, (_, slot, _) in enumerate(node.writes):
                if row[k] is None and self.plan.needed_by[slot]:
                    raise self._missing_input(node, slot)
        tensors, missing, readers = self.tensors, self.missing, self.readers
        missing[node.index] = _OVER
        self.open -= 1
        for k, (_, slot, consumers) in enumerate(node.writes):
            if readers[slot]:  # 0 if all readers were skipped
                tensors[slot] = row[k]
            for n in consumers:
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)
        for slot in node.distinct_inputs:
            readers[slot] -= 1
            if not readers[slot]:
                tensors[slot] = None

    def _go_on(self, ready: list[int], tickets: list[Ticket]) -> None:
        """Start the nodes and operations that are ready, and those that become ready as a result."""
        plan = self.plan
        nodes, spaces = plan.nodes, plan.spaces
        assert spaces is not None
        count = len(nodes)
        for n in ready:  # operations append to it
            if n >= count:
                self._operate(spaces.operations[n - count], ready)
                continue
            self.open += 1
            slot = spaces.spreads[n]
            if slot == NO_SLOT:
                tickets.append(self._ticket(nodes[n]))
            else:
                self._start(nodes[n], self.tensors[slot], tickets)

    def _start(self, node: PlanNode, spread: Spread, tickets: list[Ticket]) -> None:
        """Queue a step of a space, in parts."""
        graph = self.plan.graph
        space = graph.nodes[node.index].space
        size = (node.max_batch_size or 1) if graph.has_rows(space) else 1
        step = _Step(self, node, space, spread, size)
        self._queue_parts(step, step.most, tickets)

    def _queue_parts(self, step: _Step, count: int, tickets: list[Ticket]) -> None:
        node = step.node
        has_rows = self.plan.graph.has_rows(self.plan.graph.nodes[node.index].space)
        for _ in range(min(count, step.most - step.live, len(step.waiting))):
            part = step.next_part(self.rows, has_rows=has_rows)
            self.live[part] = None
            tickets.append(part.ticket(node))

    def _joined(self, node: PlanNode, parts: Sequence[Any], j: int) -> Any:
        graph = self.plan.graph
        written = graph.nodes[node.index]
        missing = sum(part is None for part in parts)
        if missing == len(parts):
            return None
        name = written.outputs[j].name
        if missing:
            text = f"model '{node.model.name}' left out output '{name}' for {missing} of {len(parts)} parts of its rows"
            raise self.located(Internal(text), node)
        if not graph.has_rows(written.space):
            return parts[0]
        try:
            return self.rows.join(parts, name)
        except FlowserveError as error:
            raise self.located(error, node) from None

    # Operations

    def _operate(self, operation: Operation, ready: list[int]) -> None:
        tensors, missing, readers = self.tensors, self.missing, self.readers
        made = self._only_branch(operation) if operation.branches else None
        if made is None:
            made = self._made(operation, [tensors[slot] for slot in operation.tensors])
        if operation.opens is not None:
            self._begin_space(operation, made, ready)
        else:
            slot = operation.slot
            if made is None and self.plan.needed_by[slot]:
                raise self._left_out(operation)
            if readers[slot]:
                tensors[slot] = made
            for n in self.plan.consumers[slot]:
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)
        for slot in operation.reads:
            readers[slot] -= 1
            if not readers[slot]:
                tensors[slot] = None

    def _begin_space(self, operation: Operation, spread: Spread, ready: list[int]) -> None:
        """Begin a space with these rows. If there are none, its steps and those of the spaces within it are skipped."""
        space, absence, slot = operation.opens, operation.absence, operation.slot
        assert space is not None
        assert absence is not None
        tensors, missing, readers = self.tensors, self.missing, self.readers
        self.spreads[space.index] = spread
        if readers[slot]:
            tensors[slot] = spread
        if spread.rows:
            for n in self.plan.consumers[slot]:
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)
            return
        for within in absence.spaces:
            self.spreads[within.index] = self.rows.undecided(within, 0)
        for n, slots in absence.waiting:
            missing[n] -= slots
            if not missing[n]:
                ready.append(n)
        for slot, count in absence.reading:
            readers[slot] -= count
            if not readers[slot]:
                tensors[slot] = None

    def _only_branch(self, operation: Operation) -> Any:
        """The result of a merge if all rows are of one branch: the tensor of that branch. None if rows may be of
        several.
        """
        tensors = self.tensors
        base = None
        for slot, of in operation.branches:
            if of == NO_SLOT:
                base = tensors[slot]
            elif rows := tensors[of].rows:
                return tensors[slot] if rows == tensors[of].parent_rows else None
        return base if base is not None and (base.stop >= 0 or not operation.has_rows) else None

    def _made(self, operation: Operation, tensors: Sequence[Any]) -> Any:
        """The spread of a space, or a tensor at its border, made from these tensors."""
        space, graph = operation.opens, self.plan.graph
        try:
            return self._derived(operation, tensors) if space is None else self._opened(operation, space, tensors)
        except FlowserveError as error:
            if space and isinstance(error, ModelFailed) and all(graph.made_by(ref)[0] == GRAPH for ref in space.opens):
                error = Invalid(str(error))  # the client sent these tensors
            error.lineage = error.lineage or self._border(operation)
            raise error from None
        except Exception as error:  # a fault in code that reads tensors fails this request, not the scheduler
            failed = Internal(f"rows cannot be chosen or put together: {type(error).__name__}: {error}")
            failed.lineage = self._border(operation)
            raise failed from None

    def _border(self, operation: Operation) -> str:
        """The place of an operation in the graph, for the text of an error: the innermost space of its tensors."""
        spaces, derived = self.plan.graph.spaces, operation.derived
        if derived is None:
            return "" if operation.opens is None else _lineage(operation.opens)
        index = max((*derived.spaces, derived.space))
        return _lineage(spaces[index - 1]) if index else ""

    def _opened(self, operation: Operation, space: Space, tensors: Sequence[Any]) -> Any:
        parent_rows = self.spreads[operation.around].rows if operation.around else self._request_rows
        if not parent_rows or (None in tensors and self._is_undecided(space, tensors)):
            return self.rows.undecided(space, parent_rows)
        return self.rows.open_space(space, tensors)

    def _is_undecided(self, space: Space, tensors: Sequence[Any]) -> bool:
        """Whether the request omitted the tensors of a space, which are optional inputs. Raises Internal if a model
        left one out, and Invalid if only some of the tensors that are divided into items together were given.
        """
        absent = [i for i, tensor in enumerate(tensors) if tensor is None]
        for i in absent:
            maker, _ = self.plan.graph.made_by(space.opens[i])
            if maker != GRAPH:
                step = self.plan.graph.nodes[maker].name
                raise Internal(f"`{space.title}` cannot be decided: step '{step}' left its tensor out")
        names = (space.test.tensor,) if space.test is not None else space.each.tensors if space.each is not None else ()
        lacking = [names[i] for i in absent if i < len(names)]
        if lacking and len(lacking) < len(names):
            raise Invalid(f"{_quoted(names)} are taken apart together, and {_quoted(lacking)} was not given")
        return bool(lacking)

    def _derived(self, operation: Operation, tensors: Sequence[Any]) -> Any:
        """A tensor at the border of a space; None if there is none for these rows."""
        derived, rows, held = operation.derived, self.rows, self.tensors
        assert derived is not None
        how = derived.how
        spreads = [held[slot] if slot != NO_SLOT else None for slot in operation.spreads]
        if how is _MERGE:
            return rows.merge(derived, tensors, spreads, operation.has_rows)
        if how is _GATHER:
            return rows.gather(derived, tensors[0], spreads[0], operation.has_rows)
        if how is _PRESENT:
            return rows.present(derived, spreads, operation.has_rows)
        (tensor,) = tensors
        if tensor is None:
            return None
        if how is _TAKE:
            return rows.take(tensor, spreads[0], operation.has_rows)
        if how is _ITEMS:
            return rows.items(tensor, spreads[0])
        return tensor.converted(Conversion(derived.reshapes))

    def _left_out(self, operation: Operation) -> FlowserveError:
        plan, derived = self.plan, operation.derived
        reader = next(node for node in plan.nodes if node.name == plan.needed_by[operation.slot])
        name = derived.spec.name if derived is not None else ""
        text = f"model '{reader.model.name}' needs tensor '{name}', which was left out for the rows of this step"
        return self.located(Internal(text), reader)

    def check(self) -> None:
        assert self.done or self.open > 0, f"(3) {self!r} is neither done nor going anywhere"
        assert all(count >= 0 for count in self.missing), "(2) a node became ready twice"
        under_way: dict[int, int] = {}
        for part in self.live:
            under_way[part.step.node.index] = under_way.get(part.step.node.index, 0) + 1
            assert not part.done, "(4)"
        for n, count in under_way.items():
            limit = self.plan.graph.nodes[n].max_inflight
            assert not limit or count <= limit, f"(4) node {n} is over its limit"

    def __repr__(self) -> str:
        return f"SpaceFlow({self.plan.graph.name}, open={self.open}, parts={len(self.live)}, done={self.done})"


def skipped(plan: Plan, spreads: Sequence[Spread | None]) -> list[int]:
    """The nodes whose space had no row."""
    assert plan.spaces is not None
    nodes = zip(plan.spaces.nodes, spreads, strict=True)
    return [n for inside, spread in nodes if spread is not None and not spread.rows for n in inside]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _lineage(space: Space) -> str:
    return f" (`{space.title}`" + (f" at {space.place})" if space.place is not None else ")")
